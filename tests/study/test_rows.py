"""Measurements beside the study's tables: what is kept, how inputs are shifted, what is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from scipy.ndimage import gaussian_filter

import laplace_plus as lp
from benchmarks.study import sets, shifts
from benchmarks.study.methods import Task
from benchmarks.study.rows import Rows, said, table
from benchmarks.study.sampled_noise import Tangent
from benchmarks.study.training import build, train


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


def test_means_have_standard_errors():
    assert said([1.0, 2.0, 3.0], 2) == "2.00 ± 0.58" and said([1.0], 1) == "1.0" and said([]) == ""
    assert table(["", "a"], [["x", "1"]]) == ["|  | a |", "|---|---|", "| x | 1 |", ""]


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


def compressed(pixels):
    """Images ``[N, 32, 32, 3]`` of colours that are even over 2×2 pixels, as coefficients."""
    r, g, b = np.moveaxis(pixels.astype(float), 3, 0)
    bright = 0.299 * r + 0.587 * g + 0.114 * b
    planes = [bright - 128, (b - bright) / 1.772, (r - bright) / 1.402]
    result = np.zeros((64, 24, len(pixels)))
    for k in range(len(pixels)):
        for part in range(4):
            row, column = divmod(part, 2)
            area = np.s_[k, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16]
            for block in range(4):
                y, x = 8 * (block // 2), 8 * (block % 2)
                result[:, 6 * part + block, k] = dctn(planes[0][area][y : y + 8, x : x + 8], norm="ortho").ravel()
            for tint in (1, 2):
                small = planes[tint][area][::2, ::2]
                result[:, 6 * part + 3 + tint, k] = dctn(small, norm="ortho").ravel()
    return result


def write(folder, part, pixels, labels):
    scale = np.full((2, 64), 2, np.uint8)
    found = np.rint(compressed(pixels) / 2).astype(np.int64)
    kept = found.astype(np.int8)
    beyond = np.flatnonzero(kept.ravel() != found.ravel())
    kept.ravel()[beyond] = 0
    values = found.ravel()[beyond].astype(np.int16)
    folder.mkdir(exist_ok=True)
    np.savez(
        folder / f"{part}_jpegq75.npz", coef=kept, q=scale, y=labels, ovf_index=beyond, ovf_value=values
    )  # fmt: skip
    return len(beyond)


def test_photographs_are_read_with_their_colours(tmp_path):
    generator = np.random.default_rng(0)
    grey = generator.integers(0, 256, (6, 32, 32, 1)).repeat(3, 3)
    grey[0] = np.array([200, 40, 90])  # one colour all over
    labels = np.arange(6, dtype=np.uint8)
    assert write(tmp_path / "cifar10", "train", grey, labels) > 0
    write(tmp_path / "cifar10", "test", grey[:4], labels[:4])
    source = {"images": True, "train_size": 4, "validation_size": 2, "test_size": 3}
    data = sets.load("cifar10", 0, tmp_path, source)
    assert [tuple(part[0].shape) for part in (data.train, data.validation, data.test)] == [
        (4, 3, 32, 32), (2, 3, 32, 32), (3, 3, 32, 32)
    ]  # fmt: skip
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    assert torch.cat([data.train[1], data.validation[1]]).tolist() == order.tolist()
    own = torch.from_numpy(grey[order[:4].numpy()]).permute(0, 3, 1, 2) / 255
    expected = (own - own.mean()) / own.std()
    assert float((data.train[0] - expected).abs().max()) < 0.06  # a quantum of two, over all frequencies
    assert build({"channels": [2, 3], "hidden": [4]}, data)(data.test[0]).shape == (3, 10)


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
