"""Likelihoods of one's own and random numbers, for the tests of likelihoods."""

from __future__ import annotations

import torch.distributions as td

from laplace_plus.likelihoods import Likelihood


class StudentT(Likelihood):
    """Heavy tails: not log-concave far from the target."""

    def log_density(self, outputs, targets):
        return td.StudentT(4.0, outputs, 0.7).log_prob(targets).sum(-1)


class Ordinal(Likelihood):
    """A log-concave likelihood of one's own, with a distribution."""

    links = ("mc",)

    def log_density(self, outputs, targets):
        return self.distribution(outputs).log_prob(targets).sum(-1)

    def distribution(self, outputs):
        return td.Geometric(logits=outputs)
