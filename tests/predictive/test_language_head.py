"""A head with as many outputs as a language model has, in a process of its own, whose memory is measured."""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection

import pytest
import torch
from torch import nn

import laplace_plus as lp

OUTPUTS, FEATURES, TOP = 50_000, 768, 10
MOST_KIB = 3.3 * 2**20


def fit_tune_and_predict(name: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, FEATURES), nn.GELU(), nn.Linear(FEATURES, OUTPUTS))
    x, y = torch.randn(256, 64), torch.randint(OUTPUTS, (256,))
    data = list(zip(x.split(64), y.split(64), strict=True))
    posterior = lp.get_posterior(name)(model, "classification", parameters="last_layer").fit(data)
    posterior.fit_prior_precision("marginal_likelihood")
    best = model(x[:64]).topk(TOP).indices
    covariance = posterior.functional_posterior(x[:64], outputs=best).covariance
    probabilities = posterior.predictive(x[:64]).mean
    variances = posterior.functional_posterior(x[:4], outputs="diagonal").covariance.gather(1, best[:4])
    connection.send(
        {
            "total": probabilities.sum(1),
            "largest": probabilities.topk(TOP).values,
            "covariance": covariance,
            "variances": variances,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KFAC", "Diagonal"])
def test_a_head_of_fifty_thousand_outputs_fits_into_memory(name):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=fit_tune_and_predict, args=(name, sender))
    process.start()
    sender.close()
    found = receiver.recv()
    process.join()
    torch.testing.assert_close(found["total"], torch.ones(64), rtol=0, atol=1e-4)
    assert (found["largest"] > 1 / OUTPUTS).all()
    assert found["covariance"].shape == (64, TOP, TOP) and (torch.linalg.eigvalsh(found["covariance"]) > 0).all()
    diagonal = found["covariance"][:4].diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found["variances"], diagonal, rtol=1e-4, atol=0)
    assert found["peak"] < MOST_KIB  # torch and its libraries take 0.7 GiB of it
