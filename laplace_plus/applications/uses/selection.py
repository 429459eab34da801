"""Batch active learning: which inputs of a pool to label next.

Each input is described by features ``F``, ``[C, S]``. Those of the posterior have ``F F'ᵀ = Λ^½ J Σ J'ᵀ Λ'^½``, the
covariance of the linearised outputs in units of the noise (Gaussian targets) or of the softmax's curvature
``Λ = diag p − p pᵀ``. Those of the prior have ``F F'ᵀ = J J'ᵀ``. Both are exact up to S parameters (for Gaussian
posteriors), and else sketched by S random vectors, so that any posterior serves. After an input is chosen, the features
of the others are multiplied by the root of ``(I + FᵀF)⁻¹``, which is the posterior after its label, whatever that is.

Sources: Holzmüller et al. (2023), "A framework and benchmark for deep batch active learning for regression"; Kirsch et
al. (2019), "BatchBALD"; Ash et al. (2020), "Deep batch active learning by diverse, uncertain gradient lower bounds";
Ash et al. (2021), "Gone fishing: neural active learning with Fisher embeddings".
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Bernoulli, Categorical
from laplace_plus.likelihoods.sampling import draw_by
from laplace_plus.network.batches import batch_size, can_be_cut, cut
from laplace_plus.network.linearization import batch_jacobian
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.posteriors import GaussianPosterior, Posterior

Method = Literal["variance", "determinant", "targets", "max_distance", "lcmd", "kmeans++"]

_ENTRIES = 2**26
"""Of the gradients that are held at a time: a pool may be many batches."""


class Chosen(NamedTuple):
    """Inputs of a pool, in the order in which they were chosen.

    Attributes:
        indices: ``[k]``, rows of the pool.
        scores: ``[k]`` float64: the criterion of each when it was chosen; NaN for the first of ``"kmeans++"`` and the
            like, without any point to be far from.
    """

    indices: Tensor
    scores: Tensor


def select(
    posterior: Posterior,
    pool: Any,
    k: int,
    *,
    method: Method = "determinant",
    targets: Any = None,
    n_features: int = 512,
    scale: Literal["layer"] | None = None,
    generator: torch.Generator | None = None,
) -> Chosen:
    """Choose k inputs of a pool, whose labels are then most informative.

    Args:
        posterior: Any fitted posterior of a network with outputs ``[B, C]``.
        pool: A batch's inputs, all candidates: a tensor, a tuple or a mapping.
        k: How many.
        method: ``"variance"``, the largest traces of ``F Fᵀ``; ``"determinant"``, greedily the largest gain of
            information ``½ log det(I + F Fᵀ)``; ``"targets"``, greedily the largest drop of the summed variances of
            ``targets``. With features of the prior: ``"max_distance"``, the farthest point from training data and
            chosen ones; ``"lcmd"``, the farthest point of the largest cluster (by summed squared distances) around
            them; ``"kmeans++"``, drawn in proportion to the squared distance.
        targets: Inputs at which to predict, for ``"targets"``; by default the pool.
        n_features: S, of sketches.
        scale: ``"layer"`` divides gradients of each weight by the root of its inputs' number, as the neural tangent
            parametrisation does; for features of the prior.
        generator: Source of randomness, of sketches and of ``"kmeans++"``.

    Raises:
        NotFittedError: Before the fit.
        ConfigurationError: An unknown method, or k beyond the pool.
        DataError: A distance method for a posterior that no longer knows its training data.
        UnsupportedError: Outputs with further axes, or likelihoods other than Gaussian, Categorical and Bernoulli.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> select(posterior, torch.tensor([[0.1], [3.0], [-2.0]]), 2).indices.tolist()
        [1, 2]
    """
    checks.choice("method", method, ("variance", "determinant", "targets", "max_distance", "lcmd", "kmeans++"))
    checks.choice("scale", scale, ("layer", None))
    checks.count("k", k, 1)
    checks.count("n_features", n_features, 1)
    checks.generator(generator)
    posterior.require_fit()
    checks.number("k", k, most=batch_size(posterior.network.receive(pool)))
    with exact_arithmetic(posterior.network), torch.no_grad():
        if method in ("variance", "determinant", "targets"):
            roots = _posterior_roots(posterior, n_features, generator)
            found = _features(posterior, pool, roots, weighted=True)
            wanted = _features(posterior, targets, roots, weighted=True) if targets is not None else found
            return _greedy(found, wanted, k, method)
        roots = _prior_roots(posterior, n_features, generator, by_layer=scale == "layer")
        data = posterior.training_data.again(None, "Distances are those from the training data.")
        seen = [_features(posterior, batch.inputs, roots) for batch in posterior.batches(data)]
        found = _features(posterior, pool, roots)
        return _spread(found.flatten(1), torch.cat(seen).flatten(1), k, method, generator)


def _posterior_roots(posterior: Posterior, n: int, generator: torch.Generator | None) -> Tensor:
    """``[P, S]`` whose rows' products are the covariance, exactly or in expectation."""
    if isinstance(posterior, GaussianPosterior) and posterior.n_parameters <= n:
        return torch.linalg.cholesky(posterior.covariance_matrix().double())
    drawn = posterior.sample(n, generator=generator)
    return ((drawn - posterior.mean) / math.sqrt(len(drawn))).mT


def _prior_roots(posterior: Posterior, n: int, generator: torch.Generator | None, *, by_layer: bool) -> Tensor:
    """``[P, S]`` whose rows' products are the identity, exactly or in expectation, but for the scale by layer."""
    size, network = posterior.n_parameters, posterior.network
    if size <= n:
        roots = torch.eye(size, dtype=torch.float64, device=network.device)
    else:
        device = network.device if generator is None else generator.device
        signs = torch.randint(0, 2, (size, n), generator=generator, device=device)
        roots = ((2 * signs - 1) / math.sqrt(n)).to(network.device, network.dtype)
    for item in network.selected if by_layer else ():
        fan_in = max(1, item.shape[1:].numel())
        roots[network.offsets[item.name] :][: item.size] /= math.sqrt(fan_in)
    return roots


def _features(posterior: Posterior, inputs: Any, roots: Tensor, *, weighted: bool = False) -> Tensor:
    """``[B, C, S]`` float64, on the network's device; in units of the noise if weighted."""
    inputs = posterior.network.receive(inputs)
    network, rows, size = posterior.network, [], batch_size(inputs)
    step = max(1, _ENTRIES // (max(1, posterior.n_outputs) * posterior.n_parameters))
    cuts = [slice(start, start + step) for start in range(0, size, step)] if can_be_cut(inputs, size) else []
    for part in [cut(inputs, some) for some in cuts] or [inputs]:
        found, jacobian = batch_jacobian(network, part)
        checks.finite("The network's output", found)
        checks.shape("The network's output", found, [None, None])
        moved = (jacobian.to(roots.dtype) @ roots).double().view(*found.shape, -1)
        rows.append(_output_root(posterior, found.double()) @ moved if weighted else moved)
    return torch.cat(rows)


def _output_root(posterior: Posterior, outputs: Tensor) -> Tensor:
    """``[B, C, C]`` or ``[C, C]``: a root of Λ, transposed."""
    likelihood = posterior.likelihood
    if likelihood.noise_std is not None:
        return torch.diag(likelihood.noise_std.detach().to(outputs).expand(outputs.shape[1]).reciprocal())
    if not likelihood.is_classifier:
        expected = "Gaussian noise of given scale, or classes"
        raise UnsupportedError("The value of a label is not known.", expected=expected, got=repr(likelihood))
    plain = Categorical() if likelihood.couples_outputs else Bernoulli()
    return plain.output_root(outputs, outputs).mT


def _greedy(found: Tensor, wanted: Tensor, k: int, method: str) -> Chosen:
    """The best by one criterion, one after the other, given the labels of those before."""
    found, wanted = found.clone(), wanted.clone()
    free = torch.ones(len(found), dtype=torch.bool, device=found.device)
    indices, scores = [], []
    eye = torch.eye(found.shape[1]).to(found)
    for _ in range(k):
        kernel = found @ found.mT
        if method == "variance":
            value = kernel.diagonal(dim1=-2, dim2=-1).sum(-1)
        elif method == "determinant":
            value = torch.linalg.slogdet(eye + kernel).logabsdet / 2
        else:
            scatter = torch.einsum("bcs,bct->st", wanted, wanted)
            drop = torch.linalg.solve(eye + kernel, found @ scatter @ found.mT)
            value = drop.diagonal(dim1=-2, dim2=-1).sum(-1)
        best = value.masked_fill(~free, -math.inf).argmax()
        indices.append(best)
        scores.append(value[best])
        free[best] = False
        if method == "variance":
            continue
        rows = found[best]
        values, vectors = torch.linalg.eigh(rows @ rows.mT)
        values = values.clamp_min(0)
        # (1/√(1 + λ) − 1)/λ without cancellation
        shrink = -1 / ((1 + values).sqrt() * (1 + (1 + values).sqrt()))
        middle = vectors * shrink @ vectors.mT
        found += found @ rows.mT @ middle @ rows
        wanted = found if wanted is found else wanted + wanted @ rows.mT @ middle @ rows
    return Chosen(torch.stack(indices).cpu(), torch.stack(scores).cpu())


def _spread(found: Tensor, seen: Tensor, k: int, method: str, generator: torch.Generator | None) -> Chosen:
    """Points far from those that were seen or chosen; squared distances to the nearest of these, and which it is."""
    distance, nearest = (torch.cdist(found, seen, compute_mode="donot_use_mm_for_euclid_dist") ** 2).min(1)
    free, indices, scores = torch.ones_like(distance, dtype=torch.bool), [], []
    for count in range(k):
        open_ = distance.masked_fill(~free, -1.0)
        if method == "kmeans++" and bool((open_ > 0).any()):
            best = draw_by(partial(torch.multinomial, num_samples=1), open_.clamp_min(0), generator)[0]
        elif method == "lcmd":
            sizes = torch.zeros(len(seen) + count).to(distance).index_add_(0, nearest[free], distance[free])
            largest = sizes[nearest].masked_fill(~free, -1.0).max()
            best = open_.masked_fill(sizes[nearest] < largest, -1.0).argmax()
        else:
            best = open_.argmax()
        indices.append(best)
        scores.append(distance[best])
        free[best] = False
        moved = (found - found[best]).square().sum(1)
        closer = moved < distance
        nearest = torch.where(closer, len(seen) + count, nearest)
        distance = torch.minimum(distance, moved)
    return Chosen(torch.stack(indices).cpu(), torch.stack(scores).cpu())
