"""Adapters whose packages are not installed are left out of the doctests."""

from importlib.util import find_spec

collect_ignore = [
    f"laplace_plus/integrations/{name}.py"
    for name in ("botorch", "lightning", "sklearn", "torch_geometric", "transformers")
    if find_spec(name) is None
]
