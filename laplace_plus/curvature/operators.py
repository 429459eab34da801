"""The curvature of a network's loss over a whole data set as operators: products, and never a matrix.

The loss is the negative log-likelihood summed over the data, and the curvature is that at the likelihood's *current*
observation noise. With ``J_n`` the Jacobian of example n's outputs in the selected parameters:

=========================  ===========================================================================================
:class:`GGNOperator`       ``Σ_n J_nᵀ Λ_n J_n``, ``Λ = −∂² log p(y|f) / ∂f²`` (Schraudolph, 2002)
:class:`FisherOperator`    ``Σ_n J_nᵀ g_n g_nᵀ J_n`` with gradients g at sampled labels or at the data's own
:class:`HessianOperator`   ``Σ_n ∂² (−log p(y_n | f_n)) / ∂θ²`` (Pearlmutter, 1994)
:class:`JacobianOperator`  ``J``, all examples below each other
:class:`RootOperator`      ``Λ^½ J``, whose small Gram matrix shares the spectrum of the GGN
=========================  ===========================================================================================

A product with several vectors takes one pass over the data. For one vector that costs about two forward and two
backward passes. Memory is that of one batch and ``chunk_size`` vectors, besides the vectors themselves.
But for rounding and sampled labels, results do not depend on how the data are cut into batches.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature.base import Backend
from laplace_plus.curvature.output_roots import OutputRoot, exact_root, gradient_root
from laplace_plus.curvature.streaming import CHUNK_SIZE, Stream
from laplace_plus.curvature.structures import LowRankStructure
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg.linear_maps import attach
from laplace_plus.linalg.operators import Operator
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import batch_gradients, loss_gradient
from laplace_plus.network.linearization import Linearization, Pullback
from laplace_plus.network.network import Network, exact_arithmetic


class NetworkOperator(Operator):
    """An operator whose products run over a :class:`~laplace_plus.curvature.streaming.Stream`.

    Products are differentiable in the vectors, at the cost of another pass, but not in the network's parameters.
    ``matvecs`` is the number of vectors multiplied so far, by the operator or its transpose.
    """

    def __init__(self, stream: Stream, n_rows: int | None = None):
        self._stream, self.network = stream, stream.network
        self.dtype, self.device = stream.network.dtype, stream.network.device
        n_parameters = stream.network.n_parameters
        self.shape = (n_parameters if n_rows is None else n_rows, n_parameters)
        self.matvecs = 0

    @property
    def n_data(self) -> int:
        """Number of examples that the loader yielded."""
        return self._stream.n_data

    @abstractmethod
    def _multiply(self, vectors: Tensor) -> Tensor:
        """``A v`` for vectors ``[m, n]``, in one pass over the data."""

    def _run(self, multiply: Callable[[Tensor], Tensor], transpose: Operator, size: int, vectors: Tensor) -> Tensor:
        """A product with ``[..., n]`` by a function ``[m, n] -> [m, size]``; differentiable."""
        # Not inside of an autograd function's forward, where torch switches forward derivatives off.
        flat = vectors.detach().reshape(vectors.shape[:-1].numel(), vectors.shape[-1])
        self.matvecs += len(flat)
        # Contexts are entered here rather than in the generators, which may be left half-way.
        with exact_arithmetic(self.network), torch.no_grad():
            flat = flat.clone() if flat.is_inference() else flat
            products = multiply(flat) if len(flat) else flat.new_zeros(0, size)
        return attach(
            (products.view(*vectors.shape[:-1], size),),
            (vectors,),
            lambda _, cotangents: [None if cotangents[0] is None else transpose(cotangents[0])],
        )[0]

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self._run(self._multiply, self.T, self.shape[0], vectors)

    @override
    def _details(self) -> str:
        return f"{self.n_data} data"


class _RowOperator(NetworkOperator):
    """``Sᵀ J``: rows that each belong to one batch, in the order of the data.

    ``output_root`` gives S for a batch, its outputs, and the number of its first observation.
    """

    def __init__(self, stream: Stream, n_rows: int, output_root: Callable[[Batch, Tensor, int], OutputRoot]):
        NetworkOperator.__init__(self, stream, n_rows)
        self._output_root = output_root

    def _passed(self, vectors: Tensor | None) -> Iterator[tuple[Linearization, Tensor, OutputRoot, slice]]:
        """Each batch linearised, its ``J v`` for some vectors or none, S, and its slice of rows."""
        start = first_row = 0
        pushed = torch.empty(0)
        for batch, line in self._stream.linearizations(type(self).__name__, ordered=True):
            if vectors is not None:  # the outputs come with it
                pushed = torch.cat([line.push(vectors[some]) for some in self._stream.chunks(len(vectors))])
            root = self._output_root(batch, line.outputs, first_row)
            if start + root.size > self.shape[0]:
                raise self._stream.changed(f"more than {self.shape[0]} rows")
            yield line, pushed, root, slice(start, start + root.size)
            start += root.size
            first_row += line.outputs.shape[:-1].numel()

    @override
    def _multiply(self, vectors: Tensor) -> Tensor:
        result = vectors.new_zeros(len(vectors), self.shape[0])
        for _, pushed, root, where in self._passed(vectors):
            result[:, where] = root.down(pushed).to(result.dtype)
        return result

    def _multiply_transposed(self, vectors: Tensor) -> Tensor:
        result = vectors.new_zeros(len(vectors), self.shape[1])
        for line, _, root, where in self._passed(None):
            for some in self._stream.chunks(len(vectors)):
                line.pull.add_to(result[some], root.up(vectors[some, where]).to(result.dtype))
        return result

    @override
    def _apply_transposed(self, vectors: Tensor) -> Tensor:
        return self._run(self._multiply_transposed, self, self.shape[1], vectors)

    def rows(self, chosen: Tensor) -> Tensor:
        """The rows of those numbers ``[k]``, which ascend: ``[k, n]``, by a backward pass over its batch for each."""
        parts = [torch.zeros(0, self.shape[1], dtype=self.dtype, device=self.device)]
        with exact_arithmetic(self.network), torch.no_grad():
            for line, _, root, where in self._passed(None):
                own = chosen[(chosen >= where.start) & (chosen < where.stop)].to(self.device) - where.start
                for some in self._stream.chunks(len(own)):
                    unit = nn.functional.one_hot(own[some], root.size).to(parts[0])
                    parts.append(line.pull(root.up(unit)))
        return torch.cat(parts)

    @override
    def dense(self) -> Tensor:
        """The rows ``[m, n]``: as each belongs to one example, by as many cotangents as an example has rows."""
        result = checks.zeros("The operator", *self.shape, torch.empty(0, dtype=self.dtype, device=self.device))
        start = first_row = 0
        with exact_arithmetic(self.network):
            for batch in self._stream.batches(type(self).__name__, ordered=True):
                gradients = batch_gradients(self.network, batch)
                shape, raw = gradients.capture.output_shape, gradients.capture.outputs
                root = self._output_root(batch, raw.view(shape), first_row)
                rows = result[start : start + root.size].view(root.n_apart, -1, self.shape[1])
                unit = torch.eye(rows.shape[1], dtype=raw.dtype, device=raw.device)
                for some in gradients.cotangent_chunks(len(unit)):
                    chosen = unit[some, None].expand(-1, len(rows), -1).flatten(1)
                    cotangents = root.up(chosen).to(raw.dtype).view(-1, *raw.shape)
                    values = gradients.whole(cotangents)[1].dense(slice(0, len(raw))).squeeze((2, 3))
                    # The sum is over positions that went as examples of their own.
                    rows[:, some] = values.unflatten(1, (len(rows), -1)).sum(2).movedim(0, 1)
                start += root.size
                first_row += shape[:-1].numel()
        return result


class JacobianOperator(_RowOperator):
    """``J``: rows are the outputs of all examples (positions, then outputs, within each), columns the parameters.

    ``J`` itself in place of ``JᵀJ`` keeps solvers such as LSMR from squaring the condition number.

    Args:
        network: The network, or a module of which all parameters that require gradients are taken and whose last axis
            holds the outputs.
        data: An iterable of batches ``(x, y)`` that can be started again and keeps its order; the targets are not used.
        chunk_size, progress: As for :class:`CurvatureOperator`, also for errors.
    """

    def __init__(
        self, network: Network | nn.Module, data: Iterable[Any], *, chunk_size: int = CHUNK_SIZE, progress: bool = False
    ):
        stream = Stream(network, resolve_likelihood("regression").arrange, data, chunk_size, progress)
        with exact_arithmetic(stream.network):
            for _ in stream.survey(type(self).__name__):
                pass
        _RowOperator.__init__(self, stream, stream.n_outputs, lambda batch, outputs, _: OutputRoot(outputs.shape))


class CurvatureOperator(NetworkOperator):
    """A curvature of the loss, summed over the data, ``[P, P]``.

    Args:
        network: The network, or a module of which all parameters that require gradients are taken.
        likelihood: A name or a :class:`~laplace_plus.Likelihood`; its observation noise is that of the products.
        data: An iterable of batches that can be started again.
        chunk_size: Number of vectors that are pushed through the network at a time.
        progress: Whether to show a progress bar for each pass.

    Attributes:
        likelihood: The likelihood.

    Raises:
        DataError: Data that can be run over only once, or of no known form.
        EmptyDataError: No data.
        LabelError: Targets that do not fit the likelihood.
        OutputError: Network outputs that do not fit it.
        NonFiniteError: NaN or infinity in the parameters, the inputs or the outputs.
    """

    symmetric = True

    def __init__(
        self,
        network: Network | nn.Module,
        likelihood: str | Likelihood,
        data: Iterable[Any],
        *,
        chunk_size: int = CHUNK_SIZE,
        progress: bool = False,
    ):
        self.likelihood = resolve_likelihood(likelihood)
        stream = Stream(network, self.likelihood.arrange, data, chunk_size, progress)
        with exact_arithmetic(stream.network):
            for batch, outputs in stream.survey(type(self).__name__):
                self.likelihood.validate(outputs, batch.target)
                self._look_at(batch, outputs)
        NetworkOperator.__init__(self, stream)  # the survey has settled which layer is the last one

    def _look_at(self, batch: Batch, outputs: Tensor) -> None:
        """Called for each batch of the first pass."""


class _SandwichOperator(CurvatureOperator):
    """``Σ Jᵀ S Sᵀ J`` with a root S of some curvature in output space."""

    _n_root = 0
    _ordered = False

    @abstractmethod
    def output_root(self, batch: Batch, outputs: Tensor, first_row: int) -> OutputRoot:
        """S on a batch whose first observation has that number."""

    @override
    def _look_at(self, batch: Batch, outputs: Tensor) -> None:
        self._n_root += self.output_root(batch, outputs, 0).size

    @override
    def _multiply(self, vectors: Tensor) -> Tensor:
        result = torch.zeros_like(vectors)
        first_row = 0
        for batch, line in self._stream.linearizations(type(self).__name__, ordered=self._ordered):
            root = self.output_root(batch, line.outputs, first_row)
            first_row += line.outputs.shape[:-1].numel()
            for some in self._stream.chunks(len(vectors)):
                cotangents = root.up(root.down(line.push(vectors[some])))
                line.pull.add_to(result[some], cotangents.to(result.dtype))
        return result

    def root(self) -> RootOperator:
        """The ``R = Sᵀ J`` with which this operator is ``Rᵀ R``; the data must keep their order for it."""
        return RootOperator(self)


class RootOperator(_RowOperator):
    """``Sᵀ J``: a root of the curvature in output space times the Jacobian; made by ``GGNOperator(…).root()``.

    Where it has fewer rows than columns, ``root @ root.T`` is the small matrix with those eigenvalues of the curvature
    that are not zero. ``curvature`` is the GGN or Fisher operator that it is a root of.
    """

    def __init__(self, curvature: _SandwichOperator):
        _RowOperator.__init__(self, curvature._stream, curvature._n_root, curvature.output_root)
        self.curvature = curvature


class GGNOperator(_SandwichOperator):
    """The generalised Gauss-Newton matrix ``Σ_n J_nᵀ Λ_n J_n``; arguments and errors as :class:`CurvatureOperator`.

    With ``root`` the rows of ``Λ^½ J``: for one of C classes, C for each example or position.

    Raises:
        UnsupportedError: The log-density is not concave in the outputs.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.randn(5, 3), torch.randint(2, (5,)))]
        >>> ggn = GGNOperator(nn.Linear(3, 2), "classification", data)
        >>> ggn
        GGNOperator(8 × 8, float32, cpu, symmetric, 5 data)
        >>> ggn(torch.ones(4, 8)).shape
        torch.Size([4, 8])
    """

    @override
    def output_root(self, batch: Batch, outputs: Tensor, first_row: int) -> OutputRoot:
        return exact_root(self.likelihood, outputs, batch.target)


class FisherOperator(_SandwichOperator):
    """The Fisher information from gradients at sampled labels, or the empirical one.

    ``kind="mc"``: ``Σ_n 1/M Σ_s J_nᵀ g_ns g_nsᵀ J_n`` with gradients ``g`` of the loss at labels drawn from the
    likelihood; its expectation is the Fisher information, which for canonical likelihoods is the GGN. Labels are drawn
    once, batch by batch, and kept: all products are with the same matrix. Positions of an example (tokens, pixels)
    count separately, as their labels are independent.

    ``kind="empirical"``: ``Σ_n ∇ℓ_n ∇ℓ_nᵀ`` with the gradients at the data's own targets, one for each example.

    Args:
        network, likelihood, chunk_size, progress: As for :class:`CurvatureOperator`.
        data: As there; for ``"mc"`` it must keep its order.
        kind: ``"mc"`` or ``"empirical"``.
        n_samples: M, the number of labels drawn for each example.
        seed: Seed of the labels.

    Raises:
        ConfigurationError: Another kind, or no samples.
    """

    def __init__(
        self,
        network: Network | nn.Module,
        likelihood: str | Likelihood,
        data: Iterable[Any],
        *,
        kind: Literal["mc", "empirical"] = "mc",
        n_samples: int = 1,
        seed: int = 0,
        chunk_size: int = CHUNK_SIZE,
        progress: bool = False,
    ):
        checks.choice("Fisher information", kind, ["mc", "empirical"])
        checks.count("n_samples", n_samples, 1)
        checks.count("seed", seed, 0)
        self.kind, self.n_samples, self.seed = kind, n_samples, seed
        self._ordered = kind == "mc"
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: list[Tensor] = []  # of each batch, [M, observations, ...]
        _SandwichOperator.__init__(self, network, likelihood, data, chunk_size=chunk_size, progress=progress)
        self._labels = torch.cat(self._drawn, 1) if kind == "mc" else None
        self._drawn.clear()

    @override
    def _look_at(self, batch: Batch, outputs: Tensor) -> None:
        if self.kind == "empirical":
            self._n_root += len(outputs)
            return
        rows, _, _ = self.likelihood.rows(outputs, batch.target)
        draws = [self.likelihood.sample_targets(rows, generator=self._generator) for _ in range(self.n_samples)]
        self._drawn.append(torch.stack(draws))
        self._n_root += len(rows) * self.n_samples

    @override
    def output_root(self, batch: Batch, outputs: Tensor, first_row: int) -> OutputRoot:
        last_row = first_row + outputs.shape[:-1].numel()
        labels = None if self._labels is None else self._labels[:, first_row:last_row]
        return gradient_root(self.likelihood, outputs, batch.target, labels)


class HessianOperator(CurvatureOperator):
    """The Hessian of the loss, by differentiating twice; arguments and errors as :class:`CurvatureOperator`.

    It may be indefinite, and does not contain the prior.

    Raises:
        UnsupportedError: An operation of the network cannot be differentiated twice.
    """

    _checked = False

    @override
    def _multiply(self, vectors: Tensor) -> Tensor:
        result, point = torch.zeros_like(vectors), self.network.vector()
        for batch in self._stream.batches(type(self).__name__, ordered=False):
            pull = Pullback(*loss_gradient(self.network, self.likelihood, batch, point))
            try:
                if not self._checked:
                    self._check_symmetry(pull)
                for some in self._stream.chunks(len(vectors)):
                    pull.add_to(result[some], vectors[some])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise self._refusal(f"one that has none: {error}") from error
        return result

    def _check_symmetry(self, pull: Pullback) -> None:
        """Refuse second derivatives that are not symmetric, as those of some of torch's fused operations are."""
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(2, self.shape[1], generator=generator, dtype=self.dtype).to(self.device)
        products = torch.stack([pull.one(vector) for vector in vectors])
        left, right = float(vectors[0] @ products[1]), float(vectors[1] @ products[0])
        scale = float((vectors[0] * products[1]).norm() + (vectors[1] * products[0]).norm())
        if abs(left - right) > 1e-2 * scale:
            raise self._refusal(f"one whose second derivative is not symmetric: {left:.6g} and {right:.6g}")
        self._checked = True

    def _refusal(self, got: str) -> UnsupportedError:
        return UnsupportedError(
            "The network's Hessian cannot be computed.",
            expected="operations that torch can differentiate twice",
            got=got,
            fix="Replace that operation by elementary ones, or use the GGN.",
        )


def curvature_operator(
    backend: Backend,
    network: Network,
    likelihood: Likelihood,
    data: Iterable[Any],
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Operator:
    """The operator of a backend's curvature of all the data, at unit observation noise.

    Arguments are as for :class:`CurvatureOperator`. A backend's own :meth:`Backend.operator` is preferred; otherwise
    its kind and number of samples count, and ``generator`` is the source of the sampled labels of ``"ggn_mc"``.

    Raises:
        UnsupportedError: The backend has no low-rank curvature of its kind.
    """
    backend.check(LowRankStructure(), likelihood)
    own: Operator | None = backend.operator(network, likelihood, data, generator=generator, progress=progress)
    if own is not None:
        return own
    unit = likelihood if likelihood.noise_std is None else likelihood.with_noise(1.0)
    if backend.kind in ("ggn", "hessian"):
        operator = GGNOperator if backend.kind == "ggn" else HessianOperator
        return operator(network, unit, data, progress=progress)
    return FisherOperator(
        network,
        unit,
        data,
        kind="mc" if backend.kind == "ggn_mc" else "empirical",
        n_samples=backend.n_samples,
        seed=draw_seed(torch.default_generator if generator is None else generator),
        progress=progress,
    )
