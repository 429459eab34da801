"""The rows of one batch as a differentiable function of the parameters.

:class:`~laplace_plus.posteriors.projection.rows.NullSpaceRows` streams over a data set at fixed weights. Here the
weights are a vector that requires gradients, and so do projections onto the rows' null space: by the adjoint of the
least-squares problem, not through its iterations.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from laplace_plus.curvature.output_roots import OutputRoot, column_root, gradient_root
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.lsmr import LeastSquaresSolution
from laplace_plus.linalg.null_space import project_null_space
from laplace_plus.network.batches import Batch
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.network import Network
from laplace_plus.posteriors.projection.rows import Rows, inverse_lengths

_DENSE_ROWS, _DENSE_ENTRIES = 512, 2**24
"""Bounds below which A becomes a dense matrix: its singular value decomposition then takes well under a second."""


class BatchRows:
    """Rows ``A(θ) [m, P]`` of one batch.

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

    def rank(self) -> int:
        """The number of independent rows."""
        if self._whitening is not None:
            return len(self._whitening)
        with torch.no_grad():
            rows = torch.eye(self.shape[0], dtype=self._theta.dtype, device=self._theta.device)
            gram = torch.stack([self.matvec(self.rmatvec(row)) for row in rows]).double()
        values = torch.linalg.eigvalsh((gram + gram.mT) / 2)
        rtol = 1e-12 if self._theta.dtype == torch.float64 else 1e-6
        return int((values > rtol * values.amax().clamp(min=0)).sum())
