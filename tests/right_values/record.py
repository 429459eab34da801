"""Writes ``values.npz``: ``PYTHONPATH=.:tests python -m right_values.record``.

The file in the repository was recorded with version 0.2.0. It is recorded again only where one of its values has been
shown to be wrong, and then the commit says which, and why.
"""

from __future__ import annotations

import numpy as np
import torch
from right_values.cases import CASES, PATH, values


def with_errors(case: str) -> dict[str, np.ndarray]:
    """A case's values; beside sampled ones the standard error of the difference of two seeds' values."""
    found = values(case)
    sampled = [name for name in found if name.startswith("sampled")]
    others = [values(case, seed) for seed in range(1, 9)] if sampled else []
    for name in sampled:
        found[f"error of {name}"] = 2**0.5 * torch.stack([found[name], *(other[name] for other in others)]).std(0)
    return {f"{case}/{name}": value.numpy() for name, value in found.items()}


if __name__ == "__main__":
    recorded = {name: value for case in CASES for name, value in with_errors(case).items()}
    sizes = np.array([value.size for value in recorded.values()])
    np.savez_compressed(PATH, names=np.array([*recorded]), sizes=sizes, values=np.concatenate([*recorded.values()]))
