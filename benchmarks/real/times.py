"""DeepLC: retention times of peptides in minutes, with measured ones; groups are charges, decoys an unknown kind.

The network has an output for each of 6543 instruments. Some rows, of no half, choose the one that correlates best, and
the line that takes its times to those measured; both become a linear last layer of one output.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from deeplc import _model_ops, core
from deeplc.data import DeepLCDataset
from psm_utils import PSM, PSMList
from torch import Tensor, nn

from benchmarks.real.methods import Problem, features_of

LINE = 300
"""Rows that choose an instrument and a line."""


class OneInstrument(nn.Module):
    """The encoder, its projection, and a linear output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.project = model.encoder, model.head.proj
        self.out = nn.Linear(self.project.out_features, 1)

    def forward(self, atoms: Tensor, whole: Tensor, letters: Tensor) -> Tensor:
        """Times, ``[n, 1]``."""
        return self.out(self.project(self.encoder(atoms, whole, letters)))


def rows(model: Any) -> dict[str, Any]:
    """Sure targets and all decoys of the example, as tensors."""
    path = files("deeplc") / "package_data" / "examples" / "example_psms.tsv.gz"
    table = pd.read_csv(str(path), sep="\t").drop_duplicates("peptidoform")
    table = table[table.is_decoy | (table.qvalue < 0.01)].sample(frac=1, random_state=0)
    peptides = [PSM(peptidoform=name, spectrum_id=str(n)) for n, name in enumerate(table.peptidoform)]
    options = core._feature_kwargs_from_spec(model.feature_spec)
    found = DeepLCDataset.from_psm_list(PSMList(psm_list=peptides), **options).encode_batch(range(len(table)))
    return {
        "inputs": (found[0], found[2], found[3]),
        "targets": torch.tensor(table.retention_time.to_numpy()).float()[:, None],
        "groups": torch.tensor([int(name.rpartition("/")[2]) for name in table.peptidoform]),
        "known": torch.tensor(~table.is_decoy.to_numpy()),
    }


def choose(model: Any, network: OneInstrument, features: Tensor, times: Tensor) -> None:
    """Set the output to the instrument and the line of some rows."""
    head = model.head
    with torch.no_grad():
        outputs = features @ head.embedding.T * head.scale + head.shift
        best = int(torch.corrcoef(torch.cat([times, outputs], 1).T)[0, 1:].argmax())
        design = torch.stack([outputs[:, best], torch.ones(len(times))], 1)
        slope, start = torch.linalg.lstsq(design, times).solution[:, 0]
        network.out.weight.copy_(head.embedding[best] * head.scale[best] * slope)
        network.out.bias.copy_(head.shift[best] * slope + start)


def load(cache: Path) -> Problem:
    """The network and rows; those are kept in the folder."""
    model = _model_ops.load_model(core.DEFAULT_MODEL, device="cpu").eval()
    path = cache / "times.pt"
    if not path.exists():
        torch.save(rows(model), path)
    own, network = torch.load(path), OneInstrument(model).eval().requires_grad_(True)
    own["features"], seconds = features_of(network, network.out, own["inputs"])
    first = own["known"].nonzero()[:LINE, 0]
    choose(model, network, own["features"][first], own["targets"][first])
    rest = torch.ones(len(own["known"]), dtype=torch.bool)
    rest[first] = False
    inputs = tuple(column[rest] for column in own.pop("inputs"))
    own = {name: column[rest] for name, column in own.items()}
    return Problem("regression", network, inputs, head=network.out, forward_seconds=seconds, **own)
