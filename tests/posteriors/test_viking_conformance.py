"""Kernel/image posteriors pass what every posterior passes."""

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.testing import PosteriorConformance


class TestVIKING(PosteriorConformance):
    one_pass = False
    rows = 12

    def network(self, outputs):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, outputs)]
        return nn.Sequential(*layers).double().train()

    def make(self, model, likelihood, **options):
        return lp.VIKING(model, likelihood, n_samples=3, projector="svd", **options)


@pytest.mark.slow
class TestTrainedVIKING(TestVIKING):
    def make(self, model, likelihood, **options):
        training = lp.ELBOTraining(epochs=1, scale_epochs=0)
        return lp.VIKING(model, likelihood, n_samples=3, mode=training, projector="svd", **options)
