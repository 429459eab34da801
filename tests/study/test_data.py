"""Data sets of the study: files of a user's own, their splits, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.study import sets, tables
from laplace_plus.errors import ConfigurationError, DataError, LabelError, LaplacePlusError

NUMBERS = "a,b,target\n" + "\n".join(f"{k},{k % 7},{k % 2}" for k in range(40))


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


@pytest.mark.parametrize("head", ["\ufeffy,a,b", "Y,0,1", "y,1,2"])
def test_lines_of_names_are_known_by_the_names_that_mean_something(tmp_path, head):
    data = read(tmp_path, head + "\n" + "\n".join(f"{k % 2},{k},{k % 7}" for k in range(40)))
    assert data.classification and len(data.train[1]) + len(data.validation[1]) + len(data.test[1]) == 40
    assert not any("no line of names" in note for note in data.notes)


def test_constant_columns_become_zero_and_are_said(tmp_path):
    data = read(tmp_path, "a,b,y\n" + "\n".join(f"{k},0.1,{k % 2}" for k in range(40)))
    assert bool((data.train[0][:, 1] == 0).all()) and bool((data.test[0][:, 1] == 0).all())
    assert any("constant" in note and "feature 1" in note for note in data.notes)


def replaced(row, text):
    lines = NUMBERS.splitlines()
    lines[row] = text
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (replaced(3, "1,,0"), DataError, "'b' has missing values"),
        (replaced(3, "1,NA,0"), DataError, "first in row 3"),
        (replaced(3, "1,green,0"), DataError, "'b' holds text"),
        (replaced(3, "1,2,"), LabelError, "target has missing values|'target' has missing values"),
        (replaced(3, "1,2"), DataError, "another length"),
        (replaced(3, "1,inf,0"), DataError, "missing or infinite"),
        ("a,b,y\n" + "\n".join(f"{k},{k},1" for k in range(20)), LabelError, "only one class"),
        ("a,b,y\n" + "\n".join(f"1,2,{k % 2}" for k in range(20)), DataError, "all columns are constant"),
        ("a,a,y\n1,2,0\n3,4,1", DataError, "same name"),
        ("a,y,split\n" + "\n".join(f"{k},{k % 2},{k % 4}" for k in range(20)), DataError, "'split' is wrong"),
        ("a,y,split\n" + "\n".join(f"{k},{int(k > 17)},{0 if k < 15 else 1 + k % 2}" for k in range(20)), LabelError,
         "leaves a class out"),
        ("a,y,split\n" + "\n".join(f"{k},{k % 2},0" for k in range(20)), DataError, "no validation rows"),
        ("a,y\n", DataError, "is empty"),
        ("a;y\n1;0\n2;1", DataError, "has one column"),
        ("y,split\n" + "\n".join(f"{k % 2},{k % 3}" for k in range(20)), DataError, "has no features"),
        ("0,1,label\n" + "\n".join(f"{k},{k % 7},{k % 2}" for k in range(40)), DataError, "numbers and a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(tmp_path, text, error, words):
    with pytest.raises(error, match=words) as caught:
        read(tmp_path, text)
    assert "mine" in str(caught.value)


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


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"split": np.zeros((30, 1), dtype=int)}, "'split' is wrong"),
        ({"split": np.full(30, 3)}, "'split' is wrong"),
        ({"standard_test": np.zeros(29, dtype=bool)}, "'standard_test' is wrong"),
        ({"standard_test": np.zeros(30)}, "'standard_test' is wrong"),
        ({"y": np.array(["a", 1] * 15, dtype=object)}, "cannot be read"),
    ],
)
def test_arrays_that_would_be_misread_are_refused(tmp_path, arrays, words):
    np.savez(tmp_path / "mine.npz", **{"x": np.zeros((30, 2)), "y": np.arange(30) % 2, **arrays})
    with pytest.raises(DataError, match=words):
        sets.load("mine", 0, tmp_path, {})


def test_files_that_are_none_are_refused(tmp_path):
    (tmp_path / "mine.npz").write_text("no archive")
    with pytest.raises(DataError, match="cannot be read"):
        sets.load("mine", 0, tmp_path, {})
    (tmp_path / "yours.csv").write_bytes("größe,y\n1,0\n2,1".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        sets.load("yours", 0, tmp_path, {})


def test_test_rows_may_be_marked_by_ones(tmp_path):
    marks = (np.arange(30) % 3 == 0).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", x=np.arange(30.0)[:, None], y=np.arange(30) % 2, standard_test=marks)
    data = sets.load("mine", 0, tmp_path, {})
    assert len(data.test[1]) == 10 and not any("made here" in note for note in data.notes)


def test_splits_made_here_are_stratified_and_stay_the_same():
    table = tables.Table("mine", np.zeros((200, 1)), np.repeat([0, 1], [160, 40]), True)
    part = tables.made_here(table, 3)
    for label, counts in ((0, [112, 24, 24]), (1, [28, 6, 6])):
        assert [int(((part == k) & (table.y == label)).sum()) for k in range(3)] == counts
    assert (part == tables.made_here(table, 3)).all() and (part != tables.made_here(table, 4)).any()
