"""The rows of a small classifier as a dense matrix, for tests of posteriors on their null space."""

from __future__ import annotations

import torch
from torch import nn


def classifier_and_batches():
    """A classifier with three outputs, and six examples in batches of three, two and one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    x = torch.randn(6, 2, dtype=torch.float64)
    y = torch.arange(6) % 3
    return net, [(x[:3], y[:3]), (x[3:5], y[3:5]), (x[5:], y[5:])]


def dense_rows(network, data, kind, theta):
    """The rows at θ, ``[m, P]``, differentiable."""
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    J = torch.func.jacrev(lambda v: network(x, network.substitute(v)))(theta)
    p = network(x, network.substitute(theta)).softmax(-1)
    if kind == "logit":
        return J.flatten(0, 1)
    if kind == "ggn":
        root = p.sqrt().diag_embed() - p[:, :, None] * p.sqrt()[:, None]
        return (root.mT @ J).flatten(0, 1)
    return torch.einsum("nc,ncp->np", p - nn.functional.one_hot(y, 3), J)


def projector_of(rows):
    """The projector onto their null space, ``[P, P]``."""
    return torch.eye(rows.shape[1], dtype=rows.dtype) - torch.linalg.pinv(rows, rtol=1e-9) @ rows
