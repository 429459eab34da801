"""A Bayesian last layer by variational inference, on the features of a trained network (Harrison et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._memory import budget, require_free, require_room
from laplace_plus.curvature import Backend
from laplace_plus.curvature.linear_head import head_features, head_rows
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.likelihoods.base import check_outputs, doubt_logits, widen
from laplace_plus.likelihoods.sampling import draw_by, draw_seed
from laplace_plus.likelihoods.student_t import StudentTNoise
from laplace_plus.network.batches import DataSums
from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import bytes_per_example, pieces
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.configuration import common_arguments, full_precision
from laplace_plus.posteriors.gaussian import MANY_LEVELS
from laplace_plus.posteriors.training_data import require_restartable, require_same_data
from laplace_plus.posteriors.variational_bound import BoundResult, VariationalBound
from laplace_plus.posteriors.variational_last_layer.bounds import Bound, resolve_bound
from laplace_plus.posteriors.variational_last_layer.conjugate import Regression, Solution
from laplace_plus.posteriors.variational_last_layer.gaussians import HISTORY, Gaussians, climb
from laplace_plus.predictive.linearized import FunctionalPosterior
from laplace_plus.predictive.outputs import Outputs, output_indices, require_outputs, wants_variances
from laplace_plus.tuning import Tuner, TuningResult
from laplace_plus.tuning.base import tunes_noise

_OPTIONS = "mean", "covariance", "bound", "n_samples", "noise", "noise_shape", "max_iterations"


class VariationalLastLayer(Posterior):
    """Gaussians over the weights of a linear last layer, by maximising a lower bound on its evidence.

    The features φ that enter the last layer stay as they are. Outputs ``w_kᵀφ`` have independent ``w_k ~ N(m_k, S_k)``,
    with the prior ``N(μ, I/α)``. In regression with Gaussian noise that is known in closed form, and follows other
    hyperparameters at once: with ``mean="optimal"`` it is the exact posterior, and the bound the evidence. With
    ``noise="student_t"`` an output's noise precision has the prior ``Gamma(a₀, a₀ σ₀²)``, σ₀ being the likelihood's
    noise, and the weights have ``N(μ, σ²/α)``; predictions are Student-t with ``2 a₀ + N`` degrees of freedom. Other
    likelihoods: :meth:`fit` searches at the present α, from the Laplace approximation, and :meth:`fit_prior_precision`
    goes on from there and tunes α, too. An α that is set by hand needs another fit.

    The search takes some 30·C·D² numbers for C outputs and D features (diagonal: 30·C·D) beside the features. These are
    computed anew in each step, batch by batch, where they take more than a quarter of the memory budget. :meth:`fit`
    raises UnsupportedError unless the network ends with a linear layer of its own weights, and ConfigurationError if
    covariances do not fit into memory. It warns (ConvergenceWarning) if the search did not converge.

    Args:
        mean: ``"trained"``, or ``"optimal"``, which predicted worse where features fit their training data closely.
        covariance: ``"dense"`` or ``"diagonal"``; with Gaussian noise dense.
        bound: For classes ``"reduced_kn"``, ``"jensen"`` or ``"mc"``: see ``bounds.expected_log_density``.
        n_samples, max_iterations: An even number of samples for ``"mc"``, the same throughout; that of L-BFGS.
        noise, noise_shape: ``"gaussian"`` or ``"student_t"``, and a₀.
        parameters, backend: ``"last_layer"``, or the names of all of a linear last layer's parameters; not used.
        model, likelihood, prior_precision, prior_mean, temperature, memory_budget: As for :class:`Posterior`; one α.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.VariationalLastLayer(net, "regression", noise="student_t").fit([(x, x.sin())])
        >>> posterior.predictive(x).distribution.df[0]
        tensor([22.])
    """

    one_precision = True
    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"elbo": VariationalBound}
    _sums: Regression | None = None
    _solution: Solution | None = None
    _key: tuple[Any, ...] | None = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        mean: Literal["trained", "optimal"] = "trained",
        covariance: Literal["dense", "diagonal"] = "dense",
        bound: str | None = None,
        n_samples: int = 20,
        noise: Literal["gaussian", "student_t"] = "gaussian",
        noise_shape: float = 1.0,
        max_iterations: int = 200,
        parameters: Selection = "last_layer",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        checks.choice("mean", mean, ("trained", "optimal"))
        checks.choice("covariance", covariance, ("dense", "diagonal"))
        checks.choice("noise", noise, ("gaussian", "student_t"))
        checks.count("n_samples", n_samples)
        checks.count("max_iterations", max_iterations)
        checks.positive("noise_shape", noise_shape)
        super().__init__(model, likelihood, **common_arguments(locals()))
        self._own = {name: value for name, value in locals().items() if name in _OPTIONS}
        exact = self.likelihood.is_gaussian
        if (covariance, bound) != ("dense", None) if exact else noise == "student_t" or n_samples % 2:
            what, expected = "These options do not fit the likelihood, or n_samples is odd.", "those of the docstring"
            raise ConfigurationError(what, expected=expected, got=str(self._own))
        self._kind = "" if exact else resolve_bound(self.likelihood, bound)

    @override
    def options(self) -> dict[str, Any]:
        return dict(self._own)

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        sums, rows, (self.n_data, self._data_sum) = self._gather(data, progress=progress)
        self.prior()  # refuses a mean of another shape
        weights, noise = self._weights(self.network.vector()), self.noise_std
        self.n_outputs, self._seed = len(weights), draw_seed(generator) if self._kind == "mc" else 0
        self._sums = self._solution = self.other_likelihood = self._key = None
        if noise is not None and self.noise_per_output and noise.ndim == 0 and 1 < len(weights) <= MANY_LEVELS:
            self.likelihood = self.likelihood.with_noise(noise.expand(len(weights)))
        if isinstance(sums, Regression):
            self._sums = sums
            self._solve()
        else:
            alpha = self._prior_precision.detach().to(weights)
            start = Gaussians.laplace(weights, sums / float(self._temperature.detach()), alpha)
            self._take(self._bound(rows, alpha).maximise(start, self._own["max_iterations"], progress)[0])

    def _gather(self, data: Iterable[Any], *, progress: bool) -> tuple[Any, Any, tuple[int, float]]:
        """Sums over the data, how to pass over features and targets again, and the data's number and sum."""
        found, doubt, count, kept, total = DataSums(self.network.device), 0.0, 0, list[Any](), cast(Any, None)
        for batch in self.batches(data, progress=progress, description=f"{type(self).__name__}: features"):
            found.add(batch, len(batch.target))
            for index, features, targets, outputs in head_rows(self.network, self.likelihood, batch):
                self._index = index
                count += len(features)
                doubt += self.likelihood.evidence_for_probabilities(outputs, targets) if len(features) else 0.0
                new = self._sums_of(features, outputs, targets)
                total = new if total is None else total.plus(new) if isinstance(new, Regression) else total + new
                kept += [] if self.likelihood.is_gaussian else [(features, targets)]
                if kept and 8 * count * features.shape[1] > budget(features.device) // 4:
                    require_restartable(data, "Features that do not fit into the memory budget are computed again.")
                    kept.clear()
        if not count:
            raise self.zero_curvature()
        if doubt > 0:
            doubt_logits(self.likelihood, doubt)
        kept = [tuple(map(torch.cat, zip(*kept, strict=True)))] if sum(len(one) for one, _ in kept) == count else []

        def rows() -> Iterable[tuple[Tensor, Tensor]]:
            parts = (part for own in self.batches(data) for part in head_rows(self.network, self.likelihood, own))
            return kept or ((part[1], part[2]) for part in parts)

        return total, rows, (found.count, found.values()[0])

    def _sums_of(self, features: Tensor, outputs: Tensor, targets: Tensor) -> Any:
        """Those of regression, or the curvature ``Σ_n Λ_n,kk φφᵀ [C, D, D]``, or its diagonal ``[C, D]``."""
        if self.likelihood.is_gaussian:
            return Regression.of(features, targets, self._weights(self.network.vector()))
        known = self.likelihood.output_curvature(outputs, torch.ones_like(outputs[:, 0]))
        each = known.diagonal if known else torch.linalg.diagonal(self.likelihood.output_hessian(outputs, targets))
        columns = each.detach().clamp_min(0.0).mT.unsqueeze(-1)  # [C, n, 1]
        if self._own["covariance"] != "dense":
            return (columns * features.square()).sum(1)
        what, fix = f"A search over covariances of {len(columns)} outputs", 'Write covariance="diagonal".'
        n_bytes = 24 * (min(HISTORY, self._own["max_iterations"]) + 3) * len(columns) * features.shape[1] ** 2
        require_room(n_bytes, what.lower(), features.device, if_given=True)
        require_free(n_bytes, what, features.device, fix)
        return torch.stack([(own * features).mT @ features for own in columns])

    def _weights(self, vector: Tensor) -> Tensor:
        """A parameter vector as weights ``[C, D]`` float64."""
        return vector.detach().expand(self.n_parameters).double().to(self._index.device)[self._index]

    def _bound(self, rows: Any, alpha: Tensor | None) -> Bound:
        own = self._weights(self._prior_mean), alpha, float(self._temperature.detach()), self._own["n_samples"]
        return Bound(rows, self.likelihood, self._kind, *own, self._own["mean"] == "trained", self._seed)

    def _take(self, q: Gaussians) -> None:
        vector = self.network.vector().clone()
        vector[self._index] = q.mean.to(vector)
        self._q, self.mean = q, vector

    def _solve(self) -> None:
        """The exact posterior at the present hyperparameters, unless it is known."""
        own = self._prior_precision, self._prior_mean, self._temperature
        key = (*own, self.likelihood, *(tensor._version for tensor in own))
        if self._sums is None or self._key and all(map(is_, self._key, key)):
            return
        self._solution, self._key = self._solution_at(self._prior_precision.detach(), self.noise_std), key
        self._take(self._solution.q)
        if (rate := self._solution.rate) is not None:
            self.other_likelihood = StudentTNoise(self._solution.shape, rate, self.likelihood.output_axis)

    def _solution_at(self, alpha: Tensor, noise: Tensor | None) -> Solution:
        assert self._sums is not None and noise is not None
        shape = self._own["noise_shape"] if self._own["noise"] == "student_t" else 0.0
        own = self._weights(self._prior_mean), float(self._temperature.detach()), shape, self._own["mean"] == "trained"
        return self._sums.solve(alpha.to(self._sums.gram), noise, *own)

    @override
    def require_fit(self, *, thorough: bool = False) -> None:
        """As of :class:`Posterior`; a posterior in closed form then follows its hyperparameters."""
        super().require_fit(thorough=thorough)
        self._solve()

    @full_precision
    def elbo(self, data: Iterable[Any] | None = None) -> Tensor:
        """The lower bound on the log evidence, in nats, 0-d; but for regression from the fit's data, else DataError."""
        self.require_fit()
        if self._sums is not None and self._solution is not None:
            return self._solution.evidence
        bound = self._bound(self._again(data), self._prior_precision.detach().double())
        return torch.tensor(bound.value(lambda: self._q), dtype=torch.float64)

    def _again(self, data: Iterable[Any] | None, *, progress: bool = False) -> Any:
        data = self.training_data.again(data, "The bound of a last layer passes over the data.")
        _, rows, seen = self._gather(data, progress=progress)
        require_same_data("the fit", (self.n_data, self._data_sum), seen)
        return rows

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """Maximise the bound; see :class:`VariationalBound`."""
        assert isinstance(tuner, VariationalBound)
        noisy, own, sums = tunes_noise(self.likelihood, tuner.tune_noise), self.noise_std, self._sums
        if sums is None or own is None:
            bound = self._bound(self._again(tuner.data, progress=progress), None)
            q, value, converged = bound.maximise(self._q, self._own["max_iterations"], progress)
            return BoundResult("elbo", bound.best_precision(q), None, value, converged, q=q)

        def evidence(at: list[Tensor], slope: bool = False) -> float:
            found = self._solution_at(at[0].exp(), at[1].exp().view(own.shape) if noisy else own).evidence
            _ = slope and (-found).backward()
            return float(found.detach())

        errors = (sums.squares if own.ndim else sums.squares.mean()) / sums.size
        starts = [[errors.new_full((1,), k), errors.clamp_min(1e-20).log() / 2] for k in range(-20, 21, 2)]
        (alpha, noise), converged = climb(evidence, max(starts, key=evidence), 500, progress)
        levels = noise.exp().view(own.shape) if noisy else None
        return BoundResult("elbo", alpha[0].exp(), levels, evidence([alpha, noise]), converged)

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        super().apply_tuning(result)
        if isinstance(result, BoundResult) and result.q is not None:
            self._take(result.q)

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        self.require_fit()
        self.check_draws(n=n)
        moves, found = self._q.deviations(n, generator), self._solution
        if found is not None and found.rate is not None:  # q has the mean of σ², and each draw a σ² of its own
            shapes = torch.full((n, self.n_outputs), found.shape).to(moves)
            moves = moves * ((found.shape - 1) / draw_by(torch._standard_gamma, shapes, generator)).sqrt().unsqueeze(-1)
        result = self.mean.expand(n, -1).clone()
        result[:, self._index] = (self._q.mean + moves).to(result)
        return result

    @override
    @full_precision
    def functional_posterior(
        self,
        x: Any,
        *,
        joint: bool = False,
        outputs: Outputs = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> FunctionalPosterior:
        """As of :class:`Posterior`; exact, with independent outputs."""
        self.require_fit()
        if self.network.function is not None:  # of which the last layer is only a part
            own = {"joint": joint, "differentiable": differentiable}
            return super().functional_posterior(x, outputs=outputs, generator=generator, **own)
        x = self.network.receive(x)
        together = joint or differentiable or (isinstance(outputs, Tensor) and outputs.ndim > 1)
        each = 0 if together else bytes_per_example(self.network, x)
        if len(parts := pieces(self.network, x, each, budget(self.network.device) // 2)) > 1:
            every = [self.functional_posterior(part, outputs=outputs) for part in parts]
            return FunctionalPosterior(*map(torch.cat, zip(*every, strict=True)))
        capture = Capture(self.network, x, differentiable=differentiable)
        shape, dtype = capture.output_shape, widen(capture.outputs).dtype
        if not shape.numel() or shape[-1] != self.n_outputs:
            require_outputs(shape, self.n_outputs, x)
            raise DataError("There is nothing to predict.", expected="at least one example", got="none")
        features, only = head_features(self.network, capture)[1], wants_variances(outputs, joint)
        mean, pushed = (features @ self._q.mean.mT).view(shape).to(dtype), self._q.pushed(features)
        check_outputs(mean)
        if joint:
            fix = "Pass fewer inputs at a time."
            require_free(16 * shape.numel() ** 2, "A joint covariance", mean.device, fix)
            across = torch.diag_embed((pushed @ pushed.mT).permute(1, 2, 0)).transpose(1, 2)  # [N, C, N, C]
            return FunctionalPosterior(mean, across.reshape(*shape, *shape).to(dtype))
        found = pushed.square().sum(-1).mT.reshape(shape).to(dtype)
        if not (outputs is None or isinstance(outputs, str)):
            chosen = output_indices(outputs, shape).to(mean.device)
            chosen = chosen.expand(*shape[:-1], chosen.shape[-1])
            mean, found = mean.gather(-1, chosen), found.gather(-1, chosen)
        return FunctionalPosterior(mean, found if only else torch.diag_embed(found))

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        held = self._q if self._sums is None else self._sums
        return {"seed": self._seed, "data_sum": self._data_sum}, {"index": self._index, **held._asdict()}

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        own = {name: value for name, value in tensors.items() if name != "vector"}
        self._index, self._seed, self._data_sum = own.pop("index"), int(header["seed"]), header["data_sum"]
        (c, d), index = self._index.shape, self._index.flatten().sort().values
        shapes = {"gram": (d, d), "cross": (d, c), "squares": (c,), "size": (), "weights": (c, d), "mean": (c, d)}
        shapes["root"] = (c, d, *[d] * (self._own["covariance"] == "dense"))
        fits = index.dtype == torch.int64 and torch.equal(index, torch.arange(self.n_parameters).to(index))
        if not fits or any(x.shape != shapes[name] or x.dtype != torch.float64 for name, x in own.items()):
            raise ValueError("an index, sums or factors of another form")
        if self.likelihood.is_gaussian:
            self._sums, self._key = Regression(**own), None
            self._solve()
        else:
            self._q = Gaussians(**own)
