"""Gradients of a network's loss at many points at once: the landscape on which particles move.

The gradient at one point is mapped over a stack of points (``torch.func.vmap``), and the mapped gradient of batches of
a shape that comes again and again is recorded (:mod:`laplace_plus.geometry.recording`), which saves most of the time
that small networks take. Neither works for every network. Each way is therefore compared with plain backward
passes at its first use, and left where it fails or differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import _memory, batches
from laplace_plus.batches import Batch
from laplace_plus.errors import UnsupportedError
from laplace_plus.geometry.loss import _COPIES, LossLandscape
from laplace_plus.geometry.recording import record
from laplace_plus.linalg import lanczos
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network import exact_arithmetic

Way = Literal["recorded", "mapped", "one by one"]

_RECORDINGS = 8
"""Batches of up to so many different shapes are recorded."""

_WORTH = 30
"""Gradients of batches of one shape after which recording is worth it, if nothing is known of how many are to come."""

_MANY = 100
"""Recording takes about as long as so many gradients of a small network."""

_CACHE = 16 << 20
"""Bytes that points which a CPU takes together may need in a forward pass. Beyond, a small image network's passes take
twice as long together as one after the other: their tensors leave the caches, and are mapped anew each time."""

_LANCZOS_STEPS = 12

_MARGIN = {torch.float64: 1e-6}
"""How far gradients may be from plain ones, relative to the largest entry; 1e-3 for other types."""


class ParticleLandscape(LossLandscape):
    """A :class:`LossLandscape` whose gradients at several points are computed together.

    As many points go through the network at a time as ``chunk_size`` and the memory budget allow, and of a batch for
    which even one is too many, a part at a time.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._gradients = StackedGradients()
        self._per_example = 0
        super().__init__(*args, **kwargs)

    @property
    def way(self) -> Way:
        """How gradients are computed at present."""
        way = self._gradients.way
        return "mapped" if way == "recorded" and not self._gradients._recordings else way

    def allow(self, way: Way) -> None:
        """Try no quicker way than this one."""
        self._gradients.way = way

    def expect(self, count: int) -> None:
        """Say that so many gradients are to come, so that the first of them is recorded, or none."""
        self._gradients.unrecorded = 0 if count >= _MANY else count

    @override
    def gradient(self, points: Tensor) -> Tensor:
        if self.linearized:
            return LossLandscape.gradient(self, points)
        result = self.prior_gradient(points)
        with exact_arithmetic(self.network), torch.no_grad():
            for batch in self._batches():
                for part, some in self._pieces(batch, points):
                    found = self._gradients.recorded(part, points[some], self.scale)
                    if found is None:  # the scope's modes look at every operation, which a recording needs no more
                        with self._scope():
                            found = self._gradients(self._batch_loss, part, points[some], self.scale)
                    result[some] += found
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

    def _pieces(self, batch: Batch, points: Tensor) -> Iterator[tuple[Batch, slice]]:
        """Parts of a batch, and of the points, whose gradients fit into memory."""
        size = batches.batch_size(batch.target)
        self._per_example = self._per_example or max(1, self._bytes_per_example(batch))
        each = _COPIES * self._per_example  # for one example at one point
        room = max(1, _memory.budget(points.device) // each)
        together = max(1, min(len(points), self._stream.chunk_size, room // size))
        if points.device.type == "cpu":
            together = max(1, min(together, _CACHE // (self._per_example * size)))
        rows = size
        if room < size and batches.can_be_cut(batch.inputs, size):
            rows = room
        for start in range(0, size, rows):
            part = batch
            if rows < size:
                chosen = slice(start, start + rows)
                part = Batch(batches.cut(batch.inputs, chosen), batch.target[chosen])
            for first in range(0, len(points), together):
                yield part, slice(first, first + together)


class StackedGradients:
    """Gradients of a function of a batch and a point, at a stack of points, in the quickest way that proves right.

    Attributes:
        way: The way that is taken at present.
        unrecorded: Number of gradients of batches of one shape before they are recorded.
    """

    def __init__(self) -> None:
        self.way: Way = "recorded"
        self.unrecorded = _WORTH
        self._proven: set[Way] = set()
        self._uses: dict[Any, int] = {}
        self._recordings: dict[Any, Callable[..., Tensor]] = {}

    def recorded(self, batch: Batch, points: Tensor, constant: Any = None) -> Tensor | None:
        """Gradients ``[k, P]`` by a recording, if there is one for batches of this shape."""
        if not self._recordings:
            return None
        recording = self._recordings.get(_key(batch, points, constant))
        return None if recording is None else recording(points, *_tensors(batch))

    def __call__(
        self, function: Callable[[Batch, Tensor], Tensor], batch: Batch, points: Tensor, constant: Any = None
    ) -> Tensor:
        """Gradients ``[k, P]``; those of a batch whose shape comes again and again are recorded on the way.

        Args:
            function: From a batch and ``[P]`` to a 0-d tensor; the same one in every call.
            batch: The batch.
            points: ``[k, P]``.
            constant: What else the function depends on; a recording is for one value of it.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about slow batching rules
            if self.way == "recorded":
                found = self._recorded(function, batch, points, constant)
                if found is not None:
                    return found
            if self.way != "one by one":
                found = self._attempt("mapped", lambda: _mapped(function, batch, points), function, batch, points)
                if found is not None:
                    return found
                self.way = "one by one"
            return _one_by_one(function, batch, points)

    def _recorded(
        self, function: Callable[[Batch, Tensor], Tensor], batch: Batch, points: Tensor, constant: Any
    ) -> Tensor | None:
        """Gradients by a new recording; None at the first uses of batches of this shape, or if recording fails."""
        key = _key(batch, points, constant)
        if key is None or len(self._recordings) >= _RECORDINGS:
            return None
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] <= self.unrecorded:
            return None
        _, rebuild = batches.flatten(batch.inputs)
        tensors = _tensors(batch)

        def gradients(points: Tensor, *tensors: Tensor) -> Tensor:
            return _mapped(function, Batch(rebuild(tensors[:-1]), tensors[-1]), points)

        made: list[Callable[..., Tensor]] = []

        def first() -> Tensor:
            made.append(record(gradients, points, *tensors))
            return made[0](points, *tensors)

        found = self._attempt("recorded", first, function, batch, points)
        if found is None:
            self.way = "mapped"
        else:
            self._recordings[key] = made[0]
        return found

    def _attempt(
        self,
        way: Way,
        compute: Callable[[], Tensor],
        function: Callable[[Batch, Tensor], Tensor],
        batch: Batch,
        points: Tensor,
    ) -> Tensor | None:
        """What a way gives, unless it fails or, at its first use, differs from plain backward passes."""
        try:
            found = compute()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001  -- whatever it is, another way may do
            if way in self._proven:
                raise
            return None
        if (way == "recorded" or way not in self._proven) and bool(torch.isfinite(found).all()):
            ends = [0, len(points) - 1]
            plain = _one_by_one(function, batch, points[ends])
            margin = _MARGIN.get(points.dtype, 1e-3) * plain.abs().max()
            if not bool(((found[ends] - plain).abs() <= margin).all()):
                return None
            if way == "mapped":  # every recording is looked at by itself
                self._proven.add(way)
        return found


def _tensors(batch: Batch) -> list[Any]:
    return [*batches.flatten(batch.inputs)[0], batch.target]


def _key(batch: Batch, points: Tensor, constant: Any) -> Any:
    """What a recording depends on besides numbers; None where a batch holds more than tensors."""
    tensors = _tensors(batch)
    if not all(isinstance(leaf, Tensor) for leaf in tensors):
        return None
    return constant, *((tuple(leaf.shape), leaf.dtype) for leaf in (points, *tensors))


def _mapped(function: Callable[[Batch, Tensor], Tensor], batch: Batch, points: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda point: function(batch, point)))(points).detach()


def _one_by_one(function: Callable[[Batch, Tensor], Tensor], batch: Batch, points: Tensor) -> Tensor:
    rows = []
    for point in points:
        with torch.enable_grad():
            leaf = point.detach().clone().requires_grad_()
            value = function(batch, leaf)
        if value.requires_grad:
            rows.append(torch.autograd.grad(value, leaf, allow_unused=True, materialize_grads=True)[0])
        else:
            rows.append(torch.zeros_like(point))
    return torch.stack(rows)
