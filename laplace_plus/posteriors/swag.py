"""SWAG: a Gaussian from the moments of weights along stochastic gradient descent (Maddox et al., 2019).

Of snapshots ``θ_1 … θ_T`` of the weights, with running means ``θ̄_t``, the posterior is

    N(θ̄_T, s (Σ_diag + D Dᵀ/(k − 1))),    Σ_diag = diag(1/T Σ θ_t² − θ̄_T²),    D = [θ_t − θ̄_t] of the last k snapshots

with ``s = ½``, as both terms estimate the covariance: "A simple baseline for Bayesian uncertainty in deep learning",
arXiv:1902.02476. Without D it is ``N(θ̄_T, Σ_diag)``.

A network of sampled weights needs statistics of its own in batch normalisation. They take a pass over the training data
for each network. Those of ``n_members`` draws are computed by :meth:`SWAG.fit`, kept and saved; predictions by sampled
networks are then those of these draws.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import DataError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed, global_randomness, standard_normal
from laplace_plus.network import batches
from laplace_plus.network.gradients import mean_loss
from laplace_plus.network.network import Network, full_precision
from laplace_plus.network.selection import refine
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.state import State, survey
from laplace_plus.tuning import Auto, Tuner, Validation

_LEAST = 1e-30
"""Variances are at least this, as in the authors' code: weights that do not move have none."""


@stored
@dataclass(frozen=True)
class PathMoments:
    """What is known of the weights ``θ_1 … θ_T`` on a path.

    Attributes:
        mean: The running mean ``θ̄_T``, ``[P]`` float64.
        squares: ``Σ (θ_t − θ̄_T)²``, ``[P]`` float64.
        deviations: ``θ_t − θ̄_t`` of the last weights, ``[k, P]``.
        count: T.
    """

    mean: Tensor
    squares: Tensor
    deviations: Tensor
    count: int = 0

    @classmethod
    def none(cls, like: Tensor) -> PathMoments:
        """Those of no weights yet; they will be ``like`` a vector ``[P]``."""
        zeros = torch.zeros_like(like, dtype=torch.float64)
        return cls(zeros, zeros, like.new_zeros(0, len(like)))

    def plus(self, vector: Tensor, rank: int = 0) -> PathMoments:
        """With further weights ``[P]``; the last ``rank`` deviations are kept."""
        count = self.count + 1
        step = vector.to(self.mean) - self.mean
        mean = self.mean + step / count
        deviation = vector.to(mean) - mean
        kept = torch.cat([self.deviations, deviation[None].to(self.deviations)])
        return PathMoments(mean, self.squares + step * deviation, kept[max(0, len(kept) - rank) :], count)

    @property
    def variance(self) -> Tensor:
        """``1/T Σ θ_t² − θ̄_T²``, ``[P]`` float64."""
        return self.squares / self.count


@stored
@dataclass(frozen=True)
class DiagonalSWAG:
    """Train a copy of the network further by SGD, and take the variance of each weight over the epochs' ends.

    The loss is the mean negative log-likelihood of a batch plus half of ``weight_decay`` times the squared norm, as
    ``torch.optim.SGD`` has it; the copy is in training mode. The network itself stays as it is.

    Args:
        learning_rate: Constant; large enough that the weights keep moving.
        n_snapshots: Number of epochs, each of which ends with a snapshot; at least 2.
        momentum: Of SGD.
        weight_decay: Of SGD.

    Raises:
        ConfigurationError: A number out of range.
    """

    learning_rate: float = 0.01
    n_snapshots: int = 40
    momentum: float = 0.9
    weight_decay: float = 3e-4

    def __post_init__(self) -> None:
        checks.count("n_snapshots", self.n_snapshots, 2, fix="The variance of one snapshot is zero.")
        checks.positive("learning_rate", self.learning_rate)
        checks.number("momentum", self.momentum, least=0.0, most=1.0)
        checks.number("weight_decay", self.weight_decay, least=0.0)

    def follow(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        *,
        rank: int = 0,
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> PathMoments:
        """Train, and give the moments of the network's selected entries.

        Raises:
            NonFiniteError: Training diverges.
        """
        moving = copy.deepcopy(network.model).train().requires_grad_(False)
        for module in moving.modules():
            if getattr(module, "sparse", False) is True:  # of an embedding: sparse gradients have few operations
                module.sparse = False  # type: ignore[assignment]
        vector = network.vector().clone().requires_grad_()  # the selected entries alone are trained
        rates: Any = {"lr": self.learning_rate, "momentum": self.momentum, "weight_decay": self.weight_decay}
        optimizer, moments = torch.optim.SGD([vector], **rates), PathMoments.none(network.vector())
        epochs = progress_bar(range(self.n_snapshots), enabled=progress, description="SWAG: epochs")
        with global_randomness(network.device, generator), torch.enable_grad():
            for epoch in epochs:
                for batch in batches.iterate(data, device=network.device):
                    args, keywords = batches.bind(moving, batch.inputs)
                    # An embedding with a largest norm writes to its weights, which views of others' must not be.
                    weights = {name: own.clone() for name, own in network.substitute(vector).items()}
                    raw = torch.func.functional_call(moving, weights, args, keywords)
                    outputs = likelihood.arrange(batches.output_tensor(raw))
                    what = f"SWAG diverged in epoch {epoch + 1}: the network's output"
                    checks.finite(what, outputs, fix="Use a smaller learning_rate.")
                    likelihood.validate(outputs.detach(), batch.target)
                    (vector.grad,) = torch.autograd.grad(mean_loss(likelihood, outputs, batch.target), vector)
                    optimizer.step()
                moments = moments.plus(vector.detach(), rank)
        return moments


@stored
@dataclass(frozen=True)
class SWAGState(State):
    """The path's moments, whether they were collected, seeds and statistics of draws, and the scale, if it was set."""

    path: PathMoments
    collected: bool
    seeds: tuple[int, ...] = ()
    statistics: dict[str, Tensor] = field(default_factory=dict)
    scale: float | None = None


class SWAG(Posterior):
    """A Gaussian around the average of weights on the path of SGD: their variances, and their last deviations.

    Either train the network further and hand over snapshots, and then pass the training data to :meth:`fit`::

        posterior = lp.SWAG(model, "classification")
        for _ in range(epochs):
            train_for_an_epoch(model)  # with a constant, large learning rate
            posterior.collect(model)
        posterior.fit(train_loader)

    Or call :meth:`fit` alone, which trains a copy as :class:`DiagonalSWAG` does. The network must not change after
    :meth:`fit`. Predictions are those of sampled networks. Memory is ``rank + 2`` vectors of the network's size. The
    prior and the temperature have no part in it; a prior enters by the weight decay of SGD. What is tuned is the scale.

    Args:
        model, likelihood: As for :class:`Posterior`.
        rank: How many of the last deviations are kept; 0 for variances alone.
        scale: Factor s on ``Σ_diag + D Dᵀ/(k − 1)``; by default ½, or 1 for rank 0.
        n_snapshots: Epochs of the training by :meth:`fit`, at least 2.
        learning_rate, momentum, weight_decay: Of its SGD, as ``torch.optim.SGD`` has them.
        n_members: How many draws get statistics of batch normalisation of their own.
        parameters: As for :class:`Posterior`.
        **common: As for :class:`Posterior`; prior, temperature and backend are without effect.

    Raises:
        ConfigurationError: A number out of range, besides what :class:`Posterior` raises. By :meth:`fit`, a single
            snapshot.
        NonFiniteError: By :meth:`fit`, where training diverges.

    Example:
        >>> import laplace_plus as lp
        >>> x, y = torch.randn(40, 2), torch.arange(40) % 2
        >>> posterior = lp.SWAG(nn.Linear(2, 2), "classification", n_snapshots=10).fit([(x, y)])
        >>> posterior.predictive(x[:3], n_samples=20).mean.shape
        torch.Size([3, 2])
    """

    default_method = "sampled"
    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation, "auto": Auto}
    _collected: PathMoments | None = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        rank: int = 20,
        scale: float | None = None,
        n_snapshots: int = 40,
        learning_rate: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 3e-4,
        n_members: int = 30,
        **common: Any,
    ):
        self.rank, self.n_members = checks.count("rank", rank, 0), checks.count("n_members", n_members)
        self._scale = (0.5 if rank else 1.0) if scale is None else checks.positive("scale", scale)
        self._training = DiagonalSWAG(learning_rate, n_snapshots, momentum, weight_decay)
        super().__init__(model, likelihood, **common)

    # -- snapshots and the fit -----------------------------------------------------------------------------------------

    @full_precision
    def collect(self, model: nn.Module | None = None) -> Self:
        """Take a snapshot of the weights; :meth:`fit` makes the posterior of all of them.

        Args:
            model: The network as it is now: the posterior's own, by default, or another with the same parameters.

        Raises:
            SelectionError: A model without the selected parameters.
            NonFiniteError: Weights that are not finite.
        """
        network = self.network
        if model is not None:
            network = Network(model, refine(network.selected), self.likelihood.arrange)
        network.check_finite()
        vector = network.vector().to(self.network.device)
        self._collected = (self._collected or PathMoments.none(vector)).plus(vector, self.rank)
        return self

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> SWAGState:
        path, norms = self._collected, self._norms(self.network.model)
        why = "SWAG passes over the data several times." if path is None or norms else None
        n_data, n_outputs, _ = survey(self, data, why)
        if path is None:
            options: Any = {"rank": self.rank, "progress": progress, "generator": generator}
            path = self._training.follow(self.network, self.likelihood, data, **options)
        checks.count("The number of snapshots", path.count, 2, fix="Call collect(model) after each epoch.")
        mean, collected = path.mean.to(self.network.dtype), self._collected is not None
        state = SWAGState(mean, n_data, n_outputs, path, collected)
        if norms:
            source = torch.Generator().manual_seed(draw_seed(generator))
            state = replace(state, seeds=tuple(draw_seed(source) for _ in range(self.n_members)))
            self.set_state(state)
            state = replace(state, statistics=self._normalised(data, progress))
        return state

    @override
    def set_state(self, state: SWAGState) -> None:
        super().set_state(state)
        if state.collected:
            self._collected = state.path

    # -- batch normalisation -------------------------------------------------------------------------------------------

    @staticmethod
    def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
        return {name: own for name, own in model.named_modules() if isinstance(own, _BatchNorm)}

    def _member(self, number: int) -> Tensor:
        """The weights of a draw that has statistics, ``[P]``; the same on every device."""
        return self.sample(1, generator=torch.Generator().manual_seed(self.state.seeds[number]))[0]

    def _normalised(self, data: Iterable[Any], progress: bool) -> dict[str, Tensor]:
        """Means and variances ``[n_members, *]`` of each batch normalisation, from one pass over the data."""
        moving = copy.deepcopy(self.network.model).eval().requires_grad_(False)
        norms, found, seen = self._norms(moving), dict[str, Tensor](), 0
        for name, own in norms.items():
            own.train()
            for kind in ("running_mean", "running_var"):
                found[f"{name}.{kind}" if name else kind] = torch.stack([getattr(own, kind)] * self.n_members)
        for batch in self.batches(data, progress=progress, description="SWAG: batch normalisation"):
            size = batches.batch_size(batch.target)
            if size < 2:  # noqa: PLR2004  -- a single example has no variance
                continue
            seen += size
            for own in norms.values():
                own.momentum = size / seen  # the mean over the examples so far
            args, keywords = batches.bind(moving, batch.inputs)
            for number in range(self.n_members):
                known = self.network.substitute(self._member(number))
                known |= {name: every[number] for name, every in found.items()}  # written to in place
                with torch.no_grad():
                    torch.func.functional_call(moving, known, args, keywords)
        if not seen:
            expected = "batches of two examples or more"
            raise DataError("Batch normalisation has no statistics.", expected=expected, got="single examples")
        return found

    @override
    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        """Outputs of n sampled networks; with batch normalisation, of as many draws that have statistics."""
        if not self.state.seeds:
            yield from super().sampled_outputs(x, n, generator)
            return
        network, x = self.network, self.network.receive(x)
        device = None if generator is None else generator.device
        order = torch.randperm(len(self.state.seeds), generator=generator, device=device).tolist()
        for number in order[:n]:
            known = network.substitute(self._member(number))
            known |= {name: every[number] for name, every in self.state.statistics.items()}
            with torch.no_grad():
                yield network(x, known)

    # -- the Gaussian --------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """The factor s; after a new one, draws with batch normalisation pass over the training data of the fit."""
        return self._scale if self._found is None or self._found.scale is None else self._found.scale

    @scale.setter
    def scale(self, value: float) -> None:
        self.require_fit()
        self._found = replace(self.state, scale=checks.positive("scale", float(value)))
        if self.state.seeds:
            data = self.training_data.again(None, "Draws at another scale have other statistics of normalisations.")
            self._found = replace(self.state, statistics=self._normalised(data, False))

    def tunables(self) -> dict[str, Sequence[float]]:
        """The scale takes the place of a prior precision."""
        return {"scale": [2.0 ** (1 - step) for step in range(9)]}

    def _variance(self) -> Tensor:
        """``s Σ_diag``, ``[P]``."""
        return (self.scale * self.state.path.variance.clamp(min=_LEAST)).to(self.mean)

    def _deviations(self) -> Tensor:
        """``(s/(k − 1))^½ Dᵀ``, ``[k, P]``."""
        deviations = self.state.path.deviations
        return deviations.to(self.mean) * (self.scale / max(1, len(deviations) - 1)) ** 0.5

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        self.require_fit()
        result = checks.zeros("The matrix of samples", checks.count("n", n), len(self.mean), self.mean)
        deviations = self._deviations()
        shapes = (n, len(self.mean)), (n, len(deviations))
        diagonal, low = (standard_normal(shape, like=self.mean, generator=generator) for shape in shapes)
        return result.addmm_(low, deviations).add_(self.mean + diagonal * self._variance().sqrt())

    @full_precision
    def variance(self) -> Tensor:
        """The variance of each parameter entry, ``[P]``."""
        self.require_fit()
        return self._variance() + self._deviations().square().sum(0)
