"""The exact Gauss-Newton matrix behind leave-one-out displacements, for posteriors whose own curvature is another.

Its leverages are below one at any prior. It is formed over the P parameters where ``3 P²`` numbers fit into the memory
budget, else over the R rows of all data's outputs together, where the Jacobian ``[R, P]`` and ``4 R²`` numbers do: with
``K = J P₀⁻¹ Jᵀ`` and a root S of the data's Hessians, ``V = K − K S (I + Sᵀ K S)⁻¹ Sᵀ K`` is the same covariance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus._memory import budget, in_words
from laplace_plus.batches import iterate
from laplace_plus.curvature import Curvature, FullStructure, Native
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.errors import ConfigurationError, SelectionError
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.leave_one_out.covariances import Covariances, FactorCovariances, KnownCovariances, Unit
from laplace_plus.network import Network
from laplace_plus.priors import as_hyperparameter


@dataclass(frozen=True)
class Displacement:
    """Which covariances a route is asked for.

    Attributes:
        model: The posterior's curvature and all that the evidence is a function of.
        network: The network.
        data: The data of the fit.
        precision: Prior precision of the displacement.
        temperature: Divides gradients and Hessians.
        noise_std: Noise of the displacement; None for the likelihood's.
        unit: What is left out.
    """

    model: LaplaceModel
    network: Network
    data: Iterable[Any]
    precision: Any
    temperature: Any
    noise_std: Any
    unit: Unit


def whole_route(of: Displacement) -> Covariances:
    """Covariances under the exact Gauss-Newton matrix over all selected parameters.

    One pass over the data, and ``O(R P²)`` operations over parameters or ``O(R² P + R³)`` over rows.

    Raises:
        ConfigurationError: Neither form fits into the memory budget; says what they would take.
    """
    network = of.network
    allowed, item = budget(network.device), network.dtype.itemsize
    size = network.n_parameters
    dense = 3 * item * size**2
    if dense > allowed:
        rows = sum(
            network.forward(batch.inputs).numel()
            for batch in iterate(of.data, device=network.device, description="rows of outputs")
        )
        by_rows = item * rows * size + 4 * 8 * rows**2
        if by_rows > allowed:
            raise ConfigurationError(
                "The exact Gauss-Newton matrix fits into the memory budget in neither form.",
                expected=f"at most {in_words(allowed)}",
                got=f"{in_words(dense)} over {size:,} parameters, or {in_words(by_rows)} over all {rows:,} outputs",
                fix='Use leverages="last_layer", select fewer parameters, or raise memory_budget.',
            )
        return _over_rows(of)
    whole = replace(of.model, curvature=_exact(of.model, network, of.data), backend=Native())
    factors = whole.factors(of.precision, of.temperature, of.noise_std)
    return FactorCovariances(network, [factors], of.unit, of.model.n_outputs)


def last_layer_route(of: Displacement) -> Covariances:
    """Covariances under the exact Gauss-Newton matrix of the last layer, the other parameters being held fixed.

    Raises:
        SelectionError: The posterior is not over the last layer, so that it has no prior there.
        ConfigurationError: A matrix that does not fit into memory.
    """
    model, network = of.model, of.network
    last = Network(network.model, "last_layer", model.likelihood.arrange)
    last.ambient_autocast = network.ambient_autocast
    curvature = _exact(model, last, of.data)  # only now it is certain which layer is last
    spread = model.prior(of.precision).vector().detach()
    starts = network.offsets()
    sizes = {item.name: item.size for item in network.selected}
    missing = [item.name for item in last.selected if sizes.get(item.name) != item.size]
    if missing:
        raise SelectionError(
            "The posterior says nothing about the last layer.",
            expected=f"a selection with {', '.join(missing)}",
            got=f"parameters {', '.join(network.parameter_names[:4])} …",
            fix='Use leverages="full".',
        )
    places = torch.cat([torch.arange(starts[item.name], starts[item.name] + item.size) for item in last.selected])
    own = spread[places.to(spread.device)]
    mean = as_hyperparameter(model.prior_mean)
    head = replace(
        model,
        curvature=curvature,
        backend=Native(),
        vector=last.vector(),
        layer_index=last.layer_index(),
        prior_mean=mean if mean.ndim == 0 else mean[places.to(mean.device)],
    )
    level = own[0] if bool((own == own[0]).all()) else own
    factors = head.factors(level, of.temperature, of.noise_std)
    return FactorCovariances(last, [factors], of.unit, model.n_outputs)


def _exact(model: LaplaceModel, network: Network, data: Iterable[Any]) -> Curvature:
    """The exact Gauss-Newton matrix of all the data at unit noise."""
    backend, total = Native(), None
    for batch in iterate(data, device=network.device, description="curvature for leave-one-out"):
        total, _ = backend.accumulate(total, network, model.likelihood, batch, FullStructure())
    assert total is not None
    return total


def _over_rows(of: Displacement) -> Covariances:
    """The covariances by way of the matrix over all rows of outputs."""
    likelihood, network = of.model.likelihood, of.network
    weights = likelihood.curvature_weights(of.noise_std) / as_hyperparameter(of.temperature).double()
    deviations = of.model.prior(of.precision).vector().detach().double().rsqrt().to(network.device)
    jacobians, roots, sizes, known = [], [], [], []
    for batch in iterate(of.data, device=network.device, description="Jacobians for leave-one-out"):
        jacobian, outputs = _jacobian(network, batch.inputs, deviations)
        likelihood.validate(outputs, batch.target)
        rows, targets, weight = likelihood.rows(outputs.double(), batch.target)
        root = likelihood.output_root(rows, targets) * weight[:, None, None]
        groups = likelihood.output_groups(root.shape[-1]).to(root.device)
        roots.append(root * weights.to(root)[groups].sqrt())
        jacobians.append(jacobian)
        known.append(outputs)
        block = outputs.shape[-1] if of.unit == "position" else outputs[0].numel()
        sizes.append((len(jacobian) // block, block))
    together, root = torch.cat(jacobians), torch.cat(roots)
    del jacobians, roots
    kernel = torch.zeros(len(together), len(together), dtype=torch.float64, device=together.device)
    # In double precision, some columns at a time: V is a difference of matrices that may be far larger than it.
    for columns in together.split(max(1, len(together)), 1):
        part = columns.double()
        kernel.addmm_(part, part.T)
    del together, part, columns
    blocks = kernel.view(len(kernel), *root.shape[:2]).transpose(0, 1)  # a column block for each row of outputs
    reach = torch.bmm(blocks, root).transpose(0, 1).reshape(len(kernel), -1)  # K S
    inner = torch.bmm(root.mT, reach.view(*root.shape[:2], -1)).reshape(reach.shape[1], -1)  # Sᵀ K S
    inner.diagonal().add_(1.0)
    solved = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), reach.T, upper=False)
    del reach, inner
    found, start = [], 0
    for count, block in sizes:
        parts = []
        for _ in range(count):
            own = slice(start, start + block)
            parts.append(kernel[own, own] - solved[:, own].T @ solved[:, own])
            start += block
        found.append(torch.stack(parts))
    return KnownCovariances(found, known)


def _jacobian(network: Network, inputs: Any, deviations: Tensor) -> tuple[Tensor, Tensor]:
    """``J P₀^(−½)`` of a batch, ``[B·M·C, P]``, and the outputs ``[B, *, C]``."""
    capture = Capture(network, inputs)
    gradients = Gradients(network, capture)
    outputs = capture.outputs.view(capture.output_shape)
    n, each = outputs.shape[0], outputs[0].numel()
    # Captured outputs may count positions as examples of their own: cotangents have the captured shape.
    shape = capture.outputs.shape
    parts = []
    for chunk in gradients.cotangent_chunks(each):
        units = outputs.new_zeros(chunk.stop - chunk.start, n, each)
        number = torch.arange(len(units), device=units.device)
        units[number, :, number + chunk.start] = 1
        _, stack = gradients.whole(units.view(len(units), *shape))
        values = stack.dense(slice(0, stack.n_examples)).flatten(2)  # [V, B', P]
        if stack.n_examples != n:
            values = values.view(len(units), n, -1, values.shape[-1]).sum(2)
        parts.append(values)
    jacobian = torch.cat(parts).transpose(0, 1).reshape(n * each, -1)
    return jacobian * deviations.to(jacobian), outputs.detach()
