"""Data sets of the study: files of a user's own, their splits, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.study import sets, tables
from laplace_plus.errors import ConfigurationError, DataError, LaplacePlusError


def read(tmp_path, text, **settings):
    (tmp_path / "mine.csv").write_text(text)
    return sets.load("mine", 0, tmp_path, settings)


def test_csv_with_text_classes_and_a_split_column(tmp_path):
    rows = [f"{'red' if k % 3 else 'blue'},{k},{k**2},{0 if k < 20 else 1 if k < 25 else 2}" for k in range(30)]
    data = read(tmp_path, "y,first,second,split\n" + "\n".join(rows))
    assert [len(part[1]) for part in (data.train, data.validation, data.test)] == [20, 5, 5]
    assert data.classification and data.n_outputs == 2
    # the classes in alphabetical order: blue, red
    assert data.train[1].tolist() == [int(k % 3 > 0) for k in range(20)]
    first = torch.arange(20, dtype=torch.float64)
    torch.testing.assert_close(data.train[0][:, 0].double(), (first - 9.5) / first.std(correction=0), rtol=0, atol=1e-6)


def test_csv_without_names_has_its_target_last_and_decimals_are_numbers(tmp_path):
    data = read(tmp_path, "\n".join(f"{k},{k % 5},{k / 3}" for k in range(100)))
    assert not data.classification and data.n_outputs == 1 and data.train[0].shape[1] == 2
    assert "made here" in " ".join(data.notes) and "no line of names" in " ".join(data.notes)
    y = data.train[1].double()
    assert abs(float(y.mean())) < 1e-6 and abs(float(y.std(correction=0)) - 1) < 1e-6


def test_npz_with_splits_gaps_and_errors(tmp_path):
    x, y = np.arange(60.0).reshape(30, 2), np.linspace(0, 1, 30)
    gap = np.zeros((2, 30), dtype=bool)
    gap[0, 10:20] = gap[1, 20:] = True
    np.savez(tmp_path / "mine.npz", x=x, y=y, gap_test=gap)
    data = sets.load("mine", 1, tmp_path, {"splits": "gap_test"})
    assert [len(part[1]) for part in (data.train, data.validation, data.test)] == [17, 3, 10]
    assert data.unit == pytest.approx(y[:20].std(), rel=0.2)
    with pytest.raises(DataError, match="no split 2"):
        sets.load("mine", 2, tmp_path, {"splits": "gap_test"})
    with pytest.raises(DataError, match="no such splits"):
        sets.load("mine", 0, tmp_path, {"splits": "other_test"})
    with pytest.raises(ConfigurationError, match="unknown settings"):
        sets.load("mine", 0, tmp_path, {"fold": 1})
    with pytest.raises(DataError, match="no data set 'yours'"):
        sets.load("yours", 0, tmp_path, {})
    np.savez(tmp_path / "bare.npz", x=x)
    with pytest.raises(DataError, match="no y"):
        sets.load("bare", 0, tmp_path, {})
    assert issubclass(DataError, LaplacePlusError)


def test_splits_made_here_are_stratified_and_stay_the_same():
    table = tables.Table("mine", np.zeros((200, 1)), np.repeat([0, 1], [160, 40]), True)
    part = tables.made_here(table, 3)
    for label, counts in ((0, [112, 24, 24]), (1, [28, 6, 6])):
        assert [int(((part == k) & (table.y == label)).sum()) for k in range(3)] == counts
    assert (part == tables.made_here(table, 3)).all() and (part != tables.made_here(table, 4)).any()
