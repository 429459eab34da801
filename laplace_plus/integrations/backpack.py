"""Curvature by BackPACK (Dangel, Kunstner and Hennig, 2020, arXiv:1912.10985).

BackPACK stores hooks and attributes on modules and passes curvature from module to module. It sees only what happens
inside modules that it supports. Of a network that does anything in between – adds, reshapes, uses a module twice – its
result is wrong without notice, which the comparison with the native backend finds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from backpack import backpack, extend
from backpack.context import CTX
from backpack.extensions import KFLR, DiagGGNExact, SqrtGGNExact
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.curvature.structures import Curvature, DiagonalStructure, KroneckerStructure, Structure
from laplace_plus.integrations.foreign import ForeignBackend, Layer, Task
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import batches
from laplace_plus.network.gradients import Gradients, whole_layout
from laplace_plus.network.invariant import examined
from laplace_plus.network.network import Network
from laplace_plus.structured import DenseBlock, DiagonalBlock, KroneckerBlock

# The extension for each structure, and the attribute of a parameter under which it leaves its result.
_EXTENSIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "full": (SqrtGGNExact, "sqrt_ggn_exact"),
    "diagonal": (DiagGGNExact, "diag_ggn_exact"),
    "KFAC": (KFLR, "kflr"),
}


class BackPack(ForeignBackend):
    """The full, diagonal or Kronecker-factored Gauss-Newton matrix by BackPACK; see :class:`Backend`.

    For chains of modules that BackPACK knows, each used once, with outputs ``[B, C]``. Likelihoods are Categorical,
    Bernoulli with one output and Gaussian. Kronecker factors exist for ``nn.Linear`` on ``[B, i]`` inputs: those that
    BackPACK has for convolutions are neither of KFAC-expand nor of KFAC-reduce.

    Example:
        >>> import laplace_plus as lp
        >>> net, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
        >>> data = [(x, torch.tensor([0, 1, 2, 0]))]
        >>> mine = lp.Diagonal(net, "classification", backend="backpack").fit(data).variance()
        >>> torch.allclose(mine, lp.Diagonal(net, "classification").fit(data).variance())
        True
    """

    name: ClassVar[str] = "backpack"
    supported: ClassVar[frozenset[tuple[str, str]]] = frozenset(("ggn", name) for name in _EXTENSIONS)

    @override
    def check(self, structure: Structure, likelihood: Likelihood) -> None:
        super().check(structure, likelihood)
        one = likelihood.n_noise == 1 or not isinstance(structure, KroneckerStructure)
        got = f"{likelihood.n_noise} noise levels"
        self.require(one, "cannot separate the outputs in Kronecker factors", "one noise level", got)

    @override
    def compute(self, task: Task) -> Curvature:
        network, structure = task.network, task.structure
        several, scale = task.likelihood.n_noise > 1, self.loss(task)[1]
        private = self.private_copy(network)
        layers = self.kronecker_layers(task, private) if isinstance(structure, KroneckerStructure) else []
        for layer in layers:  # BackPACK's factors of convolutions are neither KFAC-expand nor KFAC-reduce
            known = isinstance(layer.module, nn.Linear) and layer.call.value.ndim == 2
            got = f"{type(layer.module).__name__} on inputs {tuple(layer.call.value.shape)}"
            self.require(known, f"has other factors for {layer.name!r}", "nn.Linear on inputs [B, i]", got)
        by_output = several and isinstance(structure, DiagonalStructure)
        make, field = _EXTENSIONS["full" if by_output else structure.name]
        with _extended(private), torch.enable_grad():
            self._run(private, task, make())
        found = {name: getattr(p, field, None) for name, p in private.named_parameters() if p.requires_grad}
        unused = examined(network, task.capture).unused
        missing = [name for name, value in found.items() if value is None and name not in unused]
        expected = "modules that BackPACK supports, called as modules"
        self.require(not missing, "cannot differentiate some modules", expected, f"those of {', '.join(missing)}")
        if layers:
            size = len(task.outputs)
            return Curvature([(layer.layout, _kronecker_block(layer, found, size, scale, network)) for layer in layers])
        values = _vectors(network, found)
        if isinstance(structure, DiagonalStructure):
            if by_output:  # the cotangents of the squared error's root are outputs
                values = values.square().sum(1)
            values = values.view(-1, network.n_parameters) * scale  # [K, P]
            layouts = Gradients(network, task.capture).layouts
            return Curvature([(layout, DiagonalBlock(layout.gather(values))) for layout in layouts])
        rows = values if several else values.flatten(0, 1)[None]  # [V, B, P] or [1, V·B, P]
        layout = whole_layout(network)
        return Curvature([(layout, DenseBlock((rows.mT @ rows)[:, None] * scale, layout.shape))])

    def _run(self, private: nn.Module, task: Task, extension: Any) -> None:
        """A forward pass, and a backward pass of the loss with the extension."""
        loss, _, targets, ignored = self.loss(task)
        leaves, rebuild = batches.flatten(task.batch.inputs)
        # Without a history, which a backward pass would otherwise reach.
        inputs = rebuild([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        raw = batches.output_tensor(batches.call(private, inputs))
        is_binary = isinstance(loss, nn.BCEWithLogitsLoss)
        plain = raw.ndim == 2 and raw.shape == task.outputs.shape and not (is_binary and raw.shape[1] > 1)
        expected = f"outputs {'[B, 1]' if is_binary else '[B, C]'}"
        self.require(plain, "has losses for one row of outputs per example", expected, tuple(raw.shape))
        self.require(not ignored, "counts ignored targets", "no target equal to ignore_index", "ignored targets")
        with backpack(extension):
            extend(loss)(raw, targets).backward()


@contextmanager
def _extended(private: nn.Module) -> Iterator[None]:
    """The copy's innermost modules extended; afterwards BackPACK's global list of hooks is as it was."""
    n_handles = len(CTX.hook_handles)
    for module in private.modules():
        if getattr(module, "inplace", False):  # hooks on modules do not go with writing to their outputs
            module.inplace = False  # type: ignore[assignment]
        if not any(True for _ in module.children()):
            extend(module)
    try:
        with warnings.catch_warnings():
            # The first selected layer has inputs without gradients.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield
    finally:
        del CTX.hook_handles[n_handles:]
        for module in private.modules():  # outputs and hooks refer to each other; do not wait for garbage collection
            for attribute in [name for name in vars(module) if name == "output" or name.startswith("input")]:
                delattr(module, attribute)


def _kronecker_block(
    layer: Layer, found: dict[str, Any], n_data: int, scale: float, network: Network
) -> KroneckerBlock:
    """Join the factors of weight and bias, which BackPACK has one by one: the bias's input is the constant one."""
    prefix = f"{layer.name}." if layer.name else ""
    if layer.call.weight is None:
        left = found[f"{prefix}bias"][0]
        right = left.new_full((1, 1), n_data)
    else:
        left, mean = found[f"{prefix}weight"]
        right = mean * n_data
        if layer.call.bias is not None:
            column = layer.call.value.sum(0).to(right)
            border = torch.cat([column, column.new_full((1,), n_data)])
            right = torch.cat([torch.cat([right, column[:, None]], 1), border[None]])
    count = torch.tensor(float(n_data), dtype=torch.float64)
    return KroneckerBlock(left[None, None].to(network.dtype) * scale, right[None].to(network.dtype), count)


def _vectors(network: Network, found: dict[str, Any]) -> Tensor:
    """Per-parameter results ``[…, *shape]`` as rows ``[…, P]`` of the selected entries; zero for unused parameters."""
    lead = next(found[p.name].shape[: -len(p.shape) or None] for p in network.selected if found[p.name] is not None)
    pieces = []
    for item in network.selected:
        value = found[item.name]
        if value is None:
            value = torch.zeros(*lead, *item.shape, device=network.device)
        flat = value.detach().reshape(*lead, -1).to(network.dtype)
        pieces.append(flat if item.mask is None else flat[..., item.mask.to(flat.device)])
    return torch.cat(pieces, -1)
