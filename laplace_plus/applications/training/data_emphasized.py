"""Training by the data-emphasised bound, and tuning by it (Harvey, Petrov and Hughes, 2025, arXiv:2502.01861).

For P weights, N data and groups g of P_g weights, with ``q = N(θ, σ² I)`` and prior ``N(θ_p, τ_g² I)``,

    J = κ E_q[log p(D|θ)] − KL(q ‖ p),   κ = max(1, P/N),
    τ_g² = ‖θ − θ_p‖²_g / P_g + σ²,      KL = ½ Σ_g P_g log(τ_g²/σ²),

where τ is the best one for each θ and σ. With κ = 1 that is the evidence lower bound, which underfits where P is many
times N; with κ = P/N it chooses hyperparameters without held-out data. Its q is far narrower than a posterior.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from laplace_plus import checks
from laplace_plus.applications.training.run import Run, Update
from laplace_plus.applications.training.settings import OptimizerFactory, SchedulerFactory, Settings
from laplace_plus.curvature import Curvature
from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.network.batches import Batch, bind, iterate, output_tensor
from laplace_plus.posteriors import Diagonal
from laplace_plus.posteriors.sums import FitSums
from laplace_plus.posteriors.training_data import TrainingData
from laplace_plus.priors import LAYERWISE, Groups
from laplace_plus.structured import DiagonalBlock
from laplace_plus.tuning import GAUSSIAN_TUNERS, TuningResult
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.groups import check_structure, chosen_groups, curvature_diagonal


def emphasis_of(emphasis: float | str, n_parameters: int, n_data: int) -> float:
    """κ of ``"P/N"``, which is at least 1, or of a number; ConfigurationError for anything else."""
    if emphasis == "P/N":
        return max(1.0, n_parameters / n_data)
    checks.positive("emphasis", emphasis)
    return float(emphasis)


@dataclass(frozen=True, eq=False)
class DataEmphasizedTraining:
    """A network trained by the data-emphasised bound.

    Attributes:
        model: The network that was passed in, trained in place.
        posterior: A :class:`Diagonal` of variances σ², whose ``prior_precision`` is ``1/τ_g²``. It is colder than a
            posterior: fit another class with these precisions for error bars.
        prior_std, std: τ of each group, ``[G]``, and σ, 0-d; float64.
        emphasis: κ.
        losses: The mean of ``−J/(κN)`` over each epoch, in nats for each example.
        n_data: N.
    """

    model: nn.Module
    posterior: Diagonal
    prior_std: Tensor
    std: Tensor
    emphasis: float
    losses: tuple[float, ...]
    n_data: int


def train_data_emphasized(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Any = "classification",
    *,
    epochs: int = 100,
    emphasis: float | Literal["P/N"] = "P/N",
    prior_mean: float | Tensor | Literal["pretrained"] = "pretrained",
    structure: str | Groups = LAYERWISE,
    initial_std: float = 1e-4,
    optimizer: OptimizerFactory = torch.optim.SGD,
    optimizer_options: Mapping[str, Any] | None = None,
    scheduler: SchedulerFactory | None = None,
    schedule_by: Literal["epoch", "batch"] = "epoch",
    max_gradient_norm: float | None = 1.0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> DataEmphasizedTraining:
    """Train a network and its weight decay by the data-emphasised bound, without validation data.

    **The model is trained in place**, in training mode, and is at θ afterwards. Each step takes one sample of the
    weights, ``θ + σ ε``, for the mean negative log-likelihood of its batch, and adds ``KL/(κN)``. The noise of a
    Gaussian likelihood stays. Arguments that are not described here are those of
    :func:`~laplace_plus.train_marginal_likelihood`, as are checkpoints and what happens to frozen parameters and after
    failures.

    Args:
        model: The network to train.
        loader: Batches.
        likelihood: As for :class:`Posterior`.
        epochs: Passes over the data.
        emphasis: κ: ``"P/N"``, but at least 1, or a number.
        prior_mean: θ_p: the ``"pretrained"`` weights, those of the model as it is passed; a number; or ``[P]``, such as
            these for the backbone and zeros for a new head.
        structure: Which weights share τ: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` or groups.
        initial_std: Where σ starts.
        optimizer: It is given the weights and ρ, ``σ = log(1 + exp ρ)``. Of several learning rates take that with the
            least loss at the end.
        optimizer_options: By default, of SGD, a learning rate of .1 and a momentum of .9.
        scheduler: Called with the optimizer.
        schedule_by: ``"epoch"`` or ``"batch"``.
        max_gradient_norm: Where to clip the norm of the whole gradient; None for nowhere.
        checkpoint: A folder that is written after every epoch.
        resume: Whether to continue from it; the model has to be the one that the run started from.
        progress: Whether to show a progress bar.
        generator: Source of the samples; by default torch's global one.

    Raises:
        ConfigurationError: An argument that cannot be, or an optimizer with weight decay; and what
            :func:`~laplace_plus.train_marginal_likelihood` raises.

    Example:
        >>> import laplace_plus as lp
        >>> x, net = torch.linspace(-1, 1, 40)[:, None], torch.nn.Linear(1, 2)
        >>> trained = lp.train_data_emphasized(net, [(x, (x[:, 0] > 0).long())], epochs=50)
        >>> trained.emphasis, trained.posterior.prior_precision.shape
        (1.0, torch.Size([1]))
    """
    arguments = {name: value for name, value in locals().items() if name not in ("model", "loader", "generator")}
    checks.positive("initial_std", initial_std)
    emphasis_of(emphasis, 1, 1)
    check_structure(structure)
    options = {"lr": 0.1, "momentum": 0.9} if optimizer is torch.optim.SGD else {}
    resolved = resolve_likelihood(likelihood)
    pretrained = isinstance(prior_mean, str) and prior_mean == "pretrained"
    arguments |= {
        "likelihood": resolved,
        "prior_mean": Diagonal(model, resolved).network.vector().clone() if pretrained else prior_mean,
        "optimizer_options": options | dict(optimizer_options or {}),
        "checkpoint": None if checkpoint is None else Path(checkpoint),
    }
    # What training by the evidence has besides: the run ends with its only update.
    fixed: dict[str, Any] = {"posterior": Diagonal, "prior_precision": 1.0, "temperature": 1.0, "tune_noise": False}
    fixed |= {"backend": None, "burn_in": 0, "frequency": 2**31, "hyper_steps": 1, "hyper_lr": 0.1, "callback": None}
    settings = _Settings(**arguments, **fixed, early_stopping=False, patience=None)
    run = _Run(model, loader, loader, settings, generator)
    run.train()
    return run.result()


class _Settings(Settings):
    """The arguments of a run."""

    def described(self, *run: Any) -> dict[str, Any]:
        """As of any training, and what this one has besides."""
        return {**super().described(*run), "emphasis": self.emphasis, "initial_std": self.initial_std}


class _Scale:
    """ρ, in its place among what a run stores."""

    def __init__(self, rho: Tensor):
        self.rho = rho.requires_grad_()

    def state(self) -> dict[str, Any]:
        return {"rho": self.rho.detach()}

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.rho.copy_(state["rho"])


class _Run(Run):
    """A run whose objective is the bound, and which updates nothing between epochs."""

    def _rehearse(self) -> None:
        super()._rehearse()
        settings, posterior = self.settings, self.posterior
        one = settings.structure == "scalar"
        index = torch.zeros_like(posterior.prior_groups.index) if one else posterior.prior_groups.index
        self.index, factory = index.to(self.device), settings.optimizer
        start = torch.tensor(settings.initial_std, dtype=torch.float64, device=self.device)
        self.scale = _Scale(start.expm1().log())
        self.ascent = cast(Any, self.scale)
        self.sizes = torch.bincount(self.index).double()
        if callable(factory):
            settings.optimizer = lambda weights, **options: factory([*weights, self.scale.rho], **options)

    @property
    def emphasis(self) -> float:
        """κ."""
        return emphasis_of(self.settings.emphasis, self.network.n_parameters, self.n_data)

    def _levels(self) -> tuple[Tensor, Tensor]:
        """σ², 0-d, and τ² of each group, ``[G]``, float64; differentiable in the weights and ρ."""
        named = dict(self.network.model.named_parameters())
        theta = torch.cat([named[name].flatten().double() for name in self.network.parameter_names])
        squares = (theta - self.posterior.prior_mean.to(theta)).square()
        variance = softplus(self.scale.rho).square()
        return variance, torch.zeros_like(self.sizes).index_add(0, self.index, squares) / self.sizes + variance

    def objective(self) -> Any:
        """``−J/(κN)`` estimated from a batch."""
        network, likelihood, kappa = self.network, self.posterior.likelihood, self.emphasis
        named = {name: own for name, own in network.model.named_parameters() if name in network.parameter_names}

        def loss(batch: Batch) -> Tensor:
            variance, prior = self._levels()
            sampled = {}
            for name, own in named.items():
                sampled[name] = own + variance.sqrt().to(own) * standard_normal(
                    own.shape, like=own, generator=self.generator
                )
            raw = torch.func.functional_call(network.model, sampled, *bind(network.model, batch.inputs))
            outputs = likelihood.arrange(output_tensor(raw))
            likelihood.validate(outputs, batch.target)
            rows, targets, weights = likelihood.rows(outputs, batch.target)
            density = likelihood.log_density(rows, targets)
            fit = torch.where(weights > 0, density, torch.zeros_like(density)).sum() / self.mean_batch_size
            divergence = (self.sizes * (prior / variance).log()).sum() / 2
            return (divergence / (kappa * self.n_data)).to(fit) - fit

        return loss

    def _update(self, epoch: int, loss: float) -> None:
        """No update: the levels are part of the objective."""
        precision = self._levels()[1].detach().reciprocal().cpu()
        self.updates.append(Update(epoch, -loss, -loss, loss, precision, None, improved=True))

    def _result(self) -> Any:
        return None

    def result(self) -> DataEmphasizedTraining:
        """What came out, with a posterior of q's variances."""
        variance, prior = (level.detach() for level in self._levels())
        posterior, settings = cast(Diagonal, self.settings.make_posterior(self.model)), self.settings
        statistics, seen, first = cast(Any, 0.0), 0, None
        for batch in iterate(self.loader, device=self.device):
            if first is None:
                first = posterior.fit([(batch.inputs, batch.target)]).sums
            outputs = posterior.network.forward(batch.inputs)
            statistics, seen = (
                statistics + posterior.likelihood.statistics(outputs, batch.target).cpu(),
                seen + len(outputs),
            )
        assert first is not None
        added = ((1 / variance - 1 / prior) / float(posterior.likelihood.curvature_weights()[0]))[self.index]
        blocks: list[Any] = []
        for layout, block in first.curvature:
            values = torch.zeros_like(cast(DiagonalBlock, block).values)
            values[0] = layout.gather(added)  # the other noise levels' parts stay zero
            blocks.append((layout, DiagonalBlock(values)))
        posterior.adopt(FitSums(Curvature(blocks), statistics, seen, first.n_outputs), posterior.mean)
        posterior.training_data = TrainingData(self.loader)
        if self.groups is not None:
            posterior.prior_groups = self.groups
        posterior.prior_precision = (1 / prior).to(posterior.mean)[0] if settings.structure == "scalar" else 1 / prior
        stds = prior.sqrt().cpu(), variance.sqrt().cpu()
        return DataEmphasizedTraining(self.model, posterior, *stds, self.emphasis, tuple(self.losses), self.n_data)


@dataclass(frozen=True)
class DataEmphasized:
    """Chooses prior precisions by the data-emphasised bound of the linearised network, in closed form.

    The weights θ stay. With ``d = ‖θ − θ_p‖²_g/P_g`` and ``h = κ tr H_g / P_g`` of the curvature H, the bound is
    largest at ``σ² = 2 d / (h d + (h² d² + 4 h d)^½)``, which is ``1/(h + 1/τ²)``, and ``1/τ² = 1/(d + σ²)`` is the
    precision. It takes no search; noise stays as it is.

    Args:
        structure: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` or groups.
        emphasis: κ: ``"P/N"``, but at least 1, or a number.

    Raises:
        ConfigurationError: An option that is none of these.
    """

    structure: str | Groups = "scalar"
    emphasis: float | str = "P/N"
    name: ClassVar[str] = "data_emphasized"

    def __post_init__(self) -> None:
        check_structure(self.structure)
        emphasis_of(self.emphasis, 1, 1)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """The precisions; ConfigurationError where the weights equal the prior mean, or the data say nothing."""
        model, groups = posterior.laplace_model(), None
        index = torch.zeros_like(model.layer_index)
        if self.structure != "scalar":
            groups = chosen_groups(posterior, self.structure)
            index = groups.index
        kappa = emphasis_of(self.emphasis, len(index), posterior.n_data)
        trace = curvature_diagonal(model, model.weights()).cpu() / float(posterior.temperature.detach())
        squares = (posterior.mean - posterior.prior_mean.to(posterior.mean)).double().square().cpu()
        index = index.cpu()
        sizes = torch.bincount(index).double()
        h, d = (torch.zeros_like(sizes).index_add(0, index, own) / sizes for own in (kappa * trace, squares))
        if not bool((h > 0).all() and (d > 0).all()):
            what, expected = "The bound has no optimum.", "weights other than the prior mean, on which outputs depend"
            raise ConfigurationError(what, expected=expected, got=f"mean squares {d.tolist()}, curvatures {h.tolist()}")
        variance = 2 * d / (h * d + (h.square() * d.square() + 4 * h * d).sqrt())
        prior = d + variance
        fit = float(model.log_likelihood(posterior.noise_std)) / float(posterior.temperature.detach())
        value = kappa * fit - float((sizes * (h * variance + (prior / variance).log())).sum()) / 2
        precision = (1 / prior[0] if self.structure == "scalar" else 1 / prior).to(model.vector)
        return TuningResult(self.name, precision, None, value, converged=True, groups=groups)


GAUSSIAN_TUNERS["data_emphasized"] = DataEmphasized
