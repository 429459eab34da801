"""The command `predict`, on tables, arrays and images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from cli_problems import refused
from torch import nn

import laplace_plus as lp
from laplace_plus.cli import main

SAVED = """
import torch
from torch import nn

def network(outputs=3, size=2):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(size, outputs))

def halved(batch):
    return batch / 2
"""


@pytest.fixture
def saved(write, tmp_path):
    """A saved posterior, and what to call with."""

    def make(likelihood="classification", outputs=3, size=2):
        write("saved_network.py", SAVED)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(size, outputs))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(20, size, generator=generator)
        y = x[:, :outputs] if likelihood == "regression" else torch.randint(0, outputs, (20,), generator=generator)
        posterior = lp.KFAC(model, likelihood).fit([(x, y)])
        posterior.save(tmp_path / "posterior")
        settings = {
            "model": "saved_network:network",
            "model_kwargs": {"outputs": outputs, "size": size},
            "posterior": str(tmp_path / "posterior"),
            "batch_size": 2,
        }
        return posterior, ["predict", write("predict.yaml", yaml.safe_dump(settings))]

    return make


def test_predictions_of_a_table(saved, write, tmp_path):
    posterior, command = saved()
    x = torch.tensor([[0.5, -1.0], [2.0, 1e-3], [3.0, 4.0]])
    text = "\n".join(",".join(map(repr, row)) for row in x.tolist())
    prediction = posterior(x)
    wanted = torch.cat([prediction.mean, prediction.epistemic, prediction.entropy()[:, None]], 1)
    for name, content in (("plain.csv", text), ("named.csv", f"length,e\n{text}\n")):
        output = tmp_path / "new" / "found.csv"
        assert main([*command, "--inputs", write(name, content), "--output", str(output)]) == 0
        first, *lines = output.read_text(encoding="utf-8").splitlines()
        assert first == "mean_0,mean_1,mean_2,epistemic_0,epistemic_1,epistemic_2,entropy"
        found = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
        torch.testing.assert_close(found[:, [0, 1, 2, 6]], wanted[:, [0, 1, 2, 6]])
        torch.testing.assert_close(found[:, 3:6], wanted[:, 3:6], rtol=1, atol=0.05)  # by Monte Carlo


def test_predictions_of_arrays(saved, tmp_path):
    posterior, command = saved("regression", outputs=1)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    np.savez(tmp_path / "in.npz", x=x.double().numpy())
    options = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
    assert main([*command, *options, "--transform", "saved_network:halved"]) == 0
    prediction = posterior(x / 2)
    with np.load(tmp_path / "out.npz") as archive:
        found = dict(archive)
    for name in ("mean", "std"):
        torch.testing.assert_close(torch.from_numpy(found[name]), getattr(prediction, name))
    torch.testing.assert_close(torch.from_numpy(found["entropy"]), prediction.entropy())


def test_predictions_of_a_folder_of_images(saved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    posterior, command = saved(size=4 * 5)
    pixels = torch.randint(0, 256, (3, 4, 5), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    (tmp_path / "images").mkdir()
    for name, one in zip("bca", pixels, strict=True):
        image.fromarray(one.numpy()).save(tmp_path / "images" / f"{name}.png")
    (tmp_path / "images" / "notes.txt").write_text("no image", encoding="utf-8")
    output = tmp_path / "found.csv"
    assert main([*command, "--inputs", str(tmp_path / "images"), "--output", str(output)]) == 0
    rows = [line.split(",") for line in output.read_text(encoding="utf-8").splitlines()[1:]]
    assert [row[0] for row in rows] == ["a.png", "b.png", "c.png"]
    wanted = posterior(pixels[[2, 0, 1], None] / 255).mean
    torch.testing.assert_close(torch.tensor([[float(n) for n in row[1:4]] for row in rows]), wanted)


def test_inputs_that_cannot_be_read_are_refused(saved, write, tmp_path, capsys):
    _, command = saved()
    for inputs in (str(tmp_path / "none.csv"), write("words.csv", "a,b\nc,d\n"), write("empty.csv", ""), str(tmp_path)):
        message = refused([*command, "--inputs", inputs, "--output", str(tmp_path / "o.csv")], capsys)
        assert "inputs cannot be read" in message
    message = refused([*command, "--inputs", write("fine.csv", "1,2\n"), "--output", str(tmp_path / "o.txt")], capsys)
    assert "'.csv', '.npz'" in message
