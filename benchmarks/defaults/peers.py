"""laplace-torch with its own defaults on the cells of the battery: test NLL only."""

from __future__ import annotations

import copy
import resource
import signal
from typing import Any

import torch
from torch import nn

from benchmarks.defaults.scores import BATCH, Row
from benchmarks.study.sets import DataSet
from laplace_plus import metrics

STRUCTURES = {
    "KFAC": ("all", "kron"),
    "Diagonal": ("all", "diag"),
    "last layer": ("last_layer", "kron"),
    "Full": ("all", "full"),
}

SECONDS, BYTES = 60, 8 * 2**30
"""After so long, or with so much memory, a row counts as failed."""

STEPS = 300
"""Of Adam at 0.1 on prior precision and noise together, as in its regression example, which takes 1000."""


def peer_row(network: nn.Module, data: DataSet, name: str) -> Row:
    """Fit, tune by its marginal likelihood, predict with its default link.

    Raises:
        TimeoutError: It took too long.
        RuntimeError: It took too much memory.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, limits[1]))
    try:
        return {"nll": _nll(network, data, name)}
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        signal.signal(signal.SIGALRM, before)


def _nll(network: nn.Module, data: DataSet, name: str) -> float:
    from laplace import Laplace  # noqa: PLC0415  -- an extra

    subset, structure = STRUCTURES[name]
    likelihood = "classification" if data.classification else "regression"
    peer: Any = Laplace(copy.deepcopy(network), likelihood, subset_of_weights=subset, hessian_structure=structure)
    rows = torch.utils.data.TensorDataset(*data.train)
    peer.fit(torch.utils.data.DataLoader(rows, batch_size=100))
    x, y = data.test
    if data.classification:
        peer.optimize_prior_precision()
        probabilities = torch.cat([peer(part).detach() for part in x.split(BATCH)])
        return float(metrics.negative_log_likelihood(probabilities, y))
    prior, noise = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([prior, noise], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-peer.log_marginal_likelihood(prior.exp(), noise.exp())).backward()
        optimizer.step()
    parts = [peer(part) for part in x.split(BATCH)]
    mean, variance = (torch.cat([part[k].detach().reshape(-1, 1) for part in parts]) for k in range(2))
    return float(metrics.gaussian_nll(mean, variance + noise.exp().detach().square(), y))
