"""What the adapters of other curvature libraries share: their losses, a private copy of the network, and refusals.

Those libraries know a few losses, watch modules rather than functions, and store hooks and attributes on modules. They
therefore get a copy that shares only the network's weights. Where their Gauss-Newton matrix of the first batch is not
that of :class:`~laplace_plus.curvature.native.Native`, the adapter refuses. Other curvatures are the native backend's.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.curvature.base import Backend
from laplace_plus.curvature.native import Native
from laplace_plus.curvature.structures import Curvature, Structure
from laplace_plus.errors import InputError, LaplacePlusError, UnsupportedError
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

    def loss_targets(self) -> tuple[Tensor, bool]:
        """Targets as torch's losses take them, and whether some are to be ignored.

        They are labels ``[B, *]``, −100 where ignored, or numbers ``[B, *, C]``.
        """
        _, targets, weight = self.likelihood.rows(widen(self.outputs), self.batch.target)
        if targets.is_floating_point() and self.likelihood.couples_outputs:
            what, fix = "Soft labels are not for this backend.", 'Use backend="native".'
            raise UnsupportedError(what, got=f"{targets.dtype} targets", fix=fix)
        if bool(targets.isnan().any()):
            raise UnsupportedError("Missing targets are not for this backend.", got="NaN", fix='Use backend="native".')
        if targets.is_floating_point():
            return targets.view(self.outputs.shape), bool((weight == 0).any())
        return targets.where(weight > 0, -100).view(self.outputs.shape[:-1]), bool((weight == 0).any())


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
        with self._translated():
            found = self.compute(task)
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
        if not torch.allclose(mine, native, rtol=torch.finfo(vectors.dtype).eps ** 0.5, atol=1e-30):
            got = f"vᵀ H v of {mine.tolist()}"
            raise self.refusal("computes another curvature for this network", f"the native {native.tolist()}", got)

    @abstractmethod
    def compute(self, task: Task) -> Curvature:
        """The curvature of one batch."""

    def refusal(self, what: str, expected: str, got: str) -> UnsupportedError:
        """The error for what the library, unlike the native backend, cannot do; ``what`` follows "The … backend"."""
        fix = 'Use backend="native".'
        return UnsupportedError(f"The {self.name} backend {what}.", expected=expected, got=got, fix=fix)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the library's own errors into an :class:`UnsupportedError` that keeps their text.

        The network has run on the same batch before, so any failure in here is the library's.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, IndexError) as error:
            if isinstance(error, LaplacePlusError) and not isinstance(error, InputError):
                raise
            cause = error.__cause__ if isinstance(error, InputError) else error
            text = " ".join(str(cause).split()) or type(cause).__name__
            raise self.refusal(
                "cannot differentiate this network", "operations that the library supports", text[:400]
            ) from error

    def loss(self, likelihood: Likelihood) -> tuple[nn.Module, float]:
        """The torch loss of a likelihood at unit noise, and its factor; UnsupportedError if there is none."""
        found = _LOSSES.get(type(likelihood))
        if found is None or likelihood.of_new_targets is not None:  # weights or smoothing
            expected = ", ".join(cls.__name__ for cls in _LOSSES) + ", without weights"
            raise self.refusal(f"has no loss for {type(likelihood).__name__}", expected, repr(likelihood))
        return found[0](reduction="sum"), found[1]

    def private_copy(self, network: Network) -> nn.Module:
        """A copy of the model in evaluation mode, which may take hooks and attributes.

        It has parameters of its own, of which only the selected ones require gradients. Their storage is the model's:
        no weight is copied, and none may be written to. UnsupportedError for a tied last layer.
        """
        memo: dict[int, object] = {}
        tied = set(network.parameter_names).difference(dict(network.model.named_parameters()))
        if tied:
            raise self.refusal("cannot tell uses of a tied weight apart", "weights that are not tied", f"{tied}")
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
            if not known or layout.rule != MATRIX or layout.shape[0] != 1 or len(uses) != 1:
                expected = "nn.Linear, or nn.Conv2d without groups, each used once"
                got = f"{type(module).__name__}, {len(uses)} uses"
                raise self.refusal(f"has no Kronecker product for {layout.names[0]!r}", expected, got)
            layers.append(Layer(layout, next(iter(owners)), module, uses[0]))
        return layers
