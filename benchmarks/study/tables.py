"""Tables of numbers from ``.npz`` and CSV files, checked; what cannot be used is refused by name.

A ``.npz`` file holds ``x [N, D]`` and ``y [N]``, and may hold ``split``: for each division of the rows (``[K, N]``, or
``[N]`` for a single one) 0 for training, 1 for validation, 2 for test; or ``*_test [K, N]``, true or 1 for test rows.
A CSV file has one row for each example, with or without a line of names; the target is the column named ``y`` or
``target``, or else the last one, and a column named ``split`` says 0, 1 or 2.
"""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from laplace_plus.errors import DataError, LabelError

MOST_CLASSES = 50
"""Integer targets with more values than this are taken for numbers."""

PARTS = (0.70, 0.15, 0.15)
"""Shares of training, validation and test where a file has no splits."""


@dataclass(frozen=True)
class Table:
    """A table as it was read.

    Attributes:
        name: What it is called.
        x: Features ``[N, D]``, float64, finite.
        y: Classes ``0 … C−1`` as int64, or float64 numbers, ``[N]``.
        classification: Whether they are classes.
        splits: Divisions of the rows by name, ``[K, N]``: integers 0, 1, 2, or booleans, true for test.
        notes: What a reader of results has to know.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    classification: bool
    splits: dict[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def checksum(*arrays: np.ndarray) -> str:
    """Tells data apart: other numbers, shapes or types have another one."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:10]


def read(path: Path, kind: str | None = None) -> Table:
    """Read and check a file.

    Args:
        path: A ``.npz`` or ``.csv`` file.
        kind: ``"classification"`` or ``"regression"``; by default integers and texts are classes.

    Raises:
        DataError: A file that cannot be used; the message says where and what to change.
        LabelError: Targets that cannot be used.
    """
    name = path.parent.name if path.stem == "data" else path.stem
    said: tuple[str, ...] = ()
    if path.suffix == ".npz":
        arrays = _arrays(path, name)
        if missing := {"x", "y"} - arrays.keys():
            raise DataError(
                f"{name}: {path.name} has no {' and no '.join(sorted(missing))}.",
                expected="arrays x [N, D] and y [N]",
                got=", ".join(arrays) or "none",
            )
        x, y = arrays["x"], arrays["y"]
        known = {key: value for key, value in arrays.items() if key == "split" or key.endswith("_test")}
        for other in ("x_test", "y_test", "presplit_test"):  # other data; published halves without a validation part
            known.pop(other, None)
        splits = {key: _division(key, value, y, name) for key, value in known.items()}
    elif path.suffix == ".csv":
        x, y, splits, said = _read_csv(path, name)
    else:
        raise DataError(f"{name}: an unknown kind of file.", expected=".npz or .csv", got=path.name)
    x = _features(x, y, name)
    y, classification, notes = _targets(y, name, kind)
    return Table(name, x, y, classification, splits, (*said, *notes))


def _arrays(path: Path, name: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
        raise DataError(
            f"{name}: {path.name} cannot be read.",
            expected="a file that numpy.savez wrote, of numbers and texts but no Python objects",
            got=f"{type(error).__name__}: {error}",
            fix="Convert objects first: np.savez(path, x=x.astype(float), y=y.astype(str)).",
        ) from error


def _division(key: str, value: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
    """Splits ``[K, N]``, checked: one that cannot be used would let test rows be trained on."""
    fits = value.ndim in (1, 2) and value.shape[-1:] == y.shape[:1]
    most = 2 if key == "split" else 1
    if not fits or value.dtype.kind not in "biu" or not np.isin(value, range(most + 1)).all():
        raise DataError(
            f"{name}: the array {key!r} is wrong.",
            expected=f"[N] or [K, N] with N = {len(y)}, "
            + ("0 (training), 1 (validation) or 2 (test)" if key == "split" else "true for test rows"),
            got=f"{value.dtype} {list(value.shape)}" + (f" with {np.unique(value)[:5].tolist()}" if fits else ""),
        )
    value = np.atleast_2d(value)
    return value if key == "split" else value.astype(bool)


def _lines(path: Path, name: str) -> list[list[str]]:
    """Cells of all lines that are not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # with the mark that spreadsheets put first, or without
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: {path.name} is no text in UTF-8.", expected="UTF-8", got=str(error)) from error
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    rows = [row for row in rows if any(row)]
    if len(rows) < 2:  # noqa: PLR2004
        raise DataError(f"{name}: {path.name} is empty.", expected="at least two rows", got=str(len(rows)))
    if len(rows[0]) < 2:  # noqa: PLR2004
        raise DataError(
            f"{name}: {path.name} has one column.", expected="features and a target, apart by commas", got=rows[0][0]
        )
    return rows


def _names(rows: list[list[str]], name: str) -> list[str]:
    """The first line, if it is one of names.

    It is if none of its cells is a number, or if one of them is a name that means something here.

    Raises:
        DataError: A first line of numbers with a text above a column of numbers: names or data, that is not clear.
    """
    first = rows[0]
    if not any(_is_number(cell) for cell in first) or any(cell.lower() in NAMED for cell in first):
        return first
    for cell, *others in zip(*rows, strict=False):
        if not (_is_number(cell) or cell.lower() in MISSING) and all(map(_is_number, others)):
            raise DataError(
                f"{name}: the first line has numbers and a text above a column of numbers.",
                expected="a line of names, or data from the first line on",
                got=", ".join(first[:8]),
                fix="Give each column a name that is no number, or call the target's y.",
            )
    return []


def _read_csv(path: Path, name: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], tuple[str, ...]]:
    rows = _lines(path, name)
    names = _names(rows, name)
    said = () if names else ("the file has no line of names, and its last column is the target",)
    rows = rows[1:] if names else rows
    width = len(names) or len(rows[0])
    for number, row in enumerate(rows):
        if len(row) != width:
            raise DataError(
                f"{name}: row {number + 1} has another length.", expected=f"{width} columns", got=str(len(row))
            )
    names = names or [f"column {k + 1}" for k in range(width)]
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    if len(columns) != width:
        raise DataError(f"{name}: two columns have the same name.", expected="different names", got=", ".join(names))
    target = next((key for key in names if key.lower() in NAMED[:2]), None)
    target = target or [key for key in names if key.lower() != "split"][-1]
    y = columns.pop(target)
    if gaps := sum(cell.lower() in MISSING for cell in y):
        raise LabelError(
            f"{name}: the target {target!r} has missing values.", expected="a target in each row", got=f"{gaps} gaps"
        )
    targets = np.array([float(cell) for cell in y]) if all(map(_is_number, y)) else np.array(y)
    parts = next((columns.pop(key) for key in names if key.lower() == "split"), None)
    splits = {} if parts is None else {"split": _parts(parts, name)}
    if not columns:
        raise DataError(f"{name}: {path.name} has no features.", expected="columns beside the target", got="none")
    return np.stack([_column(cells, key, name) for key, cells in columns.items()], 1), targets, splits, said


NAMED = ("y", "target", "split")
"""Columns that mean something."""

MISSING = ("", "?", "na", "nan", "null", "none")
"""What stands for a missing value in a CSV file."""


def _column(cells: list[str], column: str, name: str) -> np.ndarray:
    gaps = [number + 1 for number, cell in enumerate(cells) if cell.lower() in MISSING]
    if gaps:
        raise DataError(
            f"{name}: the column {column!r} has missing values.",
            expected="a number in each row",
            got=f"{len(gaps)} gaps, the first in row {gaps[0]}",
            fix="Leave those rows out, or fill them in (and add a column that says so).",
        )
    texts = sorted({cell for cell in cells if not _is_number(cell)})
    if texts:
        raise DataError(
            f"{name}: the column {column!r} holds text.",
            expected="numbers",
            got=", ".join(map(repr, texts[:3])) + (", …" if len(texts) > 3 else ""),  # noqa: PLR2004
            fix="Give each of its values a column of zeros and ones, or leave the column out.",
        )
    return np.array([float(cell) for cell in cells])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _parts(cells: list[str], name: str) -> np.ndarray:
    wrong = sorted(set(cells) - {"0", "1", "2"})
    if wrong:
        raise DataError(
            f"{name}: the column 'split' is wrong.",
            expected="0 (training), 1 (validation) or 2 (test)",
            got=", ".join(map(repr, wrong[:3])),
        )
    return np.array([[int(cell) for cell in cells]], dtype=np.uint8)


def _features(x: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim != 2 or y.ndim != 1 or len(x) != len(y):  # noqa: PLR2004
        raise DataError(f"{name}: x and y do not fit.", expected="x [N, D] and y [N]", got=f"{x.shape} and {y.shape}")
    if not np.issubdtype(x.dtype, np.number) or np.iscomplexobj(x):
        raise DataError(f"{name}: the features are no numbers.", expected="real numbers", got=str(x.dtype))
    x = x.astype(np.float64)
    rows, columns = np.nonzero(~np.isfinite(x))
    if len(rows):
        raise DataError(
            f"{name}: the features have missing or infinite values.",
            expected="finite numbers",
            got=f"{len(rows)} others, in the columns {sorted(set(columns.tolist()))[:5]}, the first in row {rows[0]}",
            fix="Leave those rows out, or fill them in (and add a column that says so).",
        )
    return x


def _targets(y: np.ndarray, name: str, kind: str | None) -> tuple[np.ndarray, bool, tuple[str, ...]]:
    if kind not in (None, "classification", "regression"):
        raise DataError(f"{name}: an unknown kind of targets.", expected="classification or regression", got=repr(kind))
    text = not np.issubdtype(y.dtype, np.number)
    if not text and not np.isfinite(y).all():
        raise LabelError(f"{name}: targets are missing or infinite.", expected="finite numbers", got="others")
    values = np.unique(y)
    whole = text or bool((values == np.round(values)).all())
    classes = kind == "classification" or (kind is None and whole and len(values) <= MOST_CLASSES)
    if not classes:
        if text:
            raise LabelError(f"{name}: the targets are text.", expected="numbers for regression", got=str(values[:3]))
        if len(values) == 1:
            raise LabelError(f"{name}: all targets are the same.", expected="numbers that vary", got=str(values[0]))
        return y.astype(np.float64), False, ()
    if len(values) < 2:  # noqa: PLR2004
        raise LabelError(
            f"{name}: there is only one class.", expected="at least two", got=str(values[0]), fix="Add the others."
        )
    if len(values) > len(y) / 2:
        raise LabelError(
            f"{name}: hardly any class occurs twice.",
            expected="classes",
            got=f"{len(values)} different targets in {len(y)} rows",
            fix="If they are numbers, say kind: regression in the configuration.",
        )
    renamed = not (not text and (values == np.arange(len(values))).all())
    shown = ", ".join(map(str, values[:10].tolist())) + (", …" if len(values) > 10 else "")  # noqa: PLR2004
    notes = (f"the classes {shown} are numbered from 0",) if renamed else ()
    return np.searchsorted(values, y).astype(np.int64), True, notes


def made_here(table: Table, number: int) -> np.ndarray:
    """Division ``number`` of a table that comes without any, ``[N]``: stratified by class, drawn from that seed."""
    generator = np.random.default_rng(number)
    part = np.zeros(len(table.y), dtype=np.uint8)
    groups: list[Any] = [np.arange(len(table.y))]
    if table.classification:
        groups = [np.flatnonzero(table.y == label) for label in np.unique(table.y)]
    for rows in groups:
        order = generator.permutation(rows)
        # at least one row of each class to train on
        train = max(1, round(PARTS[0] * len(rows)))
        validation = round(PARTS[1] * len(rows))
        part[order[train : train + validation]] = 1
        part[order[train + validation :]] = 2
    return part
