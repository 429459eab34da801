"""The Gaussian over outputs that a Gaussian over parameters induces in the linearised network, and its prediction.

``f(x) ~ N(f(θ̂, x), J(x) Σ J(x)ᵀ)``, computed layer by layer from inputs and output gradients. The full Jacobian is only
built if one dense block covers all parameters.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus._memory import budget, require_free, require_room, slices
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.gradients import Gradients, bytes_per_example, pieces, same_outputs
from laplace_plus.curvature.structures import Layout
from laplace_plus.errors import ConfigurationError, DataError, NotPositiveDefiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import check_finite, check_outputs, shape_text, unknown_link
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.likelihoods.normal import is_full
from laplace_plus.network import Network
from laplace_plus.predictive.output_covariances import (
    QUICK_BYTES,
    Wanted,
    covariances_by_cotangents,
    covariances_of_head,
    room_for_cotangents,
)
from laplace_plus.predictive.prediction import Prediction, RandomSource, from_samples
from laplace_plus.structured import Factor

MANY_OUTPUTS = 64
"""With more outputs than this, links that need only variances get only variances: covariances would take C times the
memory, and the links ignore them."""

Outputs = Literal["diagonal", "independent"] | Sequence[int] | Sequence[bool] | slice | Tensor | None

_OF_LINKS: dict[str, Outputs] = {"gumbel": "independent", "network": "independent", "probit": "diagonal"}

_SMALL_GRAPH = 2**14
"""Bytes of one example's graph up to which no batch is cut before its forward pass."""


class FunctionalPosterior(NamedTuple):
    """Gaussian over the linearised network's outputs.

    Attributes:
        mean: ``[B, *, C]``; of K chosen outputs ``[B, *, K]``.
        covariance: ``[B, *, C, C]``; variances ``[B, *, C]`` if only the diagonal was asked for; with ``joint=True``
            ``[B, *, C, B, *, C]``; of K chosen outputs K in place of C.
    """

    mean: Tensor
    covariance: Tensor


def functional_posteriors(
    network: Network,
    factor_sets: Sequence[Mapping[str, Factor]],
    inputs: Any,
    *,
    joint: bool = False,
    outputs: Outputs = None,
    differentiable: bool = False,
    expected_outputs: int | None = None,
    apart: bool = True,
    layouts: Sequence[Layout] | None = None,
) -> list[FunctionalPosterior]:
    """Functional posteriors under several covariances, e.g. for a grid of prior precisions, from one Jacobian pass.

    Args:
        network: The network.
        factor_sets: For each covariance, the factors of the posterior precision's blocks by layout key.
        inputs: A batch's inputs.
        joint: Whether to give the covariance across inputs too.
        outputs: None for all outputs; ``"diagonal"`` for variances only; ``"independent"`` for those of
            :func:`~laplace_plus.likelihoods.categorical.independent_variances`, which stand for the covariances and
            cost what variances cost; or some outputs: their indices, a slice, a bool mask ``[C]``, or integers
            ``[B, *, K]`` that choose K outputs for each example and position by itself, such as its most probable
            classes. Only chosen outputs are differentiated.
        differentiable: Whether gradients flow to the inputs.
        expected_outputs: C, where it is known.
        apart: Whether the batch may be cut into micro-batches to save memory.
        layouts: The blocks of the precision, where they may be others than the layers.

    Raises:
        ConfigurationError: Outputs that the network does not have, or a memory budget that does not hold the gradients
            of one output.
        DataError: Inputs for which the network takes another path than while fitting.
    """
    again = partial(functional_posteriors, network, factor_sets, differentiable=differentiable, layouts=layouts)
    if apart and (outputs is None or isinstance(outputs, (str, slice))):
        of_part = partial(again, outputs=outputs, expected_outputs=expected_outputs)
        parts = _in_micro_batches(of_part, network, inputs, joint, expected_outputs or 1)
        if parts is not None:
            return parts
    capture = Capture(network, inputs, differentiable=differentiable)
    shape = capture.output_shape
    if not shape.numel():
        raise DataError("There is nothing to predict.", expected="at least one example", got=batches.describe(inputs))
    if expected_outputs is not None and shape[-1] != expected_outputs:
        require_outputs(shape, expected_outputs, inputs)
    gradients = Gradients(network, capture, layouts)
    mean = capture.outputs.to(torch.promote_types(capture.outputs.dtype, torch.float32))
    if not math.isfinite(mean.detach().sum()):
        check_outputs(mean)
    wanted = _wanted(outputs, mean, shape, joint)
    n_bytes = math.prod(wanted.covariance_shape) * mean.element_size() * len(factor_sets)
    if n_bytes > QUICK_BYTES:
        what, fix = f"A covariance {[*wanted.covariance_shape]} of the outputs", 'ask for outputs="diagonal".'
        require_free(n_bytes, what, mean.device, f"Pass fewer inputs at a time, or {fix}")
    covariances = covariances_of_head(gradients, factor_sets, wanted)
    if covariances is None:
        each, capacity, n_parts = room_for_cotangents(gradients, wanted)
        if apart and not (joint or capture.pointwise) and n_parts > 1 and batches.can_be_cut(capture.inputs, len(mean)):
            del gradients
            every = []
            for part in slices(len(mean), 1, -(-len(mean) // n_parts)):
                own = cast(Tensor, wanted.chosen)[part] if wanted.individual else outputs
                every.append(again(batches.cut(capture.inputs, part), outputs=own))
            parts = _joined(every)
            if same_outputs(parts[0].mean, wanted.mean):
                return parts
            # An example's output depends on the other examples: the batch must stay whole.
            del every, parts, capture
            return again(inputs, outputs=outputs, apart=False)
        require_room(each, f"the gradients of one output for {len(mean)} examples", mean.device)
        covariances = covariances_by_cotangents(gradients, factor_sets, wanted, capacity)
    results = []
    for covariance in covariances:
        found = covariance.reshape(wanted.covariance_shape).to(mean.dtype)
        if not math.isfinite(found.detach().sum()):
            check_finite(found, "The functional covariance")
        found = found if wanted.centre is None else independent_variances(wanted.mean, found)
        results.append(FunctionalPosterior(wanted.mean, found))
    return results


def _wanted(outputs: Outputs, mean: Tensor, shape: torch.Size, joint: bool) -> Wanted:
    """The outputs that were asked for, of means ``[B, *, C]`` of which ``mean`` may have all positions in one axis."""
    if outputs is None or isinstance(outputs, str):
        variances = outputs is not None and wants_variances(outputs, joint)
        centre = centring_weights(mean) if outputs == "independent" else None
        kind = "joint" if joint else "diagonal" if variances else "full"
        return Wanted(mean, mean.view(shape).clone(), None, kind, centre)
    chosen, picked = output_indices(outputs, shape).to(mean.device), mean.view(shape)
    picked = picked.gather(-1, chosen) if chosen.ndim > 1 else picked[..., chosen]
    return Wanted(mean, picked, chosen, "joint" if joint else "full", None)


def _in_micro_batches(
    again: Callable[..., list[FunctionalPosterior]], network: Network, inputs: Any, joint: bool, n_outputs: int
) -> list[FunctionalPosterior] | None:
    """The posteriors from parts of a batch whose graph would not fit; None where it does."""
    graph = network.bytes_per_example or bytes_per_example(network, inputs)  # of one example, as the fit has learnt
    if joint:
        graph += graph * n_outputs // 2  # with the gradients of all outputs, as measured
    if graph <= _SMALL_GRAPH or len(parts := pieces(network, inputs, graph, budget(network.device) // 2)) == 1:
        return None
    if not joint:
        return _joined([again(part) for part in parts])
    require_room(2 * graph, "the gradients of all outputs of two examples", network.device, if_given=True)
    return _across(partial(again, joint=True, apart=False), inputs, batches.batch_size(parts[0]))


def _joined(parts: Sequence[Sequence[FunctionalPosterior]]) -> list[FunctionalPosterior]:
    """The posteriors of a batch from those of its parts."""
    return [FunctionalPosterior(*map(torch.cat, zip(*one, strict=True))) for one in zip(*parts, strict=True)]


def _across(again: Callable[..., list[FunctionalPosterior]], inputs: Any, size: int) -> list[FunctionalPosterior]:
    """Joint posteriors where the gradients of all examples do not fit: any two parts of so many examples meet once."""
    n, results = batches.batch_size(inputs), list[FunctionalPosterior]()
    for both in map(torch.cat, combinations(torch.arange(n).split(size), 2)):
        found = again(batches.cut(inputs, both.tolist()))
        if not results:
            kept = found[0].mean.shape[1:]
            n_bytes = (n * kept.numel()) ** 2 * found[0].mean.element_size()
            require_free(
                n_bytes * len(found), "A joint covariance", found[0].mean.device, "Pass fewer inputs at a time."
            )
            shapes = (n, *kept), (n, *kept, n, *kept)
            results = [FunctionalPosterior(*map(one.mean.new_empty, shapes)) for one in found]
        for result, one in zip(results, found, strict=True):
            result.mean[both] = one.mean
            axes = one.mean.ndim, 1  # the second axis of examples
            result.covariance.movedim(*axes)[both[:, None], both] = one.covariance.movedim(*axes)
    return results


def from_functional(
    likelihood: Likelihood,
    mean: Tensor,
    covariance: Tensor,
    *,
    link: str | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    joint: bool = False,
) -> Prediction:
    """The prediction of a Gaussian over the network's outputs.

    Args:
        likelihood: How targets are distributed given the outputs.
        mean: ``[B, *, C]``.
        covariance: ``[B, *, C, C]``; variances ``[B, *, C]``, where the link and the likelihood need no more; or across
            inputs, ``[B, *, C, B, *, C]``, with ``joint``.
        link: One of ``likelihood.links``; ``None`` for the first.
        n_samples: Number of samples for ``"mc"``, and for quantities without a closed form.
        generator: Source of randomness. It advances by one number here, which determines everything random about the
            prediction, in any order of access. Without one the global generator is used at the first access.
        joint: Whether the covariance is across inputs. The link then still gives the mean and variance of each input;
            samples and log-probability are joint over all inputs.

    Raises:
        ConfigurationError: If there is no such link, or the shapes do not fit.
        NonFiniteError: If the mean or the covariance holds NaN or infinity, or is so large that the prediction does.
        NotPositiveDefiniteError: If a variance is negative by more than rounding.

    Example:
        >>> from laplace_plus.likelihoods import Bernoulli
        >>> from_functional(Bernoulli(), torch.tensor([[2.0]]), torch.tensor([[[8.0]]])).mean
        tensor([[0.7277]])
    """
    likelihood = likelihood.of_new_targets or likelihood
    link = likelihood.links[0] if link is None else link
    if link not in likelihood.links:
        raise unknown_link(likelihood, link)
    if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 1:
        what = "n_samples must be a positive integer."
        raise ConfigurationError(what, expected="an integer >= 1", got=repr(n_samples))
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
    covariance = covariance.to(torch.promote_types(covariance.dtype, torch.float32))
    if mean.dim() < 2 or not math.isfinite((mean.sum() + covariance.sum()).detach()):
        check_outputs(mean)
        check_finite(covariance, "The functional covariance")
    given = covariance
    if joint:
        covariance = _each_input(mean, covariance)
    full = covariance.dim() > mean.dim()
    if covariance.shape != ((*mean.shape, mean.shape[-1]) if full else mean.shape):
        is_full(mean, covariance)  # raises
    if link == "mc" and likelihood.couples_outputs and not full and mean.shape[-1] > 1:
        what = f"Monte Carlo for {type(likelihood).__name__} needs the covariances of the outputs."
        expected, got = shape_text((*mean.shape, mean.shape[-1])), f"variances only, {shape_text(covariance.shape)}"
        fix = "Ask for the full functional covariance, or for another link."
        raise ConfigurationError(what, expected=expected, got=got, fix=fix)
    variance = covariance.detach()
    variance = variance.diagonal(dim1=-2, dim2=-1) if full else variance
    if variance.numel():
        lowest, highest = map(float, variance.aminmax())
        if lowest < -(torch.finfo(variance.dtype).eps ** 0.5) * max(highest, -lowest):  # beyond rounding
            fix = "Use a larger prior precision, a positive semi-definite curvature (GGN) or float64."
            raise NotPositiveDefiniteError("A functional variance is negative.", got=f"{lowest:.3g}", fix=fix)
    marginal = None if link == "mc" else likelihood.predict(mean, covariance, link=link)
    if marginal is not None and not math.isfinite(marginal.mean.detach().sum()):  # variances whose squares overflow
        check_finite(marginal.mean, "The predictive means")
    return Prediction(
        likelihood=likelihood,
        functional_mean=mean,
        functional_covariance=given,
        link=link,
        joint=joint,
        marginal=marginal,
        n_samples=n_samples,
        source=RandomSource() if generator is None else RandomSource.of(generator),
    )


def stacked(predictions: Sequence[Prediction]) -> Prediction:
    """One prediction for the inputs of several, whose randomness is that of the first; none may be joint.

    Raises:
        DataError: Their outputs differ in shape.
    """
    first, shapes = predictions[0], {one.functional_mean.shape[1:] for one in predictions}
    if len(shapes) > 1:
        what, got = "Batches with outputs of different shapes make no one prediction.", ", ".join(map(str, shapes))
        raise DataError(what, expected="one shape", got=got, fix="Call predictive on each batch.")
    if any(one.outputs is not None for one in predictions):
        outputs = torch.cat([one.functional_samples for one in predictions], 1)
        return replace(from_samples(first.likelihood, outputs), source=first.source)
    mean = torch.cat([one.functional_mean for one in predictions])
    covariance = torch.cat([cast(Tensor, one.functional_covariance) for one in predictions])
    found = from_functional(first.likelihood, mean, covariance, link=first.link, n_samples=first.n_samples)
    found = replace(found, source=first.source)
    if any(one.without_each is not None for one in predictions):  # from numbers of samples that may differ
        vars(found)["standard_error"] = torch.cat([one.standard_error for one in predictions])
    return found


def _each_input(mean: Tensor, covariance: Tensor) -> Tensor:
    """The covariance of each input, ``[B, *, C, C]``, from that across inputs."""
    if covariance.shape != (*mean.shape, *mean.shape):
        expected, fix = shape_text((*mean.shape, *mean.shape)), "Ask for functional_posterior(x, joint=True)."
        what = "The covariance must be across inputs."
        raise ConfigurationError(what, expected=expected, got=shape_text(covariance.shape), fix=fix)
    size = mean.shape[-1]
    n = mean[..., 0].numel()
    blocks = covariance.reshape(n, size, n, size).diagonal(dim1=0, dim2=2)  # [C, C, N]
    return blocks.movedim(-1, 0).reshape(*mean.shape, size)


def outputs_for(link: str, n_outputs: int) -> Outputs:
    """What a link needs of so many outputs: variances where those do, or else all covariances."""
    return _OF_LINKS.get(link) if n_outputs > MANY_OUTPUTS else None


def require_outputs(shape: torch.Size, expected: int, inputs: Any) -> None:
    """Raise :class:`DataError` for inputs with another number of outputs, e.g. an example without a batch axis."""
    if shape[-1] != expected:
        what = "The network gives another number of outputs than while fitting."
        fix = "Pass a batch: x[None] for one input."
        got = f"outputs of shape {tuple(shape)} for inputs {batches.describe(inputs)}"
        raise DataError(what, expected=f"{expected} outputs for each example", got=got, fix=fix)


def wants_variances(outputs: Outputs, joint: bool) -> bool:
    """Whether a choice of outputs is of variances only; refuses other texts, and these with ``joint``."""
    if isinstance(outputs, str) and (outputs not in ("diagonal", "independent") or joint):
        expected = 'None, "diagonal", "independent" (neither with joint=True) or indices'
        raise ConfigurationError("Unknown choice of outputs.", expected=expected, got=f"{outputs!r}, joint={joint}")
    return isinstance(outputs, str)


def output_indices(outputs: Sequence[int] | Sequence[bool] | slice | Tensor, shape: torch.Size) -> Tensor:
    """A choice of outputs as indices from 0 to C−1: ``[K]``, or ``[B, *, K]`` where each example has its own."""
    n_outputs = shape[-1]
    expected = f"indices below {n_outputs}, a slice or a bool mask of length {n_outputs}; at least one"
    what = "The network does not have these outputs."
    refused = ConfigurationError(what, expected=expected, got=reprlib.repr(outputs))
    if isinstance(outputs, (list, tuple)) and len({isinstance(entry, bool) for entry in outputs}) > 1:
        raise refused
    try:
        chosen = torch.as_tensor(range(n_outputs)[outputs] if isinstance(outputs, slice) else outputs)
        if chosen.dtype is torch.bool and chosen.shape == (n_outputs,):
            chosen = chosen.nonzero().squeeze(-1)
        integers = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype is torch.bool)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise refused from error
    if not chosen.ndim or not chosen.numel() or not integers:
        raise refused
    chosen = chosen.long()
    if int(chosen.min()) < -n_outputs or int(chosen.max()) >= n_outputs:  # an index on a GPU would end the process
        raise refused
    chosen = chosen % n_outputs
    if chosen.ndim > 1 and chosen.shape[:-1] != shape[:-1]:
        expected, got = f"integers {[*shape[:-1], 'K']} below {n_outputs}", f"integers {list(chosen.shape)}"
        what = "The choice of outputs for each example does not fit the network's outputs."
        raise ConfigurationError(what, expected=expected, got=got)
    return chosen
