"""Gradients of a network's loss at many points at once: the landscape on which particles move.

The gradient at one point is mapped over the points (``torch.func.vmap``). Where many gradients on batches of one shape
are to come, the mapped gradient is traced once (``make_fx``) and runs without the Python code around its operations:
1.6 to 2.4 times as fast in an exploration of trained networks with two hidden layers of 32 units. Neither works for
every network. Each is therefore compared with plain backward passes at its first use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from typing_extensions import override

from laplace_plus import _memory, batches
from laplace_plus.batches import Batch
from laplace_plus.errors import UnsupportedError
from laplace_plus.geometry.landscape import gradients
from laplace_plus.geometry.loss import LossLandscape
from laplace_plus.linalg import lanczos
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network import exact_arithmetic

Way = Literal["recorded", "mapped", "one by one"]

_MANY = 100
"""Number of gradients from which tracing pays: it takes about as long as 100 gradients of a small network."""

_SHAPES = 8
"""Number of batch shapes that are traced: a loader of equal batches has two, and tracing many would cost more than it
saves."""

_CACHE = 16 << 20
"""Bytes of forward passes that a CPU takes together. Measured: beyond this size the tensors leave the caches, and a
small image network's passes take twice as long together as one after the other."""

_LANCZOS_STEPS = 12
"""They cost little beside an exploration's thousands of gradients, and find the largest eigenvalue of the tests'
classifiers to a relative 1e-3."""


class ParticleLandscape(LossLandscape):
    """A :class:`LossLandscape` whose gradients at several points are computed together.

    As many points go through the network at a time as ``chunk_size`` and the memory budget allow. Of a batch that does
    not fit even for one point, a part goes at a time.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._allowed: Way = "recorded"
        self._pays = False
        # Shared by the subsets, which are copies: traced gradients, and which ways gave right gradients.
        self._traced: dict[Any, Callable[..., Tensor]] = {}
        self._right: dict[Any, bool] = {}
        self._per_example = 0
        super().__init__(*args, **kwargs)

    @property
    def way(self) -> Way:
        """How gradients are computed so far: ``"recorded"`` (traced), ``"mapped"`` or ``"one by one"``."""
        if self._allowed == "one by one" or self._right.get("mapped") is False:
            return "one by one"
        return "recorded" if self._traced else "mapped"

    def allow(self, way: Way) -> None:
        """Try no faster way than this one."""
        self._allowed = way

    def expect(self, count: int) -> None:
        """Tell how many gradients are to come, so that they are traced if this pays."""
        self._pays = count >= _MANY

    @override
    def gradient(self, points: Tensor) -> Tensor:
        if self.linearized:
            return LossLandscape.gradient(self, points)
        result = self.prior_gradient(points)
        with exact_arithmetic(self.network), torch.no_grad():
            for batch in self._batches():
                for part, some in self._parts(batch, points):
                    result[some] += self._batch_gradient(part, points[some])
        return result

    def prior_gradient(self, points: Tensor) -> Tensor:
        """The prior's part of :meth:`gradient`, ``[k, P]``."""
        return self._precision * (points - self._centre)

    def largest_curvature(self, point: Tensor, *, prior: bool = True, seed: int = 0) -> float:
        """The largest eigenvalue of the generalised Gauss-Newton matrix of L at ``point [P]``.

        By 12 steps of Lanczos' method, which approach it from below. The Hessian takes the matrix's place where a
        log-density is not concave.

        Args:
            point: ``[P]``.
            prior: Whether to count the prior's part.
            seed: Of the start vector.
        """
        source = torch.Generator().manual_seed(seed)
        start = draw_probes("gaussian", 1, len(point), generator=source, dtype=point.dtype, device=point.device)[0]

        def hessian_products(vectors: Tensor) -> Tensor:
            rows = vectors.reshape(-1, len(point))
            whole = self.derivatives(point.expand_as(rows), rows).products.view(vectors.shape)
            return whole if prior else whole - self._precision * vectors

        steps = min(_LANCZOS_STEPS, len(point))
        try:
            ggn = self.ggn(point)
            extra = self._precision if prior else 0.0
            found = lanczos(lambda v: ggn(v) * self.likelihood_weight + extra * v, start, steps)
        except UnsupportedError:
            found = lanczos(hessian_products, start, steps)
        return float(torch.linalg.eigvalsh(found.tridiagonal().double())[-1])

    def _parts(self, batch: Batch, points: Tensor) -> Iterator[tuple[Batch, slice]]:
        """Parts of a batch, and of the points, whose gradients fit into memory."""
        size = batches.batch_size(batch.target)
        self._per_example = self._per_example or max(1, self._bytes_per_example(batch))
        room = max(1, _memory.budget(points.device) // self._bytes_at_one_point(self._per_example))
        together = max(1, min(len(points), self._stream.chunk_size, room // size))
        if points.device.type == "cpu":
            together = max(1, min(together, _CACHE // (self._per_example * size)))
        rows = room if room < size and batches.can_be_cut(batch.inputs, size) else size
        for start in range(0, size, rows):
            part = batch
            if rows < size:
                chosen = slice(start, start + rows)
                part = Batch(batches.cut(batch.inputs, chosen), batch.target[chosen])
            for first in range(0, len(points), together):
                yield part, slice(first, first + together)

    def _batch_gradient(self, batch: Batch, points: Tensor) -> Tensor:
        """Gradients ``[k, P]`` of one batch's loss in the fastest way that proves right."""
        leaves, rebuild = batches.flatten(batch.inputs)
        tensors = [*leaves, batch.target]
        key: Any = None
        if self._pays and self._allowed == "recorded" and all(isinstance(leaf, Tensor) for leaf in tensors):
            key = self.scale, *((tuple(leaf.shape), leaf.dtype) for leaf in (points, *tensors))
            if key in self._traced:
                return self._traced[key](points, *tensors)
        # A traced gradient does without the modes that this scope puts around every operation.
        with self._scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # slow batching rules
            if key is not None and self._right.get(key) is not False and len(self._traced) < _SHAPES:

                def function(points: Tensor, *tensors: Tensor) -> Tensor:
                    return self._mapped(Batch(rebuild(tensors[:-1]), tensors[-1]), points)

                def trace() -> Tensor:
                    module = make_fx(function)(points, *tensors)
                    module.graph.eliminate_dead_code()  # the loss's value, of which only the gradient is wanted
                    module.recompile()
                    self._traced[key] = module.forward
                    return self._traced[key](points, *tensors)

                found = self._checked(key, trace, batch, points)
                if found is not None:
                    return found
                self._traced.pop(key, None)
            if self.way != "one by one":
                found = self._checked("mapped", partial(self._mapped, batch, points), batch, points)
                if found is not None:
                    return found
            return gradients(partial(self._batch_loss, batch), points)

    def _mapped(self, batch: Batch, points: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(partial(self._batch_loss, batch)))(points).detach()

    def _checked(self, key: Any, compute: Callable[[], Tensor], batch: Batch, points: Tensor) -> Tensor | None:
        """What a way gives; None where it fails or, at its first use, differs from plain backward passes."""
        try:
            found = compute()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  -- the next way may work
            if self._right.get(key):
                raise
            self._right[key] = False
            return None
        if key not in self._right and bool(torch.isfinite(found).all()):
            ends = [0, len(points) - 1]
            plain = gradients(partial(self._batch_loss, batch), points[ends])
            # Right gradients differ by rounding, which is well below either bound.
            margin = (1e-6 if points.dtype == torch.float64 else 1e-3) * plain.abs().max()
            self._right[key] = bool(((found[ends] - plain).abs() <= margin).all())
        return found if self._right.get(key, True) else None
