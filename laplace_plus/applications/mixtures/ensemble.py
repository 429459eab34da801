"""Deep ensembles: networks of one kind, trained from different starts, that predict together.

Lakshminarayanan, Pritzel & Blundell (2017, arXiv:1612.01474). Predictions are those of M sampled networks, ``1/M Σ_m
p(y | f_m(x))``; their differences are the epistemic uncertainty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.resolve import resolve_likelihood
from laplace_plus.network.batches import inputs_of, iterate
from laplace_plus.network.network import Network
from laplace_plus.predictive import Prediction, from_samples


class Ensemble:
    """Trained networks behind one predictive; see also :class:`Mixture`, whose members are posteriors.

    Networks stay as they are, and are called in evaluation mode.

    Args:
        models: M trained networks with the same inputs and outputs.
        likelihood: As for :class:`Posterior`. Gaussian noise that is not given is fitted to the residuals of the mean
            of the networks by :meth:`fit`, without which nothing else needs one.

    Raises:
        ConfigurationError: No networks, or what are none.

    Example:
        >>> nets = [nn.Linear(2, 3) for _ in range(5)]
        >>> Ensemble(nets, "classification").predictive(torch.zeros(4, 2)).mean.shape
        torch.Size([4, 3])
    """

    def __init__(self, models: Iterable[nn.Module], likelihood: Any):
        self.likelihood: Likelihood = resolve_likelihood(likelihood)
        several = () if isinstance(models, nn.Module) else models  # a Sequential iterates over its layers
        self.networks = tuple(Network(model, "all", self.likelihood.arrange) for model in several)
        checks.count("The number of networks", len(self.networks))

    def __repr__(self) -> str:
        return f"Ensemble({len(self.networks)} networks, {self.likelihood!r})"

    def fit(self, data: Iterable[Any], *, progress: bool = False) -> Self:
        """Set Gaussian noise to the root mean square of the residuals of the networks' mean, one level an output.

        Training residuals are too small where networks interpolate: held-out data give a better noise.

        Args:
            data: Batches.
            progress: Whether to show a progress bar.

        Raises:
            ConfigurationError: The likelihood has no noise.
            DataError: Residuals that are all zero.
        """
        if not self.likelihood.is_gaussian:
            raise ConfigurationError("There is no noise to fit.", expected="a Gaussian likelihood", got=repr(self))
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in iterate(data, device=self.networks[0].device, progress=progress, description="Ensemble: noise"):
            mean = self._outputs(batch.inputs).mean(0)
            outputs, targets, _ = self.likelihood.rows(mean, batch.target)
            total = total + (outputs - targets).double().square().sum(0).cpu()
            count += len(outputs)
        if not bool((total > 0).all()):
            raise DataError(
                "The networks fit these data exactly.", expected="residuals", got="zero: pass held-out data"
            )
        self.likelihood = self.likelihood.with_noise((total / count).sqrt().to(mean))
        return self

    def _outputs(self, x: Any) -> Tensor:
        with torch.no_grad():
            found = [network.forward(network.receive(x)) for network in self.networks]
        return torch.stack([checks.shape("A network's output", own, found[0].shape).to(found[0]) for own in found])

    def predictive(
        self, x: Any = None, *, joint: bool = False, generator: torch.Generator | None = None, **batch: Any
    ) -> Prediction:
        """``1/M Σ p(y | f_m(x))``.

        Args:
            x: A batch's inputs.
            joint: Whether log-probabilities are of all inputs together.
            generator: Source of randomness of entropies without a closed form.
            **batch: In place of ``x``, the entries of a batch that is a mapping.

        Raises:
            ConfigurationError: Networks with other outputs than the first one's.
            InputError: A network fails on these inputs.
        """
        checks.generator(generator)
        outputs = self._outputs(inputs_of(batch) if x is None else x)
        return from_samples(self.likelihood, outputs, generator=generator, joint=joint)
