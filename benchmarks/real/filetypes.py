"""Magika: the type of a file by its first and last kilobytes; labels are extensions, others are unknown kinds.

The files are those of the Python installation and of ``/usr``, so that figures differ between machines. KFAC is of the
last normalisation and the last layer only: 214 outputs for 512 positions are too many for the others.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, one_hot

from benchmarks.real.methods import Problem, features_of

MOST, MOST_UNKNOWN = 80, 25
SAME = "c cpp css csv diff gif go html ico java json makefile pdf php png po proto rst scss sql svg swift tcl toml ttf"
SAME += " txt vue woff woff2 xml zip npz npy onnx h5 parquet asm awk cmake m4 lua jar tar xls xlsx docx mp3 wav"
OTHER = "py python pyc pythonbytecode cc cpp js javascript ts typescript md markdown yml yaml yaml yaml jpg jpeg so elf"
OTHER += (
    " gz gzip sh shell pl perl pm perl rb ruby f90 fortran f fortran el lisp mk makefile ipynb ipynb bz2 bzip o elf"
)
OTHER += " bat batch rs rust ps postscript tex latex patch diff whl zip dll pebin exe pebin db sqlite ps1 powershell"
OTHER += " cs cs pt pytorch pth pytorch xz xz"
TYPES = {name: name for name in SAME.split()} | dict(zip(OTHER.split()[::2], OTHER.split()[1::2], strict=True))
STRANGE = "mo a safetensors pyx pxd cu cuh texi afm pfb elc hyb gmo metal glsl pxi tmpl S ll plist icc dat"
STRANGE += " pak tflite bcmap ttc qm cl hwdb lock decTest tables enc"
UNKNOWN = set(STRANGE.split())


class Magika(nn.Module):
    """The network of the package's ONNX file, whose probabilities it repeats within 1e-4."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.embedding, self.conv, self.head = nn.Linear(257, 64), nn.Conv1d(256, 512, 5), nn.Linear(512, 214)
        self.norms = nn.ModuleList([nn.LayerNorm(512, eps=1e-6), nn.LayerNorm(512, eps=1e-6)])
        own = {
            self.embedding: (weights["Const:0"].T, weights["MagikaV2/Dense_0/Reshape:0"]),
            self.norms[0]: (weights["MagikaV2/LayerNorm_0/Reshape_2:0"], weights["MagikaV2/LayerNorm_0/Reshape_3:0"]),
            self.conv: (weights["MagikaV2/Conv_0/transpose_3:0"][..., 0], weights["const_fold_opt__209"]),
            self.norms[1]: (weights["MagikaV2/LayerNorm_1/Reshape_2:0"], weights["MagikaV2/LayerNorm_1/Reshape_3:0"]),
            self.head: (weights["Const_24:0"].T, weights["MagikaV2/Dense_1/Reshape:0"]),
        }
        with torch.no_grad():
            for layer, (weight, bias) in own.items():
                layer.weight.copy_(weight.reshape(layer.weight.shape))
                layer.bias.copy_(bias.reshape(-1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, ``[n, 214]``."""
        letters = gelu(self.embedding(one_hot(x.long(), 257).float()), approximate="tanh")
        positions = self.norms[0](letters.reshape(len(x), 512, 256).mT)
        return self.head(self.norms[1](gelu(self.conv(positions), approximate="tanh").amax(-1)))


def ends(path: Path) -> list[int]:
    """The first and last 1024 bytes without white space outside, 256 where there are none."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(4096).lstrip()[:1024]
        file.seek(max(0, size - 4096))
        last = file.read(4096).rstrip()[-1024:]
    return [*first, *[256] * (1024 - len(first)), *[256] * (1024 - len(last)), *last]


def rows(labels: list[str]) -> dict[str, Any]:
    """Different files of each extension, as tensors."""
    found = defaultdict[str, list[Path]](list)
    for root in {sys.prefix, sys.base_prefix, "/usr"}:
        for path in Path(root).rglob("*"):
            kind = path.suffix[1:]
            if kind in TYPES or kind in UNKNOWN:
                found[kind].append(path)
    kinds: dict[str, dict[tuple[int, ...], None]] = defaultdict(dict)
    for extension, paths in sorted(found.items()):
        kind = TYPES.get(extension, f".{extension}")
        random.Random(0).shuffle(paths.sort() or paths)
        for path in paths:
            if len(kinds[kind]) >= (MOST if extension in TYPES else MOST_UNKNOWN):
                break
            if path.is_file() and not path.is_symlink() and path.stat().st_size >= 64:  # noqa: PLR2004
                kinds[kind][tuple(ends(path))] = None
    every = [(kind, content) for kind, contents in kinds.items() for content in contents]
    targets = torch.tensor([-1 if kind[0] == "." else labels.index(kind) for kind, _ in every])
    return {"bytes": torch.tensor([content for _, content in every], dtype=torch.int16), "targets": targets}


def load(cache: Path) -> Problem:
    """The end of the network and rows, which are kept in the folder."""
    folder = files("magika") / "models" / "standard_v3_3"
    graph = onnx.load(str(folder / "model.onnx")).graph
    weights = {part.name: torch.tensor(onnx.numpy_helper.to_array(part).copy()) for part in graph.initializer}
    short = {
        name.replace("jax2tf_get_logits_/", "").replace("pjit_get_logits_/", ""): weights[name] for name in weights
    }
    model, path = Magika(short).eval(), cache / "filetypes.pt"
    if not path.exists():
        own = rows(json.loads((folder / "config.min.json").read_text())["target_labels_space"])
        own["inputs"], own["seconds"] = features_of(model, model.norms[1], (own.pop("bytes"),))
        torch.save(own, path)
    own = torch.load(path)
    end = nn.Sequential(model.norms[1], model.head)
    features, _ = features_of(end, model.head, (own["inputs"],))
    known, n_fit = own["targets"] >= 0, int((own["targets"] >= 0).sum()) // 2
    sizes = {"forward_seconds": own["seconds"], "n_fit": n_fit, "n_test": n_fit, "from_features": True}
    targets = own["targets"]
    return Problem("classification", end, (own["inputs"],), model.head, features, targets, targets, known, **sizes)
