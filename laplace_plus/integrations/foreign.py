"""What the adapters of other curvature libraries share: their losses, a private copy of the network, and refusals.

Those libraries know a few losses, watch modules rather than functions, and store hooks and attributes on modules. They
therefore get a copy that shares only the network's weights. Where they would compute something else than
:class:`~laplace_plus.curvature.native.Native`, the adapter refuses by name before they run.
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
from laplace_plus.curvature.structures import Curvature, KroneckerStructure, Structure
from laplace_plus.errors import InputError, LaplacePlusError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import widen
from laplace_plus.network.batches import Batch
from laplace_plus.network.calls import Call
from laplace_plus.network.capture import Capture, capture_batch
from laplace_plus.network.gradients import Gradients
from laplace_plus.network.network import Network
from laplace_plus.structured.layout import MATRIX, Layout


@dataclass(frozen=True)
class Task:
    """One batch whose curvature is asked for, with the network's outputs ``[B, *, C]``."""

    network: Network
    likelihood: Likelihood
    batch: Batch
    structure: Structure
    capture: Capture
    outputs: Tensor
    generator: torch.Generator | None

    def loss_targets(self) -> tuple[Tensor, bool]:
        """Targets as torch's losses take them, and whether some are to be ignored.

        They are labels ``[B, *]``, −100 where ignored, or numbers ``[B, *, C]``.
        """
        _, targets, weight = self.likelihood.rows(widen(self.outputs), self.batch.target)
        if targets.is_floating_point() and self.likelihood.couples_outputs:
            what, fix = "Soft labels are not for this backend.", 'Use backend="native".'
            raise UnsupportedError(what, got=f"{targets.dtype} targets", fix=fix)
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
    def check(self, structure: Structure, likelihood: Likelihood) -> None:
        super().check(structure, likelihood)
        if isinstance(structure, KroneckerStructure) and structure.eigenvalue_corrected:
            raise self.refusal("has no eigenvalue correction", "eigenvalue_corrected=False", "True")

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
        capture = capture_batch(network, batch)
        outputs = capture.outputs.view(capture.output_shape)
        likelihood.validate(outputs, batch.target)
        return self.compute(Task(network, likelihood, batch, structure, capture, outputs, generator)), outputs

    @abstractmethod
    def compute(self, task: Task) -> Curvature:
        """The curvature of one batch."""

    def refusal(self, what: str, expected: str, got: str) -> UnsupportedError:
        """The error for what the library, unlike the native backend, cannot do; ``what`` follows "The … backend"."""
        native = 'backend="native"' if self.kind == "ggn" else f'backend=Native(kind="{self.kind}")'
        return UnsupportedError(f"The {self.name} backend {what}.", expected=expected, got=got, fix=f"Use {native}")

    @contextmanager
    def translated(self) -> Iterator[None]:
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
        loss = likelihood.torch_loss()
        if loss is None:
            name = type(likelihood).__name__
            raise self.refusal(f"has no loss for {name}", "a likelihood with a torch_loss", name)
        return loss

    def private_copy(self, network: Network) -> nn.Module:
        """A copy of the model in evaluation mode, which may take hooks and attributes.

        It has parameters of its own, of which only the selected ones require gradients. Their storage is the model's:
        no weight is copied, and none may be written to. UnsupportedError for a model that cannot be copied, weights of
        half precision, or a tied last layer.
        """
        memo: dict[int, object] = {}
        tied = set(network.parameter_names).difference(dict(network.model.named_parameters()))
        if tied:
            raise self.refusal("cannot tell uses of a tied weight apart", "weights that are not tied", f"{tied}")
        for name, parameter in network.model.named_parameters():
            selected = name in network.parameter_names
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=selected)
            if selected and torch.finfo(parameter.dtype).bits < 32:
                got = f"{parameter.dtype} in {name!r}"
                raise self.refusal("would sum in half precision", "parameters of float32 or float64", got)
        try:
            private: nn.Module = copy.deepcopy(network.model, memo)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            text = " ".join(str(error).split())[:400]
            raise self.refusal(
                "needs a copy of the model, which cannot be copied", "a model that copy.deepcopy accepts", text
            ) from error
        for module in private.modules():
            module.training = False
        return private

    def kronecker_layers(self, task: Task, private: nn.Module) -> list[Layer]:
        """The selection's layers, plain modules with a Kronecker product each; else UnsupportedError."""
        layers = []
        for layout in Gradients(task.network, task.capture).layouts:
            owners = {name.rpartition(".")[0] for name in layout.names}
            module = private.get_submodule(next(iter(owners)))
            uses = [call for call in task.capture.calls if {rows.name for rows in call.rows} & set(layout.names)]
            fault = None
            if set(layout.names) & task.capture.unused:
                fault = "a parameter that the network does not use"
            elif len(owners) > 1 or type(module) not in (nn.Linear, nn.Conv2d):
                fault = "several modules" if len(owners) > 1 else type(module).__name__
            elif layout.rule != MATRIX or len(uses) != 1:
                fault = "a weight that is shared, or used by another function than its layer"
            elif layout.shape[0] != 1:
                fault = "a grouped convolution"
            elif isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
                fault = f"padding_mode={module.padding_mode!r}"
            if fault is not None:
                raise self.refusal(
                    f"has no Kronecker product for {layout.names[0]!r}",
                    "nn.Linear, or nn.Conv2d without groups and with zero padding, each used once",
                    fault,
                )
            layers.append(Layer(layout, next(iter(owners)), module, uses[0]))
        return layers
