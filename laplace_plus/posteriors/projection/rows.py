"""Rows ``A [m, P]`` whose null space a posterior may move in: derivatives of what must not change on the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, JacobianOperator
from laplace_plus.curvature.output_roots import OutputRoot, column_root, gradient_root
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import Diagonal, Operator
from laplace_plus.linalg.lsmr import LeastSquaresSolution
from laplace_plus.linalg.null_space import project_null_space
from laplace_plus.network.batches import Batch, iterate
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.gradients import batch_gradients
from laplace_plus.network.network import Network

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

    def __init__(
        self, network: Network, likelihood: Likelihood, data: Iterable[Any], kind: Rows, *, chunk_size: int = CHUNK_SIZE
    ):
        self._network, self._likelihood, self._data = network, likelihood, data
        self._kind, self._chunk_size = kind, chunk_size
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
            return JacobianOperator(self._network, data, chunk_size=self._chunk_size)
        if self._scales is None:
            return GGNOperator(self._network, self._likelihood, data, chunk_size=self._chunk_size).root()
        losses = FisherOperator(self._network, self._likelihood, data, kind="empirical", chunk_size=self._chunk_size)
        rows = losses.root()
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
