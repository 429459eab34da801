"""What adapters share: a plain training, and a posterior that is fitted and tuned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from laplace_plus.errors import UnsupportedError, warn
from laplace_plus.likelihoods import Bernoulli, Categorical, Likelihood, resolve_likelihood
from laplace_plus.posteriors import Posterior, get_posterior


class Standardised(nn.Module):
    """Inputs ``[*, d]`` at zero mean and unit variance, as some data ``[n, d]`` have them; nothing is trained."""

    center: Tensor
    scale: Tensor

    def __init__(self, data: Tensor):
        super().__init__()
        scale = data.std(0, correction=0)
        self.register_buffer("center", data.mean(0))
        self.register_buffer("scale", torch.where(scale > 0, scale, torch.ones_like(scale)))

    def forward(self, inputs: Tensor) -> Tensor:
        """``(x − center) / scale``."""
        return (inputs - self.center) / self.scale


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss: nn.Module,
    *,
    epochs: int,
    lr: float,
    weight_decay: float,
    batch_size: int,
    weight: Tensor | None = None,
) -> None:
    """Train in place by Adam, minibatches in random order and steps that shrink to zero along a cosine.

    Weights end where the loss is stationary, which a Laplace approximation supposes. The model ends in evaluation mode.
    With ``weight [N]``, the loss gives one number for each entry of the targets, of which the weighted mean is taken.
    """
    device = next(model.parameters()).device
    inputs, targets, model = inputs.to(device), targets.to(device), model.train()
    share = None if weight is None else (weight / weight.mean()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr, weight_decay=weight_decay)
    schedule = CosineAnnealingLR(optimizer, max(1, epochs))
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).to(device).split(batch_size):
            optimizer.zero_grad()
            value = loss(model(inputs[batch]), targets[batch])
            if share is not None:
                value = (value.view(len(batch), -1).mean(1) * share[batch]).mean()
            value.backward()
            optimizer.step()
        schedule.step()
    model.eval()


def fitted(
    posterior: str | type[Posterior],
    model: nn.Module,
    likelihood: Any,
    data: Iterable[Any],
    *,
    generator: torch.Generator | None = None,
    seen: bool = True,
    **options: Any,
) -> Any:
    """A posterior, tuned by the library's default; ``seen`` data are those of training."""
    cls = get_posterior(posterior) if isinstance(posterior, str) else posterior
    found = cls(model, likelihood, **options).fit(data, generator=generator)
    return found.fit_prior_precision(generator=generator, seen=(seen and "auto" in found.tuners) or None)


def require_one_process(number: int) -> None:
    """UnsupportedError where several processes train."""
    if number > 1:
        what, fix = "The posterior is fitted in one process.", "Train without the callback, and fit on one device."
        raise UnsupportedError(what, expected="one process", got=f"{number}", fix=fix)


def as_trained(likelihood: Any, losses: Iterable[Any], *, adopts: bool = False) -> Any:
    """A likelihood with the class weights, label smoothing, … of those of torch's losses that training had.

    One that is given by its name, or ``adopts``, takes them over. A warning names others, and losses of no likelihood.
    """
    known, found = resolve_likelihood(likelihood), set[Likelihood]()
    losses = [loss for loss in losses if isinstance(loss, nn.modules.loss._Loss)]
    likely = nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss, nn.MSELoss, nn.GaussianNLLLoss, nn.PoissonNLLLoss
    if losses and not any(isinstance(loss, likely) for loss in losses):
        warn(f"The loss of training, {losses[0]}, is not that of the posterior's likelihood, {known!r}.")
    for loss in losses:
        if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
            smoothing = getattr(loss, "label_smoothing", 0.0)
            own: Any = Categorical(loss.ignore_index, weight=loss.weight, label_smoothing=smoothing)
        elif isinstance(loss, nn.BCEWithLogitsLoss):
            own = Bernoulli(pos_weight=loss.pos_weight)
            if loss.weight is not None:
                warn("The weight= of BCEWithLogitsLoss is left out: targets (y, weight) with weighted=True have one.")
        else:
            continue
        if isinstance(known, type(own)):
            found.add(replace(own, output_axis=known.output_axis, weighted=known.weighted))
        elif own != type(own)():
            found.add(own)
    adopts = adopts or isinstance(likelihood, str)
    if len(found) == 1 and adopts and type(own := next(iter(found))) is type(known):
        return own
    if found and (adopts or known not in found):
        told = " and ".join(sorted(map(repr, found)))
        warn(f"The loss of training was that of {told}, and the posterior's likelihood is {known!r}.")
    return likelihood
