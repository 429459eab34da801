"""A Bayesian last layer by variational inference, on the features of a trained network (Harrison et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import widen
from laplace_plus.likelihoods.doubts import Doubts
from laplace_plus.likelihoods.gaussian import StudentTNoise
from laplace_plus.likelihoods.sampling import draw_by, draw_seed
from laplace_plus.network.batches import Batch, batch_size
from laplace_plus.network.capture import Capture, capture_batch
from laplace_plus.network.data_sums import DataSums
from laplace_plus.network.gradients import Gradients, output_layer_inputs
from laplace_plus.network.network import Network, full_precision
from laplace_plus.network.selection import Selection, layer_of, tied_names, uses
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.gaussian import MANY_LEVELS
from laplace_plus.posteriors.public import require_influence
from laplace_plus.posteriors.state import State, require_same_data
from laplace_plus.posteriors.variational_last_layer.bounds import (
    Bound,
    Gaussians,
    Regression,
    Solution,
    climb,
    resolve_bound,
)
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, pick, require_outputs, wants_variances
from laplace_plus.tuning import Tuner, TuningResult
from laplace_plus.tuning.base import VariationalBound, tunes_noise


@stored
@dataclass(frozen=True)
class LastLayer(State):
    """What the fit found; the mean is that of the search, or the network's weights.

    Attributes:
        index: Where each weight is in the parameter vector, ``[C, D]``.
        data_sum: A number by which the training data are recognised.
        seed: Of the samples of ``bound="mc"``.
        sums: Of regression, from which all follows at once.
        searched: The Gaussians of other likelihoods.
    """

    index: Tensor
    data_sum: float
    seed: int = 0
    sums: Regression | None = None
    searched: Gaussians | None = None


class VariationalLastLayer(Posterior):
    """Gaussians over the weights of a linear last layer, by maximising a lower bound on its evidence.

    The features φ that enter the last layer stay as they are. Outputs ``w_kᵀφ`` have independent ``w_k ~ N(m_k, S_k)``,
    with the prior ``N(μ, I/α)``. In regression with Gaussian noise that is known in closed form, and follows other
    hyperparameters at once: with ``mean="optimal"`` it is the exact posterior, and the bound the evidence. With
    ``noise="student_t"`` an output's noise precision has the prior ``Gamma(a₀, a₀ σ₀²)``, σ₀ being the likelihood's
    noise, and the weights have ``N(μ, σ²/α)``; predictions are Student-t with ``2 a₀ + N`` degrees of freedom. Other
    likelihoods: :meth:`fit` searches at the present α, from the Laplace approximation, and :meth:`fit_prior_precision`
    goes on from there and tunes α, too. An α that is set by hand needs another fit.

    The search takes some 30·C·D² numbers for C outputs and D features (diagonal: 30·C·D) beside the features of all
    data. :meth:`fit` raises UnsupportedError unless the network ends with a linear layer of its own weights, and warns
    (ConvergenceWarning) if the search did not converge.

    Args:
        mean: ``"trained"``, or ``"optimal"``, which predicted worse where features fit their training data closely.
        covariance: ``"dense"`` or ``"diagonal"``; with Gaussian noise dense.
        bound: For classes ``"reduced_kn"``, ``"jensen"`` or ``"mc"``: see ``bounds.expected_log_density``.
        n_samples, max_iterations: An even number of samples for ``"mc"``, the same throughout; that of L-BFGS.
        noise, noise_shape: ``"gaussian"`` or ``"student_t"``, and a₀.
        parameters, backend: ``"last_layer"``, or the names of all of a linear last layer's parameters; not used.
        model, likelihood, common: As for :class:`Posterior`; one α.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.VariationalLastLayer(net, "regression", noise="student_t").fit([(x, x.sin())])
        >>> posterior.predictive(x).distribution.df[0]
        tensor([22.])
    """

    _one_precision = True
    tuners: ClassVar[Mapping[str, type[Tuner]]] = dict.fromkeys(("elbo", "marginal_likelihood"), VariationalBound)

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
        **common: Any,
    ):
        self.keeps_mean = checks.choice("mean", mean, ("trained", "optimal")) == "trained"
        self.is_dense = checks.choice("covariance", covariance, ("dense", "diagonal")) == "dense"
        self.noise_shape = checks.positive("noise_shape", noise_shape)
        if checks.choice("noise", noise, ("gaussian", "student_t")) == "gaussian":
            self.noise_shape = 0.0
        self.n_samples = checks.count("n_samples", n_samples)
        self.max_iterations = checks.count("max_iterations", max_iterations)
        super().__init__(model, likelihood, parameters=parameters, **common)
        exact = self.likelihood.is_gaussian
        if (covariance, bound) != ("dense", None) if exact else noise == "student_t" or n_samples % 2:
            what, expected = "These options do not fit the likelihood, or n_samples is odd.", "those of the docstring"
            raise ConfigurationError(what, expected=expected, got=str(self.options))
        self.bound = "" if exact else resolve_bound(self.likelihood, bound)

    # -- the fit -------------------------------------------------------------------------------------------------------

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> LastLayer:
        state, rows, curvature = self._pass_over(data, progress=progress)
        self.prior()  # refuses a mean of another shape
        noise = self.noise_std
        if noise is not None and self.noise_per_output and noise.ndim == 0 and 1 < state.n_outputs <= MANY_LEVELS:
            self.likelihood = self.likelihood.with_noise(noise.expand(state.n_outputs))
        if state.sums is not None:
            self.set_state(state)
            self.require_fit()  # Student-t noise may have no variance
            return state
        state = replace(state, seed=draw_seed(generator) if self.bound == "mc" else 0)
        alpha = self._prior_precision.detach().to(curvature)
        start = Gaussians.laplace(_weights(state.mean, state.index), curvature / float(self._temperature), alpha)
        return _at(state, self._bound(state, rows, alpha).maximise(start, self.max_iterations, progress)[0])

    def _pass_over(self, data: Iterable[Any], *, progress: bool) -> tuple[LastLayer, Any, Any]:
        """What one pass tells: the state before a search, features ``[n, D]`` with targets, and the curvature.

        Of regression all is in the state's sums.
        """
        seen, count, doubts = DataSums(self.network.device), 0.0, Doubts(self.likelihood)
        features, targets, shares, total = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for batch in self.batches(data, progress=progress, description=f"{type(self).__name__}: features"):
            seen.add(batch, batch_size(batch.target))
            index, phi, y, outputs, share = _head_rows(self.network, self.likelihood, batch, doubts)
            count += float(share.sum())
            if self.likelihood.is_gaussian:
                checks.finite("A target that is observed in part", y, "Leave its row out, or take lp.Full.")
                residuals, own = y - phi @ _weights(self.network.vector(), index).mT, share[:, None] * phi
                new = [phi.mT @ own, own.mT @ residuals, share @ residuals.square()]
            else:
                new = [self._curvature(phi, outputs, y, share)]
                features.append(phi)
                targets.append(y)
                shares.append(share)
            total = [*map(add, total, new)] if total else new
        require_influence(self, count)
        doubts.settle()
        state = LastLayer(self.network.vector(), seen.count, len(index), index, seen.values()[0])
        if self.likelihood.is_gaussian:
            gram, cross, squares = total
            sums = Regression.of(gram, cross, squares, count, _weights(state.mean, index))
            return replace(state, sums=sums), None, None
        return state, (torch.cat(features), torch.cat(targets), torch.cat(shares)), total[0]

    def _curvature(self, features: Tensor, outputs: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        """``Σ_n w_n Λ_n,kk φφᵀ [C, D, D]``, or its diagonal ``[C, D]``."""
        known = self.likelihood.output_curvature(outputs, targets, torch.ones_like(outputs[:, 0]))
        each = known.diagonal if known else self.likelihood.output_root(outputs, targets).square().sum(-1)
        each = share[:, None] * each
        columns = each.detach().clamp_min(0.0).mT.unsqueeze(-1)  # [C, n, 1]
        if not self.is_dense:
            return (columns * features.square()).sum(1)
        return torch.stack([(own * features).mT @ features for own in columns])

    def _bound(self, state: LastLayer, rows: tuple[Tensor, Tensor, Tensor], alpha: Tensor | None) -> Bound:
        return Bound(*rows, self, self._prior_weights(state), alpha, state.seed)

    def _prior_weights(self, state: LastLayer) -> Tensor:
        """``μ [C, D]``."""
        return _weights(self._prior_mean.expand(self.n_parameters), state.index)

    # -- the Gaussians -------------------------------------------------------------------------------------------------

    @property
    def q(self) -> Gaussians:
        """The Gaussians of the outputs' weights, float64."""
        self.require_fit()
        return self._solution().q if self.state.searched is None else self.state.searched

    @q.setter
    def q(self, value: Gaussians) -> None:
        self.set_state(_at(self.state, value))

    @property
    def mean(self) -> Tensor:
        """The posterior mean ``[P]``."""
        return _at(self.state, self.q).mean

    def _solution(self, alpha: Tensor | None = None, noise: Tensor | None = None) -> Solution:
        """The exact posterior of regression, at the present hyperparameters in place of those that are not given."""
        sums, mean = self.state.sums, self._prior_weights(self.state)
        alpha = (self._prior_precision.detach() if alpha is None else alpha).to(sums.values)
        noise = self.noise_std if noise is None else noise
        return sums.solve(alpha, noise, mean, float(self._temperature), self.noise_shape, self.keeps_mean)

    @override
    def require_fit(self) -> None:
        """As of :class:`Posterior`; Student-t noise then follows the hyperparameters."""
        super().require_fit()
        if self.noise_shape and self.network.function is None:  # of the network itself, not of a view
            found = self._solution()
            assert found.rate is not None
            self._other_likelihood = StudentTNoise(found.shape, found.rate, self.likelihood.output_axis)

    @full_precision
    def elbo(self, data: Iterable[Any] | None = None) -> Tensor:
        """The lower bound on the log evidence, in nats, 0-d; but for regression from the fit's data, else DataError."""
        self.require_fit()
        if self.state.sums is not None:
            return self._solution().evidence
        bound = self._bound(self.state, self._again(data), self._prior_precision.detach().double())
        return torch.tensor(bound.value(lambda: self.state.searched), dtype=torch.float64)

    def _again(self, data: Iterable[Any] | None, *, progress: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        data = self.training_data.again(data, "The bound of a last layer passes over the data.")
        now, rows, _ = self._pass_over(data, progress=progress)
        require_same_data("the fit", (self.n_data, self.state.data_sum), (now.n_data, now.data_sum))
        return rows

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """Maximise the bound; see :class:`VariationalBound`."""
        assert isinstance(tuner, VariationalBound)
        noisy, own, sums = tunes_noise(self.likelihood, tuner.tune_noise), self.noise_std, self.state.sums
        if sums is None or own is None:
            bound = self._bound(self.state, self._again(tuner.data, progress=progress), None)
            q, value, converged = bound.maximise(self.state.searched, self.max_iterations, progress)
            return TuningResult("elbo", bound.best_precision(q), None, value, converged, settings={"q": q})

        def evidence(at: list[Tensor], slope: bool = False) -> float:
            found = self._solution(at[0].exp(), at[1].exp().view(own.shape) if noisy else None).evidence
            _ = slope and (-found).backward()
            return float(found.detach())

        errors = (sums.squares if own.ndim else sums.squares.mean()) / sums.size
        starts = [[errors.new_full((1,), k), errors.clamp_min(1e-20).log() / 2] for k in range(-20, 21, 2)]
        (alpha, noise), converged = climb(evidence, max(starts, key=evidence), 500, progress)
        levels = noise.exp().view(own.shape) if noisy else None
        return TuningResult("elbo", alpha[0].exp(), levels, evidence([alpha, noise]), converged)

    # -- predictions ---------------------------------------------------------------------------------------------------

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        q, mean = self.q, self.state.mean
        result = checks.zeros("The matrix of samples", checks.count("n", n), len(mean), mean).add_(mean)
        moves = q.deviations(n, generator)
        if self.noise_shape:  # q has the mean of σ², and each draw a σ² of its own
            shape = self._solution().shape
            gammas = draw_by(torch._standard_gamma, torch.full((n, self.n_outputs), shape).to(moves), generator)
            moves = moves * ((shape - 1) / gammas).sqrt().unsqueeze(-1)
        result[:, self.state.index] = (q.mean + moves).to(result)
        return result

    @override
    def _exact(self, x: Any, *, joint: bool, outputs: Outputs, differentiable: bool) -> FunctionalPosterior | None:
        if self.network.function is not None:  # of which the last layer is only a part
            return None
        q = self.q
        capture = Capture(self.network, x, differentiable=differentiable)
        shape, dtype = capture.output_shape, widen(capture.outputs).dtype
        require_outputs(shape, self.n_outputs, x)
        only, features = wants_variances(outputs, joint), _head_features(self.network, capture)[1]
        mean, pushed = (features @ q.mean.mT).view(shape).to(dtype), q.pushed(features)
        checks.finite("The network's output", mean)
        if joint:
            across = torch.diag_embed((pushed @ pushed.mT).permute(1, 2, 0)).transpose(1, 2)  # [N, C, N, C]
            return FunctionalPosterior(mean, across.reshape(*shape, *shape).to(dtype))
        variances = pick(pushed.square().sum(-1).mT.reshape(shape).to(dtype), outputs)
        return FunctionalPosterior(pick(mean, outputs), variances if only else torch.diag_embed(variances))


def _head_features(network: Network, capture: Capture) -> tuple[Tensor, Tensor]:
    """Where each weight is in the parameter vector, ``[C, D]``, and features ``[N, D]`` float64, the bias's one last.

    UnsupportedError unless the selection is one linear layer whose outputs are the network's, with weights of its own.
    """
    found, names = output_layer_inputs(Gradients(network, capture)), set(network.parameter_names)
    tied = {name for first, others in tied_names(network.model).items() for name in (first, *others)} & names
    whole = {name for name in uses(network.model) if layer_of(name) == network.layers[0]} == names
    if found is None or tied or not whole or found[0].index.numel() != network.n_parameters:
        what = f"These parameters are {'tied to others' if tied else 'not those of one linear last layer'}."
        expected = 'parameters="last_layer" of a network that ends with an nn.Linear of its own weights'
        got, fix = ", ".join(sorted(tied or names)[:4]), 'Use lp.Full(model, likelihood, parameters="last_layer").'
        raise UnsupportedError(what, expected=expected, got=f"{got} of {type(network.model).__name__}", fix=fix)
    return found[0].index[0].to(found[1].device), found[1].double()


def _head_rows(network: Network, likelihood: Likelihood, batch: Batch, doubts: Doubts) -> tuple[Tensor, ...]:
    """The index, features ``[n, D]``, targets, outputs ``[n, C]`` and weights of rows that are not ignored."""
    capture = capture_batch(network, batch)
    outputs = capture.outputs.view(capture.output_shape)
    likelihood.validate(outputs, batch.target)
    doubts.add(outputs, batch.target)
    index, features = _head_features(network, capture)
    rows, targets, weights = likelihood.rows(outputs, batch.target)
    targets = targets.double() if targets.is_floating_point() else targets
    used = weights > 0
    return index, features.detach()[used], targets[used], rows.detach().double()[used], weights.double()[used]


def _weights(vector: Tensor, index: Tensor) -> Tensor:
    """A parameter vector as weights ``[C, D]`` float64."""
    return vector.detach().double().to(index.device)[index]


def _at(state: LastLayer, q: Gaussians) -> LastLayer:
    """The state with other Gaussians, and their mean."""
    vector = state.mean.clone()
    vector[state.index] = q.mean.to(vector)
    return replace(state, mean=vector, searched=q)
