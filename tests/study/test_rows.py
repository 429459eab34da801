"""Measurements beside the study's tables: what is kept, how inputs are shifted, what is read."""

from __future__ import annotations

import pytest
import torch
from scipy.ndimage import gaussian_filter

import laplace_plus as lp
from benchmarks.study import sets, shifts
from benchmarks.study.methods import Task
from benchmarks.study.rows import Rows
from benchmarks.study.sampled_noise import Tangent
from benchmarks.study.training import train


def test_rows_are_measured_once_and_a_torn_line_again(tmp_path):
    calls = []

    def measure():
        calls.append(1)
        return {"score": 2.0}

    path = tmp_path / "rows.jsonl"
    for seed in (0, 1, 0):
        row = Rows(path).of(measure, method="mine", seed=seed)
        assert row["score"] == 2.0 and row["warnings"] == [] and row["seconds"] >= 0
    assert len(calls) == 2
    path.write_text(path.read_text()[:-5])
    assert [row["seed"] for row in Rows(path).where(method="mine")] == [0]
    Rows(path).of(measure, method="mine", seed=1)
    assert len(calls) == 3 and [row["seed"] for row in Rows(path).all] == [0, 1]


def test_shifts_are_what_they_say():
    images = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(shifts.rotated(images, 0.0), images)
    torch.testing.assert_close(shifts.rotated(images, 90.0), images.rot90(-1, (2, 3)))
    torch.testing.assert_close(shifts.rotated(images, 180.0), images.flip(2, 3), rtol=0, atol=1e-5)
    blurred = gaussian_filter(images.numpy(), (0, 0, 1.0, 1.0), mode="nearest", radius=(0, 0, 3, 3))
    torch.testing.assert_close(shifts.blurred(images, 1.0), torch.from_numpy(blurred))
    flat = shifts.flattened(images, 0.25)
    torch.testing.assert_close(flat.mean((1, 2, 3)), images.mean((1, 2, 3)))
    torch.testing.assert_close(flat.std((1, 2, 3)), 0.25 * images.std((1, 2, 3)))
    noise = shifts.noisy(torch.full((50, 1, 20, 20), 0.5), 0.05) - 0.5
    assert float(noise.std()) == pytest.approx(0.05, rel=0.03)


def test_the_dense_tangent_is_that_of_a_full_posterior():
    inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    part = inputs, torch.arange(30) % 3
    data = sets.DataSet("small", 0, part, part, part, True, 3)
    network = {"hidden": [4], "activation": "tanh"}
    task = Task(data, train(network, {"epochs": 5}, data, 1), network, 0.0)
    own = Tangent.of(task)
    full = lp.Full(task.model, "classification", prior_precision=2.0).fit(task.train)
    p = task.model(inputs).softmax(-1).detach()
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
    torch.testing.assert_close(root @ root.mT, torch.diag_embed(p) - p[:, :, None] * p[:, None])
    covariance = torch.linalg.inv(own.curvature + 2 * torch.eye(len(own.curvature)))
    expected = root.mT @ full.functional_posterior(inputs).covariance @ root
    torch.testing.assert_close(own.rows @ covariance @ own.rows.mT, expected, rtol=1e-3, atol=1e-5)
    alpha = own.mackay()
    assert alpha * own.scatter == pytest.approx(float(own.share(alpha).sum()))
