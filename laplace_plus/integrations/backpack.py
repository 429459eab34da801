"""Curvature by BackPACK (Dangel, Kunstner and Hennig, 2020, arXiv:1912.10985).

BackPACK hangs hooks and attributes on modules and passes curvature on from module to module, so it only sees what
happens inside modules that it knows. The adapter runs it on a private copy and watches the forward pass: a network that
does anything in between – adds, reshapes, uses a module twice – is refused, because BackPACK would not notice and its
result would be wrong. First-order quantities (the empirical Fisher) need the modules that own parameters only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from backpack import backpack, extend
from backpack.context import CTX
from backpack.extensions import (
    KFAC,
    KFLR,
    BatchGrad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus import batches
from laplace_plus.batches import Batch
from laplace_plus.curvature.capture import Capture, capture_batch
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.structures import Curvature, DiagonalStructure, KroneckerStructure, Structure, whole_layout
from laplace_plus.integrations.foreign import ForeignBackend, Layer, loss_targets
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import global_randomness
from laplace_plus.network import Network
from laplace_plus.structured import DenseBlock, DiagonalBlock, KroneckerBlock

_FIRST_ORDER = "empirical_fisher"

# The extension for each kind and structure, and the attribute of a parameter under which it leaves its result.
_EXTENSIONS: dict[tuple[str, str], tuple[Callable[..., Any], str]] = {
    ("ggn", "full"): (SqrtGGNExact, "sqrt_ggn_exact"),
    ("ggn_mc", "full"): (SqrtGGNMC, "sqrt_ggn_mc"),
    ("empirical_fisher", "full"): (BatchGrad, "grad_batch"),
    ("ggn", "diagonal"): (DiagGGNExact, "diag_ggn_exact"),
    ("ggn_mc", "diagonal"): (DiagGGNMC, "diag_ggn_mc"),
    ("empirical_fisher", "diagonal"): (SumGradSquared, "sum_grad_squared"),
    ("hessian", "diagonal"): (DiagHessian, "diag_h"),
    ("ggn", "KFAC"): (KFLR, "kflr"),
    ("ggn_mc", "KFAC"): (KFAC, "kfac"),
}


class BackPack(ForeignBackend):
    """Full, diagonal and Kronecker-factored curvature by BackPACK; see :class:`Backend`.

    For chains of modules that BackPACK knows, each used once, with outputs ``[B, C]``. Likelihoods are Categorical,
    Bernoulli with one output and Gaussian; the empirical Fisher takes any. Kronecker factors exist for
    ``nn.Linear`` on ``[B, i]`` inputs: those that BackPACK has for convolutions are neither of KFAC-expand nor of
    KFAC-reduce.

    Example:
        >>> import laplace_plus as lp
        >>> net, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
        >>> data = [(x, torch.tensor([0, 1, 2, 0]))]
        >>> mine = lp.Diagonal(net, "classification", backend="backpack").fit(data).variance()
        >>> torch.allclose(mine, lp.Diagonal(net, "classification").fit(data).variance())
        True
    """

    name: ClassVar[str] = "backpack"
    supported: ClassVar[frozenset[tuple[str, str]]] = frozenset(_EXTENSIONS)

    @override
    def check(self, structure: Structure, likelihood: Likelihood) -> None:
        """Refuse by name what the backend cannot do."""
        super().check(structure, likelihood)
        if likelihood.n_noise > 1 and (self.kind != "ggn" or isinstance(structure, KroneckerStructure)):
            raise self.refusal(
                f"cannot tell the outputs' shares of a {structure.name} {self.kind} curvature apart",
                expected="one noise level",
                got=f"{likelihood.n_noise} noise levels",
            )

    @override
    def curvature(
        self,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        structure: Structure,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Curvature, Tensor]:
        self.check(structure, likelihood)
        if self.kind != _FIRST_ORDER:
            self.loss(likelihood)
        capture = capture_batch(network, batch)
        outputs = capture.outputs.view(capture.output_shape)
        likelihood.validate(outputs, batch.target)
        self._require_plain_use(network, capture)
        private = self.private_copy(network)
        if self.kind == _FIRST_ORDER:
            self._require_known_options(private)
        else:
            self._require_chain(private, batch)
        layers: list[Layer] = []
        if isinstance(structure, KroneckerStructure):
            layers = self._linear_layers(network, capture, private)
        input_sums = {layer.name: _watch_input_sum(layer.module) for layer in layers}
        by_output = likelihood.n_noise > 1 and isinstance(structure, DiagonalStructure)
        make, field = _EXTENSIONS[self.kind, "full" if by_output else structure.name]
        extension = make(mc_samples=self.n_samples) if self.kind == "ggn_mc" else make()
        with _extended(private), self.translated(), global_randomness(network.device, generator), torch.enable_grad():
            if self.kind == _FIRST_ORDER:
                self._backward_first(private, network, likelihood, batch, extension)
                scale = 1.0
            else:
                scale = self._backward_second(private, network, likelihood, batch, extension)
        found = {name: getattr(p, field, None) for name, p in private.named_parameters() if p.requires_grad}
        for name, value in found.items():
            if value is None and name not in capture.unused:
                raise self.refusal(
                    f"cannot differentiate the module of {name!r}",
                    expected="modules that BackPACK knows, called as modules",
                    got=type(private.get_submodule(name.rpartition(".")[0])).__name__,
                )
        if isinstance(structure, KroneckerStructure):
            blocks = [
                (layer.layout, _kronecker_block(layer, found, input_sums[layer.name], outputs.shape[0], scale, network))
                for layer in layers
            ]
            return Curvature(list(blocks)), outputs
        values = _vectors(network, found)
        if isinstance(structure, DiagonalStructure):
            if by_output:  # the cotangents of the squared error's root are outputs
                values = values.square().sum(1)
            values = values.view(-1, network.n_parameters) * scale  # [K, P]
            layouts = Gradients(network, capture).layouts
            return Curvature([(layout, DiagonalBlock(layout.gather(values))) for layout in layouts]), outputs
        if self.kind == _FIRST_ORDER:
            values = values[None]
        if likelihood.n_noise > 1:
            matrix = torch.einsum("vnp,vnq->vpq", values, values)
        else:
            matrix = torch.einsum("vnp,vnq->pq", values, values)[None]
        layout = whole_layout(network)
        return Curvature([(layout, DenseBlock(matrix[:, None] * scale, layout.shape))]), outputs

    # -- what BackPACK would get wrong ---------------------------------------------------------------------------------

    def _require_plain_use(self, network: Network, capture: Capture) -> None:
        """Refuse parameters that are not used exactly once, by a call with the examples along its first axis."""
        axes = Gradients(network, capture).axes
        size = capture.output_shape[0]
        for name in network.parameter_names:
            if name in capture.unused:
                continue
            calls = [
                (call, axis)
                for call, axis in zip(capture.calls, axes, strict=True)
                if name in {rows.name for rows in call.rows}
            ]
            what = None
            if len(calls) != 1:
                what = "no such use" if not calls else f"{len(calls)} uses"
            elif calls[0][1] != (0, False) or calls[0][0].value.shape[0] != size or calls[0][0].packed:
                what = "a use with other axes"
            if what is not None:
                raise self.refusal(
                    f"cannot follow how the network uses {name!r}",
                    expected="one use as a layer's weight or bias, with the examples along the first axis",
                    got=what,
                )

    def _require_known_options(self, private: nn.Module) -> None:
        for name, module in private.named_modules():
            quirk = _quirk(module)
            if quirk is not None and any(p.requires_grad for p in module.parameters(recurse=False)):
                raise self.refusal(
                    f"overlooks an option of {name!r}", expected="padding by numbers, with zeros", got=quirk
                )

    def _require_chain(self, private: nn.Module, batch: Batch) -> None:
        chain = _Chain()
        chain.run(private, batch.inputs)
        if chain.broken is not None:
            raise self.refusal(
                "passes curvature on from module to module only",
                expected="a chain of modules from the first selected layer to the outputs, each used once",
                got=chain.broken,
            )

    def _linear_layers(self, network: Network, capture: Capture, private: nn.Module) -> list[Layer]:
        layers = self.kronecker_layers(network, capture, private)
        for layer in layers:
            if not isinstance(layer.module, nn.Linear) or layer.call.value.ndim != 2:
                raise self.refusal(
                    f"has Kronecker factors for {layer.name!r} that are neither KFAC-expand nor KFAC-reduce",
                    expected="nn.Linear on inputs [B, i]",
                    got=f"{type(layer.module).__name__} on inputs {tuple(layer.call.value.shape)}",
                )
        return layers

    # -- backward passes -----------------------------------------------------------------------------------------------

    def _backward_first(
        self, private: nn.Module, network: Network, likelihood: Likelihood, batch: Batch, extension: Any
    ) -> None:
        outputs = network.arrange(batches.output_tensor(batches.call(private, _detached(batch.inputs))))
        rows, targets, weight = likelihood.rows(outputs.detach(), batch.target)
        gradient = likelihood.gradient(rows, targets) * weight[:, None].to(rows.dtype)
        with backpack(extension):
            outputs.backward(gradient.view_as(outputs).to(outputs.dtype))

    def _backward_second(
        self, private: nn.Module, network: Network, likelihood: Likelihood, batch: Batch, extension: Any
    ) -> float:
        """Run a second-order extension; returns the factor by which its results are to be multiplied."""
        raw = batches.output_tensor(batches.call(private, _detached(batch.inputs)))
        outputs = network.arrange(raw)
        loss, scale = self.loss(likelihood)
        if isinstance(loss, nn.BCEWithLogitsLoss) and raw.ndim == 2 and raw.shape[1] > 1:
            raise self.refusal("has a binary loss for one output", expected="C = 1", got=f"C = {raw.shape[1]}")
        if raw.ndim != 2 or outputs.shape != raw.shape:
            raise self.refusal(
                "has losses for one row of outputs per example", expected="outputs [B, C]", got=f"{tuple(raw.shape)}"
            )
        targets, ignored = loss_targets(likelihood, outputs.detach(), batch)
        if ignored:
            raise self.refusal(
                "counts ignored targets", expected="no target equal to ignore_index", got="ignored targets"
            )
        with backpack(extension):
            extend(loss)(raw, targets).backward()
        return scale


class _Chain(TorchFunctionMode):
    """Watches whether a forward pass, from the first selected parameter on, is a chain of modules without children.

    To be run before the modules are extended: BackPACK's hooks make views of what goes from module to module.

    Attributes:
        broken: How the chain is broken, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: str | None = None
        self._begun = False
        self._inside = False
        self._latest: Tensor | None = None
        self._seen: set[str] = set()

    def run(self, private: nn.Module, inputs: Any) -> None:
        """Watch a private copy, whose selected parameters are those that require gradients, at work on some inputs."""
        handles = []
        for name, module in private.named_modules():
            if not any(True for _ in module.children()):
                handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
                handles.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            with torch.no_grad(), self:
                raw = batches.output_tensor(batches.call(private, inputs))
        finally:
            for handle in handles:
                handle.remove()
        if raw is not self._latest:
            self._break("outputs that are not those of the last module")

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._inside = True
        if not self._begun and not any(p.requires_grad for p in module.parameters(recurse=False)):
            return
        if name in self._seen:
            self._break(f"{name!r} used more than once")
        self._seen.add(name)
        quirk = _quirk(module)
        if quirk is not None:
            self._break(f"{name!r} with {quirk}")
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            self._break(f"{name!r} called with something else than one tensor")
        elif self._begun and inputs[0] is not self._latest:
            self._break(f"{name!r} called with something else than the output of the module before it")
        self._begun = True

    def _leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside = False
        if self._begun:
            if not isinstance(output, Tensor):
                self._break(f"{name!r} returning something else than one tensor")
            self._latest = output

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._begun and not self._inside and isinstance(output, (Tensor, tuple, list)):
            self._break(f"{getattr(func, '__name__', func)} between modules")
        return output

    def _break(self, how: str) -> None:
        self.broken = self.broken or how


def _quirk(module: nn.Module) -> str | None:
    """An option of a module that BackPACK overlooks, or None."""
    if isinstance(module, nn.modules.conv._ConvNd):
        if module.padding_mode != "zeros":
            return f"padding_mode={module.padding_mode!r}"
        if isinstance(module.padding, str):
            return f"padding={module.padding!r}"
    if getattr(module, "divisor_override", None) is not None:
        return "divisor_override"
    return None


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
            # The first selected layer has inputs without gradients; first-order extensions pass over frozen modules.
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            warnings.filterwarnings("ignore", message="Extension saving to")
            yield
    finally:
        del CTX.hook_handles[n_handles:]
        for module in private.modules():  # outputs and hooks refer to each other; do not wait for garbage collection
            for attribute in [name for name in vars(module) if name == "output" or name.startswith("input")]:
                delattr(module, attribute)


def _detached(inputs: Any) -> Any:
    """Inputs without a history, which a backward pass would otherwise reach."""
    leaves, rebuild = batches.flatten(inputs)
    return rebuild([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _watch_input_sum(module: nn.Module) -> list[Tensor]:
    """A list that every call of a linear layer adds the sum ``[i]`` of its input rows to."""
    sums: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sums.append(inputs[0].detach().sum(0))

    module.register_forward_pre_hook(note)
    return sums


def _kronecker_block(
    layer: Layer, found: dict[str, Any], input_sums: list[Tensor], n_data: int, scale: float, network: Network
) -> KroneckerBlock:
    """Join the factors of weight and bias, which BackPACK has one by one: the bias's input is the constant one."""
    prefix = f"{layer.name}." if layer.name else ""
    count = torch.tensor(float(n_data), dtype=torch.float64)
    left = found[prefix + ("weight" if layer.call.weight is not None else "bias")][0]
    if layer.call.weight is not None:
        right = found[prefix + "weight"][1] * n_data  # BackPACK's is an average
        if layer.call.bias is not None:
            (column,) = input_sums
            border = torch.cat([column, column.new_full((1,), n_data)])
            right = torch.cat([torch.cat([right, column[:, None]], 1), border[None]])
    else:
        right = left.new_full((1, 1), n_data)
    return KroneckerBlock(left[None, None].to(network.dtype) * scale, right[None].to(network.dtype), count)


def _vectors(network: Network, found: dict[str, Any]) -> Tensor:
    """Per-parameter results ``[…, *shape]`` as rows ``[…, P]`` of the selected entries."""
    lead = next(
        value.shape[: value.ndim - len(p.shape)] for p in network.selected if (value := found[p.name]) is not None
    )
    pieces = []
    for item in network.selected:
        value = found[item.name]
        if value is None:  # not used by the network
            value = torch.zeros(*lead, *item.shape, dtype=network.dtype, device=network.device)
        flat = value.detach().reshape(*lead, -1).to(network.dtype)
        pieces.append(flat if item.mask is None else flat[..., item.mask.to(flat.device)])
    return torch.cat(pieces, -1)
