"""Noise in normalisation layers, and a few epochs of fine-tuning (Franchi et al., 2024, "Make me a BNN").

A normalisation gives ``γ ∘ ĥ ∘ (1 + α ε) + β`` with standard normal ε in place of ``γ ∘ ĥ + β``. Each of M members
starts at the trained network and moves γ and β alone, by a few epochs of SGD on the loss of the noisy network.
Predictions are averaged over members and noise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import NoGainWarning, SelectionError, UnsupportedError, warn
from laplace_plus.likelihoods.sampling import draw_seed, stage_generator, standard_normal
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import mean_loss
from laplace_plus.network.network import full_precision
from laplace_plus.network.selection import Selection
from laplace_plus.network.shadow import unwrap
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.public import require_influence
from laplace_plus.posteriors.state import State, of_state, survey
from laplace_plus.tuning import Auto, Tuner, TuningResult, Validation

_MOMENTUM, _DECAY = 0.9, 1e-4
"""Of SGD: Nesterov's momentum, and weight decay."""

_SCALES = (0.05, 0.1, 0.2, 0.3, 0.5)
"""What is tried on held-out data, besides no noise."""

_DRAWS = 2
"""Noisy networks of each member by which the fit is judged on the training data."""

_DROP, _HALVINGS = 0.02, 5
"""By how much the accuracy on the training data may fall, and how many scales are tried before the network itself."""


@stored
@dataclass(frozen=True)
class FineTuned(State):
    """γ and β of the members ``[M, P]``, whether they or the network's own have noise, and how much."""

    members: Tensor
    noise_scale: float
    fine_tuned: bool = True


class ABNN(Posterior):
    """Noise on what normalisation layers put out, around γ and β of several fine-tuned members.

    Choose it for networks with batch, instance, group, layer or RMS normalisation that are too large for curvature:
    a fit takes ``n_members · epochs`` passes of training, with gradients of γ and β alone, and stores those only.
    Running statistics stay as they are, and dropout is off. Normalisations that are not torch's own are not seen, and
    have no noise.

    The prior has no part in it, and neither has the temperature. Predictions are those of sampled networks, members in
    turn; a few dozen are enough. With ``noise="channel"`` every draw is a network with ``γ ∘ (1 + α ε)`` in place of γ:
    a distribution over weights with :meth:`sample` and joint predictions. With ``noise="element"``, the authors', each
    activation of each example has noise of its own, which no weights have.

    How much noise predictions bear depends on the network's depth, as relative variances multiply. :meth:`fit` halves
    the scale while averaged predictions lose more than .02 of the network's accuracy on the training data. Held-out
    data tell more: ``fit_prior_precision(data=held_out)`` chooses the scale and whose γ and β predict. Both can fall
    back to the network itself.

    Args:
        model: A trained network with normalisation layers.
        likelihood: As for :class:`Posterior`.
        noise: ``"channel"`` or ``"element"``.
        scale: α.
        n_members: M.
        epochs: Of fine-tuning; 0 for noise alone.
        learning_rate: Of SGD with Nesterov's momentum .9 and weight decay 1e-4; a tenth of it after the first epoch,
            and a hundredth after the fourth.
        parameters: ``"all"`` γ and β that require gradients, or some of them by name.
        **common: As for :class:`Posterior`; prior, temperature and backend are without effect.

    Attributes:
        scale: α of the next fit.

    Raises:
        UnsupportedError: No normalisation layer with γ.
        SelectionError: Parameters of other layers, parts of some, or no γ.
        ConfigurationError: A number out of range.
        NonFiniteError: Fine-tuning diverged.

    Warns:
        NoGainWarning: The scale is not the one that was asked for.

    Example:
        >>> import laplace_plus as lp
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))
        >>> posterior = lp.ABNN(net, "classification").fit([(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))])
        >>> posterior.members.shape, posterior.predictive(torch.ones(5, 2), n_samples=20).mean.shape
        (torch.Size([4, 18]), torch.Size([5, 3]))
    """

    default_method = "sampled"
    members = of_state("members", "γ and β of the fine-tuned members, ``[M, P]``.")
    fine_tuned = of_state("fine_tuned", "Whether γ and β are the members', or the network's own.", bool)
    noise_scale = of_state(
        "noise_scale",
        "The present α: ``scale``, or what :meth:`fit` or a tuning made of it.",
        partial(checks.number, "noise_scale", least=0.0),
    )
    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation, "auto": Auto}

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        noise: Literal["channel", "element"] = "channel",
        scale: float = 0.2,
        n_members: int = 4,
        epochs: int = 5,
        learning_rate: float = 5e-3,
        parameters: Selection = "all",
        **common: Any,
    ):
        self.noise = checks.choice("noise", noise, ("channel", "element"))
        self.scale = checks.number("scale", scale, least=0.0)
        self.n_members, self.epochs = checks.count("n_members", n_members), checks.count("epochs", epochs, 0)
        self.learning_rate = checks.positive("learning_rate", learning_rate)
        if isinstance(model, nn.Module) and isinstance(parameters, str) and parameters == "all":
            own = dict(unwrap(model).named_parameters(remove_duplicate=False))
            known = norm_parameters(unwrap(model))
            if not any(known.values()):
                what, expected = "The network has no normalisation layer with γ.", "torch's batch, layer, … norms"
                raise UnsupportedError(what, expected=expected, got=type(model).__name__, fix="Take lp.KFAC.")
            parameters = [name for name in known if own[name].requires_grad]
        super().__init__(model, likelihood, parameters=parameters, **common)
        known, selected = norm_parameters(self.network.model), self.network.selected
        whole = all(item.name in known and item.mask is None for item in selected)
        if not whole or not any(known[item.name] for item in selected):
            what, expected = "Noise belongs to normalisation layers, whole γ with or without β.", "such as "
            expected += ", ".join([*known][:3])
            raise SelectionError(what, expected=expected, got=", ".join(self.parameter_names))
        self._is_scale = torch.cat([torch.full((item.size,), known[item.name]) for item in selected])

    # -- the fit -------------------------------------------------------------------------------------------------------

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> FineTuned:
        n_data, n_outputs, _ = survey(self, data, "Fine-tuning passes over the data again and again.")
        seed = draw_seed(generator)
        members = self._fine_tune(data, seed, progress=progress)
        self.set_state(FineTuned(members.mean(0), n_data, n_outputs, members, self.scale))
        if self.likelihood.is_classifier:
            self._quieten(data, seed, progress=progress)
        return self.state

    def _quieten(self, data: Iterable[Any], seed: int, *, progress: bool) -> None:
        """Halve the scale while noise costs accuracy on the training data; in the end, leave the network itself."""
        lost: list[float] = []
        for _ in range(_HALVINGS):
            lost.append(self._lost(data, stage_generator(seed, self.epochs + 1), progress=progress))
            if lost[-1] <= _DROP:
                break
            self.noise_scale /= 2
        else:
            self.noise_scale, self.fine_tuned = 0.0, False
        if lost[0] > _DROP:
            what = f"Noise of scale {self.scale:.3g} costs {lost[0]:.1%} of the accuracy on the training data"
            now = f"it is {self.noise_scale:.3g} now" if self.fine_tuned else "the posterior now is the network"
            warn(f"{what}; {now}. fit_prior_precision(data=held_out) chooses better.", NoGainWarning)

    def _fine_tune(self, data: Iterable[Any], seed: int, *, progress: bool) -> Tensor:
        """Members after SGD, ``[M, P]``; all take their steps in the same pass."""
        theta = self.network.vector().repeat(self.n_members, 1).requires_grad_()
        optimizer = torch.optim.SGD([theta], self.learning_rate, _MOMENTUM, weight_decay=_DECAY, nesterov=True)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4])
        for epoch in range(self.epochs):
            source = stage_generator(seed, epoch + 1)
            for batch in self.batches(data, progress=progress, description=f"ABNN: epoch {epoch + 1}"):
                theta.grad = torch.stack([self._gradient(batch, member, source) for member in theta.detach()])
                optimizer.step()
            schedule.step()
            checks.finite("Fine-tuning diverged: γ or β", theta, fix="Take a smaller learning_rate or scale.")
        return theta.detach()

    def _gradient(self, batch: Batch, vector: Tensor, source: torch.Generator) -> Tensor:
        """Of the mean loss of one noisy network, ``[P]``."""
        with torch.enable_grad():
            leaf = vector.clone().requires_grad_()
            loss = mean_loss(self.likelihood, self._noisy(batch.inputs, leaf, self.scale, source), batch.target)
            require_influence(self, loss.requires_grad)
            return torch.autograd.grad(loss, leaf)[0]

    def _lost(self, data: Iterable[Any], source: torch.Generator, *, progress: bool) -> float:
        """By how much averaged predictions of noisy networks are right less often on the training data."""
        likelihood, lost, count = self.likelihood, 0.0, 0.0
        for batch in self.batches(data, progress=progress, description="ABNN: training data"):
            drawn = self.sampled_outputs(batch.inputs, _DRAWS * self.n_members, source)
            own, targets, share = likelihood.rows(self.network.forward(batch.inputs), batch.target)
            noisy = torch.stack([likelihood.rows(one, batch.target)[0] for one in drawn])
            before, after = likelihood.distribution(own).mode, likelihood.mixture(noisy).mode
            labels = targets.argmax(-1) if targets.ndim > before.ndim else targets
            change = (before == labels).to(share) - (after == labels).to(share)
            lost += float(share @ change.reshape(len(share), -1).mean(1))
            count += float(share.sum())
        return lost / count

    # -- what it found, and what is tuned ------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        """The posterior mean ``[P]``: that of the members, or the network's own γ and β."""
        return self.members.mean(0) if self.fine_tuned else self.network.vector()

    def tunables(self) -> dict[str, Sequence[Any]]:
        """α, and whose γ and β, take the place of a prior precision."""
        return {"fine_tuned": (False, True), "noise_scale": (0.0, *_SCALES)}

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        super().apply_tuning(result)
        if getattr(result, "chosen", "") != "network" and not self.fine_tuned and self.noise_scale == 0:
            what = "On the held-out data no noise predicts better than the network, which is what the posterior now is."
            warn(what, NoGainWarning)

    # -- noise ---------------------------------------------------------------------------------------------------------

    def _noisy(self, inputs: Any, vector: Tensor, alpha: float, source: torch.Generator | None) -> Tensor:
        """Outputs ``[B, *, C]`` of a network with γ and β ``[P]`` and noise, differentiable in the vector."""
        if self.noise == "channel":
            vector = self._jittered(vector, alpha, source)
        values = self.network.substitute(vector)
        with ElementNoise(alpha, values.values(), source) if self.noise == "element" else nullcontext():
            return self.network(inputs, values)

    def _jittered(self, vectors: Tensor, alpha: float, source: torch.Generator | None) -> Tensor:
        """``γ ∘ (1 + α ε)`` in place of γ."""
        noise = standard_normal(vectors.shape, like=vectors, generator=source)
        return vectors * (1 + alpha * noise * self._is_scale.to(vectors))

    def _drawn(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Members in turn from a random one on, ``[n, P]``; or the network's own vector."""
        if not self.fine_tuned:
            return self.mean.expand(n, -1)
        device = None if generator is None else generator.device
        first = torch.randint(self.n_members, (), generator=generator, device=device)
        return self.members[(torch.arange(n) + first.cpu()) % self.n_members]

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw γ and β, ``[n, P]``; errors as of :class:`Posterior`.

        Raises:
            UnsupportedError: With ``noise="element"``.
        """
        checks.count("n", n)
        self.require_fit()
        if self.noise == "element":
            what, fix = "Noise of each activation is no distribution over weights.", 'Take noise="channel".'
            raise UnsupportedError(what, expected='predictive(x, method="sampled")', got="samples of weights", fix=fix)
        return self._jittered(self._drawn(n, generator), self.noise_scale, generator)

    @override
    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        if self.noise == "channel":
            yield from super().sampled_outputs(x, n, generator)
            return
        x = self.network.receive(x)
        for vector in self._drawn(n, generator):
            with torch.no_grad():
                yield self._noisy(x, vector, self.noise_scale, generator)


# -- normalisation layers ----------------------------------------------------------------------------------------------

LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Batch and instance normalisation of all kinds, and the others."""

_PLACES: dict[Any, int] = {F.batch_norm: 3, F.instance_norm: 3, F.layer_norm: 2, F.group_norm: 2, F.rms_norm: 2}
"""The position of γ among the arguments of each function; that of β, which RMS normalisation lacks, is the next."""


def norm_parameters(model: nn.Module) -> dict[str, bool]:
    """The parameters of torch's normalisation layers by name, and whether each is a scale γ."""
    found: dict[str, bool] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LAYERS):
            for name, _ in module.named_parameters(prefix, recurse=False):
                found[name] = name.endswith("weight")
    return found


class ElementNoise(TorchFunctionMode):
    """Makes ``γ ∘ ĥ + β`` to ``γ ∘ ĥ ∘ (1 + α ε) + β``, with a standard normal ε for each activation.

    A normalisation's result r becomes ``r + α ε ∘ (r − β)``. Normalisations without γ get noise as well; those with
    other scales than the ``scales`` get none.
    """

    def __init__(self, alpha: float, scales: Collection[Tensor], generator: torch.Generator | None):
        super().__init__()
        self.alpha, self.generator = alpha, generator
        self.scales = {id(scale) for scale in scales}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _PLACES:
            return result
        gamma, beta = _argument(args, kwargs, _PLACES[func], "weight"), None
        if gamma is not None and id(gamma) not in self.scales:
            return result
        if func is not F.rms_norm:
            beta = _argument(args, kwargs, _PLACES[func] + 1, "bias")
        centre: Any = 0.0 if beta is None else beta
        if beta is not None and func is not F.layer_norm:  # of which γ and β belong to the last axes
            centre = beta.view(-1, *[1] * (result.ndim - 2))
        noise = standard_normal(result.shape, like=result, generator=self.generator)
        return result + self.alpha * noise * (result - centre)


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
