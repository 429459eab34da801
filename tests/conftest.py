"""What holds for all tests."""

from __future__ import annotations

import importlib
import os

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:  # workers that each use every core only get in each other's way
    os.environ["OMP_NUM_THREADS"] = "1"  # which NumPy, SciPy and the processes that tests start read

import pytest  # noqa: E402
import torch  # noqa: E402

# Run in processes of their own, where they may change torch or import for seconds.
collect_ignore = ["pretend_card.py", *[f"distributed/{name}.py" for name in ("worker", "sharded", "trainer")]]

if WORKER:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "where the conformance suite, the right values and tests/test_devices.py have "
    parser.addoption("--device", default="cpu", help=f"{what} their networks: cpu, cuda, or a pretended card")
    parser.addoption("--data-device", default="cpu", help=f"{what} their data")


def pytest_configure(config: pytest.Config) -> None:
    places = config.getoption("--device"), config.getoption("--data-device")
    if places != ("cpu", "cpu"):
        from laplace_plus.testing import PosteriorConformance  # noqa: PLC0415

        if "card" in places:
            importlib.import_module("pretend_card")
        PosteriorConformance.device, PosteriorConformance.data_device = places


@pytest.fixture
def double():
    """Float64 as torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def values_of(cell: pytest.Function) -> set[tuple]:
    """What each parametrisation of a test gives to one of its cells."""
    groups = [mark.args[0] for mark in cell.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in groups]
    return {(*names, *(id(cell.callspec.params[name]) for name in names)) for names in groups}


def diagonal_of(cells: list[pytest.Function]) -> list[pytest.Function]:
    """So few of the cells of crossed parametrisations that each value is in one of them."""
    missing, found = {cell: values_of(cell) for cell in cells}, []
    while any(missing.values()):
        found.append(max(missing, key=lambda cell: len(missing[cell])))
        held = missing.pop(found[-1])
        missing = {cell: values - held for cell, values in missing.items()}
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cells of a test marked ``diagonal`` or ``quick``, or both, all others are slow."""
    tables: dict[str, list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cells in tables.items():
        named, crossed = cells[0].get_closest_marker("quick"), cells[0].get_closest_marker("diagonal")
        if named is None and crossed is None:
            continue
        quick = set(diagonal_of(cells)) if crossed else set()
        own = {cell for cell in cells if named and cell.callspec.id in named.args}
        if named and not own and len(cells) > 1:
            raise pytest.UsageError(f"{name}: no case is called as its quick ones, {named.args}")
        for cell in set(cells) - quick - own:
            cell.add_marker("slow")
