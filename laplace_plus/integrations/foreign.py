"""What the adapters of other curvature libraries share: their losses, a private copy of the network, and refusals.

Those libraries know a handful of losses, watch modules rather than functions, and hang hooks and attributes on what
they work on. So they are handed a copy that shares the network's weights and nothing else, and whatever they would
compute differently from :class:`~laplace_plus.curvature.native.Native` is refused by name before they see it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.batches import Batch
from laplace_plus.curvature.base import Backend
from laplace_plus.curvature.calls import Call, ExampleAxis
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.structures import MATRIX, KroneckerStructure, Layout, Structure
from laplace_plus.errors import InputError, LaplacePlusError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import Network


class ForeignBackend(Backend):
    """A backend that leaves the work to another library; see :class:`Backend`."""

    @override
    def check(self, structure: Structure, likelihood: Likelihood) -> None:
        """Refuse by name what the backend cannot do."""
        super().check(structure, likelihood)
        if isinstance(structure, KroneckerStructure) and structure.eigenvalue_corrected:
            raise self.refusal(
                "has no eigenvalue correction that goes batch by batch",
                expected="eigenvalue_corrected=False",
                got="eigenvalue_corrected=True",
            )

    def refusal(self, what: str, *, expected: str, got: str) -> UnsupportedError:
        """The error for something that the library cannot do and the native backend can.

        Args:
            what: What it cannot do, to follow "The … backend".
            expected: What it could do.
            got: What was asked for.
        """
        native = 'backend="native"' if self.kind == "ggn" else f'backend=Native(kind="{self.kind}")'
        return UnsupportedError(f"The {self.name} backend {what}.", expected=expected, got=got, fix=f"Use {native}")

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn the library's own errors into an :class:`UnsupportedError` that keeps their text.

        The network has run on the same batch before, so what fails in here is the library.
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
                "cannot differentiate this network", expected="operations that the library knows", got=text[:400]
            ) from error

    def loss(self, likelihood: Likelihood) -> tuple[nn.Module, float]:
        """The torch loss that stands for a likelihood at unit noise, and its factor; see :meth:`Likelihood.torch_loss`.

        Raises:
            UnsupportedError: There is none.
        """
        loss = likelihood.torch_loss()
        if loss is None:
            raise self.refusal(
                f"has no loss for {type(likelihood).__name__}",
                expected="a likelihood with a torch_loss, such as Categorical, Bernoulli or Gaussian",
                got=type(likelihood).__name__,
            )
        return loss

    def private_copy(self, network: Network) -> nn.Module:
        """A copy of the model in evaluation mode, for hooks and attributes to be hung on.

        It has parameters of its own, of which only the selected ones require gradients, but their storage is the
        model's: no weight is copied, and none may be written to.

        Raises:
            UnsupportedError: The model cannot be copied, or has weights of less than single precision.
        """
        selected = frozenset(network.parameter_names)
        memo: dict[int, object] = {}
        for name, parameter in network.model.named_parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=name in selected)
            if name in selected and torch.finfo(parameter.dtype).bits < 32:
                raise self.refusal(
                    "would sum in half precision",
                    expected="selected parameters of float32 or float64",
                    got=f"{parameter.dtype} in {name!r}",
                )
        try:
            private: nn.Module = copy.deepcopy(network.model, memo)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise self.refusal(
                "works on a copy of the model, which cannot be copied",
                expected="a model that copy.deepcopy takes",
                got=" ".join(str(error).split())[:400],
            ) from error
        for module in private.modules():
            module.training = False
        return private

    def kronecker_layers(self, network: Network, capture: Capture, private: nn.Module) -> list[Layer]:
        """The layers that make up the selection, each a plain module with a Kronecker product of its own.

        Args:
            network: The network.
            capture: Its capture of a batch.
            private: A copy of its model.

        Raises:
            UnsupportedError: Some selected parameter does not belong to such a layer.
        """
        gradients = Gradients(network, capture)
        axes = dict(zip(map(id, capture.calls), gradients.axes, strict=True))
        layers = []
        for layout in gradients.layouts:
            owners = {name.rpartition(".")[0] for name in layout.names}
            module = private.get_submodule(owners.pop()) if len(owners) == 1 else None
            calls = [call for call in capture.calls if {rows.name for rows in call.rows} & set(layout.names)]
            what = None
            if set(layout.names) & capture.unused:
                what = "a parameter that the network does not use"
            elif type(module) not in (nn.Linear, nn.Conv2d):
                what = type(module).__name__ if module is not None else "several modules"
            elif layout.rule != MATRIX or len(calls) != 1:
                what = "a weight that is shared, or used by something else than its layer"
            elif layout.shape[0] != 1:
                what = "a grouped convolution"
            elif isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
                what = f"padding_mode={module.padding_mode!r}"
            if what is not None or module is None:
                raise self.refusal(
                    f"has no Kronecker product for {layout.names[0]!r}",
                    expected="nn.Linear, or nn.Conv2d without groups and with zero padding, each used once",
                    got=what or "no module",
                )
            name = layout.names[0].rpartition(".")[0]
            layers.append(Layer(layout, name, module, calls[0], axes[id(calls[0])]))
        return layers


@dataclass(frozen=True)
class Layer:
    """A module whose weight and bias make up one block.

    Attributes:
        layout: The block's layout.
        name: The module's name.
        module: The module, in the private copy.
        call: How it was called.
        axis: Where the examples lie in its output.
    """

    layout: Layout
    name: str
    module: nn.Module
    call: Call
    axis: ExampleAxis | None


def loss_targets(likelihood: Likelihood, outputs: Tensor, batch: Batch) -> tuple[Tensor, bool]:
    """Targets as torch's losses take them, and whether some are to be ignored.

    Args:
        likelihood: One that :meth:`ForeignBackend.loss` knows.
        outputs: ``[B, *, C]``.
        batch: The batch.

    Returns:
        Labels ``[B, *]``, −100 where ignored, or numbers ``[B, *, C]``.
    """
    _, targets, weight = likelihood.rows(outputs, batch.target)
    ignored = bool((weight == 0).any())
    if not targets.is_floating_point():
        return torch.where(weight > 0, targets, torch.full_like(targets, -100)).view(outputs.shape[:-1]), ignored
    return targets.view(outputs.shape), ignored
