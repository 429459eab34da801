"""Checkpoints that somebody has edited and signed again are refused when they are loaded, not when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError, NonFiniteError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


MADE: dict[str, Any] = {
    "Full": lp.Full,
    "KFAC": lp.KFAC,
    "Diagonal": lp.Diagonal,
    "LowRank": lambda model, likelihood: lp.LowRank(model, likelihood, rank=3, remainder_probes=2),
    "last layer": lambda model, likelihood: lp.Full(model, likelihood, parameters="last_layer"),
    "NullSpace": lambda model, likelihood: lp.NullSpace(model, likelihood, rows="loss", n_samples=2),
    "MetricBNN": lambda model, likelihood: lp.MetricBNN(
        model, likelihood, n_particles=2, n_steps=3, latent=lp.LatentModel(dimension=2, hidden=(4,), epochs=1)
    ),
    "limited rank": lambda model, likelihood: lp.KFAC(model, likelihood, factor_rank=2),
    "VariationalLastLayer": lambda model, likelihood: lp.VariationalLastLayer(model, likelihood, max_iterations=5),
    "SpatialField": lambda model, likelihood: lp.SpatialField(
        model, likelihood, box=[[-9.0] * 3, [9.0] * 3], resolution=1
    ),
}


def put(path: str, value: Any) -> Any:
    def change(header: Any, tensors: Any) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in parents:
            header = header[key]
        header[last] = value

    return change


def view(name: str, *shape: int) -> Any:
    return lambda header, tensors: tensors.update({name: tensors[name].reshape(shape)})


CASES = {
    "names of a block": ("KFAC", put("state.blocks.0.names", ["0.weight", "?"]), "of other parameters"),
    "no names": ("Full", put("state.blocks.0.names", []), "of other parameters"),
    "scale": ("KFAC", put("state.covariance_scale", -1.0), "covariance_scale"),
    "scale of latents": ("MetricBNN", put("state.latent.scale", 10**30), "scale must be a positive number"),
    "chunk": ("MetricBNN", put("options.chunk_size", 10**30), "chunk_size must be a positive integer"),
    "output axis": ("KFAC", put("likelihood.output_axis", "1"), "is damaged"),
    "number of parts": ("KFAC", put("likelihood", {"name": "gaussian", "noise_std": [1.0, 2.0]}), "number of parts"),
    "complex": ("Full", lambda h, t: t.update({"vector": t["vector"].to(torch.complex64)}), "complex"),
    "statistics": ("Full", view("statistics"), "do not fit together"),
    "left": ("KFAC", view("block.0.left", 4, 4, 1, 1), "'block.0.left' has another shape|'left' has another shape"),
    "values": ("Diagonal", view("block.0.values", 1, 1, 4, 4, 1), "'values' has another shape"),
    "nodes": ("LowRank", view("block.0.nodes", -1, 2, 2), "'nodes' has another shape|do not fit"),
    "rows": ("last layer", view("block.0.scales", 12, 3, 1), "'scales' has another shape"),
    "noise": ("NullSpace", view("directions", -1, 2), "'directions' has another shape"),
    "limit": (
        "limited rank",
        lambda h, t: t.update({name: -one for name, one in t.items() if "limit" in name}),
        "limit of",
    ),
    "index": ("VariationalLastLayer", lambda h, t: t.update({"index": t["index"] + 1}), "index, sums"),
    "index's type": ("VariationalLastLayer", lambda h, t: t.update({"index": t["index"].double()}), "index, sums"),
    "root": ("VariationalLastLayer", lambda h, t: t.update({"root": t["root"][:, :1]}), "index, sums"),
    "key": ("SpatialField", put("state.blocks.0.key", "x"), "blocks of another kind"),
    "start": ("MetricBNN", view("latent.start", 2, 1), "'start' has another shape"),
}


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")
@pytest.mark.parametrize("case", CASES)
def test_forged_checkpoints_are_refused_when_loaded(case: str, tmp_path: Path) -> None:
    name, change, message = CASES[case]
    model = net()
    MADE[name](model, "classification").fit([(X, Y)]).save(tmp_path / "it")
    header, tensors = io.read(tmp_path / "it")
    change(header, tensors)
    io.write(tmp_path / "it", header, tensors)
    with pytest.raises(CheckpointError, match=message):
        lp.load(tmp_path / "it", model)


@pytest.mark.parametrize("change", ["identity", "stage", "kernel", "iterations"])
def test_forged_stages_of_a_fit_are_refused(change: str, tmp_path: Path) -> None:
    model, folder = net(), tmp_path / "fit"
    MADE["NullSpace"](model, "classification").fit([(X, Y)], checkpoint=folder)
    header, tensors = io.read(folder / "noise-0")
    if change in header:
        header[change] = 7
    else:
        del tensors[change]
    io.write(folder / "noise-0", header, tensors)
    with pytest.raises(CheckpointError, match=f"no '{change}'|a dictionary"):
        MADE["NullSpace"](model, "classification").fit([(X, Y)], checkpoint=folder)


@pytest.mark.parametrize("seed", [[1], -1, "7"])
def test_a_forged_seed_is_refused(seed: Any, tmp_path: Path) -> None:
    model, folder = net(), tmp_path / "fit"
    MADE["NullSpace"](model, "classification").fit([(X, Y)], checkpoint=folder)
    header, tensors = io.read(folder / "draws")
    header["stage"]["seed"] = seed
    io.write(folder / "draws", header, tensors)
    with pytest.raises(CheckpointError, match="another seed"):
        MADE["NullSpace"](model, "classification").fit([(X, Y)], checkpoint=folder)


def test_the_function_of_a_subnetworks_network_is_compared(tmp_path: Path) -> None:
    model = net()
    lp.Subnetwork(model, "classification", lp.LargestMagnitude(5)).fit([(X, Y)]).save(tmp_path / "it")
    model[1] = nn.ReLU()
    with pytest.raises(CheckpointError, match="another function"):
        lp.load(tmp_path / "it", model)


@pytest.mark.parametrize("name", ["Full", "NullSpace"])
def test_predictions_that_overflow_are_named(name: str) -> None:
    """Variances are finite at this prior, their squares are not."""
    posterior = MADE[name](net().double(), "classification").fit([(X.double(), Y)])
    posterior.prior_precision = torch.tensor(1e-300, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="predictive means hold NaN"):
        posterior.predictive(X.double())
