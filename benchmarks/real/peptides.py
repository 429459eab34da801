"""IM2Deep: the collision cross-section of a peptide in Å², with measured ones; groups are charges."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from deeplc.data import DeepLCDataset
from im2deep._model_ops import _get_architecture, _get_loss_function, _get_model_config
from im2deep.constants import DEFAULT_MODEL
from psm_utils import PSM, PSMList
from torch import Tensor, nn

from benchmarks.real.methods import Problem, features_of

ROWS = 4000


class Branches(nn.Module):
    """The network with plain tensors in and out; its own ``forward`` needs a trainer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.branches = nn.ModuleList([model.ConvAtomComp, model.ConvDiatomComp, model.ConvGlobal, model.OneHot])
        self.together = model.Concat

    def forward(self, atoms: Tensor, pairs: Tensor, whole: Tensor, letters: Tensor) -> Tensor:
        """Cross-sections, ``[n, 1]``."""
        found = [atoms.mT, pairs.mT, whole, letters.mT]
        for number, branch in enumerate(self.branches):
            for layer in branch:
                found[number] = layer(found[number])
        out = torch.cat([found[0], found[1], found[3], found[2]], 1)
        for layer in self.together:
            out = layer(out)
        return out


def network() -> Branches:
    """The trained network of one output."""
    options = {"config": _get_model_config(multi=False), "criterion": _get_loss_function(multi=False)}
    model = _get_architecture(multi=False).load_from_checkpoint(checkpoint_path=DEFAULT_MODEL, **options)
    return Branches(model).eval().requires_grad_(True)


def rows() -> dict[str, Any]:
    """Random peptides of the reference, as tensors."""
    table = pd.read_csv(str(files("im2deep") / "reference_data" / "reference_ccs.csv.gz"))
    table = table.sample(ROWS, random_state=0)
    peptides = [PSM(peptidoform=name, spectrum_id=str(n)) for n, name in enumerate(table.peptidoform)]
    data = DeepLCDataset.from_psm_list(PSMList(psm_list=peptides), add_ccs_features=True)
    inputs = tuple(torch.stack(column) for column in zip(*(data[n][0] for n in range(ROWS)), strict=True))
    charges = torch.tensor([int(name.rpartition("/")[2]) for name in table.peptidoform])
    return {"inputs": inputs, "targets": torch.tensor(table.CCS.to_numpy()).float()[:, None], "groups": charges}


def load(cache: Path) -> Problem:
    """The network and rows; those are kept in the folder."""
    path = cache / "peptides.pt"
    if not path.exists():
        torch.save(rows(), path)
    own, model = torch.load(path), network()
    head = model.together[-1]
    own["features"], seconds = features_of(model, head, own["inputs"])
    known = torch.ones(len(own["targets"]), dtype=torch.bool)
    return Problem("regression", model, head=head, known=known, forward_seconds=seconds, **own)
