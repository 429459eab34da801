"""Doctests leave out adapters without examples or their packages, and scripts; tests collect no garbage of torch."""

import gc
from importlib.util import find_spec
from pathlib import Path

gc.set_threshold(200_000, 50, 50)  # looking for cycles among all objects of torch took a quarter of the tests' time

collect_ignore_glob = ["docs/*.py", "tests/integrations/lightning_parts.py"]
collect_ignore = [
    f"laplace_plus/integrations/{name}.py"
    for name in ("botorch", "lightning", "sklearn", "torch_geometric", "transformers")
    if find_spec(name) is None
    or ">>>" not in (Path(__file__).parent / f"laplace_plus/integrations/{name}.py").read_text()
]


def pytest_collection_finish() -> None:
    """Exempt what has been imported from the search for cycles."""
    gc.collect()
    gc.freeze()
