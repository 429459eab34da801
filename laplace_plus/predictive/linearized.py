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

from laplace_plus._memory import budget, chunk_bytes, require_free, require_room, slices
from laplace_plus.curvature.native import output_layer_gradients
from laplace_plus.errors import ConfigurationError, DataError, NotPositiveDefiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import check_finite, check_outputs, shape_text, unknown_link
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.likelihoods.normal import is_full
from laplace_plus.network import batches
from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import Gradients, bytes_per_example, pieces, same_outputs
from laplace_plus.network.network import Network
from laplace_plus.predictive.prediction import Prediction, RandomSource, from_samples
from laplace_plus.structured import Factor
from laplace_plus.structured.layout import GENERAL, Layout

MANY_OUTPUTS = 64
"""With more outputs than this, links that need only variances get only variances: covariances would take C times the
memory, and the links ignore them."""

WHOLE = "all"
"""Key of a block that covers the whole parameter vector."""

Outputs = Literal["diagonal", "independent"] | Sequence[int] | Sequence[bool] | slice | Tensor | None
_Forms = Callable[..., list[Tensor]]

_OF_LINKS: dict[str, Outputs] = {"gumbel": "independent", "network": "independent", "probit": "diagonal"}

_LEAST_EXAMPLES = 8
"""Variances are computed for a few outputs at a time before a micro-batch gets smaller than this: products with fewer
rows take as long."""

_SMALL_GRAPH = 2**14
"""Bytes of one example's graph up to which no batch is cut before its forward pass."""

QUICK_BYTES = 512 * 2**20
"""On a CPU, more output gradients at a time than this only cost new pages of memory."""


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
    graph = network.bytes_per_example or bytes_per_example(network, inputs)  # of one example, as the fit has learnt
    shared = outputs is None or isinstance(outputs, (str, slice))
    cuts = graph > _SMALL_GRAPH and apart and shared and not joint
    if cuts and len(parts := pieces(network, inputs, graph, budget(network.device) // 2)) > 1:
        every = [again(part, outputs=outputs, expected_outputs=expected_outputs) for part in parts]
        return [FunctionalPosterior(*map(torch.cat, zip(*one, strict=True))) for one in zip(*every, strict=True)]
    graph += graph * (expected_outputs or 1) // 2  # with the gradients of all outputs, as measured
    cuts = joint and apart and shared and graph > _SMALL_GRAPH
    if cuts and len(parts := pieces(network, inputs, graph, budget(network.device) // 2)) > 1:
        require_room(2 * graph, "the gradients of all outputs of two examples", network.device, if_given=True)
        pairs = partial(again, joint=True, outputs=outputs, expected_outputs=expected_outputs, apart=False)
        return _across(pairs, inputs, batches.batch_size(parts[0]))
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
    device = mean.device
    diagonal, chosen = isinstance(outputs, str) and wants_variances(outputs, joint), cast(Any, None)
    if outputs is None or isinstance(outputs, str):
        individual, picked, size = False, mean.view(shape).clone(), shape[-1]
    else:
        chosen, picked = output_indices(outputs, shape).to(device), mean.view(shape)
        individual, size = chosen.ndim > 1, chosen.shape[-1]
        picked = picked.gather(-1, chosen) if individual else picked[..., chosen]
    kept = (*shape[:-1], size)
    final = (*kept, *kept) if joint else kept if diagonal else (*kept, size)
    n_bytes = math.prod(final) * mean.element_size() * len(factor_sets)
    if n_bytes > QUICK_BYTES:
        fix = 'Pass fewer inputs at a time, or ask for outputs="diagonal".'
        require_free(n_bytes, f"A covariance {list(final)} of the outputs", device, fix)
    mode = "joint" if joint else "diagonal" if diagonal else "full"
    centre = centring_weights(mean) if diagonal and outputs == "independent" else None
    # Gradients of a linear output layer are known without one cotangent for each output.
    head = None
    if capture.pointwise and WHOLE not in factor_sets[0]:
        positions = torch.arange(size, device=device) if chosen is None else chosen
        head = output_layer_gradients(gradients, positions.reshape(len(mean), -1) if individual else positions)
    if head is not None and head[0].key in factor_sets[0]:
        rows = head[1].features
        if centre is None:
            covariances = _quadratic_forms([head], factor_sets, mode)
        else:  # the rows (e_k − w) of all outputs are written out, if at all, for a few examples at a time
            found_parts = []
            for part in slices(len(rows), mean.shape[-1] ** 2 * rows.element_size(), chunk_bytes(device, of_caches=64)):
                own = replace(head[1], features=rows[part], centre=centre.flatten(0, -2)[part].to(rows.dtype))
                found_parts.append(_quadratic_forms([(head[0], own)], factor_sets, mode))
            covariances = [torch.cat(parts) for parts in zip(*found_parts, strict=True)]
    else:
        flat = mean.flatten(1, -2) if mean.ndim > 2 else mean[:, None]  # [B, M, C]
        general = 0
        for layout in gradients.layouts:
            general += layout.n_entries if layout.rule == GENERAL else 0
        each = capture.cotangent_bytes // 2 + len(flat) * general * flat.element_size()  # of one cotangent
        allowed = budget(device)
        room = min(QUICK_BYTES if device.type == "cpu" else allowed, allowed // 2)
        count = -(-size // max(1, room // max(1, each)))
        count = min(count, len(flat) // _LEAST_EXAMPLES) if diagonal else count
        count = min(len(flat), max(count, -(-each // max(1, room))))  # one cotangent must fit
        cuts = apart and not joint and not capture.pointwise and count > 1
        if cuts and batches.can_be_cut(capture.inputs, len(flat)):
            del gradients, flat
            found = []
            for part in slices(len(mean), 1, -(-len(mean) // count)):
                found.append(again(batches.cut(capture.inputs, part), outputs=chosen[part] if individual else outputs))
            joined = [FunctionalPosterior(*map(torch.cat, zip(*one, strict=True))) for one in zip(*found, strict=True)]
            if same_outputs(joined[0].mean, picked):
                return joined
            # An example's output depends on the other examples: the batch must stay whole.
            del found, joined, capture
            return again(inputs, outputs=outputs, apart=False)
        if each > allowed:
            require_room(each, f"the gradients of one output for {len(flat)} examples", device)
        one_hot = None if chosen is None else chosen.view(*flat.shape[:2], -1) if individual else chosen
        centre = None if centre is None else centre.reshape(flat.shape)
        forms = partial(_one_hot_forms, gradients, flat, one_hot, size, factor_sets, mode, centre)
        covariances = _by_cotangents(forms, flat.shape[1], size, mode, max(1, room // max(1, each)))
    results = []
    for covariance in covariances:
        found_one = covariance.reshape(final).to(mean.dtype)
        if not math.isfinite(found_one.detach().sum()):
            check_finite(found_one, "The functional covariance")
        found_one = found_one if centre is None else independent_variances(picked, found_one)
        results.append(FunctionalPosterior(picked, found_one))
    return results


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


def _by_cotangents(forms: _Forms, n_positions: int, each: int, mode: str, capacity: int) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors by one-hot cotangents of K outputs at each of M positions, a few at a time.

    Shapes are ``[B, M, K, K]`` (full), ``[B, M·K]`` (diagonal) or ``[B, M·K, B, M·K]`` (joint).
    """
    numbers = torch.arange(n_positions * each)
    if len(numbers) <= min(each, capacity):
        return forms(numbers)
    if mode == "full" and each > capacity:
        chunks = [_by_pairs(forms, position, capacity) for position in numbers.split(each)]
    else:
        size = {"joint": len(numbers), "diagonal": capacity, "full": capacity // each * each}[mode]
        chunks = []
        for which in numbers.split(size):
            chunks.append(forms(which, each if mode == "full" else None))
    return chunks[0] if len(chunks) == 1 else [torch.cat(part, 1) for part in zip(*chunks, strict=True)]


def _by_pairs(forms: _Forms, position: Tensor, capacity: int) -> list[Tensor]:
    """One position's ``[B, 1, K, K]`` if its cotangents do not fit in memory: any two chunks of them meet once."""
    results: list[Tensor] = []
    for pair in combinations(position.split(max(1, capacity // 2)), 2):
        both = torch.cat(pair)
        parts, index = forms(both), both - position[0]
        results = results or [part.new_zeros(len(part), 1, len(position), len(position)) for part in parts]
        for result, part in zip(results, parts, strict=True):
            result[:, 0, index[:, None], index] = part
    return results


def _one_hot_forms(
    gradients: Gradients,
    flat: Tensor,
    chosen: Tensor | None,
    size: int,
    factor_sets: Sequence[Mapping[str, Factor]],
    mode: str,
    centre: Tensor | None,
    which: Tensor,
    block: int | None = None,
) -> list[Tensor]:
    """Quadratic forms of the cotangents ``which``: number ``m K + k`` is the k-th chosen output of position m.

    Outputs are ``flat [B, M, C]``; ``chosen`` are ``[K]`` of them (None for all), or ``[B, M, K]`` of each example.
    Their mean with weights ``centre [B, M, C]`` is taken from the chosen ones.
    """
    n, positions, n_outputs = flat.shape
    if chosen is None or chosen.ndim == 1:
        columns = which if chosen is None else which // size * n_outputs + chosen.cpu()[which % size]
        units = flat.new_zeros(len(which), positions * n_outputs).scatter_(1, columns.to(flat.device).unsqueeze(1), 1.0)
        units = units.view(-1, 1, positions, n_outputs).expand(-1, n, -1, -1)  # all examples share one memory
        if centre is not None:
            position, units = which // size, units.clone()
            units[torch.arange(len(which)), :, position] -= centre[:, position].transpose(0, 1)
    else:
        number, position = which % size, which // size
        units = flat.new_zeros(len(which), n, positions, n_outputs)
        example = torch.arange(n)[:, None]
        units[torch.arange(len(which)), example, position, chosen.cpu()[example, position, number]] = 1
    cotangents = units.reshape(len(which), *gradients.capture.outputs.shape)
    stacks = [gradients.whole(cotangents)] if WHOLE in factor_sets[0] else gradients.blocks(cotangents)
    return _quadratic_forms(stacks, factor_sets, mode, block)


def _quadratic_forms(
    stacks: Any, factor_sets: Sequence[Mapping[str, Factor]], mode: str, block: int | None = None
) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors, summed over the layouts' gradients; one change of basis for each basis.

    With ``block``, only products within each group of so many cotangents: ``[B, V/block, block, block]``.
    """
    totals: list[Tensor] = []
    for layout, stack in stacks:
        coordinates: dict[int, Any] = {}
        for number, factors in enumerate(factor_sets):
            if layout.key not in factors:
                what = f"The network uses {layout.key!r} in another way than it did while fitting."
                expected = f"the blocks {', '.join(list(factors)[:4])} …"
                raise DataError(what, expected=expected, fix="Feed inputs of the same kind as the training data.")
            factor = factors[layout.key]
            if id(factor.basis) not in coordinates:
                coordinates[id(factor.basis)] = factor.basis.coordinates(stack)
            own = coordinates[id(factor.basis)]
            if block is None or own.n_cotangents == block:
                part = factor.quadratic_form(own, mode)
                part = part if block is None else part[:, None]
            else:
                groups = torch.arange(own.n_cotangents, device=own.device).split(block)
                part = torch.stack([factor.quadratic_form(own.select(group), mode) for group in groups], 1)
            if number == len(totals):
                totals.append(part)
            else:
                totals[number] = totals[number] + part
    return totals
