"""A network's loss over a data set as a landscape: the negative log-posterior, one objective for all purposes.

    L(θ) = −1/T Σ_n log p(y_n | f(θ, x_n)) + ½ (θ − μ₀)ᵀ P₀ (θ − μ₀)

the sum over all data, at the likelihood's current noise, without the prior's constant. Training with weight decay, the
Laplace approximation and geodesics speak of the same L, whose stationary point the trained weights should be.

With ``linearized=True`` the network is replaced by its tangent ``f(θ̂, x) + J(x) (θ − θ̂)``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import _memory, batches
from laplace_plus.batches import Batch
from laplace_plus.curvature.linearization import Linearization
from laplace_plus.curvature.operators import CHUNK_SIZE, GGNOperator
from laplace_plus.curvature.streaming import DataSums, Stream
from laplace_plus.differentiability import differentiable_kernels
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.geometry.landscape import Landscape
from laplace_plus.geometry.second_order import Derivatives, SecondOrder
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.network import Network, exact_arithmetic
from laplace_plus.priors import GaussianPrior

_KEPT_BYTES = 256 * 2**20
"""Data, or a Jacobian of all of them, up to this size are kept."""

_COPIES = 4
"""A gradient with its forward derivative holds about so many times what a plain backward pass keeps."""


class LossLandscape(Landscape):
    """The negative log-posterior of (some of) a network's parameters, summed over the data.

    Small data sets are kept, in batches as large as the memory budget allows where examples are independent of each
    other; others are streamed. Points go through the network ``chunk_size`` at a time.

    Args:
        network: The network, or a module of which all parameters that require gradients are taken.
        likelihood: A name or a :class:`~laplace_plus.Likelihood`; its observation noise is that of the loss.
        data: An iterable of batches that can be started again.
        prior_precision: One number, one for each layer, or one for each entry; zero for the loss without a prior.
        prior_mean: One number, or one for each entry.
        temperature: Divides the log-likelihood.
        linearized: Whether to take the network's tangent at its weights for the network.
        chunk_size: Number of points that are pushed through the network at a time.
        progress: Whether to show a progress bar for each pass over streamed data.

    Attributes:
        network: The network.
        likelihood: The likelihood.
        linearized: As given.
        vector: θ̂, the network's weights, ``[P]``.
        n_data: Number of examples.
        scale: Factor on the log-likelihood besides the temperature: 1, or N/B for a subset of B of N examples.

    Raises:
        DataError: Data that can be run over only once, or of no known form.
        EmptyDataError: No data.
        LabelError: Targets that do not fit the likelihood.
        OutputError: Network outputs that do not fit it.
        NonFiniteError: NaN or infinity in the parameters, the inputs or the outputs.
        ConfigurationError: A prior that does not fit.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(20, 3, dtype=torch.float64)
        >>> data = [(x, x.sum(1, keepdim=True))]
        >>> landscape = LossLandscape(nn.Linear(3, 1).double(), "regression", data, prior_precision=0.5)
        >>> best = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
        >>> landscape.gradient(best)  # only the prior still pulls
        tensor([[0.5000, 0.5000, 0.5000, 0.0000]], dtype=torch.float64)
    """

    def __init__(
        self,
        network: Network | nn.Module,
        likelihood: str | Likelihood,
        data: Iterable[Any],
        *,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        linearized: bool = False,
        chunk_size: int = CHUNK_SIZE,
        progress: bool = False,
    ):
        self.likelihood, self.linearized = resolve_likelihood(likelihood), linearized
        self._stream = Stream(network, self.likelihood.arrange, data, chunk_size, progress)
        self.network = self._stream.network
        self._temperature = float(torch.as_tensor(temperature, dtype=torch.float64).detach())
        self.scale = 1.0
        self._differentiate = SecondOrder()
        self._kept: list[Batch] | None = self._survey()
        self._n_data, self._is_part = self._stream.n_data, False
        self.vector = self.network.vector()
        prior = GaussianPrior.create(prior_precision, prior_mean, self.network.layer_index(), flat=True)
        self._precision = prior.vector().detach().to(self.vector)
        self._centre = prior.mean.detach().to(self.vector)
        self._tangents = self._kept_tangents()

    @property
    def n_data(self) -> int:
        """Number of examples."""
        return self._n_data

    @property
    def checksum(self) -> float:
        """A sum over the data by which they can be told from others."""
        if self._is_part:
            own = DataSums(self.network.device)
            for batch in self._batches():
                own.add(batch, batches.batch_size(batch.target))
            return own.values()[0]
        sums = self._stream._sums
        assert sums is not None
        return sums[0]

    @property
    def prior_precision(self) -> Tensor:
        """P₀'s diagonal, ``[P]``."""
        return self._precision

    # -- the data ------------------------------------------------------------------------------------------------------

    def _survey(self) -> list[Batch] | None:
        """One pass that checks the data, and keeps them if they are few."""
        limit = min(_KEPT_BYTES, _memory.budget(self.network.device) // 4)
        kept: list[Batch] | None = []
        outputs_of: list[Tensor] = []
        total = 0
        with exact_arithmetic(self.network):
            for batch, outputs in self._stream.survey("loss landscape: data"):
                self.likelihood.validate(outputs, batch.target)
                total += _n_bytes(batch)
                if kept is None or total > limit:
                    kept = None
                    continue
                kept.append(batch)
                outputs_of.append(outputs)
            return None if kept is None else self._merged(kept, outputs_of)

    def _merged(self, kept: list[Batch], outputs: list[Tensor]) -> list[Batch]:
        """Fewer batches of the same examples, where the network does not mind."""
        each = max(1, self._bytes_per_example(kept[0]) * _COPIES * self._stream.chunk_size)
        largest = max(1, _memory.budget(self.network.device) // each)
        joined = _joined(kept, largest)
        if len(joined) == len(kept):
            return kept
        again = torch.cat([self.network.forward(batch.inputs).flatten() for batch in joined])
        before = torch.cat([part.flatten() for part in outputs])
        tolerance = max(1e-4, torch.finfo(before.dtype).eps ** 0.5)
        same = again.shape == before.shape and bool((again - before).norm() <= tolerance * before.norm())
        return joined if same else kept

    def _bytes_per_example(self, batch: Batch) -> int:
        sizes: list[int] = []

        def look(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            self.network(batch.inputs, self.network.substitute(self.network.vector().requires_grad_()))
        return sum(sizes) // max(1, batch.size)

    def _batches(self) -> Iterable[Batch]:
        return self._stream.batches("loss landscape", ordered=False) if self._kept is None else self._kept

    def data(self) -> Iterable[Any]:
        """The data as a loader yields them."""
        if self._kept is None:
            return self._stream.data
        return [(batch.inputs, batch.target) for batch in self._kept]

    def minibatches(self, size: int, k: int, *, generator: torch.Generator | None = None) -> list[LossLandscape]:
        """Several landscapes, each on a random subset of the data, its log-likelihood scaled by N/size.

        Takes one pass, and memory for the subsets.

        Args:
            size: Number of examples in each, drawn without replacement.
            k: Number of subsets.
            generator: Source of randomness.

        Raises:
            ConfigurationError: More examples than there are, or none.
            UnsupportedError: Batches that cannot be cut into examples.
        """
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.n_data:
            raise ConfigurationError(
                "There is no such subset.", expected=f"a size from 1 to {self.n_data}", got=repr(size)
            )
        device = None if generator is None else generator.device
        orders = [torch.randperm(self.n_data, generator=generator, device=device)[:size].cpu() for _ in range(k)]
        return self.subsets(orders)

    def subsets(self, indices: list[Tensor]) -> list[LossLandscape]:
        """Landscapes on given examples, ``[B]`` integers each, with the log-likelihood scaled by N/B.

        Indices into a subset count its own examples, batch by batch.
        """
        pieces: list[list[Batch]] = [[] for _ in indices]
        first = 0
        with exact_arithmetic(self.network):
            for batch in self._batches():
                size = batches.batch_size(batch.target)
                if not batches.can_be_cut(batch.inputs, size):
                    raise UnsupportedError(
                        "The batches cannot be cut into examples.",
                        expected="inputs with the examples along their first axis",
                        got=batches.describe(batch.inputs),
                        fix="Use all data.",
                    )
                for own, chosen in zip(pieces, indices, strict=True):
                    here = (chosen[(chosen >= first) & (chosen < first + size)] - first).tolist()
                    if here:
                        own.append(Batch(batches.cut(batch.inputs, here), batch.target[here]))
                first += size
            results = []
            for own, chosen in zip(pieces, indices, strict=True):
                part = copy.copy(self)
                part._kept, part._n_data, part._is_part = _joined(own, len(chosen)), len(chosen), True
                part.scale = self.scale * self.n_data / len(chosen)
                part._tangents = part._kept_tangents()
                results.append(part)
        return results

    # -- values and derivatives ----------------------------------------------------------------------------------------

    def _scope(self) -> AbstractContextManager[Any]:
        scope = ExitStack()
        for context in (exact_arithmetic(self.network), torch.no_grad(), differentiable_kernels(self.network.model)):
            scope.enter_context(context)
        return scope

    def _loss(self, outputs: Tensor, target: Any) -> Tensor:
        """``−log p(target | outputs)``, times what it is scaled by."""
        rows, targets, weight = self.likelihood.rows(outputs, target)
        density = self.likelihood.log_density(rows, targets)
        return -torch.where(weight > 0, density, 0.0).sum() * (self.scale / self._temperature)

    def _batch_loss(self, batch: Batch, point: Tensor) -> Tensor:
        outputs = self.network(batch.inputs, self.network.substitute(point)).to(point.dtype)
        return self._loss(outputs, batch.target).to(point.dtype)

    def _chunks(self, points: Tensor) -> Iterator[slice]:
        for start in range(0, len(points), self._stream.chunk_size):
            yield slice(start, start + self._stream.chunk_size)

    @override
    def value(self, points: Tensor) -> Tensor:
        away = points - self._centre
        total = (self._precision * away.square()).sum(1).double() / 2
        with self._scope():
            if self.linearized:
                for batch, line in self._lines():
                    for some in self._chunks(points):
                        outputs = line.outputs + line.push(points[some] - self.vector)
                        total[some] += torch.stack([self._loss(one, batch.target) for one in outputs]).double()
            else:
                for batch in self._batches():
                    total += torch.stack([self._batch_loss(batch, point) for point in points]).double()
        return total.to(points.dtype)

    @override
    def gradient(self, points: Tensor) -> Tensor:
        result = self._precision * (points - self._centre)
        with self._scope():
            if self.linearized:
                return self._linear_derivatives(result, torch.zeros_like(result), points, None).gradients
            for batch in self._batches():
                result += self._differentiate.gradients(partial(self._batch_loss, batch), points)
        return result

    @override
    def derivatives(self, points: Tensor, directions: Tensor) -> Derivatives:
        gradients, products = self._precision * (points - self._centre), self._precision * directions
        with self._scope():
            if self.linearized:
                return self._linear_derivatives(gradients, products, points, directions)
            for batch in self._batches():
                for some in self._chunks(points):
                    part = self._differentiate(partial(self._batch_loss, batch), points[some], directions[some])
                    gradients[some] += part.gradients
                    products[some] += part.products
        return Derivatives(gradients, products)

    # -- the network's tangent -----------------------------------------------------------------------------------------

    def _linear_derivatives(
        self, gradients: Tensor, products: Tensor, points: Tensor, directions: Tensor | None
    ) -> Derivatives:
        """Add ``Jᵀ r`` and ``Jᵀ Λ J u`` at the tangent's outputs."""
        for batch, line in self._lines():
            for some in self._chunks(points):
                outputs = line.outputs + line.push(points[some] - self.vector)
                turned = None if directions is None else line.push(directions[some])
                residual, bent = self._output_derivatives(outputs, turned, batch.target)
                gradients[some] += line.pull(residual)
                if bent is not None:
                    products[some] += line.pull(bent)
        return Derivatives(gradients, products)

    def _output_derivatives(
        self, outputs: Tensor, directions: Tensor | None, target: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The loss's gradient in outputs ``[m, B, *, C]``, and its Hessian times directions there."""
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            loss = torch.stack([self._loss(one, target) for one in leaf]).sum()
            (residual,) = torch.autograd.grad(loss, leaf, create_graph=directions is not None)
        if directions is None:
            return residual.detach(), None
        if not residual.requires_grad:  # the log-density is linear
            return residual, None
        (bent,) = torch.autograd.grad(residual, leaf, directions, materialize_grads=True)
        return residual.detach(), bent

    def _lines(self) -> Iterator[tuple[Batch, Linearization | _Tangent]]:
        if self._tangents is not None and self._kept is not None:
            yield from zip(self._kept, self._tangents, strict=True)
            return
        for batch in self._batches():
            yield batch, Linearization(self.network, self.vector, batch.inputs, self._stream.ways)

    def _kept_tangents(self) -> list[_Tangent] | None:
        """The Jacobian of all data, if they are few enough."""
        entries = self._stream.n_outputs * len(self.vector) * self.vector.element_size()
        if not self.linearized or self._kept is None:
            return None
        if entries > min(_KEPT_BYTES, _memory.budget(self.network.device) // 4):
            return None
        with exact_arithmetic(self.network), torch.no_grad():
            lines = (Linearization(self.network, self.vector, batch.inputs, self._stream.ways) for batch in self._kept)
            return [_Tangent(line, self._stream.chunk_size) for line in lines]

    # -- the Gauss-Newton matrix ---------------------------------------------------------------------------------------

    def ggn(self, point: Tensor) -> GGNOperator:
        """``Σ_n J_nᵀ Λ_n J_n`` of the data's loss at ``point [P]``, neither tempered nor with the prior's part.

        Raises:
            NonFiniteError: The outputs are not finite there.
        """
        moved = _Moved(self.network, point)
        return GGNOperator(moved, self.likelihood, self.data(), chunk_size=self._stream.chunk_size)

    def batchwise_ggn(self, point: Tensor) -> Iterator[GGNOperator]:
        """The terms of :meth:`ggn`, batch by batch."""
        moved = _Moved(self.network, point)
        for batch in self._batches():
            yield GGNOperator(
                moved, self.likelihood, [(batch.inputs, batch.target)], chunk_size=self._stream.chunk_size
            )

    @property
    def likelihood_weight(self) -> float:
        """What the data's loss is multiplied by in L: ``scale / temperature``."""
        return self.scale / self._temperature


class _Tangent:
    """A batch's Jacobian written out, with the interface of a linearisation."""

    def __init__(self, line: Linearization, chunk_size: int):
        self.outputs = line.outputs
        rows = self.outputs.numel()
        self._jacobian = self.outputs.new_empty(rows, len(line.pull._point))  # [n, P]
        for some in torch.arange(rows, device=self.outputs.device).split(chunk_size):
            units = self.outputs.new_zeros(len(some), rows)
            units[torch.arange(len(some)), some] = 1.0
            self._jacobian[some] = line.pull(units.view(-1, *self.outputs.shape))

    def push(self, vectors: Tensor) -> Tensor:
        """``J v``, ``[m, P] -> [m, B, *, C]``."""
        return (vectors @ self._jacobian.mT).view(-1, *self.outputs.shape)

    def pull(self, cotangents: Tensor) -> Tensor:
        """``Jᵀ u``, ``[m, B, *, C] -> [m, P]``."""
        return cotangents.flatten(1) @ self._jacobian


class _Moved(Network):
    """A network with other weights in place of its own, which stay as they are."""

    def __init__(self, network: Network, vector: Tensor):
        vars(self).update(vars(network))
        self._point = network.substitute(vector.detach())

    @property
    @override
    def parameters(self) -> dict[str, Tensor]:
        return Network.parameters.fget(self) | self._point  # type: ignore[attr-defined]


def _n_bytes(batch: Batch) -> int:
    leaves = [*batches.flatten(batch.inputs)[0], batch.target]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))


def _joined(pieces: list[Batch], largest: int) -> list[Batch]:
    """Batches of up to ``largest`` examples, made of those that fit together."""
    result: list[Batch] = []
    group: list[Batch] = []
    for batch in pieces:
        size = sum(batches.batch_size(member.target) for member in group)
        if group and not (_fits(group[-1], batch) and size + batches.batch_size(batch.target) <= largest):
            result.append(_concatenated(group))
            group = []
        group.append(batch)
    return [*result, _concatenated(group)] if group else result


def _fits(left: Batch, right: Batch) -> bool:
    if not all(batches.can_be_cut(batch.inputs, batches.batch_size(batch.target)) for batch in (left, right)):
        return False
    ours, theirs = ([*batches.flatten(batch.inputs)[0], batch.target] for batch in (left, right))
    return len(ours) == len(theirs) and all(
        a.shape[1:] == b.shape[1:] and a.ndim == b.ndim > 0 and a.dtype == b.dtype
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def _concatenated(group: list[Batch]) -> Batch:
    if len(group) == 1:
        return group[0]
    columns = zip(*(batches.flatten(batch.inputs)[0] for batch in group), strict=True)
    leaves = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return Batch(batches.flatten(group[0].inputs)[1](leaves), torch.cat([batch.target for batch in group]))
