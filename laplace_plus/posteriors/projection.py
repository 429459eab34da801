"""Standard normal vectors, split into their projections onto the null space and the range of a network's rows.

The rows ``A [m, P]`` are derivatives of what must not change on the data. The range is that of ``Aᵀ``, the orthogonal
complement of the null space of A.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from laplace_plus import checks, kernels
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, JacobianOperator
from laplace_plus.curvature.output_roots import OutputRoot, column_root, gradient_root
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import stage_generator, standard_normal
from laplace_plus.linalg import Diagonal, Estimate, Operator
from laplace_plus.linalg.lsmr import LeastSquaresSolution
from laplace_plus.linalg.null_space import PROJECTORS, ProjectionMethod, project_null_space
from laplace_plus.network.batches import Batch, iterate
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.gradients import batch_gradients
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.predicting import SampleBased
from laplace_plus.posteriors.public import require_influence
from laplace_plus.posteriors.state import State, of_state
from laplace_plus.posteriors.storing import resolve_option

# -- rows --------------------------------------------------------------------------------------------------------------


Rows = Literal["logit", "ggn", "loss"]
"""All outputs, what the curvature sees of them, or each example's loss."""

_DENSE_ROWS, _DENSE_ENTRIES = 512, 2**24
"""Bounds below which A becomes a dense matrix: its singular value decomposition then takes well under a second."""


def inverse_lengths(norms: Tensor) -> Tensor:
    """Reciprocals of the rows' lengths; zero for rows of rounding size, whose direction means nothing."""
    floor = 100 * torch.finfo(norms.dtype).eps * norms.max()
    return torch.where(norms > floor, norms.clamp(min=1e-30).reciprocal(), torch.zeros_like(norms))


class NullSpaceRows:
    """The rows of a data set at the network's own weights, as matrix-free operators.

    ``"logit"``: ``∂f_nc/∂θ``. ``"ggn"``: ``Λ^½ J``; for classes its null space also holds a common shift of all logits.
    ``"loss"``: ``∂ℓ_n/∂θ``, one row for each example, scaled to unit length, which does not change the null space.
    Gradients of examples that are fitted exactly are rounding errors and would count as constraints: they are ignored.
    ``whole`` is the operator of all rows, ``[m, P]``. The data must keep the order of their batches.
    """

    def __init__(self, network: Network, likelihood: Likelihood, data: Iterable[Any], kind: Rows):
        self._network, self._likelihood, self._data, self._kind = network, likelihood, data, kind
        self._scales = self._row_scales() if kind == "loss" else None
        self.n_ignored = 0 if self._scales is None else int((self._scales == 0).sum())
        self.whole = self._operator(data)

    def by_batch(self) -> Iterator[Operator]:
        """The rows of one batch after the other, ``[m_b, P]``."""
        first = 0
        for item in self._data:
            rows = self._operator([item], first)
            first += rows.shape[0]
            yield rows

    def _operator(self, data: Iterable[Any], first: int = 0) -> Operator:
        if self._kind == "logit":
            return JacobianOperator(self._network, data)
        if self._scales is None:
            return GGNOperator(self._network, self._likelihood, data).root()
        rows = FisherOperator(self._network, self._likelihood, data, kind="empirical").root()
        return Diagonal(self._scales[first : first + rows.shape[0]]) @ rows

    def _row_scales(self) -> Tensor:
        """The reciprocal length of each loss's gradient, ``[N]``."""
        squares = []
        for batch in iterate(self._data, device=self._network.device, progress=False, description=""):
            gradients = batch_gradients(self._network, batch)
            outputs, shape = gradients.capture.outputs, gradients.capture.output_shape
            root = gradient_root(self._likelihood, outputs.view(shape), batch.target)
            cotangent = root.up(outputs.new_ones(1, root.size)).view(1, *outputs.shape)
            total = outputs.new_zeros(len(outputs), dtype=torch.float64)
            for _, stack in gradients.blocks(cotangent):
                ones = torch.ones(stack.shape, dtype=stack.dtype, device=stack.device)
                total += stack.quadratic(ones, "diagonal")[:, 0].double()
            squares.append(total.view(shape[0], -1).sum(1))  # over positions that went as examples of their own
        norms = checks.finite("The length of a loss's gradient", torch.cat(squares).clamp(min=0).sqrt())
        return inverse_lengths(norms.to(self._network.dtype))


class BatchRows:
    """Rows ``A(θ) [m, P]`` of one batch, as a differentiable function of the parameters.

    The weights are a vector that requires gradients, and so do projections onto the rows' null space: by the adjoint of
    the least-squares problem, not through its iterations.

    The network runs once, forward and backward; each product is one more backward pass. As a product ``A v`` is the
    derivative of ``Aᵀ u`` in u, no operation needs a forward derivative, but all need two backward ones.
    Rows of losses are scaled to unit length; the lengths are constants, as the null space does not depend on them.
    ``outputs [B, *, C]`` are differentiable in θ.
    """

    def __init__(self, network: Network, likelihood: Likelihood, batch: Batch, kind: Rows, theta: Tensor):
        self._theta = theta
        # Products need gradients also where the caller does not.
        self._point = theta if theta.requires_grad else theta.detach().requires_grad_()
        with torch.enable_grad(), differentiable_kernels(network.model):
            self.outputs = network(batch.inputs, network.substitute(self._point))
            self._cotangent = torch.zeros_like(self.outputs, requires_grad=True)
            self._pulled = self._gradient(self.outputs, self._point, self._cotangent, create_graph=True)
            if kind == "logit":
                self._root = OutputRoot(self.outputs.shape)
            else:
                of_kind = gradient_root if kind == "loss" else column_root
                self._root = of_kind(likelihood, self.outputs, batch.target)
        self.shape = (self._root.size, len(theta))
        self._scales = theta.new_ones(self._root.size)
        if kind == "loss":
            lengths = [self.rmatvec(row).norm() for row in torch.eye(len(self._scales)).to(theta)]
            self._scales = inverse_lengths(torch.stack(lengths))

    @staticmethod
    def _gradient(value: Tensor, point: Tensor, cotangent: Tensor, *, create_graph: bool) -> Tensor:
        options = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(value, point, cotangent, **options)[0]

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[k, P] -> [k, *outputs.shape]``, differentiable in θ and v."""
        keep = torch.is_grad_enabled()
        rows = [self._gradient(self._pulled, self._cotangent, vector, create_graph=keep) for vector in vectors]
        return torch.stack(rows)

    def matvec(self, vectors: Tensor) -> Tensor:
        """``A v``, ``[..., P] -> [..., m]``, differentiable in θ."""
        result = self._root.down(self.push(vectors.reshape(-1, vectors.shape[-1]))) * self._scales
        # The rows of a linear network do not depend on θ: autograd must see a derivative of zero, not none.
        result = result + (0 * self._point).sum()
        return (result if torch.is_grad_enabled() else result.detach()).reshape(*vectors.shape[:-1], -1)

    def rmatvec(self, cotangents: Tensor) -> Tensor:
        """``Aᵀ u``, ``[..., m] -> [..., P]``, without derivatives."""
        with torch.no_grad():
            rows = self._root.up(cotangents.reshape(-1, len(self._scales)) * self._scales).to(self.outputs.dtype)
        pulled = [self._gradient(self.outputs, self._point, row, create_graph=False) for row in rows]
        return torch.stack(pulled).reshape(*cotangents.shape[:-1], -1)

    @cached_property
    def _whitening(self) -> Tensor | None:
        """W ``[r, m]`` with orthogonal rows of ``W A``; None where A is too large for a dense matrix, or not finite.

        The rows have unit length, unless the scaling would amplify rounding errors of a product. ``W A`` has the null
        space of A, and LSMR takes a few iterations on it instead of hundreds. W is a constant: P depends on the row
        space alone, and so does its derivative.
        """
        m, n = self.shape
        if m > _DENSE_ROWS or m * n > _DENSE_ENTRIES:
            return None
        rows = self.rmatvec(torch.eye(m, dtype=self._theta.dtype, device=self._theta.device)).double()
        if not bool(torch.isfinite(rows).all()):
            return None  # the projection raises the error
        left, values, _ = torch.linalg.svd(rows, full_matrices=False)
        double = self._theta.dtype == torch.float64
        kept = values > (1e-12 if double else 1e-6) * values.amax()
        shortest = (1e-6 if double else 1e-2) * float(values.amax())
        return (left[:, kept] / values[kept].clamp(min=shortest)).mT.to(self._theta.dtype)

    def project(self, vectors: Tensor) -> LeastSquaresSolution:
        """``P v`` for ``[k, P]``, differentiable in θ and v by one more solve.

        With the solution's z, a cotangent ū and its ``z_u = argmin ‖Aᵀ z_u − ū‖`` the derivative in θ is that of
        ``−⟨z_u, A P v⟩ − ⟨z, A P ū⟩`` with all but A held fixed.
        """
        parameters = [self._theta] if self._theta.requires_grad else []
        white = self._whitening
        if white is None or not len(white):
            return project_null_space(self.matvec, self.rmatvec, vectors, m=self.shape[0], parameters=parameters)
        return project_null_space(
            lambda stack: self.matvec(stack) @ white.mT,
            lambda stack: self.rmatvec(stack @ white),
            vectors,
            m=len(white),
            parameters=parameters,
        )


# -- noise -------------------------------------------------------------------------------------------------------------


_TOGETHER = 8
"""Vectors that are projected together: products share their passes, and LSMR takes ten vectors of memory for each."""


stored(Estimate)
for _method in PROJECTORS.values():
    stored(_method)


@stored
@dataclass(frozen=True)
class NoiseReport:
    """How the projections of the stored noise ended.

    Attributes:
        residual: ``‖A v‖ / (‖A‖ ‖ε‖)`` of each, ``[k]``.
        iterations: Iterations or sweeps of each, ``[k]``.
        converged: Whether each met its tolerance, ``[k]`` bool.
        rank: The dimension of the range: exact with ``projector="svd"``, else ``mean ‖(I − P) ε‖²``, which is
            unbiased, with its standard error.
        ignored_rows: Number of rows that are rounding errors beside the largest row.
    """

    residual: Tensor
    iterations: Tensor
    converged: Tensor
    rank: Estimate
    ignored_rows: int


@stored
@dataclass(frozen=True)
class ProjectedNoise:
    """``ε = null_space + range`` for k standard normal vectors ε, both ``[k, P]``.

    ``range`` has no rows where it was not to be kept.
    """

    null_space: Tensor
    range: Tensor
    report: NoiseReport


def project_noise(
    rows: NullSpaceRows,
    method: ProjectionMethod,
    count: int,
    seed: int,
    *,
    keep_range: bool = True,
    progress: bool = False,
) -> ProjectedNoise:
    """Draw ``count`` normal vectors by the seed and project them, a few at a time.

    Raises NonFiniteError if a projection is not finite, and UnsupportedError if the null space is zero.
    """
    whole, projector = rows.whole, method.prepare(rows.whole, rows.by_batch)
    null_space = torch.empty(count, whole.shape[1], dtype=whole.dtype, device=whole.device)
    in_range = torch.empty_like(null_space) if keep_range else null_space[:0]
    found, squares = [], []
    for start in range(0, count, _TOGETHER):
        part = slice(start, start + _TOGETHER)
        like = null_space[part]
        noise = standard_normal(like.shape, like=like, generator=stage_generator(seed, start))
        found.append(projector.project(noise, progress=progress))
        null_space[part] = found[-1].value
        noise -= found[-1].value
        squares.append(kernels.vector_norm(noise).double().square())
        if keep_range:
            in_range[part] = noise
    residual, iterations, converged = (
        torch.cat([getattr(one, name) for one in found]) for name in ("residual", "iterations", "converged")
    )
    rank = range_dimension(null_space, torch.cat(squares), projector.rank, converged=bool(converged.all()))
    return ProjectedNoise(null_space, in_range, NoiseReport(residual, iterations, converged, rank, rows.n_ignored))


def range_dimension(
    null_space: Tensor, squares: Tensor, rank: int | None = None, *, converged: bool = True
) -> Estimate:
    """The dimension of the range: ``rank`` if known, else from ``P ε [k, P]`` and the squares ``‖(I − P) ε‖² [k]``."""
    total, lengths = null_space.shape[1], kernels.vector_norm(null_space)
    checks.finite("The length of a projection", lengths)
    # An iterative projector leaves as much in the range as its tolerance and the rows' condition allow: more than
    # rounding. In a null space of d dimensions each squared length has a χ² distribution with d degrees of freedom, so
    # that one in a hundred of d = 1 is taken for none, and hardly any of more.
    each = torch.stack([torch.ones_like(lengths), lengths.square()]).double()
    share = torch.special.gammainc(*each.sum(1) / 2)
    if rank == total or (rank is None and bool(share < 0.01)):  # noqa: PLR2004
        what = "The training data leave no direction free: there are as many independent rows as parameters."
        fix = 'Use rows="loss", which has one row for each example, fewer data, or another posterior.'
        raise UnsupportedError(what, expected=f"fewer than {total:,} independent rows", got=f"rank {total:,}", fix=fix)
    if rank is not None:
        exact = torch.tensor(float(rank), dtype=torch.float64)
        return Estimate(exact, torch.zeros_like(exact), 0, True)
    value = squares.double().mean()
    # ‖(I − P) ε‖² has a χ² distribution with r degrees of freedom.
    return Estimate(value, (2 * value / len(squares)).sqrt(), 0, converged, len(squares))


@stored
@dataclass(frozen=True)
class NoiseState(State):
    """What a fit to projected noise finds."""

    noise: ProjectedNoise


class ProjectedNoisePosterior(SampleBased, Posterior):
    """A Gaussian whose draws are projected noise, with one prior precision for the whole null space."""

    _one_precision = True
    keeps_range: ClassVar[bool]
    """Whether the noise's component in the range is kept beside that in the null space."""

    noise = of_state("noise", "The projected noise, a :class:`ProjectedNoise`.")
    report = of_state("noise.report", "How the projections ended, a :class:`NoiseReport`.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        rows: Rows = "logit",
        projector: str | ProjectionMethod | dict[str, Any] = "auto",
        n_samples: int = 30,
        **common: Any,
    ):
        self.n_samples = checks.count("n_samples", n_samples)
        self.projector = resolve_option("projector", projector, PROJECTORS)
        self.rows: Rows = checks.choice("rows", rows, ("logit", "ggn", "loss"))
        super().__init__(model, likelihood, **common)

    def _fit_noise(self, center: Network, data: Iterable[Any], seed: int, *, progress: bool) -> ProjectedNoise:
        """Noise for the rows at a network's weights."""
        rows = NullSpaceRows(center, self.likelihood, data, self.rows)
        options: dict[str, Any] = {"keep_range": self.keeps_range, "progress": progress}
        noise = project_noise(rows, self.projector, self.n_samples, seed, **options)
        report = noise.report
        require_influence(self, report.rank.value > 0)
        if not bool(report.converged.all()):
            what = f"{int((~report.converged).sum())} of {self.n_samples} projections did not meet their tolerance; the"
            what += f" largest residual is {float(report.residual.max()):.2g}. Allow more iterations, raise the"
            warn(f"{what} tolerance, or use projector='svd' where the rows fit into memory.", ConvergenceWarning)
        return noise

    def squared_distance(self, mean: Tensor) -> Tensor:
        """``‖θ − μ‖²`` of a mean θ ``[P]`` from the prior's, 0-d float64; ConfigurationError where it is zero."""
        found = (mean - self._prior_mean.to(mean)).double().square().sum()
        checks.positive("The weights' squared distance from the prior mean", float(found))
        return found
