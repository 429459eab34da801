"""What the adapters of other curvature libraries share: their losses, a private copy of the network, and refusals.

Those libraries know a few losses, watch modules rather than functions, and store hooks and attributes on modules. They
therefore get a copy that shares only the network's weights. Where their Gauss-Newton matrix of the first batch is not
that of :class:`~laplace_plus.curvature.native.Native`, the adapter refuses. Other curvatures are the native backend's.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.curvature.base import Backend
from laplace_plus.curvature.native import Native
from laplace_plus.curvature.structures import Curvature, Structure
from laplace_plus.errors import NETWORK_ERRORS, UnsupportedError
from laplace_plus.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from laplace_plus.likelihoods.base import widen
from laplace_plus.network.batches import Batch
from laplace_plus.network.calls import Call
from laplace_plus.network.capture import Capture, capture_batch
from laplace_plus.network.gradients import Gradients
from laplace_plus.network.network import Network
from laplace_plus.structured.layout import MATRIX, Layout

_LOSSES: dict[type[Likelihood], tuple[type[nn.Module], float]] = {
    Categorical: (nn.CrossEntropyLoss, 1.0),
    Bernoulli: (nn.BCEWithLogitsLoss, 1.0),
    Gaussian: (nn.MSELoss, 0.5),
}
"""Losses whose sum, times the factor, is ``−log p`` at unit noise, up to a constant."""


@dataclass(frozen=True)
class Task:
    """One batch whose curvature is asked for, with the network's outputs ``[B, *, C]``."""

    network: Network
    likelihood: Likelihood
    batch: Batch
    structure: Structure
    capture: Capture
    outputs: Tensor


@dataclass(frozen=True)
class Layer:
    """A module of the private copy whose weight and bias make up one block."""

    layout: Layout
    name: str
    module: nn.Module
    call: Call


class ForeignBackend(Backend):
    """A backend that leaves the work to another library; see :class:`Backend`."""

    @override
    def accumulate(
        self,
        total: Curvature | None,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        structure: Structure,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Curvature, Tensor]:
        self.check(structure, likelihood)
        capture = capture_batch(network, batch)
        outputs = capture.outputs.view(capture.output_shape)
        likelihood.validate(outputs, batch.target)
        task = Task(network, likelihood, batch, structure, capture, outputs)
        try:
            found = self.compute(task)
        except (torch.OutOfMemoryError, UnsupportedError):
            raise
        except (*NETWORK_ERRORS, AssertionError) as error:  # the library's: the network has run on this batch before
            text = " ".join(str(error).split())[:400] or type(error).__name__
            self.require(False, "cannot differentiate this network", "operations that the library supports", text)
        if total is not None:
            return total.add_(found), outputs
        self._compare(found, task)
        return found, outputs

    def _compare(self, found: Curvature, task: Task) -> None:
        """Refuse a network for which ``vᵀ H v`` of a batch, for random v, is not that of the native curvature."""
        network = task.network
        source = torch.Generator().manual_seed(0)
        vectors = torch.randn(3, network.n_parameters, generator=source, dtype=torch.float64).to(network.vector())

        def quadratics(curvature: Curvature) -> Tensor:
            weights = torch.linspace(1, 2, curvature.blocks[0][1].n_components).to(vectors)
            parts = [block.quadratic(weights, layout.gather(vectors)) for layout, block in curvature]
            return torch.stack(parts).double().sum(0)

        native = quadratics(Native().accumulate(None, network, task.likelihood, task.batch, task.structure)[0])
        mine = quadratics(found)
        same = torch.allclose(mine, native, rtol=torch.finfo(vectors.dtype).eps ** 0.5, atol=1e-30)
        what, got = "computes another curvature for this network", f"vᵀ H v of {mine.tolist()}"
        self.require(same, what, f"the native {native.tolist()}", got)

    @abstractmethod
    def compute(self, task: Task) -> Curvature:
        """The curvature of one batch."""

    def require(self, holds: bool, what: str, expected: str, got: Any) -> None:
        """UnsupportedError for what the library, unlike the native backend, cannot do; ``what`` has no subject."""
        if not holds:
            fix = 'Use backend="native".'
            raise UnsupportedError(f"The {self.name} backend {what}.", expected=expected, got=str(got), fix=fix)

    def loss(self, task: Task) -> tuple[nn.Module, float, Tensor, bool]:
        """The torch loss of a likelihood at unit noise, its factor, targets for it, and whether some are ignored.

        Targets are labels ``[B, *]``, −100 where ignored, or numbers ``[B, *, C]``.
        """
        likelihood, shape = task.likelihood, task.outputs.shape
        known = type(likelihood) in _LOSSES and likelihood.of_new_targets is likelihood  # neither weights nor smoothing
        expected = ", ".join(cls.__name__ for cls in _LOSSES) + ", without weights"
        self.require(known, f"has no loss for {type(likelihood).__name__}", expected, likelihood)
        make, factor = _LOSSES[type(likelihood)]
        _, targets, weight = likelihood.rows(widen(task.outputs), task.batch.target)
        is_number = targets.is_floating_point()
        plain = not (is_number and likelihood.couples_outputs) and not bool(targets.isnan().any())
        self.require(plain, "takes no soft or missing targets", "class indices, or numbers", f"{targets.dtype}, or NaN")
        targets = targets.view(shape) if is_number else targets.where(weight > 0, -100).view(shape[:-1])
        return make(reduction="sum"), factor, targets, bool((weight == 0).any())

    def private_copy(self, network: Network) -> nn.Module:
        """A copy of the model in evaluation mode, which may take hooks and attributes.

        It has parameters of its own, of which only the selected ones require gradients. Their storage is the model's:
        no weight is copied, and none may be written to. UnsupportedError for a tied last layer.
        """
        memo: dict[int, object] = {}
        tied = set(network.parameter_names).difference(dict(network.model.named_parameters()))
        self.require(not tied, "cannot tell uses of a tied weight apart", "weights that are not tied", tied)
        for name, parameter in network.model.named_parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=name in network.parameter_names)
        private: nn.Module = copy.deepcopy(network.model, memo)
        for module in private.modules():
            module.training = False
        return private

    def kronecker_layers(self, task: Task, private: nn.Module) -> list[Layer]:
        """The selection's layers, plain modules that are used once, each with one Kronecker product."""
        layers = []
        for layout in Gradients(task.network, task.capture).layouts:
            owners = {name.rpartition(".")[0] for name in layout.names}
            module = private.get_submodule(next(iter(owners)))
            uses = [call for call in task.capture.calls if {rows.name for rows in call.rows} & set(layout.names)]
            known = len(owners) == 1 and type(module) in (nn.Linear, nn.Conv2d)
            known = known and layout.rule == MATRIX and layout.shape[0] == 1 and len(uses) == 1
            what = f"has no Kronecker product for {layout.names[0]!r}"
            got = f"{type(module).__name__}, {len(uses)} uses"
            self.require(known, what, "nn.Linear, or nn.Conv2d without groups, each used once", got)
            layers.append(Layer(layout, next(iter(owners)), module, uses[0]))
        return layers
