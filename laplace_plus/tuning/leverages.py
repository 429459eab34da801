"""Output covariances ``V = J Σ Jᵀ`` of deletion units, under the posterior's or the exact Gauss-Newton matrix.

Leverages of the exact matrix lie below one at any prior. It is formed over the P parameters where ``3 P²`` numbers
fit into the memory budget. Otherwise it is formed over the R outputs of all data, where the Jacobian ``[R, P]`` and
``4 R²`` numbers fit. With ``K = J P₀⁻¹ Jᵀ`` and a root S of the data's Hessians, both give the same covariance:
``V = K − K S (I + Sᵀ K S)⁻¹ Sᵀ K``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus._memory import budget, in_words
from laplace_plus.curvature import FullStructure, Layout, Native
from laplace_plus.errors import ConfigurationError, DataError, SelectionError
from laplace_plus.network.batches import batch_size, can_be_cut, cut, iterate
from laplace_plus.network.gradients import same_outputs
from laplace_plus.network.network import Network
from laplace_plus.network.selection import tied_names
from laplace_plus.predictive.linearized import functional_posteriors
from laplace_plus.priors import as_hyperparameter
from laplace_plus.structured import Factor
from laplace_plus.tuning.laplace import LaplaceModel
from laplace_plus.tuning.tangent_model import batch_jacobian

Leverages = Literal["own", "full", "last_layer", "first_order"]
Unit = Literal["example", "position"]

Covariances = Callable[[int, Any, Tensor], list[Tensor]]
"""Maps a batch's number, inputs and outputs ``[B, *, C]`` to one ``[U, b, b]`` for each posterior.

The U deletion units have b outputs each.
"""


def factor_covariances(
    network: Network,
    factor_sets: Sequence[Mapping[str, Factor]],
    unit: Unit,
    n_outputs: int,
    layouts: Sequence[Layout] | None = None,
) -> Covariances:
    """Covariances from factorised posterior precisions, one set of factors for each posterior."""
    options: dict[str, Any] = {"expected_outputs": n_outputs, "layouts": layouts}

    def covariances(number: int, inputs: Any, outputs: Tensor) -> list[Tensor]:
        if unit == "position" or outputs.shape[1:-1].numel() == 1:
            found = functional_posteriors(network, factor_sets, inputs, **options)
            return [posterior.covariance.reshape(-1, n_outputs, n_outputs) for posterior in found]
        size, count = outputs[0].numel(), batch_size(inputs)
        if not can_be_cut(inputs, count):
            what = "Leaving out an example with several positions requires running each example alone."
            expected = "inputs whose tensors all have the examples along their first axis"
            raise DataError(what, expected=expected, fix='Pass unit="position", which leaves out one at a time.')
        each = []
        for example in range(count):
            one = cut(inputs, slice(example, example + 1))
            found = functional_posteriors(network, factor_sets, one, joint=True, **options)
            each.append([posterior.covariance.reshape(1, size, size) for posterior in found])
        return [torch.cat(column) for column in zip(*each, strict=True)]

    return covariances


def exact_covariances(
    leverages: Leverages,
    model: LaplaceModel,
    network: Network,
    data: Iterable[Any],
    point: tuple[Any, Any, Any],
    unit: Unit,
) -> Covariances:
    """Covariances under the exact Gauss-Newton matrix, of all selected parameters or of the last layer.

    ``point`` is a prior precision, a temperature and a noise level. One pass over the data. With all parameters,
    ``O(R P²)`` operations in parameter space or ``O(R² P + R³)`` in output space. With the last layer, the other
    parameters are held fixed.

    Raises:
        ConfigurationError: The matrix fits into the memory budget in neither form.
        SelectionError: The posterior has no prior on the last layer.
    """
    (precision, temperature, noise_std), whole = point, network
    if leverages == "last_layer":
        network = whole.selecting("last_layer")
    size, allowed, item = network.n_parameters, budget(network.device), network.dtype.itemsize
    dense = 3 * item * size**2
    if leverages == "full" and dense > allowed:
        n_rows = sum(network.forward(batch.inputs).numel() for batch in iterate(data, device=network.device))
        in_output_space = item * n_rows * size + 4 * 8 * n_rows**2
        if in_output_space > allowed:
            what = "The exact Gauss-Newton matrix fits into the memory budget in neither form."
            got = f"{in_words(dense)} over {size:,} parameters, {in_words(in_output_space)} over all {n_rows:,} outputs"
            fix = 'Use leverages="last_layer", select fewer parameters, or raise memory_budget.'
            raise ConfigurationError(what, expected=f"at most {in_words(allowed)}", got=got, fix=fix)
        return _in_output_space(model, network, data, point, unit)
    backend, curvature = Native(), None
    for batch in iterate(data, device=network.device, description="curvature for leave-one-out"):
        curvature, _ = backend.accumulate(curvature, network, model.likelihood, batch, FullStructure())
    assert curvature is not None
    exact = replace(model, curvature=curvature, backend=backend)
    if leverages == "last_layer":
        exact, precision = _on_last_layer(exact, whole, network, model.prior(precision).vector().detach())
    factors = exact.factors(exact.prior(precision).precision, temperature, noise_std)
    return factor_covariances(network, [factors], unit, model.n_outputs)


def _on_last_layer(
    model: LaplaceModel, whole: Network, last: Network, precision: Tensor
) -> tuple[LaplaceModel, Tensor]:
    """The model with the last layer's weights and prior mean, and the last layer's precisions out of ``[P]``."""
    starts, sizes = dict(whole.offsets), {item.name: item.size for item in whole.selected}
    for first, others in tied_names(whole.model).items():
        for name in others if first in starts else ():  # one use has the prior of all
            starts[name], sizes[name] = starts[first], sizes[first]
    missing = [item.name for item in last.selected if sizes.get(item.name) != item.size]
    if missing:
        what = "The posterior is not over the last layer, and has no prior there."
        expected, got = f"a selection with {', '.join(missing)}", f"{', '.join(whole.parameter_names[:4])} …"
        raise SelectionError(what, expected=expected, got=got, fix='Use leverages="full".')
    index = torch.cat([torch.arange(starts[item.name], starts[item.name] + item.size) for item in last.selected])
    own, mean = precision[index.to(precision.device)], as_hyperparameter(model.prior_mean)
    model = replace(
        model,
        vector=last.vector(),
        layer_index=last.layer_index(),
        prior_mean=mean if mean.ndim == 0 else mean[index.to(mean.device)],
    )
    return model, own[0] if bool((own == own[0]).all()) else own


def _in_output_space(
    model: LaplaceModel, network: Network, data: Iterable[Any], point: tuple[Any, Any, Any], unit: Unit
) -> Covariances:
    """Covariances by way of the matrix over the outputs of all data; later passes must come in the same order."""
    (precision, temperature, noise_std), likelihood = point, model.likelihood
    weights = likelihood.curvature_weights(noise_std) / as_hyperparameter(temperature).double()
    deviations = model.prior(precision).vector().detach().double().rsqrt().to(network.device)
    jacobians, roots, sizes, known = [], [], [], []
    for batch in iterate(data, device=network.device, description="Jacobians for leave-one-out"):
        outputs, jacobian = batch_jacobian(network, batch.inputs)
        likelihood.validate(outputs, batch.target)
        flat, targets, weight = likelihood.rows(outputs.double(), batch.target)
        root = likelihood.output_root(flat, targets) * weight[:, None, None]
        groups = likelihood.output_groups(root.shape[-1]).to(root.device)
        roots.append(root * weights.to(root)[groups].sqrt())
        jacobians.append(jacobian * deviations.to(jacobian))
        known.append(outputs)
        size = outputs.shape[-1] if unit == "position" else outputs[0].numel()
        sizes.append((len(jacobian) // size, size))
    jacobian, root = torch.cat(jacobians), torch.cat(roots)
    del jacobians, roots
    kernel = torch.zeros(len(jacobian), len(jacobian), dtype=torch.float64, device=jacobian.device)
    # In double precision, some columns at a time: V is a small difference of matrices that may be far larger.
    for columns in jacobian.split(max(1, len(jacobian)), 1):
        kernel.addmm_(columns.double(), columns.double().T)
    del jacobian, columns
    blocks = kernel.view(len(kernel), *root.shape[:2]).transpose(0, 1)  # one block of C columns for each position
    kernel_root = torch.bmm(blocks, root).transpose(0, 1).reshape(len(kernel), -1)  # K S
    inner = torch.bmm(root.mT, kernel_root.view(*root.shape[:2], -1)).reshape(kernel_root.shape[1], -1)  # Sᵀ K S
    inner.diagonal().add_(1.0)
    solved = torch.linalg.solve_triangular(torch.linalg.cholesky(inner), kernel_root.T, upper=False)
    del kernel_root, inner
    found, start = [], 0
    for count, size in sizes:
        units = [slice(at, at + size) for at in range(start, start + count * size, size)]
        found.append(torch.stack([kernel[own, own] - solved[:, own].T @ solved[:, own] for own in units]))
        start += count * size

    def covariances_of(number: int, inputs: Any, outputs: Tensor) -> list[Tensor]:
        if number >= len(found) or not same_outputs(known[number].to(outputs), outputs):
            what = "The data differ from those of the pass before, or come in another order."
            raise DataError(what, got=f"another batch {number}", fix="Pass data= as a loader that does not shuffle.")
        return [found[number]]

    return covariances_of
