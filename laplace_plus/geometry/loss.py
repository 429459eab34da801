"""A network's loss over a data set as a landscape: the negative log-posterior, one objective for all purposes.

    L(θ) = −1/T Σ_n log p(y_n | f(θ, x_n)) + ½ (θ − μ₀)ᵀ P₀ (θ − μ₀)

the sum over all data, at the likelihood's current noise, without the prior's constant. Training with weight decay, the
Laplace approximation and geodesics share this L, and the trained weights should be its stationary point.

With ``linearized=True`` the network is replaced by its tangent ``f(θ̂, x) + J(x) (θ − θ̂)``. :func:`kinks` tells
whether a network is smooth enough for methods that differentiate its loss twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus import _memory, batches
from laplace_plus.batches import Batch
from laplace_plus.curvature.linearization import Linearization
from laplace_plus.curvature.operators import GGNOperator
from laplace_plus.curvature.streaming import CHUNK_SIZE, DataSums, Stream
from laplace_plus.differentiability import differentiable_kernels
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.geometry.landscape import Derivatives, Landscape, SecondOrder, gradients
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.network import Network, exact_arithmetic
from laplace_plus.priors import GaussianPrior

_KEPT_BYTES = 256 * 2**20
"""Largest size of data, or of a Jacobian of all of them, that stays in memory: little for any machine."""


class LossLandscape(Landscape):
    """The negative log-posterior of (some of) a network's parameters, summed over the data.

    Small data sets are kept, in batches as large as the memory budget allows where the outputs do not depend on the
    batching; others are streamed. Points go through the network ``chunk_size`` at a time.

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
        self._second_order = SecondOrder()
        self._kept: list[Batch] | None = self._survey()
        self.n_data = self._stream.n_data
        self._checksum: float | None = self._stream.checksum
        self.vector = self.network.vector()
        prior = GaussianPrior.create(prior_precision, prior_mean, self.network.layer_index(), flat=True)
        self._precision = prior.vector().detach().to(self.vector)
        self._centre = prior.mean.detach().to(self.vector)
        self._tangents = self._keep_tangents()

    @property
    def checksum(self) -> float:
        """A sum over the data that differs for other data."""
        if self._checksum is None:
            sums = DataSums(self.network.device)
            for batch in self._batches():
                sums.add(batch, batches.batch_size(batch.target))
            self._checksum = sums.values()[0]
        return self._checksum

    @property
    def prior_precision(self) -> Tensor:
        """P₀'s diagonal, ``[P]``."""
        return self._precision

    @property
    def likelihood_weight(self) -> float:
        """What the data's loss is multiplied by in L: ``scale / temperature``."""
        return self.scale / self._temperature

    # -- the data ------------------------------------------------------------------------------------------------------

    def _survey(self) -> list[Batch] | None:
        """Check the data in one pass; the batches if they are few, else None."""
        limit = min(_KEPT_BYTES, _memory.budget(self.network.device) // 4)
        kept: list[Batch] = []
        seen: list[Tensor] = []
        total = 0
        with exact_arithmetic(self.network):
            for batch, outputs in self._stream.survey("loss landscape: data"):
                self.likelihood.validate(outputs, batch.target)
                tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)]
                total += sum(leaf.numel() * leaf.element_size() for leaf in tensors)
                if total <= limit:
                    kept.append(batch)
                    seen.append(outputs.flatten())
            if total > limit:
                return None
            budget = _memory.budget(self.network.device)
            each = self._bytes_at_one_point(self._bytes_per_example(kept[0]))
            joined = _joined(kept, max(1, budget // max(1, each * self._stream.chunk_size)))
            if len(joined) == len(kept):
                return kept
            # A network may look at the whole batch: only where its outputs stay the same are batches joined.
            before, after = torch.cat(seen), torch.cat([self.network.forward(b.inputs).flatten() for b in joined])
            tolerance = max(1e-4, torch.finfo(before.dtype).eps ** 0.5)
            same = after.shape == before.shape and bool((after - before).norm() <= tolerance * before.norm())
            return joined if same else kept

    def _bytes_per_example(self, batch: Batch) -> int:
        """What a backward pass keeps for each example."""
        sizes: list[int] = []

        def look(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
            self.network(batch.inputs, self.network.substitute(self.network.vector().requires_grad_()))
        return sum(sizes) // max(1, batch.size)

    @staticmethod
    def _bytes_at_one_point(n_bytes: int) -> int:
        """Memory of second derivatives: about four times what a plain backward pass keeps."""
        return 4 * n_bytes

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
                "size must be a number of examples.", expected=f"an integer from 1 to {self.n_data}", got=repr(size)
            )
        device = None if generator is None else generator.device
        orders = [torch.randperm(self.n_data, generator=generator, device=device)[:size].cpu() for _ in range(k)]
        return self.subsets(orders)

    def subsets(self, indices: list[Tensor]) -> list[LossLandscape]:
        """Landscapes on given examples, ``[B]`` integers each, with the log-likelihood scaled by N/B.

        Indices into a subset count its own examples, batch by batch.
        """
        parts: list[list[Batch]] = [[] for _ in indices]
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
                for own, chosen in zip(parts, indices, strict=True):
                    here = (chosen[(chosen >= first) & (chosen < first + size)] - first).tolist()
                    if here:
                        own.append(Batch(batches.cut(batch.inputs, here), batch.target[here]))
                first += size
            return [self._subset(own, len(chosen)) for own, chosen in zip(parts, indices, strict=True)]

    def _subset(self, parts: list[Batch], n: int) -> LossLandscape:
        subset = copy.copy(self)
        subset._kept, subset.n_data, subset._checksum = _joined(parts, n), n, None
        subset.scale = self.scale * self.n_data / n
        subset._tangents = subset._keep_tangents()
        return subset

    # -- values and derivatives ----------------------------------------------------------------------------------------

    def _scope(self) -> ExitStack:
        scope = ExitStack()
        for context in (exact_arithmetic(self.network), torch.no_grad(), differentiable_kernels(self.network.model)):
            scope.enter_context(context)
        return scope

    def _loss(self, outputs: Tensor, target: Any) -> Tensor:
        """``−log p(target | outputs)``, times the likelihood's weight."""
        rows, targets, weight = self.likelihood.rows(outputs, target)
        density = self.likelihood.log_density(rows, targets)
        return -torch.where(weight > 0, density, 0.0).sum() * self.likelihood_weight

    def _batch_loss(self, batch: Batch, point: Tensor) -> Tensor:
        outputs = self.network(batch.inputs, self.network.substitute(point)).to(point.dtype)
        return self._loss(outputs, batch.target).to(point.dtype)

    @override
    def value(self, points: Tensor) -> Tensor:
        total = (self._precision * (points - self._centre).square()).sum(1).double() / 2
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
                return self._add_tangent_derivatives(result, None, points, None)
            for batch in self._batches():
                result += gradients(partial(self._batch_loss, batch), points)
        return result

    @override
    def derivatives(self, points: Tensor, directions: Tensor) -> Derivatives:
        firsts, products = self._precision * (points - self._centre), self._precision * directions
        with self._scope():
            if self.linearized:
                self._add_tangent_derivatives(firsts, products, points, directions)
            else:
                for batch in self._batches():
                    for some in self._chunks(points):
                        part = self._second_order(partial(self._batch_loss, batch), points[some], directions[some])
                        firsts[some] += part.gradients
                        products[some] += part.products
        return Derivatives(firsts, products)

    def _chunks(self, points: Tensor) -> Iterator[slice]:
        for start in range(0, len(points), self._stream.chunk_size):
            yield slice(start, start + self._stream.chunk_size)

    # -- the network's tangent -----------------------------------------------------------------------------------------

    def _add_tangent_derivatives(
        self, firsts: Tensor, products: Tensor | None, points: Tensor, directions: Tensor | None
    ) -> Tensor:
        """Add ``Jᵀ r`` and ``Jᵀ Λ J u``, r and Λ the loss's derivatives in the tangent's outputs; the first of both."""
        for batch, line in self._lines():
            for some in self._chunks(points):
                outputs = line.outputs + line.push(points[some] - self.vector)
                with torch.enable_grad():
                    leaf = outputs.detach().requires_grad_()  # [m, B, *, C]
                    loss = torch.stack([self._loss(one, batch.target) for one in leaf]).sum()
                    (residual,) = torch.autograd.grad(loss, leaf, create_graph=directions is not None)
                firsts[some] += line.pull(residual.detach())
                if directions is not None and products is not None and residual.requires_grad:
                    pushed = line.push(directions[some])
                    (curved,) = torch.autograd.grad(residual, leaf, pushed, materialize_grads=True)
                    products[some] += line.pull(curved)
        return firsts

    def _lines(self) -> Iterator[tuple[Batch, Linearization | _WrittenOut]]:
        if self._tangents is not None and self._kept is not None:
            yield from zip(self._kept, self._tangents, strict=True)
            return
        for batch in self._batches():
            yield batch, Linearization(self.network, self.vector, batch.inputs, self._stream.ad_modes)

    def _keep_tangents(self) -> list[_WrittenOut] | None:
        """The Jacobian of all data, if it is small."""
        n_bytes = self._stream.n_outputs * len(self.vector) * self.vector.element_size()
        if not self.linearized or self._kept is None:
            return None
        if n_bytes > min(_KEPT_BYTES, _memory.budget(self.network.device) // 4):
            return None
        with exact_arithmetic(self.network), torch.no_grad():
            lines = (
                Linearization(self.network, self.vector, batch.inputs, self._stream.ad_modes) for batch in self._kept
            )
            return [_WrittenOut(line, len(self.vector), self._stream.chunk_size) for line in lines]

    # -- the Gauss-Newton matrix ---------------------------------------------------------------------------------------

    def ggn(self, point: Tensor) -> GGNOperator:
        """``Σ_n J_nᵀ Λ_n J_n`` of the data's loss at ``point [P]``, neither tempered nor with the prior's part.

        Raises:
            NonFiniteError: The outputs are not finite there.
        """
        return self._ggn(_Moved(self.network, point), self.data())

    def batchwise_ggn(self, point: Tensor) -> Iterator[GGNOperator]:
        """The terms of :meth:`ggn`, batch by batch."""
        moved = _Moved(self.network, point)
        for batch in self._batches():
            yield self._ggn(moved, [(batch.inputs, batch.target)])

    def _ggn(self, network: Network, data: Iterable[Any]) -> GGNOperator:
        return GGNOperator(network, self.likelihood, data, chunk_size=self._stream.chunk_size)


class _WrittenOut:
    """A batch's Jacobian written out, with the interface of a linearisation."""

    def __init__(self, line: Linearization, n_parameters: int, chunk_size: int):
        self.outputs = line.outputs
        n = self.outputs.numel()
        self._jacobian = self.outputs.new_empty(n, n_parameters)
        for some in torch.arange(n, device=self.outputs.device).split(chunk_size):
            units = self.outputs.new_zeros(len(some), n).scatter_(1, some[:, None], 1.0)
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


def _leaves(batch: Batch) -> list[Any]:
    return [*batches.flatten(batch.inputs)[0], batch.target]


def _joined(parts: list[Batch], largest: int) -> list[Batch]:
    """Batches of up to ``largest`` examples, made of successive ones that can be concatenated."""
    groups: list[list[Batch]] = []
    last, size = None, 0
    for batch in parts:
        own, n = _signature(batch), batches.batch_size(batch.target)
        if own is None or own != last or size + n > largest:
            groups.append([])
            size = 0
        groups[-1].append(batch)
        last, size = own, size + n
    result = []
    for group in groups:
        columns = zip(*(batches.flatten(batch.inputs)[0] for batch in group), strict=True)
        leaves = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
        inputs = batches.flatten(group[0].inputs)[1](leaves)
        result.append(group[0] if len(group) == 1 else Batch(inputs, torch.cat([batch.target for batch in group])))
    return result


def _signature(batch: Batch) -> list[Any] | None:
    """What batches have in common that can be concatenated; None for a batch that cannot be."""
    leaves = _leaves(batch)
    cuttable = batches.can_be_cut(batch.inputs, batches.batch_size(batch.target))
    if not cuttable or any(isinstance(leaf, Tensor) and not leaf.ndim for leaf in leaves):
        return None
    return [(x.shape[1:], x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves]


# -- smoothness --------------------------------------------------------------------------------------------------------

_KINKED = (
    "relu relu6 leaky_relu prelu rrelu threshold hardtanh hardsigmoid hardswish hardshrink softshrink elu selu celu "
    "abs absolute sign floor ceil round trunc clamp clamp_min clamp_max clip maximum minimum fmax fmin max min amax "
    "amin cummax cummin topk kthvalue median sort"
)
"""Functions whose first or second derivative jumps somewhere, by name; besides the kinds of max-pooling."""


def kinks(network: Network, inputs: Any) -> tuple[str, ...]:
    """Names of the operations that make a network's outputs other than twice continuously differentiable.

    Seen in one forward pass. It finds functions of torch that are known for it, wherever they are called; whether the
    selected parameters are before or after them it does not tell.

    Args:
        network: The network.
        inputs: One batch's inputs.
    """
    seen = _SeenKinks()
    with torch.no_grad(), seen:
        network.raw(network.receive(inputs))
    return tuple(sorted(seen.names))


class _SeenKinks(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").rstrip("_")
        kinked = name in _KINKED.split() or "max_pool" in name
        if kinked and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.names.add(name)
        return func(*args, **(kwargs or {}))
