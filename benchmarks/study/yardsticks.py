"""Methods from outside of the package that posteriors are compared with: they need more training, or validation data.

SWAG follows Maddox et al. (2019), deep ensembles Lakshminarayanan et al. (2017), temperatures Guo et al. (2017).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import laplace_plus as lp
from benchmarks.study.methods import Fitted, Task, least, method, stacked
from benchmarks.study.scored import Predict
from laplace_plus.likelihoods import Likelihood
from laplace_plus.predictive import from_samples

TEMPERATURES = [2.0 ** (step / 10) for step in range(-30, 101)]
"""Between 1/8 and 1024. There is no least loss where every validation row is predicted correctly; the first counts."""


def averaged(networks: list[nn.Module], likelihood: Likelihood) -> Predict:
    """The mean of the networks' predictive distributions."""

    def predict(x: Any) -> lp.Prediction:
        with torch.no_grad():
            return from_samples(likelihood, stacked(networks, x))

    return predict


def _likelihood(task: Task, noise: Tensor) -> Likelihood:
    """Classes, or the root mean square of the networks' noise levels."""
    return lp.Categorical() if task.data.classification else lp.Gaussian(float(noise.square().mean().sqrt()))


@method
def network(task: Task) -> Fitted:
    """The MAP network itself."""
    return Fitted(averaged([task.model], task.likelihood))


@method
def early_stopping(task: Task) -> Fitted:
    """The first network where its validation loss was least."""
    likelihood = _likelihood(task, task.trained.early_noise[:1])
    found = {"by": "validation", "epoch": task.trained.epochs[0]}
    return Fitted(averaged([task.member(0, early=True)], likelihood), found)


@method
def ensemble(task: Task, early: bool = False) -> Fitted:
    """All networks together, at their ends or where their validation losses were least."""
    count = len(task.trained.last)
    likelihood = _likelihood(task, task.trained.early_noise if early else task.trained.noise)
    found: dict[str, Any] = {"members": count}
    if early:
        found |= {"by": "validation", "epochs": task.trained.epochs}
    return Fitted(averaged([task.member(k, early=early) for k in range(count)], likelihood), found)


@method
def temperature(task: Task) -> Fitted:
    """The MAP network with the temperature (for numbers: the noise level) of least validation loss."""

    def at(value: float) -> Predict:
        if not task.data.classification:
            return averaged([task.model], lp.Gaussian(float(task.trained.noise[0]) * value))

        def predict(x: Any) -> lp.Prediction:
            with torch.no_grad():
                return from_samples(task.likelihood, task.model(x)[None] / value)

        return predict

    best, found = least(task, TEMPERATURES, at, name="temperature" if task.data.classification else "times_noise")
    edge = {"at_edge": True} if best in (TEMPERATURES[0], TEMPERATURES[-1]) else {}
    return Fitted(at(best), {key: value for key, value in found.items() if key != "tried"} | edge)


@method
def swag(
    task: Task, learning_rates: tuple[float, ...] = (0.001, 0.01, 0.1), epochs: int = 40, n_samples: int = 30
) -> Fitted:
    """A Gaussian from the weights at the ends of epochs of SGD, diagonal and low-rank; its step size by validation."""
    paths = {rate: _path(task, rate, epochs) for rate in learning_rates}

    def at(rate: float) -> Predict:
        return averaged(draws(task, paths[rate], n_samples), task.likelihood)

    best, found = least(task, learning_rates, at, name="learning_rate")
    return Fitted(at(best), found)


def _path(task: Task, rate: float, epochs: int) -> Tensor:
    """Weights at the end of each epoch of SGD from the MAP network, ``[epochs, P]``.

    For numbers, the loss is that of training times the noise's variance, so that small noise does not make steps large.
    """
    moving = copy.deepcopy(task.model).train()
    scale = 1.0 if task.data.classification else float(task.trained.noise[0]) ** 2
    optimizer = torch.optim.SGD(moving.parameters(), lr=rate, momentum=0.9, weight_decay=scale * task.weight_decay)
    inputs, targets = task.data.train
    generator, points = task.generator(), []
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(32):
            outputs = moving(inputs[rows])
            if task.data.classification:
                loss = functional.cross_entropy(outputs, targets[rows])
            else:
                loss = (outputs - targets[rows]).square().mean() / 2
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        points.append(parameters_to_vector(moving.parameters()).detach())
    return torch.stack(points)


def draws(task: Task, path: Tensor, n: int) -> list[nn.Module]:
    """Networks from SWAG's Gaussian: half of the covariance is diagonal, half of the last 20 deviations."""
    mean = path.mean(0)
    diagonal = (path - mean).square().mean(0).sqrt()
    last = path[-20:] - mean
    generator = task.generator()
    networks: list[nn.Module] = []
    for _ in range(n):
        first = torch.randn(len(mean), generator=generator) * diagonal / math.sqrt(2)
        second = torch.randn(len(last), generator=generator) @ last / math.sqrt(2 * (len(last) - 1))
        one = copy.deepcopy(task.model)
        vector_to_parameters(mean + first + second, one.parameters())
        networks.append(one)
    return networks
