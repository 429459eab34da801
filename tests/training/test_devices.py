"""Training on a graphics card: the same numbers as on the CPU, and continued there."""

from __future__ import annotations

import copy

import pytest
import torch
from training.problems import classes, classifier

import laplace_plus as lp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def train(net, **options):
    x, y = classes()
    settings = {"epochs": 8, "frequency": 2, "hyper_steps": 10, "optimizer_options": {"lr": 1e-2}}
    return lp.train_marginal_likelihood(net, [(x.double(), y)], **{**settings, **options})


def test_same_numbers_as_on_the_cpu():
    net = classifier(norm=True).double()
    there = train(copy.deepcopy(net).cuda())
    here = train(net)
    assert next(there.model.parameters()).is_cuda and there.posterior.mean.is_cuda
    assert there.evidences == pytest.approx(here.evidences, rel=1e-6)
    torch.testing.assert_close(there.prior_precisions, here.prior_precisions, rtol=1e-5, atol=1e-8)


def test_continued_equals_uninterrupted():
    def start():
        torch.manual_seed(5)
        return classifier(dropout=0.3).double().cuda()

    whole, begun = train(start()), train(start(), epochs=4)
    continued = train(start(), state=begun.state)
    assert continued.evidences == pytest.approx(whole.evidences, rel=1e-6)
