"""The rows of one batch whose kernel is looked for, as a differentiable function of the parameters.

:class:`~laplace_plus.curvature.kernel_rows.KernelRows` streams over data at a network's own weights. Here the weights
are a vector that requires gradients, and so do projections onto the rows' kernel: by the adjoint of the least-squares
problem, not through its iterations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from laplace_plus.batches import Batch
from laplace_plus.curvature.kernel_rows import KINDS, Rows
from laplace_plus.differentiability import differentiable_kernels
from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.lsmr import LeastSquaresSolution
from laplace_plus.linalg.projections import project_null_space
from laplace_plus.network import Network

_WRITTEN_ROWS, _WRITTEN_ENTRIES = 512, 2**24
"""Rows up to so many are written out and made orthonormal before vectors are projected."""


class BatchRows:
    """Rows ``A(θ) [m, P]`` of one batch.

    The network runs once, forward and backward; each product is one backward pass more. As a product ``A v`` is the
    derivative of ``Aᵀ u`` in u, no operation needs a forward derivative, but all need two backward ones.

    Args:
        network: The network.
        likelihood: Its likelihood.
        batch: The batch.
        kind: ``"logit"``, ``"ggn"`` or ``"loss"``, as for ``KernelRows``. Rows of losses are scaled to unit length,
            without derivatives of their lengths, on which the kernel does not depend.
        theta: The parameters, ``[P]``.

    Attributes:
        outputs: The network's, ``[B, *, C]``, differentiable in θ.
        shape: ``(m, P)``.

    Raises:
        ConfigurationError: Another kind.
    """

    def __init__(self, network: Network, likelihood: Likelihood, batch: Batch, kind: Rows, theta: Tensor):
        if kind not in KINDS:
            raise ConfigurationError("Unknown rows.", expected=", ".join(KINDS), got=repr(kind))
        self._theta = theta
        # Without gradients for the caller there still are some for the products.
        self._point = theta if theta.requires_grad else theta.detach().requires_grad_()
        with torch.enable_grad(), differentiable_kernels(network.model):
            self.outputs = network(batch.inputs, network.substitute(self._point))
            self._dummy = torch.zeros_like(self.outputs, requires_grad=True)
            (self._pulled,) = torch.autograd.grad(
                self.outputs, self._point, self._dummy, create_graph=True, allow_unused=True, materialize_grads=True
            )
            self._root = self._output_root(likelihood, batch, kind)
        self._m = self.outputs.numel() if self._root is None else self._root[:, 0].numel()
        self._scales: Tensor | None = None
        if kind == "loss":
            norms = torch.stack([self._pull(row).norm() for row in self._loss_rows()])
            floor = 100 * torch.finfo(norms.dtype).eps * norms.max()
            self._scales = torch.where(norms > floor, norms.clamp(min=1e-30).reciprocal(), torch.zeros_like(norms))
        self.shape = (self._m, len(theta))

    def _output_root(self, likelihood: Likelihood, batch: Batch, kind: Rows) -> Tensor | None:
        """``[L, n, V]``, which maps each n of the outputs in turn to V rows; None for the outputs themselves."""
        if kind == "logit":
            return None
        rows, targets, weight = likelihood.rows(self.outputs, batch.target)
        weights = likelihood.curvature_weights().detach().to(rows)
        if kind == "loss":  # one row for all positions of an example
            of_outputs = weights[likelihood.output_groups(rows.shape[-1]).to(weights.device)]
            gradient = likelihood.gradient(rows, targets) * weight[:, None] * of_outputs
            return gradient.reshape(len(self.outputs), -1, 1).to(self.outputs.dtype)
        root = likelihood.output_root(rows, targets) * weight[:, None, None]
        of_directions = weights[likelihood.output_groups(root.shape[-1]).to(weights.device)].sqrt()
        return (root * of_directions).to(self.outputs.dtype)

    def _loss_rows(self) -> Iterator[Tensor]:
        """The cotangent of each example's loss, ``[*outputs.shape]``."""
        assert self._root is not None
        gradients = self._root.detach().reshape(self.outputs.shape)
        for number, gradient in enumerate(gradients):
            cotangent = torch.zeros_like(gradients)
            cotangent[number] = gradient
            yield cotangent

    def _pull(self, cotangent: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(
            self.outputs, self._point, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return gradient.detach()

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[k, P] -> [k, *outputs.shape]``, differentiable in θ and v."""
        keep = torch.is_grad_enabled()
        return torch.stack(
            [
                torch.autograd.grad(
                    self._pulled,
                    self._dummy,
                    vector,
                    retain_graph=True,
                    create_graph=keep,
                    allow_unused=True,
                    materialize_grads=True,
                )[0]
                for vector in vectors
            ]
        )

    def matvec(self, vectors: Tensor) -> Tensor:
        """``A v``, ``[..., P] -> [..., m]``, differentiable in θ."""
        result = self.push(vectors.reshape(-1, vectors.shape[-1])).flatten(1)
        if self._root is not None:
            parts = result.reshape(len(result), *self._root.shape[:2])
            result = torch.einsum("kln,lnv->klv", parts, self._root).flatten(1)
        if self._scales is not None:
            result = result * self._scales
        # A linear network's rows do not depend on θ, which must be seen to be a derivative of zero.
        result = result + (0 * self._point).sum()
        return (result if torch.is_grad_enabled() else result.detach()).reshape(*vectors.shape[:-1], -1)

    def rmatvec(self, cotangents: Tensor) -> Tensor:
        """``Aᵀ u``, ``[..., m] -> [..., P]``, without derivatives."""
        rows = cotangents.detach().reshape(-1, self._m)
        if self._scales is not None:
            rows = rows * self._scales
        if self._root is not None:
            parts = rows.reshape(len(rows), len(self._root), -1)
            rows = torch.einsum("klv,lnv->kln", parts, self._root.detach())
        pulled = [self._pull(row.reshape(self.outputs.shape)) for row in rows]
        return torch.stack(pulled).reshape(*cotangents.shape[:-1], -1)

    def _whitening(self) -> Tensor | None:
        """W ``[r, m]`` for which the rows of ``W A`` are orthogonal; None where A is too large to be written out.

        They have unit length, but where that would stretch them so far that the rounding of a product shows. The kernel
        is that of A, and it takes a few iterations instead of hundreds. W is a constant: P depends on the row space
        alone, and so does its derivative.
        """
        m, n = self.shape
        if m > _WRITTEN_ROWS or m * n > _WRITTEN_ENTRIES:
            return None
        with torch.no_grad():
            rows = self.rmatvec(torch.eye(m, dtype=self._theta.dtype, device=self._theta.device)).double()
        if not bool(torch.isfinite(rows).all()):
            return None  # which the projection will say
        left, values, _ = torch.linalg.svd(rows, full_matrices=False)
        least, stretched = (1e-12, 1e-6) if self._theta.dtype == torch.float64 else (1e-6, 1e-2)
        kept = values > least * values.amax()
        return (left[:, kept] / values[kept].clamp(min=stretched * float(values.amax()))).mT.to(self._theta.dtype)

    def project(self, vectors: Tensor) -> LeastSquaresSolution:
        """``P v`` for ``[k, P]``, differentiable in θ and v by one more solve.

        With the solution's z, a cotangent ū and its ``z_u = argmin ‖Aᵀ z_u − ū‖`` the derivative in θ is that of
        ``−⟨z_u, A P v⟩ − ⟨z, A P ū⟩`` with all but A held fixed.
        """
        parameters = [self._theta] if self._theta.requires_grad else []
        white = self._whitening()
        if white is None or not len(white):
            return project_null_space(self.matvec, self.rmatvec, vectors, m=self._m, parameters=parameters)

        def matvec(stack: Tensor) -> Tensor:
            return self.matvec(stack) @ white.mT

        def rmatvec(stack: Tensor) -> Tensor:
            return self.rmatvec(stack @ white)

        return project_null_space(matvec, rmatvec, vectors, m=len(white), parameters=parameters)

    def rank(self, rtol: float | None = None) -> int:
        """The number of independent rows, from ``A Aᵀ [m, m]``.

        Args:
            rtol: Eigenvalues of at most this fraction of the largest count as zero; 1e-12 in float64 and 1e-6 in
                float32 by default.
        """
        eye = torch.eye(self._m, dtype=self._theta.dtype, device=self._theta.device)
        with torch.no_grad():
            gram = torch.stack([self.matvec(self.rmatvec(row)) for row in eye]).double()
        values = torch.linalg.eigvalsh((gram + gram.mT) / 2)
        default = 1e-12 if self._theta.dtype == torch.float64 else 1e-6
        return int((values > (default if rtol is None else rtol) * values.amax().clamp(min=0)).sum())
