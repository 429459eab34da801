"""Whether the package still computes the values that version 0.2.0 computed."""

from __future__ import annotations

import numpy as np
import pytest
from right_values.cases import CASES, PATH, values

TOLERANCES = {"exact": 1e-10, "iterated": 1e-7, "tuned": 1e-4, "sampled": 1e-7}
"""Relative to the largest magnitude among a name's values; of samples, some solve systems by iterations, up to 1e-8."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    with np.load(PATH) as file:
        parts = np.split(file["values"], file["sizes"].cumsum()[:-1])
        return dict(zip(file["names"].tolist(), parts, strict=True))


def test_every_case_is_recorded(recorded):
    assert {name.split("/")[0] for name in recorded} == CASES.keys()


LONG = {"classes: SampledLaplace, SGD"}  # solvers by SGD: tests/posteriors/test_sampled.py


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in LONG else ()) for c in CASES])
def test_values_are_those_of_the_file(case, recorded):
    """Of sampled ones the same with the same seed, or else within three standard errors, as a root mean square."""
    found, wrong = values(case), {}
    wanted = {name.split("/")[1]: value for name, value in recorded.items() if name.split("/")[0] == case}
    assert found.keys() == {name for name in wanted if not name.startswith("error of")}
    for name, value in found.items():
        right, limit = wanted[name], TOLERANCES[name.split(",")[0]] * np.abs(wanted[name]).max()
        assert value.shape == right.shape, name
        difference = np.abs(value.numpy() - right)
        error = wanted.get(f"error of {name}")
        within = error is not None and np.sqrt(np.mean((difference / (error + limit + 1e-300)) ** 2)) <= 3
        if not (difference.max() <= limit or within):
            wrong[name] = f"{difference.max():.2g} off, of {np.abs(right).max():.6g}"
    assert wrong == {}
