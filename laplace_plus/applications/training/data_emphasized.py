"""Training by the data-emphasised bound, and tuning by it (Harvey, Petrov and Hughes, 2025, arXiv:2502.01861).

For P weights, N data and groups g of P_g weights, with ``q = N(θ, σ² I)`` and prior ``N(θ_p, τ_g² I)``,

    J = κ E_q[log p(D|θ)] − KL(q ‖ p),   κ = max(1, P/N),
    τ_g² = ‖θ − θ_p‖²_g / P_g + σ²,      KL = ½ Σ_g P_g log(τ_g²/σ²),

where τ is the best one for each θ and σ. With κ = 1 that is the evidence lower bound, which underfits where P is many
times N; with κ = P/N it chooses hyperparameters without held-out data. Its q is far narrower than a posterior.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.applications.training.loop import Loop, OptimizerFactory, SchedulerFactory, log_likelihood
from laplace_plus.applications.uses.continual import entries_of
from laplace_plus.applications.uses.variances import adopt_variances
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.network.batches import Batch, bind
from laplace_plus.posteriors import Diagonal
from laplace_plus.posteriors.state import TrainingData
from laplace_plus.priors import LAYERWISE, Groups
from laplace_plus.tuning import GAUSSIAN_TUNERS, TuningResult
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.groups import check_structure, chosen_groups, curvature_diagonal


def emphasis_of(emphasis: float | str, n_parameters: int, n_data: int) -> float:
    """κ of ``"P/N"``, which is at least 1, or of a number; ConfigurationError for anything else."""
    if emphasis == "P/N":
        return max(1.0, n_parameters / n_data)
    return float(checks.positive("emphasis", emphasis))


@dataclass(frozen=True, eq=False)
class DataEmphasizedTraining:
    """A network trained by the data-emphasised bound.

    Attributes:
        model: The network that was passed in, trained in place.
        posterior: A :class:`Diagonal` of variances σ², whose ``prior_precision`` is ``1/τ_g²``. It is colder than a
            posterior: fit another class with these precisions for error bars. No evidence is known of it.
        prior_std, std: τ of each group, ``[G]``, and σ, 0-d; float64.
        emphasis: κ.
        losses: The mean of ``−J/(κN)`` over each epoch, in nats for each example.
        n_data: N.
        state: What training goes on from: a dict of tensors and numbers that ``torch.save`` takes, and the argument
            ``state`` of the next call.
    """

    model: nn.Module
    posterior: Diagonal
    prior_std: Tensor
    std: Tensor
    emphasis: float
    losses: tuple[float, ...]
    n_data: int
    state: dict[str, Any] = field(repr=False)


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
    max_gradient_norm: float | None = 1.0,
    state: Mapping[str, Any] | None = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> DataEmphasizedTraining:
    """Train a network and its weight decay by the data-emphasised bound, without validation data.

    **The model is trained in place**, in training mode, and is at θ afterwards. Each step takes one sample of the
    weights, ``θ + σ ε``, for the mean negative log-likelihood of its batch, and adds ``KL/(κN)``. The noise of a
    Gaussian likelihood stays. Arguments that are not described here are those of
    :func:`~laplace_plus.train_marginal_likelihood`, as is what happens to frozen parameters and after failures.

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
        max_gradient_norm: Where to clip the norm of the whole gradient; None for nowhere.
        state: That of an earlier result, to go on from; ``epochs`` counts those before. The pre-trained weights are
            those of the first start.
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
    checks.positive("initial_std", initial_std)
    emphasis_of(emphasis, 1, 1)
    if not isinstance(structure, Groups):
        checks.choice("structure", structure, ("scalar", LAYERWISE, "normalized_groups"))
    own = {"lr": 0.1, "momentum": 0.9} if optimizer is torch.optim.SGD else {}
    resolved = resolve_likelihood(likelihood)
    if isinstance(prior_mean, str):
        checks.choice("prior_mean", prior_mean, ("pretrained",))
        start = Diagonal(model, resolved).network.vector().clone()
        prior_mean = start if state is None else state["prior_mean"].to(start)
    posterior = Diagonal(model, resolved, prior_mean=prior_mean)
    # ρ, of σ = log(1 + exp ρ)
    rho = torch.tensor(initial_std, dtype=torch.float64, device=posterior.network.device).expm1().log().requires_grad_()
    loop = Loop(
        model,
        posterior.network,
        loader,
        epochs=epochs,
        optimizer=optimizer,
        optimizer_options=own | dict(optimizer_options or {}),
        scheduler=scheduler,
        max_gradient_norm=max_gradient_norm,
        generator=generator,
        further=[rho],
    )
    with loop.running():
        loop.begin(posterior, loader, structure)
        groups = None if structure == "scalar" else posterior.prior_groups
        bound = _Bound(posterior, rho, groups, emphasis, generator)
        if state is None:
            loop.count()
        else:
            loop.restore(state)
            with torch.no_grad():
                rho.copy_(state["rho"])
        for _ in progress_bar(range(len(loop.losses), epochs), enabled=progress, description="data-emphasised"):
            loop.train(lambda batch: bound(batch, loop))
            loop.n_data = loop.n_examples
    variance, prior = (level.detach() for level in bound.levels())
    posterior.prior_precision = 1 / prior[0] if groups is None else 1 / prior
    adopt_variances(posterior, variance.expand(posterior.n_parameters), loop.n_data, posterior.n_outputs)
    posterior.training_data = TrainingData(loader)
    return DataEmphasizedTraining(
        model=model,
        posterior=posterior,
        prior_std=prior.sqrt().cpu(),
        std=variance.sqrt().cpu(),
        emphasis=emphasis_of(emphasis, posterior.n_parameters, loop.n_data),
        losses=tuple(loop.losses),
        n_data=loop.n_data,
        state={**loop.state(), "rho": rho.detach().clone(), "prior_mean": posterior.prior_mean.clone()},
    )


class _Bound:
    """``−J/(κN)`` as a function of the weights and of ρ."""

    def __init__(
        self,
        posterior: Diagonal,
        rho: Tensor,
        groups: Groups | None,
        emphasis: float | str,
        generator: torch.Generator | None,
    ):
        self.network, self.likelihood, self.rho = posterior.network, posterior.likelihood, rho
        self.prior_mean, self.emphasis, self.generator = posterior.prior_mean, emphasis, generator
        index = torch.zeros(posterior.n_parameters, dtype=torch.long) if groups is None else groups.index
        self.index = index.to(rho.device)
        self.sizes = torch.bincount(self.index).double()

    def levels(self) -> tuple[Tensor, Tensor]:
        """σ², 0-d, and τ² of each group, ``[G]``, float64; differentiable in the weights and ρ."""
        theta = entries_of(self.network, self.network.model, self.rho)
        squares = (theta - self.prior_mean.to(theta)).square()
        variance = softplus(self.rho).square()
        return variance, torch.zeros_like(self.sizes).index_add(0, self.index, squares) / self.sizes + variance

    def __call__(self, batch: Batch, loop: Loop) -> Tensor:
        """The bound estimated from a batch and one sample of the weights."""
        variance, prior = self.levels()
        sampled = {}
        for name, own in self.network.model.named_parameters():
            if name in self.network.parameter_names:
                noise = standard_normal(own.shape, like=own, generator=self.generator)
                sampled[name] = own + variance.sqrt().to(own) * noise
        raw = torch.func.functional_call(self.network.model, sampled, *bind(self.network.model, batch.inputs))
        fit = log_likelihood(self.likelihood, raw, batch.target) / loop.mean_batch_size
        divergence = (self.sizes * (prior / variance).log()).sum() / 2
        kappa = emphasis_of(self.emphasis, self.network.n_parameters, loop.n_data)
        return (divergence / (kappa * loop.n_data)).to(fit) - fit


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
        model = posterior.laplace_model()
        groups = None if self.structure == "scalar" else chosen_groups(posterior, self.structure)
        index = (torch.zeros_like(model.layer_index) if groups is None else groups.index).cpu()
        kappa = emphasis_of(self.emphasis, len(index), posterior.n_data)
        trace = curvature_diagonal(model, model.weights()).cpu() / float(posterior.temperature.detach())
        squares = (posterior.mean - posterior.prior_mean.to(posterior.mean)).double().square().cpu()
        sizes = torch.bincount(index).double()
        h, d = (torch.zeros_like(sizes).index_add(0, index, own) / sizes for own in (kappa * trace, squares))
        checks.positive("The least mean curvature of a group", float(h.min()))
        checks.positive("The least mean square of a group's weights, less the prior mean,", float(d.min()))
        variance = 2 * d / (h * d + (h.square() * d.square() + 4 * h * d).sqrt())
        prior = d + variance
        fit = float(model.log_likelihood(posterior.noise_std)) / float(posterior.temperature.detach())
        value = kappa * fit - float((sizes * (h * variance + (prior / variance).log())).sum()) / 2
        precision = (1 / prior[0] if self.structure == "scalar" else 1 / prior).to(model.vector)
        return TuningResult(self.name, precision, None, value, converged=True, groups=groups)


GAUSSIAN_TUNERS["data_emphasized"] = DataEmphasized
