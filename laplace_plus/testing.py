"""The conformance suite: what every posterior must do, ours and a third party's alike.

Inherit from :class:`PosteriorConformance` (or, for Gaussians, :class:`GaussianConformance`) in a test module, say how
the posterior is made, and pytest runs the rest::

    class TestMyPosterior(PosteriorConformance):
        def make(self, model, likelihood, **options):
            return MyPosterior(model, likelihood, **options)
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_plus.errors import CheckpointError, DataError, EmptyDataError, LabelError, LaplacePlusError, NotFittedError
from laplace_plus.posteriors import Posterior, load

Batches = list[tuple[Tensor, Tensor]]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What a posterior must leave alone, for comparison by :func:`assert_untouched`."""
    return {
        "state": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "parameters": {name: (id(p), p.requires_grad, id(p.grad)) for name, p in model.named_parameters()},
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    """Assert that a model is as it was at :func:`snapshot`."""
    after = snapshot(model)
    for name, value in before["state"].items():
        assert torch.equal(value, after["state"][name]), f"{name} was written to"
    for what in ("modes", "parameters"):
        assert before[what] == after[what], f"the model's {what} changed"


def raises(error: type[LaplacePlusError], call: Callable[[], Any]) -> None:
    """Assert that a call raises an error that says what was expected."""
    with suppress(error):
        call()
        raise AssertionError(f"{error.__name__} was not raised")


class Sorting(nn.Module):
    """Runs a network on a batch in the order of its inputs' first features, and puts the outputs back."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """As the network."""
        order = x[:, 0].argsort()
        return self.network(x[order])[order.argsort()]


class Merging(Sorting):
    """Adds to a network's outputs those at the mean of all inputs of a batch whose first feature has the same sign."""

    def forward(self, x: Tensor) -> Tensor:
        """As the network."""
        signs, place = x[:, 0].sign().unique(return_inverse=True)
        sums = x.new_zeros(len(signs), x.shape[1]).index_add(0, place, x)
        return self.network(x) + self.network(sums / place.bincount()[:, None])[place]


class PosteriorConformance(ABC):
    """Tests that every posterior passes.

    Attributes:
        rows: Number of data.
        one_pass: Whether fitting passes over the data once; otherwise iterators must be refused.
        device: Where the networks are.
        data_device: Where their data are; predictions are where the network is.
    """

    rows: int = 24
    one_pass: bool = True
    device: str = "cpu"
    data_device: str = "cpu"

    @abstractmethod
    def make(self, model: nn.Module, likelihood: Any, **options: Any) -> Posterior:
        """The posterior under test, with few enough iterations or samples to be quick."""

    # -- problems ------------------------------------------------------------------------------------------------------

    def network(self, outputs: int) -> nn.Module:
        """A small network in float64, with dropout and batch normalisation, left in training mode."""
        torch.manual_seed(0)
        layers = [nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, outputs)]
        return nn.Sequential(*layers).double().train().to(self.device)

    def classification(self) -> tuple[nn.Module, Batches]:
        """A network with three classes and its data in ragged batches."""
        generator = _generator(1)
        x = torch.randn(self.rows, 3, generator=generator, dtype=torch.float64)
        return self.network(3), self.batches(x, torch.randint(0, 3, (self.rows,), generator=generator))

    def regression(self) -> tuple[nn.Module, Batches]:
        """A network with two outputs and its data in ragged batches."""
        generator = _generator(2)
        x = torch.randn(self.rows, 3, generator=generator, dtype=torch.float64)
        y = x[:, :2].sin() + 0.1 * torch.randn(self.rows, 2, generator=generator, dtype=torch.float64)
        return self.network(2), self.batches(x, y)

    def batches(self, x: Tensor, y: Tensor) -> Batches:
        """Ragged ones, where the data are."""
        return list(zip(x.to(self.data_device).split(7), y.to(self.data_device).split(7), strict=True))

    def fitted(self) -> tuple[Any, nn.Module, Batches]:
        """The posterior fitted to the classification problem."""
        model, data = self.classification()
        return self.make(model, "classification").fit(data), model, data

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_fit_counts_what_it_sees(self) -> None:
        posterior, _, data = self.fitted()
        assert posterior.n_data == self.rows
        assert posterior.fit(list(data)).n_data == self.rows, "a second fit must forget the first"
        if self.one_pass:
            assert posterior.fit(iter(list(data))).n_data == self.rows, "an iterator is enough for one pass"
        else:
            raises(DataError, lambda: posterior.fit(iter(list(data))))

    def test_unfitted_is_refused(self) -> None:
        model, data = self.classification()
        posterior = self.make(model, "classification")
        raises(NotFittedError, lambda: posterior.predictive(data[0][0]))

    def test_bad_data_is_refused_and_changes_nothing(self) -> None:
        posterior, model, data = self.fitted()
        before, state = snapshot(model), posterior.predictive(data[0][0], generator=_generator()).mean
        raises(EmptyDataError, lambda: posterior.fit([]))
        wrong = [*data, (data[0][0], torch.full_like(data[0][1], 3))]
        raises(LabelError, lambda: posterior.fit(wrong))
        assert_untouched(model, before)
        again = posterior.predictive(data[0][0], generator=_generator()).mean
        assert torch.equal(again, state), "a failed fit must leave the posterior as it was"

    def test_model_is_untouched(self) -> None:
        model, data = self.classification()
        before = snapshot(model)
        posterior = self.make(model, "classification").fit(data)
        assert_untouched(model, before)
        posterior.predictive(data[0][0])
        posterior.predictive(data[0][0], method="sampled", n_samples=3)
        posterior.sample(2)
        assert_untouched(model, before)

    def test_rows_may_move_by_their_data(self) -> None:
        model, data = self.classification()
        for module in model.modules():
            if isinstance(module, nn.Dropout):  # which training would draw for other rows
                module.p = 0.0
        data[0] = data[0][0][data[0][0][:, 0].argsort()], data[0][1]  # only later batches are out of order
        found = []
        for network in model, Sorting(model):
            torch.manual_seed(0)
            posterior = self.make(network, "classification").fit(data)
            found.append([posterior.predictive(x, generator=_generator()).mean for x, _ in data[:2]])
        for plain, moved in zip(*found, strict=True):
            assert_close(moved, plain, rtol=1e-6, atol=1e-8)

    def test_samples_have_the_parameters_shape(self) -> None:
        posterior, model, _ = self.fitted()
        assert 0 < posterior.n_parameters <= sum(p.numel() for p in model.parameters())
        assert set(posterior.parameter_names) <= dict(model.named_parameters()).keys()
        samples = posterior.sample(4, generator=_generator())
        assert samples.shape == (4, posterior.n_parameters)
        assert torch.isfinite(samples).all()

    def test_generator_is_honoured(self) -> None:
        posterior, _, data = self.fitted()
        state = torch.get_rng_state()
        for draw in self.draws(posterior, data[0][0]):
            first, second, other = draw(_generator(0)), draw(_generator(0)), draw(_generator(1))
            assert torch.equal(first, second), "equal generators must give equal draws"
            assert not torch.equal(first, other), "different generators must give different draws"
        assert torch.equal(state, torch.get_rng_state()), "the global generator must be left alone"

    def draws(self, posterior: Posterior, x: Tensor) -> Iterable[Callable[[torch.Generator], Tensor]]:
        """Everything random that a posterior offers."""
        yield lambda g: posterior.sample(3, generator=g)
        yield lambda g: posterior.predictive(x, method="sampled", n_samples=3, generator=g).mean

    def test_classification_gives_probabilities(self) -> None:
        posterior, _, data = self.fitted()
        prediction = posterior.predictive(data[0][0], generator=_generator())
        probabilities = prediction.mean
        assert probabilities.shape == (7, 3)
        assert_close(probabilities.sum(-1), torch.ones(7).to(probabilities))
        assert (prediction.entropy() >= 0).all()
        assert (prediction.mutual_information() >= -1e-9).all()
        assert prediction.log_prob(data[0][1]).shape == (7,)
        assert_close(prediction.variance, probabilities * (1 - probabilities))
        assert posterior.predictive(data[0][0][:1]).mean.shape == (1, 3), "one input is a batch"

    def test_regression_variance_holds_the_noise(self) -> None:
        model, data = self.regression()
        prediction = self.make(model, "regression").fit(data).predictive(data[0][0], generator=_generator())
        assert prediction.mean.shape == prediction.variance.shape == (7, 2)
        assert_close(prediction.variance, prediction.epistemic + prediction.aleatoric)
        assert (prediction.variance >= 1.0 - 1e-9).all(), "the default noise of 1 belongs to the variance"

    def test_saved_and_loaded_is_the_same(self) -> None:
        posterior, model, data = self.fitted()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "posterior"
            posterior.save(path)
            loaded = load(path, model)
            assert type(loaded) is type(posterior)
            assert loaded.n_data == posterior.n_data
            ours = posterior.predictive(data[0][0], generator=_generator())
            theirs = loaded.predictive(data[0][0], generator=_generator())
            assert_close(ours.mean, theirs.mean, rtol=1e-12, atol=0)  # other strides may round otherwise
            assert torch.equal(posterior.sample(2, generator=_generator()), loaded.sample(2, generator=_generator()))
            here = load(path, copy.deepcopy(model).cpu()).predictive(data[0][0], generator=_generator())
            assert_close(here.mean, ours.mean.cpu(), rtol=1e-7, atol=1e-10)
            other = self.network(3)
            with torch.no_grad():
                next(other.parameters()).mul_(1.5)
            raises(CheckpointError, lambda: load(path, other))


class GaussianConformance(PosteriorConformance):
    """Tests that every Gaussian posterior passes besides."""

    def draws(self, posterior: Posterior, x: Tensor) -> Iterable[Callable[[torch.Generator], Tensor]]:
        """Also the linearised predictive by Monte Carlo."""
        yield from PosteriorConformance.draws(self, posterior, x)
        yield lambda g: posterior.predictive(x, link="mc", generator=g).mean

    def test_covariance_inverts_precision(self) -> None:
        posterior, _, _ = self.fitted()
        product = posterior.precision_matrix() @ posterior.covariance_matrix()
        assert_close(product, torch.eye(len(product)).to(product), rtol=0, atol=1e-9)
        assert_close(posterior.variance(), posterior.covariance_matrix().diagonal())

    def test_evidence_is_that_of_the_dense_precision(self) -> None:
        posterior, model, data = self.fitted()
        model.eval()
        with torch.no_grad():
            here = [(x.to(self.device), y.to(self.device)) for x, y in data]
            fit = sum(-nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in here)
        mean, prior = posterior.mean, posterior.prior().vector().to(posterior.mean)
        expected = fit - (prior * mean.square()).sum() / 2
        expected = expected - posterior.precision_matrix().logdet() / 2 + prior.log().sum() / 2
        assert_close(posterior.log_marginal_likelihood(), expected.double(), rtol=1e-9, atol=1e-9)

    def test_functional_covariance_is_that_of_the_linearised_network(self) -> None:
        posterior, _, data = self.fitted()
        self.assert_linearised(posterior, data[0][0])

    def test_examples_may_share_rows(self) -> None:
        model, data = self.classification()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Which rows belong")
            posterior = self.make(Merging(model), "classification").fit(data)
            for x, _ in data[:2]:
                self.assert_linearised(posterior, x)

    def assert_linearised(self, posterior: Any, x: Tensor) -> None:
        """Assert that functional posteriors are those of the network's linearisation, written out."""
        vector, x = posterior.network.vector(), x.to(self.device)
        jacobian = torch.func.jacrev(lambda v: posterior.network(x, posterior.network.substitute(v)))(vector)
        covariance = posterior.covariance_matrix()
        expected = torch.einsum("ncp,pq,mdq->ncmd", jacobian, covariance, jacobian)
        own = torch.einsum("ncnd->ncd", expected)
        mean, marginal = posterior.functional_posterior(x)
        assert_close(mean, posterior.network.forward(x))
        assert_close(marginal, own, rtol=1e-9, atol=1e-10)
        variances = posterior.functional_posterior(x, outputs="diagonal").covariance
        assert_close(variances, own.diagonal(dim1=-2, dim2=-1), rtol=1e-9, atol=1e-10)
        some = posterior.functional_posterior(x, outputs=[2, 0]).covariance
        assert_close(some, own[:, [2, 0]][..., [2, 0]], rtol=1e-9, atol=1e-10)
        joint = posterior.functional_posterior(x, joint=True).covariance
        assert_close(joint, expected, rtol=1e-9, atol=1e-10)

    def test_batches_may_be_split_anyhow(self) -> None:
        posterior, model, data = self.fitted()
        whole = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
        other: Any = self.make(model, "classification").fit(whole)
        assert_close(other.precision_matrix(), posterior.precision_matrix(), rtol=1e-10, atol=1e-12)

    def test_tuning_raises_the_evidence(self) -> None:
        posterior, _, _ = self.fitted()
        before = posterior.log_marginal_likelihood()
        assert posterior.log_marginal_likelihood(prior_precision=7.0) != before
        assert posterior.log_marginal_likelihood() == before, "asking must change nothing"
        after = posterior.fit_prior_precision("marginal_likelihood").log_marginal_likelihood()
        assert after >= before
        nearby = [posterior.log_marginal_likelihood(posterior.prior_precision * factor) for factor in (0.8, 1.25)]
        assert all(after > value for value in nearby), "tuning must end at an optimum"

    def test_predictions_are_differentiable_in_x(self) -> None:
        posterior, _, data = self.fitted()
        x = data[0][0][:2].clone()

        def outputs(x: Tensor) -> tuple[Tensor, Tensor]:
            prediction = posterior.predictive(x, differentiable=True)
            return prediction.mean, posterior.functional_posterior(x, differentiable=True).covariance

        assert torch.autograd.gradcheck(outputs, (x.requires_grad_(),), atol=1e-6, rtol=1e-5)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
