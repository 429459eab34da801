"""A network's loss over a data set as a landscape: the negative log-posterior, one objective for all purposes.

    L(θ) = −1/T Σ_n log p(y_n | f(θ, x_n)) + ½ (θ − μ₀)ᵀ P₀ (θ − μ₀)

the sum over all data, at the likelihood's current noise, without the prior's constant. Training with weight decay, the
Laplace approximation and geodesics share this L, and the trained weights should be its stationary point.

With ``linearized=True`` the network is replaced by its tangent ``f(θ̂, x) + J(x) (θ − θ̂)``. :func:`kinks` tells
whether a network is smooth enough for methods that differentiate its loss twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature.operators import GGNOperator
from laplace_plus.curvature.streaming import CHUNK_SIZE, Stream
from laplace_plus.errors import SmoothnessWarning, UnsupportedError, warn
from laplace_plus.geometry.landscape import (
    Derivatives,
    FirstOrder,
    Landscape,
    SecondOrder,
    gradients,
    two_derivatives,
)
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.linalg import draw_probes, lanczos
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.linearization import Linearization, WrittenJacobian
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.priors import GaussianPrior

_KEPT_BYTES = 256 * 2**20
"""Largest size of data, or of their Jacobian, that stay in memory: little for any machine."""

_LANCZOS_STEPS = 12
"""They cost little beside an exploration's thousands of gradients, and find the largest eigenvalue of the tests'
classifiers to a relative 1e-3."""


class LossLandscape(Landscape):
    """The negative log-posterior of (some of) a network's parameters, summed over the data.

    Small data sets are kept, others are streamed, in batches as the loader yields them. Points go through the network
    ``chunk_size`` at a time.

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
        network, likelihood, linearized: As given.
        prior_precision: P₀'s diagonal, ``[P]``.
        vector: θ̂, the network's weights, ``[P]``.
        first_order: What computes gradients: ``expect(count)`` tells it how many are to come, so that they are traced
            if this pays, and ``way`` is how it does so.
        n_data: Number of examples.
        checksum: A sum over the data that differs for other data; a subset keeps that of the whole.
        scale: Factor on the log-likelihood besides the temperature: 1, or N/B for a subset of B of N examples.

    Raises:
        DataError, EmptyDataError, LabelError, OutputError, NonFiniteError: As the operators of ``lp.curvature``.
        ConfigurationError: A prior that does not fit.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(20, 3, dtype=torch.float64)
        >>> data = [(x, x.sum(1, keepdim=True))]
        >>> landscape = LossLandscape(nn.Linear(3, 1).double(), "regression", data, prior_precision=0.5)
        >>> best = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
        >>> torch.allclose(landscape.gradient(best), 0.5 * best)  # only the prior still pulls
        True
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
        self.likelihood, self.linearized, self.scale = resolve_likelihood(likelihood), linearized, 1.0
        self._stream = Stream(network, self.likelihood.arrange, data, chunk_size, progress)
        self.network = self._stream.network
        self._temperature = float(torch.as_tensor(temperature, dtype=torch.float64).detach())
        self.first_order, self._second_order = FirstOrder(), SecondOrder()  # shared by the subsets, which are copies
        self._kept = self._survey()
        self.n_data, self.checksum = self._stream.n_data, self._stream.checksum
        self.vector = self.network.vector()
        prior = GaussianPrior.create(prior_precision, prior_mean, self.network.layer_index(), flat=True)
        self.prior_precision = prior.vector().detach().to(self.vector)
        self._centre = prior.mean.detach().to(self.vector)
        self._tangents = self._kept_tangents()

    @property
    def likelihood_weight(self) -> float:
        """What the data's loss is multiplied by in L: ``scale / temperature``."""
        return self.scale / self._temperature

    # -- the data ------------------------------------------------------------------------------------------------------

    def _survey(self) -> list[Batch] | None:
        """Check the data in one pass; the batches if they are few, else None."""
        kept: list[Batch] = []
        total = 0
        with exact_arithmetic(self.network):
            for batch, outputs in self._stream.survey("loss landscape: data"):
                self.likelihood.validate(outputs, batch.target)
                total += sum(leaf.nbytes for leaf in batches.tensors_in((batch.inputs, batch.target)))
                if total <= _KEPT_BYTES:
                    kept.append(batch)
        return kept if total <= _KEPT_BYTES else None

    def _batches(self) -> Iterable[Batch]:
        return self._stream.batches("loss landscape", ordered=False) if self._kept is None else self._kept

    def data(self) -> Iterable[Any]:
        """The data as a loader yields them."""
        if self._kept is None:
            return self._stream.data
        return [(batch.inputs, batch.target) for batch in self._kept]

    def subsets(self, indices: list[Tensor]) -> list[Self]:
        """Landscapes on given examples, ``[B]`` integers each, with the log-likelihood scaled by N/B.

        Takes one pass, and memory for the subsets. Indices into a subset count its own examples, batch by batch.

        Raises:
            UnsupportedError: Batches that cannot be cut into examples.
        """
        parts: list[list[Batch]] = [[] for _ in indices]
        first = 0
        with exact_arithmetic(self.network):
            for batch in self._batches():
                size = batches.batch_size(batch.target)
                if self.likelihood.couples_rows or not batches.can_be_cut(batch.inputs, size):
                    got = checks.describe(batch.inputs)
                    raise UnsupportedError("The batches cannot be cut into examples.", got=got, fix="Use all data.")
                for own, chosen in zip(parts, indices, strict=True):
                    here = (chosen[(chosen >= first) & (chosen < first + size)] - first).tolist()
                    if here:
                        own.append(Batch(batches.cut(batch.inputs, here), batches.cut(batch.target, here)))
                first += size
        result = []
        for own, chosen in zip(parts, indices, strict=True):
            subset = copy.copy(self)
            subset._kept, subset.n_data = _joined(own), len(chosen)
            subset.scale = self.scale * self.n_data / len(chosen)
            subset._tangents = subset._kept_tangents()
            result.append(subset)
        return result

    def _kept_tangents(self) -> list[WrittenJacobian] | None:
        """The kept batches' Jacobians where the tangent takes the network's place and all of them are small.

        Measured: derivatives of a small network's tangent are 2 to 10 times as fast with them.
        """
        if not self.linearized or self._kept is None or self._stream.n_outputs * self.vector.nbytes > _KEPT_BYTES:
            return None
        with exact_arithmetic(self.network), torch.no_grad():
            return [WrittenJacobian(self.network, batch.inputs) for batch in self._kept]

    # -- values and derivatives ----------------------------------------------------------------------------------------

    def _losses(self, outputs: Tensor, target: Any) -> Tensor:
        """``−log p(target | outputs)``, times the likelihood's weight, for each of ``[m, B, *, C]``."""
        losses = [-self.likelihood.log_densities(one, target).sum() for one in outputs]
        return torch.stack(losses) * self.likelihood_weight

    def _loss(self, target: Any, outputs: Tensor) -> Tensor:
        return self._losses(outputs[None], target)[0]

    def _batch_loss(self, batch: Batch, point: Tensor) -> Tensor:
        outputs = self.network(batch.inputs, self.network.substitute(point)).to(point.dtype)
        return self._loss(batch.target, outputs).to(point.dtype)

    def _differentiable_loss(self, batch: Batch, point: Tensor) -> Tensor:
        with differentiable_kernels(self.network.model):
            return self._batch_loss(batch, point)

    def prior_gradient(self, points: Tensor) -> Tensor:
        """The prior's part of :meth:`gradient`, ``[k, P]``."""
        checks.shape("points", points, [None, len(self.vector)])
        return self.prior_precision * (points - self._centre)

    @override
    def value(self, points: Tensor) -> Tensor:
        total = (self.prior_gradient(points) * (points - self._centre)).sum(1).double() / 2
        with exact_arithmetic(self.network), torch.no_grad():
            for batch, line, some in self._chunks(points):
                if line is not None:
                    losses = self._losses(line.outputs + line.push(points[some] - self.vector), batch.target)
                else:
                    losses = torch.stack([self._batch_loss(batch, point) for point in points[some]])
                total[some] += losses.double()
        return total.to(points.dtype)

    @override
    def gradient(self, points: Tensor) -> Tensor:
        result = self.prior_gradient(points)
        with exact_arithmetic(self.network), torch.no_grad():
            for batch, line, some in self._chunks(points):
                if line is not None:
                    outputs = line.outputs + line.push(points[some] - self.vector)
                    result[some] += line.pull(gradients(partial(self._loss, batch.target), outputs))
                else:
                    result[some] += self.first_order(self._differentiable_loss, self.scale, batch, points[some])
        return result

    @override
    def derivatives(self, points: Tensor, directions: Tensor) -> Derivatives:
        firsts, products = self.prior_gradient(points), self.prior_precision * directions
        with exact_arithmetic(self.network), torch.no_grad(), differentiable_kernels(self.network.model):
            for batch, line, some in self._chunks(points):
                if line is not None:  # Jᵀ r and Jᵀ Λ J u, with the loss's derivatives r and Λ in the outputs
                    outputs = line.outputs + line.push(points[some] - self.vector)
                    losses = partial(self._losses, target=batch.target)
                    part = Derivatives(*map(line.pull, two_derivatives(losses, outputs, line.push(directions[some]))))
                else:
                    part = self._second_order(partial(self._batch_loss, batch), points[some], directions[some])
                firsts[some] += part.gradients
                products[some] += part.products
        return Derivatives(firsts, products)

    def _chunks(self, points: Tensor) -> Iterator[tuple[Batch, Linearization | WrittenJacobian | None, slice]]:
        """Each batch with its tangent, if that takes the network's place, and ``chunk_size`` points at a time."""
        for number, batch in enumerate(self._batches()):
            line: Linearization | WrittenJacobian | None = self._tangents[number] if self._tangents else None
            if self.linearized and line is None:
                line = Linearization(self.network, self.vector, batch.inputs)
            for some in self._stream.chunks(len(points)):
                yield batch, line, some

    def ggn(self, point: Tensor) -> GGNOperator:
        """``Σ_n J_nᵀ Λ_n J_n`` of the data's loss at ``point [P]``, neither tempered nor with the prior's part.

        Raises:
            NonFiniteError: The outputs are not finite there.
        """
        moved = MovedNetwork(self.network, point)
        return GGNOperator(moved, self.likelihood, self.data(), chunk_size=self._stream.chunk_size)

    def largest_curvature(self, point: Tensor) -> float:
        """The largest eigenvalue of L's Gauss-Newton matrix at ``point [P]``.

        By 12 steps of Lanczos' method, which approach it from below. The Hessian takes the matrix's place where a
        log-density is not concave.
        """
        source = torch.Generator().manual_seed(0)
        start = draw_probes("gaussian", 1, len(point), generator=source, dtype=point.dtype, device=point.device)[0]

        def hessian_products(vectors: Tensor) -> Tensor:
            rows = vectors.reshape(-1, len(point))
            return self.derivatives(point.expand_as(rows), rows).products.view(vectors.shape)

        try:
            ggn = self.ggn(point)
            found = lanczos(lambda v: ggn(v) * self.likelihood_weight + self.prior_precision * v, start, _LANCZOS_STEPS)
        except UnsupportedError:
            found = lanczos(hessian_products, start, _LANCZOS_STEPS)
        return float(torch.linalg.eigvalsh(found.tridiagonal().double())[-1])


class MovedNetwork(Network):
    """A network with other weights in place of its own, which stay as they are."""

    def __init__(self, network: Network, vector: Tensor):
        vars(self).update(vars(network))
        self._point = network.substitute(vector.detach())

    @override
    def tensor(self, name: str) -> Tensor:
        return self._point[name] if name in self._point else Network.tensor(self, name)

    @override
    def raw(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None, mode: Any = None) -> Any:
        return Network.raw(self, inputs, {**self._point, **(parameters or {})}, mode)


def _joined(parts: list[Batch]) -> list[Batch]:
    """The same examples in one batch, where they can be concatenated; else the very same batches."""
    try:
        return [Batch(*batches.joined([(part.inputs, part.target) for part in parts]))]
    except (RuntimeError, TypeError):  # leaves of several shapes, or that are no tensors
        return parts


# -- smoothness --------------------------------------------------------------------------------------------------------
_KINKED = (
    "relu relu6 leaky_relu prelu rrelu threshold hardtanh hardsigmoid hardswish hardshrink softshrink elu selu celu "
    "abs absolute sign floor ceil round trunc clamp clamp_min clamp_max clip maximum minimum fmax fmin max min amax "
    "amin cummax cummin topk kthvalue median sort"
)
"""Functions whose first or second derivative jumps somewhere, by name; besides the kinds of max-pooling."""


def kinks(network: Network, inputs: Any) -> tuple[str, ...]:
    """Names of the operations that make a network's outputs other than twice continuously differentiable.

    Seen in one forward pass of a batch's inputs. It finds functions of torch that are known for it, wherever they are
    called; whether the selected parameters are before or after them it does not tell.
    """
    seen = _SeenKinks()
    with torch.no_grad(), seen:
        network.raw(network.receive(inputs))
    return tuple(sorted(seen.names))


def warn_of_kinks(network: Network, inputs: Any, advice: str) -> None:
    """Warn (SmoothnessWarning) where :func:`kinks` finds any; called by a posterior's ``fit_batches``."""
    found = kinks(network, inputs)
    if found:
        problem = f"The network's {', '.join(found)} keep its loss from being twice differentiable"
        warn(f"{problem}, which this posterior assumes. {advice}", SmoothnessWarning)


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
