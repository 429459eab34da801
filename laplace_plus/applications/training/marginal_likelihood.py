"""Training of weights and hyperparameters together, by the Laplace approximation of the marginal likelihood.

The online scheme of Immer, Bauer, Fortuin, Rätsch and Khan (2021), "Scalable marginal likelihood estimation for model
selection in deep learning", arXiv:2104.04975: epochs of ordinary training of the log posterior take turns with steps of
gradient ascent on its Laplace evidence, in the logarithms of the prior precisions and of the noise. Both look at the
same function of weights and hyperparameters: see :mod:`laplace_plus.applications.training.objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from laplace_plus.applications.training.loop import OptimizerFactory, SchedulerFactory
from laplace_plus.applications.training.run import MarginalLikelihoodTraining, PosteriorFactory, Run, Settings, Update
from laplace_plus.curvature import Backend
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.posteriors import KFAC, get_posterior
from laplace_plus.priors import Groups
from laplace_plus.tuning.base import tunes_noise


def train_marginal_likelihood(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Any = "classification",
    *,
    epochs: int = 100,
    posterior: str | PosteriorFactory = KFAC,
    structure: str | Groups = "layerwise",
    prior_precision: float | Tensor = 1.0,
    prior_mean: float | Tensor = 0.0,
    temperature: float = 1.0,
    tune_noise: bool | None = None,
    backend: str | Backend | None = None,
    optimizer: OptimizerFactory = torch.optim.Adam,
    optimizer_options: Mapping[str, Any] | None = None,
    scheduler: SchedulerFactory | None = None,
    schedule_by: Literal["epoch", "batch"] = "epoch",
    max_gradient_norm: float | None = None,
    burn_in: int = 0,
    frequency: int = 5,
    hyper_steps: int | None = 100,
    hyper_lr: float = 0.1,
    early_stopping: bool = True,
    patience: int | None = None,
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
        scheduler: Called with the optimizer; its ``step()`` is called after every epoch, or after every batch.
            ``ReduceLROnPlateau`` is given the epoch's loss.
        schedule_by: ``"epoch"`` or ``"batch"``.
        max_gradient_norm: Where to clip the norm of the whole gradient.
        burn_in: Epochs before updates begin; the first comes ``frequency`` epochs later.
        frequency: Epochs from one update to the next. An update with exact curvature costs about as much as an epoch
            with as many backward passes as there are outputs; ``backend=lp.Native("ggn_mc")`` needs a single one.
        hyper_steps: Steps of Adam for each update; None to find the optimum by line search.
        hyper_lr: Their size, in e-folds.
        early_stopping: Whether to end with the weights and hyperparameters of the update with the greatest evidence,
            instead of the last.
        patience: End training after so many updates in a row without a greater evidence; by default never.
        curvature_loader: Other batches for the curvature and the evidence, such as the same images without random
            augmentation. N then counts these.
        state: ``.state`` of an earlier result, to go on from, with the same arguments and data; ``epochs`` counts those
            before. A continued run equals one that was not interrupted, to the last bit on the same machine: the state
            holds torch's global generators, ``generator``, and those that a ``DataLoader`` and its samplers hold. Other
            sources of randomness (Python's, NumPy's, those of persistent workers) are the caller's. It equals a run
            that had more epochs from the start if its last epoch was one of those with an update.
        callback: Called after every update.
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
        EmptyDataError: No data came.
        DataError: A loader that can be used only once, or a batch of a form that cannot be used.
        LabelError: Targets that do not fit the likelihood.
        OutputError: Network outputs that do not fit it.
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
    given = {name: value for name, value in locals().items() if name in Settings.__dataclass_fields__}
    given["likelihood"] = resolve_likelihood(likelihood)
    given["posterior"] = get_posterior(posterior) if isinstance(posterior, str) else posterior
    given["tune_noise"] = tunes_noise(given["likelihood"], tune_noise)
    given["optimizer_options"] = dict(optimizer_options or {})
    return Run(model, loader, curvature_loader, Settings(**given), generator).train(state)
