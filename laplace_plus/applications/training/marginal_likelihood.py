"""Training of weights and hyperparameters together, by the Laplace approximation of the marginal likelihood.

The online scheme of Immer, Bauer, Fortuin, Rätsch and Khan (2021), "Scalable marginal likelihood estimation for model
selection in deep learning", arXiv:2104.04975: epochs of ordinary training of the log posterior take turns with steps of
gradient ascent on its Laplace evidence, in the logarithms of the prior precisions and of the noise.
Both look at the same function of weights and hyperparameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.applications.training.loop import (
    Loop,
    OptimizerFactory,
    SchedulerFactory,
    log_likelihood,
    put_back,
    weights_of,
)
from laplace_plus.applications.uses.continual import entries_of, require_gaussian
from laplace_plus.curvature import Backend
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.network.batches import Batch, call
from laplace_plus.network.selection import uses
from laplace_plus.posteriors import KFAC, GaussianPosterior, get_posterior
from laplace_plus.priors import LAYERWISE, Groups
from laplace_plus.tuning.base import tunes_noise

_FIX = "Use a smaller hyper_lr, or a longer burn_in."


@dataclass(frozen=True, eq=False)
class Update:
    """One update of the hyperparameters.

    Attributes:
        epoch: After which epoch, counted from 1.
        evidence: The Laplace evidence in nats, at the weights after that epoch and the hyperparameters after the
            update.
        log_likelihood: ``log p(D|θ)`` in nats there, not tempered.
        loss: The mean of the training objective over the epoch, see :func:`train_marginal_likelihood`.
        prior_precision: After the update: 0-d or ``[G]``, one for each of the posterior's ``prior_groups``; of a
            diagonal prior, each layer's geometric mean.
        noise_std: Gaussian noise after the update, 0-d or ``[C]``; None for other likelihoods.
    """

    epoch: int
    evidence: float
    log_likelihood: float
    loss: float
    prior_precision: Tensor
    noise_std: Tensor | None


@dataclass(frozen=True, eq=False)
class MarginalLikelihoodTraining:
    """A network trained by the marginal likelihood, with the history of its training.

    Attributes:
        model: The network that was passed in, trained in place.
        posterior: Fitted to it, with the hyperparameters found.
        epoch: The epoch, counted from 1, whose weights and hyperparameters the result has.
        evidence: The Laplace evidence there, in nats.
        losses: The mean of the training objective over each epoch, in nats for each example.
        updates: All updates of the hyperparameters, in order.
        n_data: Number of examples of the posterior.
        state: What training goes on from, after its last epoch: a dict of tensors and numbers that ``torch.save``
            takes, and the argument ``state`` of the next call.
    """

    model: nn.Module
    posterior: GaussianPosterior
    epoch: int
    evidence: float
    losses: tuple[float, ...]
    updates: tuple[Update, ...]
    n_data: int
    state: dict[str, Any] = field(repr=False)

    @property
    def evidences(self) -> tuple[float, ...]:
        """The evidence after each update, in nats."""
        return tuple(update.evidence for update in self.updates)

    @property
    def prior_precisions(self) -> Tensor:
        """The prior precisions after each of U updates, ``[U]`` or ``[U, G]``."""
        return torch.stack([update.prior_precision for update in self.updates])


def train_marginal_likelihood(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Any = "classification",
    *,
    epochs: int = 100,
    posterior: str | Callable[..., GaussianPosterior] = KFAC,
    structure: str | Groups = "layerwise",
    prior_precision: float | Tensor = 1.0,
    prior_mean: float | Tensor = 0.0,
    temperature: float = 1.0,
    tune_noise: bool | None = None,
    backend: str | Backend | None = None,
    optimizer: OptimizerFactory = torch.optim.Adam,
    optimizer_options: Mapping[str, Any] | None = None,
    scheduler: SchedulerFactory | None = None,
    max_gradient_norm: float | None = None,
    burn_in: int = 0,
    frequency: int = 5,
    hyper_steps: int | None = 100,
    hyper_lr: float = 0.1,
    early_stopping: bool = True,
    curvature_loader: Iterable[Any] | None = None,
    state: Mapping[str, Any] | None = None,
    callback: Callable[[Update], object] | None = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> MarginalLikelihoodTraining:
    """Train a network and its prior precisions (and noise) by the marginal likelihood, without validation data.

    **The model is trained in place**, as by any training loop. It runs in training mode, so that dropout and batch
    normalisation behave as usual; its curvature is taken in evaluation mode, as a posterior's always is. At the end
    modules have the mode that they had before. Frozen parameters (``requires_grad=False``) stay as they are.

    With N examples, temperature T and prior ``N(μ, P₀⁻¹)`` an epoch minimises the mean over its batches of

        ``−1/(N T) log p(D|θ) + 1/(2N) (θ−μ)ᵀ P₀ (θ−μ)``,

    which is −1/N times the log posterior that the Laplace approximation expands: the likelihood is the posterior's own,
    with its noise (``1/(2σ²)`` in regression, summed over the outputs), and N counts the examples that were seen, not
    ``len(dataset)``. The prior is the weight decay: an optimizer with another one is refused. The posterior is fitted
    after every ``frequency`` epochs beyond the ``burn_in``, and after the last. The logarithms of the prior precisions
    and of the noise then climb its evidence by ``hyper_steps`` steps of Adam (Immer et al., 2021). The evidence treats
    the current weights as a mode: early in training it is only a guide.

    Args:
        model: The network to train. Its parameters end without gradients (``grad=None``).
        loader: Batches, as for :meth:`Posterior.fit`; it is run over once per epoch, and once per update.
        likelihood: As for :class:`Posterior`; of a Gaussian one, its noise is where the noise starts.
        epochs: At most so many.
        posterior: A Gaussian posterior's class or its name, or a function that is called as the class would be, such as
            ``functools.partial(lp.KFAC, weight_sharing="reduce")``. Parameters outside its selection are trained
            without a prior.
        structure: Which entries share a prior precision: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` (found
            by running the network on a batch), groups of your own, or ``"diagonal"`` where the posterior allows.
        prior_precision: Where it starts, and stays during the burn-in: a scalar, or one for each group or entry.
        prior_mean: A scalar or one for each entry.
        temperature: T, which divides the log-likelihood; it stays.
        tune_noise: Whether to tune the Gaussian noise; by default whenever there is any.
        backend: What computes the curvature; by default the posterior's own.
        optimizer: Called with a list of the parameters and ``optimizer_options``.
        optimizer_options: Such as ``{"lr": 1e-3}``. The gradient is that of the objective above, a mean over examples.
        scheduler: Called with the optimizer; its ``step()`` is called after every epoch, that of ``ReduceLROnPlateau``
            with the epoch's loss.
        max_gradient_norm: Where to clip the norm of the whole gradient.
        burn_in: Epochs before updates begin; the first comes ``frequency`` epochs later.
        frequency: Epochs from one update to the next. An update with exact curvature costs about as much as an epoch
            with as many backward passes as there are outputs; ``backend=lp.Native("ggn_mc")`` needs a single one.
        hyper_steps: Steps of Adam for each update; None to find the optimum by line search.
        hyper_lr: Their size, in e-folds.
        early_stopping: Whether to end with the weights and hyperparameters of the update with the greatest evidence,
            instead of the last.
        curvature_loader: Other batches for the curvature and the evidence, such as the same images without random
            augmentation. N then counts these.
        state: ``.state`` of an earlier result, to go on from, with the same arguments and data; ``epochs`` counts those
            before. A continued run equals one that was not interrupted, to the last bit on the same machine: the state
            holds torch's global generators, ``generator``, and those that a ``DataLoader`` and its samplers hold. Other
            sources of randomness (Python's, NumPy's, those of persistent workers) are the caller's. It equals a run
            that had more epochs from the start if its last epoch was one of those with an update.
        callback: Called with every update.
        progress: Whether to show a progress bar, with loss and evidence.
        generator: Source of randomness for curvatures that sample labels. Dropout and shuffling draw from torch's
            global generator or the loader's, as in any training.

    Returns:
        The model, a posterior fitted to it with the hyperparameters found, and the histories of the evidence, the loss,
        the precisions and the noise.

    Raises:
        ConfigurationError: An argument that cannot be, or an optimizer with weight decay.
        CheckpointError: The state is of another network, or of other generators.
        NonFiniteError: The loss (the message says in which epoch and batch), the weights or the evidence are not
            finite.
        DataError: A loader that can be used only once; and what :meth:`Posterior.fit` raises.
        UnsupportedError: A prior structure or curvature that posterior or backend do not take.

    Example:
        >>> import torch
        >>> import laplace_plus as lp
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> trained = lp.train_marginal_likelihood(
        ...     net, [(x, torch.sin(4 * x))], "regression", epochs=60, frequency=10, optimizer_options={"lr": 1e-2}
        ... )
        >>> len(trained.losses), len(trained.updates), trained.prior_precisions.shape
        (60, 6, torch.Size([6, 2]))
        >>> trained.posterior.predictive(x).mean.shape
        torch.Size([40, 1])
    """
    resolved = resolve_likelihood(likelihood)
    tune_noise, curved = tunes_noise(resolved, tune_noise), loader if curvature_loader is None else curvature_loader
    checks.count("burn_in", burn_in, 0)
    checks.count("frequency", frequency)
    checks.count("hyper_steps", 1 if hyper_steps is None else hyper_steps)
    checks.positive("hyper_lr", hyper_lr)
    factory = get_posterior(posterior) if isinstance(posterior, str) else posterior
    given = {} if backend is None else {"backend": backend}
    own = factory(model, resolved, prior_precision=1.0, prior_mean=prior_mean, temperature=temperature, **given)
    require_gaussian(own)
    loop = Loop(
        model,
        own.network,
        loader,
        epochs=epochs,
        optimizer=optimizer,
        optimizer_options=dict(optimizer_options or {}),
        scheduler=scheduler,
        max_gradient_norm=max_gradient_norm,
        generator=generator,
        other=curvature_loader,
    )
    with loop.running():
        groups = loop.begin(own, curved, structure)
        own.prior_precision = prior_precision
        run = _Run(loop, own, structure, groups, tune_noise, hyper_steps, hyper_lr, early_stopping)
        if state is None:
            loop.count(curvature_loader)
        else:
            run.restore(state)
        bar = progress_bar(range(len(loop.losses) + 1, epochs + 1), enabled=progress, description="marginal likelihood")
        for epoch in bar:
            n_data, mean_batch_size = loop.n_data, loop.mean_batch_size
            # Made anew, as a fit may choose other parameters.
            loss = loop.train(TrainingObjective(model, own, n_data=n_data, mean_batch_size=mean_batch_size))
            if curvature_loader is None:
                loop.n_data = loop.n_examples
            beyond = epoch - burn_in
            is_due = epoch == epochs or (beyond > 0 and beyond % frequency == 0)
            if is_due:
                own.fit(curved, generator=generator)
                run.update(epoch, loss)
            if isinstance(bar, tqdm):
                evidence = f"{run.updates[-1].evidence:.6g}" if run.updates else "-"
                bar.set_postfix(loss=f"{loss:.4g}", evidence=evidence, refresh=False)
            if is_due and callback is not None:
                callback(run.updates[-1])
        last, kept = run.state(), run.kept
        if run.best is not None:
            put_back(own.network.model, run.best)
        if kept["noise_std"] is not None:
            own.noise_std = kept["noise_std"]
        own.fit(curved, generator=generator)
        own.prior_precision = kept["prior_precision"]
    return MarginalLikelihoodTraining(
        model=model,
        posterior=own,
        epoch=kept["epoch"],
        evidence=kept["evidence"],
        losses=tuple(loop.losses),
        updates=tuple(run.updates),
        n_data=own.n_data,
        state=last,
    )


class TrainingObjective:
    """The objective of a minibatch b, at a posterior's likelihood, prior and temperature.

    ``ℓ_b(θ) = K/(N' T) Σ_{n∈b} −log p(yₙ|f(xₙ, θ)) + 1/(2N) (θ−μ)ᵀ P₀ (θ−μ)``, where K batches with N' examples make an
    epoch: the mean over batches is −1/N times the log posterior also where they differ in size. N' is N unless the
    curvature is computed on other data than those of training.
    """

    def __init__(self, model: nn.Module, posterior: GaussianPosterior, *, n_data: int, mean_batch_size: float):
        network, prior = posterior.network, posterior.prior()
        self._model, self._likelihood = model, posterior.likelihood
        self._n_data, self._scale = n_data, float(posterior.temperature) * mean_batch_size
        self._network, self._parameters, vector = network, uses(network.model), network.vector()
        self._precision, self._mean = prior.vector().detach().to(vector), prior.mean.detach().to(vector)

    def penalty(self) -> Tensor:
        """``½ (θ−μ)ᵀ P₀ (θ−μ)`` of the network's own parameters, 0-d; differentiable in them."""
        vector = entries_of(self._network, self._parameters, self._precision)
        return (self._precision * (vector - self._mean).square()).sum() / 2

    def __call__(self, batch: Batch) -> Tensor:
        """``ℓ_b``, 0-d and differentiable in the network's parameters."""
        fit = log_likelihood(self._likelihood, call(self._model, batch.inputs), batch.target)
        return (self.penalty() / self._n_data).to(fit) - fit / self._scale


@dataclass
class _Run:
    """Updates of the hyperparameters: gradient ascent on the evidence of a fitted posterior, in their logarithms.

    By Adam (Kingma and Ba, 2015), whose moments are kept from update to update, or by the posterior's own line search.
    ``best`` are the weights of the update with the greatest evidence; ``kept`` the result's hyperparameters, its epoch
    and its evidence.
    """

    loop: Loop
    posterior: GaussianPosterior
    structure: str | Groups
    groups: Groups | None
    tune_noise: bool
    steps: int | None
    learning_rate: float
    early_stopping: bool
    updates: list[Update] = field(default_factory=list)
    best: dict[str, Tensor] | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        posterior, structure = self.posterior, LAYERWISE if self.groups is not None else str(self.structure)
        n_groups, n_entries = len(posterior.prior_groups.names), posterior.n_parameters
        shape = {"scalar": (), "layerwise": (n_groups,), "diagonal": (n_entries,)}[structure]
        precision = posterior.prior().vector() if structure == "diagonal" else posterior.prior_precision
        precision = precision.detach().double().cpu()
        precision = precision.reshape(()).expand(shape).clone() if precision.numel() == 1 else precision
        checks.shape("prior_precision", precision, shape)
        checks.finite("The evidence", posterior.log_marginal_likelihood(precision), _FIX)  # may be unsupported
        # Searched in e-folds: the precisions, and the noise levels if they are tuned.
        tuned = [precision, *([posterior.noise_std.detach().double().cpu()] if self.tune_noise else [])]  # type: ignore[union-attr]
        self._logs = [own.log().requires_grad_() for own in tuned]
        self._optimizer = torch.optim.Adam(self._logs, lr=self.learning_rate)

    def update(self, epoch: int, loss: float) -> None:
        """Improve the hyperparameters of a fit at the present weights, and keep them if the result is to have them."""
        posterior = self.posterior
        self.loop.n_data = posterior.n_data
        self._ascend()
        evidence = checks.finite("The evidence", posterior.log_marginal_likelihood(), _FIX).item()
        precision, noise = posterior.prior_precision.detach(), posterior.noise_std
        if self.structure == "diagonal":
            precision = posterior.prior_groups.geometric_means(precision)
        improved = evidence > max((update.evidence for update in self.updates), default=-math.inf)
        update = Update(
            epoch=epoch,
            evidence=evidence,
            log_likelihood=posterior.laplace_model().log_likelihood(noise).item(),
            loss=loss,
            prior_precision=precision.double().cpu().clone(),
            noise_std=None if noise is None else noise.clone(),
        )
        self.updates.append(update)
        if improved or not self.early_stopping:
            hyper = {"prior_precision": posterior.prior_precision, "noise_std": noise}
            self.kept = {**hyper, "epoch": epoch, "evidence": evidence}
            self.best = weights_of(self.loop.network.model) if self.early_stopping else None

    def _ascend(self) -> None:
        posterior = self.posterior
        if self.steps is None:
            structure = self.structure if self.groups is None else self.groups
            posterior.fit_prior_precision(structure=structure, tune_noise=self.tune_noise)
            return
        with torch.enable_grad():
            for _ in range(self.steps):
                self._optimizer.zero_grad()
                value = posterior.log_marginal_likelihood(*(log.exp() for log in self._logs))
                (-checks.finite("The evidence", value, _FIX)).backward()
                self._optimizer.step()
        levels = [log.detach().exp() for log in self._logs]
        checks.finite("A logarithm of a prior precision", levels[0].log(), _FIX)
        self.posterior.prior_precision = levels[0]
        if self.tune_noise:
            self.posterior.noise_std = levels[1]

    def state(self) -> dict[str, Any]:
        """What training goes on from."""
        posterior = self.posterior
        return {
            **self.loop.state(),
            "prior_precision": posterior.prior_precision.clone(),
            "noise_std": posterior.noise_std,
            "best": self.best,
            "kept": self.kept,
            "logs": [log.detach().clone() for log in self._logs],
            "ascent": copy.deepcopy(self._optimizer.state_dict()),
            "updates": [dict(vars(update)) for update in self.updates],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.loop.restore(state)
        self.updates = [Update(**update) for update in state["updates"]]
        self.best, self.kept = state["best"], state["kept"]
        self.posterior.prior_precision = state["prior_precision"]
        if state["noise_std"] is not None:
            self.posterior.noise_std = state["noise_std"]
        with torch.no_grad():
            for log, known in zip(self._logs, state["logs"], strict=True):
                log.copy_(known)
        self._optimizer.load_state_dict(copy.deepcopy(state["ascent"]))
