"""Continual learning against the posterior of all tasks, and penalties against dense matrices, in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    ModelChangedError,
    NoGainWarning,
    NotFittedError,
    SelectionError,
)

NOISE = torch.tensor([0.3, 0.5], dtype=torch.float64)
PRIOR = 0.7


def tasks(n: int, seed: int = 0):
    """Inputs and targets of n tasks of different sizes, linear with noise."""
    generator = torch.Generator().manual_seed(seed)
    weights, found = torch.randn(4, 2, generator=generator).double(), []
    for task in range(n):
        x = torch.randn(8 + 5 * task, 4, generator=generator).double()
        found.append((x, x @ weights + 0.3 * torch.randn(len(x), 2, generator=generator).double()))
    return found


def minimise(net: nn.Module, loss) -> None:
    """One Newton step on a quadratic loss of a mapping of parameters, which is its minimum."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    sizes = [p.numel() for p in parameters.values()]

    def of(vector):
        parts = vector.split(sizes)
        return loss({name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts, strict=True)})

    vector = torch.cat([p.flatten() for p in parameters.values()])
    gradient, hessian = torch.autograd.functional.jacobian(of, vector), torch.autograd.functional.hessian(of, vector)
    with torch.no_grad():
        vector -= torch.linalg.solve(hessian, gradient)
        nn.utils.vector_to_parameters(vector, net.parameters())


def misfit(net, data, noise):
    def loss(parameters):
        outputs = torch.func.functional_call(net, parameters, data[0])
        return ((outputs - data[1]).square() / (2 * noise**2)).sum()

    return loss


def decay(parameters):
    return PRIOR / 2 * sum(p.square().sum() for p in parameters.values())


def learn_in_turn(cls, data, noise, **options):
    """A linear network after all tasks, one by one, and its posterior."""
    torch.manual_seed(1)
    net = nn.Linear(4, 2).double()
    likelihood = lp.Gaussian(noise_std=noise)
    minimise(net, lambda p: misfit(net, data[0], noise)(p) + decay(p))
    posterior = cls(net, likelihood, prior_precision=PRIOR, **options).fit([data[0]])
    for own in data[1:]:
        before = posterior
        minimise(net, lambda p, own=own, before=before: misfit(net, own, noise)(p) + lp.penalty(before, p))
        posterior = lp.continue_on(before, net).fit([own])
    return net, posterior


def learn_together(cls, data, noise, **options):
    net = nn.Linear(4, 2).double()
    minimise(net, lambda p: sum(misfit(net, own, noise)(p) for own in data) + decay(p))
    return cls(net, lp.Gaussian(noise_std=noise), prior_precision=PRIOR, **options).fit(data)


# -- several tasks are the posterior of all --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "noise", "options", "n"),
    [
        (lp.Full, NOISE, {}, 3),
        (lp.KFAC, NOISE, {}, 2),
        (lp.LowRank, NOISE[0], {"rank": 10, "tolerance": 1e-10}, 3),
    ],
)
def test_linear_regression_in_turn_is_that_of_all_data(cls, noise, options, n):
    data = tasks(n)
    _, posterior = learn_in_turn(cls, data, noise, **options)
    joint = learn_together(cls, data, noise, **options)
    assert posterior.n_data == joint.n_data
    assert_close(posterior.mean, joint.mean, rtol=1e-10, atol=1e-10)
    assert_close(posterior.precision_matrix(), joint.precision_matrix(), rtol=1e-10, atol=1e-9)
    # So is the evidence, whose terms of earlier tasks are known at other weights.
    assert_close(posterior.log_marginal_likelihood(), joint.log_marginal_likelihood(), rtol=1e-9, atol=1e-8)


def test_a_diagonal_adds_up_diagonals():
    data = tasks(3)
    net, posterior = learn_in_turn(lp.Diagonal, data, NOISE)
    joint = learn_together(lp.Diagonal, data, NOISE)
    assert_close(posterior.precision_matrix(), joint.precision_matrix(), rtol=1e-12, atol=1e-12)
    # The mean is that of quadratic penalties by the diagonals of one task after the other, written out.
    other, precision = nn.Linear(4, 2).double(), torch.full((10,), PRIOR).double()
    mean = torch.zeros(10).double()
    for own in data:
        minimise(
            other,
            lambda p, own=own, mean=mean, precision=precision: (
                misfit(other, own, NOISE)(p)
                + (precision * (torch.cat([v.flatten() for v in p.values()]) - mean).square()).sum() / 2
            ),
        )
        mean = torch.cat([p.detach().flatten() for p in other.parameters()])
        own_diagonal = lp.Diagonal(other, lp.Gaussian(noise_std=NOISE), prior_precision=1e-9).fit([own])
        precision = precision + own_diagonal.precision_matrix().diagonal()
    assert_close(posterior.mean, mean, rtol=1e-7, atol=1e-7)


def test_another_prior_mean_and_temperature():
    data, mean = tasks(2), torch.linspace(-1, 1, 10).double()
    options = {"prior_precision": torch.linspace(0.1, 2.0, 10).double(), "prior_mean": mean, "temperature": 2.0}
    net = nn.Linear(4, 2).double()

    def prior(p):
        vector = torch.cat([v.flatten() for v in p.values()])
        return (options["prior_precision"] * (vector - mean).square()).sum() / 2

    minimise(net, lambda p: misfit(net, data[0], NOISE)(p) / 2 + prior(p))
    first = lp.Full(net, lp.Gaussian(noise_std=NOISE), **options).fit([data[0]])
    minimise(net, lambda p: misfit(net, data[1], NOISE)(p) / 2 + lp.penalty(first, p))
    posterior = lp.continue_on(first, net).fit([data[1]])
    together = nn.Linear(4, 2).double()
    minimise(together, lambda p: sum(misfit(together, own, NOISE)(p) for own in data) / 2 + prior(p))
    joint = lp.Full(together, lp.Gaussian(noise_std=NOISE), **options).fit(data)
    assert_close(posterior.mean, joint.mean, rtol=1e-9, atol=1e-9)
    assert_close(posterior.precision_matrix(), joint.precision_matrix())
    assert_close(posterior.log_marginal_likelihood(), joint.log_marginal_likelihood(), rtol=1e-9, atol=1e-8)


# -- the penalty -----------------------------------------------------------------------------------------------------


def classifier(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch(rows=20, outputs=3, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator).to(dtype)
    return [(x, torch.randint(0, outputs, (rows,), generator=generator))]


CASES = [
    (lp.Full, {}),
    (lp.Full, {"parameters": "last_layer", "rows": 5}),  # kept as its rows of data
    (lp.Full, {"prior_precision": torch.linspace(0.1, 2.0, 45).double()}),
    (lp.KFAC, {}),
    (lp.KFAC, {"eigenvalue_corrected": True}),
    (lp.KFAC, {"parameters": ["0.weight", "2"]}),
    (lp.KFAC, {"parameters": torch.arange(45) % 3 == 0}),
    (lp.KFAC, {"prior_precision": torch.tensor([0.5, 3.0]).double()}),
    (lp.Diagonal, {}),
    (lp.LowRank, {"rank": 7, "remainder_probes": 0}),
    (lp.Subnetwork, {"selector": lp.Random(11, seed=0)}),
]


@pytest.mark.quick(
    "Full-options1",
    "Full-options2",
    "KFAC-options5",
    "KFAC-options6",
    "KFAC-options7",
    "Diagonal-options8",
    "LowRank-options9",
    "Subnetwork-options10",
)
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_the_penalty_is_the_dense_quadratic(cls, options):
    options = {"prior_precision": 0.7, "temperature": 1.5, **options}
    net, rows = classifier(), options.pop("rows", 20)
    posterior = cls(net, "classification", **options).fit(batch(rows))
    posterior.covariance_scale = 0.3
    precision, mean = posterior.precision_matrix(), posterior.mean
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.1 * torch.randn_like(p))
    named = dict(other.named_parameters())
    chosen = [
        named[s.name].flatten() if s.mask is None else named[s.name].flatten()[s.mask]
        for s in posterior.network.selected
    ]
    vector = torch.cat(chosen).detach().requires_grad_()
    wanted = (vector - mean) @ precision @ (vector - mean) / 2
    for given in (other, named, vector, other.state_dict()):
        assert_close(lp.penalty(posterior, given), wanted, rtol=1e-10, atol=1e-10)
    assert_close(posterior.log_prob(mean) - posterior.log_prob(vector), wanted, rtol=1e-9, atol=1e-9)
    (slope,) = torch.autograd.grad(lp.penalty(posterior, vector), vector)
    assert_close(slope, precision @ (vector.detach() - mean), rtol=1e-9, atol=1e-9)
    lp.penalty(posterior, other).backward()
    assert all(p.grad is not None for name, p in other.named_parameters() if name in posterior.parameter_names)
    assert torch.autograd.gradgradcheck(lambda v: lp.penalty(posterior, v), (vector,))


def test_the_network_may_move_and_stays_as_it_is():
    net, data = classifier(), batch()
    posterior = lp.KFAC(net, "classification").fit(data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    assert lp.penalty(posterior, net) == 0
    for _ in range(2):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(data[0][0]), data[0][1]) + lp.penalty(posterior, net) / 20).backward()
        optimizer.step()
    assert lp.penalty(posterior, net) > 0
    with pytest.raises(ModelChangedError):
        posterior.predictive(data[0][0])
    before = lp.testing.snapshot(net)
    moved = lp.continue_on(posterior, net).fit(data)
    lp.testing.assert_untouched(net, before)
    assert (moved.n_data, posterior.n_data) == (40, 20)
    assert lp.penalty(moved, net) == 0 < lp.penalty(posterior, net)


def test_bad_parameters_are_refused():
    net = classifier()
    posterior = lp.KFAC(net, "classification")
    with pytest.raises(NotFittedError):
        lp.penalty(posterior, net)
    with pytest.raises(NotFittedError):
        lp.continue_on(posterior, net)
    posterior.fit(batch())
    named = dict(net.named_parameters())
    wrong = {("2.wait" if name == "2.weight" else name): p for name, p in named.items()}
    with pytest.raises(ConfigurationError, match=r"'2\.weight'.*none among"):
        lp.penalty(posterior, wrong)
    with pytest.raises(ConfigurationError, match=r"'2\.weight'.*\[3, 6\].*\[6, 3\]"):
        lp.penalty(posterior, {**named, "2.weight": named["2.weight"].T})
    with pytest.raises(ConfigurationError, match="int64"):
        lp.penalty(posterior, {**named, "2.bias": torch.zeros(3, dtype=torch.long)})
    with pytest.raises(ConfigurationError, match="45"):
        lp.penalty(posterior, torch.zeros(44))
    with pytest.raises(ConfigurationError, match="no parameter"):
        lp.continue_on(posterior, nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double())
    with pytest.raises(SelectionError):
        lp.continue_on(posterior, net, parameters=["5"])


# -- heads -----------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """A body with a head for each task."""

    def __init__(self, n, outputs=(2, 2, 3)):
        super().__init__()
        self.body, self.task = nn.Linear(3, 4), 0
        self.heads = nn.ModuleList([nn.Linear(4, outputs[i]) for i in range(n)])

    def forward(self, x):
        return self.heads[self.task](torch.tanh(self.body(x)))


@pytest.mark.quick("KFAC", "Diagonal", "Full")
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal, lp.LowRank])
def test_heads_of_other_tasks_keep_what_is_known(cls):
    torch.manual_seed(0)
    net = Heads(3).double()
    options = {"rank": 39, "tolerance": 1e-8} if cls is lp.LowRank else {}
    data = [batch(12, 2, seed=1), batch(9, 2, seed=2), batch(15, 3, seed=3)]
    single, posterior = [], None
    for net.task, own in enumerate(data):
        single.append(cls(net, "classification", prior_precision=1e-9, **options).fit(own))
        earlier = cls(net, "classification", **options) if posterior is None else lp.continue_on(posterior, net)
        posterior = earlier.fit(own)
    matrices = [p.precision_matrix() - 1e-9 * torch.eye(p.n_parameters).double() for p in single]
    found = posterior.precision_matrix() - torch.eye(posterior.n_parameters).double()
    heads = slice(16, None)
    assert_close(found[heads, heads], sum(m[heads, heads] for m in matrices), rtol=1e-6, atol=1e-8)
    if cls is not lp.KFAC:  # whose factors are pooled
        assert_close(found, sum(matrices), rtol=1e-6, atol=1e-7)
    assert (posterior.n_data, posterior.n_outputs) == (36, 3)
    assert posterior.predictive(data[2][0][0]).mean.shape == (15, 3)
    again = posterior.update(data[2])
    assert again.n_data == 51


def test_kronecker_factors_of_tasks_are_pooled():
    torch.manual_seed(0)
    net = Heads(2).double()
    data = [batch(12, 2, seed=1), batch(9, 2, seed=2)]
    first = lp.KFAC(net, "classification").fit(data[0])
    net.task = 1
    second = lp.KFAC(net, "classification").fit(data[1])
    both = lp.continue_on(first, net).fit(data[1])
    (a, b, c) = (
        next(block for layout, block in p.state.curvature if "body.weight" in layout.names)
        for p in (first, second, both)
    )
    left, right = (getattr(a, side) + getattr(b, side) for side in ("left", "right"))
    assert_close(c.left, left)
    assert_close(c.right, right)
    assert float(c.count) == 21


class Shared(nn.Module):
    """Linear in its weights: shared ones, and an offset for each task."""

    def __init__(self, n):
        super().__init__()
        self.shared, self.task = nn.Linear(4, 2, bias=False), 0
        self.offsets = nn.ParameterList([torch.randn(2) for _ in range(n)])

    def forward(self, x):
        return self.shared(x) + self.offsets[self.task]


def test_a_new_head_is_under_the_prior_and_learnt():
    data = tasks(2)
    torch.manual_seed(0)
    one, two = Shared(1).double(), Shared(2).double()
    likelihood = lp.Gaussian(noise_std=NOISE)
    minimise(one, lambda p: misfit(one, data[0], NOISE)(p) + decay(p))
    first = lp.Full(one, likelihood, prior_precision=PRIOR).fit([data[0]])
    two.load_state_dict({**two.state_dict(), **one.state_dict()})
    two.task = 1
    prior = lp.continue_on(first, two)  # before the task is learnt
    assert prior.parameter_names == ("shared.weight", "offsets.0", "offsets.1")
    with torch.no_grad():
        offset = two.offsets[1].square().sum() * PRIOR / 2
    assert_close(lp.penalty(prior, two), offset)  # of the new head alone
    assert_close(lp.penalty(first, two), torch.zeros(()).double())
    minimise(two, lambda p: misfit(two, data[1], NOISE)(p) + lp.penalty(prior, p))
    posterior = prior.fit([data[1]])

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Shared(2).double()

        def forward(self, x):
            outputs = self.inner.shared(x[:, :4])
            return outputs + torch.where(x[:, 4:] > 0, self.inner.offsets[1], self.inner.offsets[0])

    joint = Both()
    x = torch.cat([torch.cat([own[0], torch.full((len(own[0]), 1), float(t))], 1) for t, own in enumerate(data)])
    every = x, torch.cat([own[1] for own in data])
    minimise(joint, lambda p: misfit(joint, every, NOISE)(p) + decay(p))
    wanted = lp.Full(joint, likelihood, prior_precision=PRIOR).fit([every])
    assert_close(posterior.mean, wanted.mean, rtol=1e-10, atol=1e-10)
    assert_close(posterior.precision_matrix(), wanted.precision_matrix(), rtol=1e-10, atol=1e-10)
    assert_close(posterior.log_marginal_likelihood(), wanted.log_marginal_likelihood(), rtol=1e-10, atol=1e-9)
    assert lp.continue_on(first, two, parameters=["shared"]).parameter_names == ("shared.weight", "offsets.0")


def test_parameters_in_another_order_and_frozen_ones():
    torch.manual_seed(0)

    class Swapped(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.two, self.one = copy.deepcopy(net.two), copy.deepcopy(net.one)

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    class Plain(Swapped):
        def __init__(self):
            nn.Module.__init__(self)
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    net = Plain().double()
    net.one.bias.requires_grad_(False)
    precision = torch.tensor([0.5, 3.0]).double()
    for cls in (lp.Full, lp.KFAC, lp.Diagonal):
        posterior = cls(net, "classification", prior_precision=precision).fit(batch(12, 2))
        assert "one.bias" not in posterior.parameter_names
        swapped = Swapped(net)
        moved = lp.continue_on(posterior, swapped)
        assert moved.parameter_names == ("two.weight", "two.bias", "one.weight")
        assert_close(moved.prior_precision, precision.flip(0))
        with torch.no_grad():
            swapped.one.weight.add_(0.1)
        assert_close(lp.penalty(moved, swapped), lp.penalty(posterior, swapped))
        swapped.two.weight.requires_grad_(False)  # frozen meanwhile: it stays in
        assert moved.fit(batch(12, 2, seed=2)).n_parameters == 22
        alone = cls(swapped, "classification", parameters=list(moved.parameter_names), prior_precision=1e-9)
        added = alone.fit(batch(12, 2, seed=2)).precision_matrix()
        if cls is lp.Full:
            order = torch.cat([torch.arange(12, 22), torch.arange(12)])
            wanted = posterior.precision_matrix()[order[:, None], order] + added
            assert_close(moved.precision_matrix(), wanted, rtol=1e-7, atol=1e-7)


def test_new_parameters_take_one_prior_precision():
    torch.manual_seed(0)
    net, more = Heads(1).double(), Heads(2).double()
    posterior = lp.Diagonal(net, "classification", prior_precision=torch.tensor([0.5, 3.0]).double()).fit(batch(12, 2))
    with pytest.raises(ConfigurationError, match="new parameters"):
        lp.continue_on(posterior, more)
    same = lp.continue_on(posterior, more, parameters=list(posterior.parameter_names))
    assert same.parameter_names == posterior.parameter_names


# -- fits, files and other posteriors --------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path):
    data = tasks(2)
    net, posterior = learn_in_turn(lp.Full, data, NOISE)
    posterior.save(tmp_path / "continued")
    loaded = lp.load(tmp_path / "continued", net)
    assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=0, atol=0)
    vector = torch.ones(10).double()
    assert_close(lp.penalty(loaded, vector), lp.penalty(posterior, vector), rtol=0, atol=0)
    refitted = lp.load(tmp_path / "continued", net).fit([data[1]])  # to the last task
    assert_close(refitted.log_marginal_likelihood(), posterior.log_marginal_likelihood())
    assert loaded.update([data[1]]).n_data == posterior.n_data + len(data[1][0])
    assert lp.continue_on(loaded, net).fit([data[0]]).n_data == loaded.n_data + len(data[0][0])
    tuned = posterior.fit_prior_precision("marginal_likelihood", tune_noise=False)
    nearby = [posterior.log_marginal_likelihood(tuned.prior_precision * f) for f in (0.8, 1.25)]
    assert tuned.log_marginal_likelihood() > max(nearby)
    for tuner, options in (("tangent", {}), ("leave_one_out", {"training_prior_precision": PRIOR})):
        for own in (None, [data[1]]):  # they pass over data that are gone
            with pytest.raises(DataError):
                posterior.fit_prior_precision(tuner, data=own, **options)
    with pytest.warns(NoGainWarning, match="not at hand"):
        posterior.fit_prior_precision(tune_noise=False)


def test_a_subnetwork_continues_as_the_class_within():
    net = classifier()
    posterior = lp.Subnetwork(net, "classification", lp.Random(11, seed=0)).fit(batch())
    moved = lp.continue_on(posterior, net).fit(batch(seed=2))
    assert isinstance(moved, lp.Full)
    assert moved.n_parameters == 11
    alone = lp.Full(net, "classification", parameters=moved.network.selection, prior_precision=1e-9)
    wanted = posterior.precision_matrix() + alone.fit(batch(seed=2)).precision_matrix()
    assert_close(moved.precision_matrix(), wanted, rtol=1e-7, atol=1e-7)


def test_corrected_eigenvalues_are_measured_in_the_first_task_s_basis():
    data = tasks(3)
    _, posterior = learn_in_turn(lp.KFAC, data[:2], NOISE[0], eigenvalue_corrected=True)
    joint = learn_together(lp.KFAC, data[:2], NOISE[0], eigenvalue_corrected=True)
    assert_close(posterior.mean, joint.mean, rtol=1e-10, atol=1e-10)
    assert_close(posterior.precision_matrix().trace(), joint.precision_matrix().trace())


@pytest.mark.parametrize("options", [{}, {"parameters": "last_layer"}])  # the latter kept as rows of data
def test_a_network_of_shifted_weights_adds_curvatures_at_both(options):
    net = classifier()
    first = lp.Full(net, "classification", **options).fit(batch(5))
    start = first.precision_matrix()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    alone = lp.Full(net, "classification", prior_precision=1e-9, **options).fit(batch(4, seed=2))
    moved = lp.continue_on(first, net).fit(batch(4, seed=2))
    assert_close(moved.precision_matrix(), start + alone.precision_matrix(), rtol=1e-8, atol=1e-8)
    assert_close(moved.mean, alone.mean)
