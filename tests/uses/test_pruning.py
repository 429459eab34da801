"""Pruning: against evidences of smaller models, refitted posteriors and dense covariances."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import laplace_plus as lp
from laplace_plus.applications.uses import conditioning, prune, saliency

NOISE, PRIOR, PRIOR_MEAN = 0.3, 2.0, 0.2


def linear_problem(cls=lp.Full, n=40, d=6, **options):
    """A ridge regression at its optimum, with a prior mean; some of the true weights are zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) @ (torch.eye(d) + 0.5).double()
    x = x * torch.linspace(3, 0.5, d).double()
    true = torch.tensor([1.0, 0, -2, 0, 0.2, 0, 0.5, 0])[:d].double()
    y = x @ true[:, None] + NOISE * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    net = nn.Linear(d, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(solution(x, y)[0].T)
    posterior = cls(net, lp.Gaussian(NOISE), prior_precision=PRIOR, prior_mean=PRIOR_MEAN, **options)
    return posterior.fit([(x[:25], y[:25]), (x[25:], y[25:])]), x, y


def solution(x, y):
    """Posterior mean and covariance."""
    precision = x.T @ x / NOISE**2 + PRIOR * torch.eye(x.shape[1]).double()
    return torch.linalg.solve(precision, x.T @ y / NOISE**2 + PRIOR * PRIOR_MEAN), torch.linalg.inv(precision)


def evidence(x, y):
    """log p(y) with the weights integrated out."""
    covariance = x @ x.T / PRIOR + NOISE**2 * torch.eye(len(x)).double()
    return MultivariateNormal(PRIOR_MEAN * x.sum(1), covariance).log_prob(y[:, 0])


def network_problem(cls, likelihood="classification", prior=None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3), nn.Tanh(), nn.Linear(3, 2)
    ).double()
    x, y = torch.randn(12, 2, 3, 3).double(), torch.randint(0, 2, (12,))
    posterior = cls(net, likelihood, prior_mean=0.1, **options)
    posterior.prior_precision = torch.tensor([2.0, 3.0, 1.0]) if prior is None else prior
    return posterior.fit([(x, y)])


def positions(posterior):
    """Where each parameter's entries are in the vector."""
    return {
        item.name: torch.arange(item.shape.numel()).view(item.shape) + posterior.network.offsets[item.name]
        for item in posterior.network.selected
    }


def units_of(posterior, unit):
    """Positions of each unit's entries, by the definitions."""
    at = positions(posterior)
    if unit == "weight":
        return [one.flatten() for name in at if "weight" in name for one in at[name].flatten().split(1)]
    if unit == "channel":
        names = ("0", "3", "5")
        return [
            torch.cat([at[f"{name}.weight"][i].flatten(), at[f"{name}.bias"][[i]]])
            for name in names
            for i in range(len(at[f"{name}.bias"]))
        ]
    if unit == "neuron":
        convolution = [at["0.weight"][:2].flatten(), at["0.weight"][2:].flatten()]  # one input for each group
        return convolution + [at[name][:, i] for name in ("3.weight", "5.weight") for i in range(at[name].shape[1])]
    return [torch.cat([own.flatten() for name, own in at.items() if name.startswith(part)]) for part in unit]


def change(posterior, at):
    """The Savage–Dickey ratio of some entries, from the dense covariance."""
    prior = posterior.prior()
    matrix = posterior.covariance_matrix()[at[:, None], at]
    before = torch.distributions.Normal(prior.mean.double(), prior.vector()[at].double().rsqrt())
    zero = torch.zeros(len(at)).double()
    return MultivariateNormal(posterior.mean[at], matrix).log_prob(zero) - before.log_prob(zero).sum()


def compensated(posterior, at):
    covariance, moved = posterior.covariance_matrix(), posterior.mean.clone()
    moved -= covariance[:, at] @ torch.linalg.solve(covariance[at[:, None], at], posterior.mean[at])
    moved[at] = 0
    return moved


def vector(posterior, pruned):
    return torch.cat([pruned.state_dict[name].flatten() for name in posterior.parameter_names])


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC])  # which are the same for one output
def test_changes_are_differences_of_exact_evidences(cls):
    posterior, x, y = linear_problem(cls)
    whole, scores = evidence(x, y), saliency(posterior, "evidence")["weight"][0]
    for i in range(6):
        kept = torch.arange(6) != i
        torch.testing.assert_close(-scores[i], evidence(x[:, kept], y) - whole, rtol=1e-9, atol=1e-9)
    pruned = prune(posterior, sparsity=0.67, criterion="magnitude")
    kept = torch.ones(6, dtype=torch.bool)
    for unit, own in zip(pruned.order, pruned.log_evidence_change, strict=True):
        before = evidence(x[:, kept], y)
        kept[unit] = False
        torch.testing.assert_close(own, evidence(x[:, kept], y) - before, rtol=1e-9, atol=1e-9)
    assert kept.tolist() == pruned.masks["weight"][0].tolist()
    assert kept.sum() == 2


def test_what_remains_is_the_posterior_of_the_smaller_model():
    posterior, x, y = linear_problem()
    pruned = prune(posterior, sparsity=0.5)
    kept = pruned.masks["weight"][0]
    mean, covariance = solution(x[:, kept], y)
    torch.testing.assert_close(pruned.state_dict["weight"][0, kept], mean[:, 0], rtol=1e-12, atol=1e-13)
    assert not pruned.state_dict["weight"][0, ~kept].any()
    # The masks are a selection: the posterior of what remains has the covariance Σ_rr − Σ_rg Σ_gg⁻¹ Σ_gr.
    net = copy.deepcopy(posterior.model)
    net.load_state_dict(pruned.state_dict)
    again = lp.Full(net, lp.Gaussian(NOISE), prior_precision=PRIOR, prior_mean=PRIOR_MEAN, parameters=pruned.masks).fit(
        [(x, y)]
    )
    torch.testing.assert_close(again.covariance_matrix(), covariance, rtol=1e-9, atol=1e-14)
    whole, gone = posterior.covariance_matrix(), ~kept
    left = whole[kept][:, gone] @ torch.linalg.solve(whole[gone][:, gone], whole[gone][:, kept])
    torch.testing.assert_close(whole[kept][:, kept] - left, covariance, rtol=1e-9, atol=1e-14)


def test_neither_sums_of_changes_nor_means_depend_on_the_order():
    posterior, x, y = linear_problem()
    orders, totals, smaller = set(), [], []
    for criterion in ("magnitude", "precision", "evidence"):
        pruned = prune(posterior, sparsity=1, criterion=criterion)
        orders.add(tuple(pruned.order.tolist()))
        totals.append(pruned.log_evidence_change.sum())
        smaller.append(change(posterior, pruned.order[:4]))
        torch.testing.assert_close(pruned.log_evidence_change[:4].sum(), smaller[-1], rtol=1e-9, atol=1e-9)
    assert len(orders) > 1
    torch.testing.assert_close(torch.stack(totals), totals[0].expand(3), rtol=1e-9, atol=0)
    torch.testing.assert_close(totals[0], evidence(x[:, :0], y) - evidence(x, y), rtol=1e-9, atol=0)


@pytest.mark.quick(
    "Full-options0-weight",
    "KFAC-options5-channel",
    "KFAC-options6-unit6",
    "Diagonal-options8-neuron",
    "KFAC-options10-neuron",
    "KFAC-options11-channel",
    "KFAC-options13-neuron",
    "LowRank-options15-unit15",
)
@pytest.mark.parametrize(
    ("cls", "options", "unit"),
    [
        *((lp.Full, {}, unit) for unit in ("weight", "channel", "neuron", ("0", "3.weight", "5"))),
        *((lp.KFAC, {}, unit) for unit in ("weight", "channel", ("0", "3.weight", "5"))),
        (lp.Diagonal, {}, "weight"),
        (lp.Diagonal, {}, "neuron"),
        (lp.KFAC, {"eigenvalue_corrected": True}, "channel"),
        (lp.KFAC, {"eigenvalue_corrected": True}, "neuron"),
        (lp.KFAC, {"factor_rank": 2}, "channel"),
        (lp.KFAC, {"factor_rank": 2}, "neuron"),
        (lp.KFAC, {"output_factor": "diagonal"}, "neuron"),
        (lp.LowRank, {"prior": 1.0}, "channel"),
        (lp.LowRank, {"prior": 1.0}, ("0", "3.weight", "5")),
    ],
)
def test_units_agree_with_dense_covariances(cls, options, unit):
    posterior = network_problem(cls, **options)
    groups = units_of(posterior, unit)
    expected = torch.stack([change(posterior, at) for at in groups])
    scores = torch.cat([own.flatten() for own in saliency(posterior, "evidence", unit).values()])
    torch.testing.assert_close(-scores, expected, rtol=1e-8, atol=1e-9)
    count = max(1, len(groups) // 3)
    matrix = posterior.precision_matrix()
    weighted = torch.stack([matrix.diagonal()[at] @ posterior.mean[at] ** 2 for at in groups])
    torch.testing.assert_close(torch.cat([own.flatten() for own in saliency(posterior, unit=unit).values()]), weighted)
    pruned = prune(posterior, sparsity=count / len(groups), unit=unit)
    assert len(pruned.order) == count
    at = torch.cat([groups[i] for i in pruned.order])
    torch.testing.assert_close(pruned.log_evidence_change.sum(), change(posterior, at), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(vector(posterior, pruned), compensated(posterior, at), rtol=1e-8, atol=1e-10)
    masks = torch.cat([pruned.masks[name].flatten() for name in posterior.parameter_names])
    assert sorted((~masks).nonzero()[:, 0].tolist()) == sorted(at.tolist())
    plain = prune(posterior, sparsity=count / len(groups), unit=unit, compensate=False)
    torch.testing.assert_close(vector(posterior, plain), posterior.mean * masks, rtol=0, atol=0)
    assert plain.order.tolist() == pruned.order.tolist()


def test_diagonal_posteriors_have_a_closed_form_for_each_weight():
    torch.manual_seed(1)
    posterior = network_problem(lp.Diagonal, prior=torch.rand(79) + 0.5)
    variance, precision = posterior.variance(), posterior.prior().vector()
    closed = -(variance * precision).log() / 2 - posterior.mean**2 / (2 * variance) + precision * 0.1**2 / 2
    scores = saliency(posterior, "evidence")
    for name, at in positions(posterior).items():
        if name in scores:
            torch.testing.assert_close(-scores[name], closed[at], rtol=1e-9, atol=1e-9)


def test_magnitudes_are_norms():
    posterior = network_problem(lp.Diagonal)
    for unit in ("weight", "channel", "neuron"):
        expected = torch.stack([posterior.mean[at].norm() for at in units_of(posterior, unit)])
        scores = torch.cat([own.flatten() for own in saliency(posterior, "magnitude", unit).values()])
        torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.quick("KFAC")
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC])
def test_the_evidence_is_looked_at_again_after_each_unit(cls):
    posterior = network_problem(cls)
    groups, gone = units_of(posterior, "channel"), []
    found = prune(posterior, sparsity=0.9, criterion="evidence", unit="channel")
    assert len(found.order) == 8
    for unit, own in zip(found.order.tolist(), found.log_evidence_change, strict=True):
        base = change(posterior, torch.cat(gone)) if gone else 0.0
        left = [i for i in range(len(groups)) if i not in found.order.tolist()[: len(gone)]]
        values = {i: float(change(posterior, torch.cat([*gone, groups[i]])) - base) for i in left}
        assert max(values, key=values.get) == unit
        assert abs(float(own) - values[unit]) < 1e-7
        gone.append(groups[unit])


def test_it_stops_where_the_evidence_is_largest():
    posterior, x, y = linear_problem(d=8)
    pruned = prune(posterior, stop="evidence", criterion="evidence")
    assert set(pruned.order.tolist()) == {1, 3, 5, 7}
    assert bool((pruned.log_evidence_change > 0).all())
    whole = prune(posterior, sparsity=1, criterion="precision").log_evidence_change.cumsum(0)
    few = prune(posterior, stop="evidence")
    assert len(few.order) == int(whole.argmax()) + 1
    assert not len(prune(posterior, stop="evidence", sparsity=0).order)


def test_no_further_than_the_loss_allows():
    posterior, x, y = linear_problem(d=8)

    def loss(weight):
        return -torch.distributions.Normal(x @ weight.T, NOISE).log_prob(y).mean()

    for cap in (0.0, 0.01, 0.3, 1e9):
        pruned = prune(posterior, max_loss_increase=cap)
        weight = posterior.model.weight.detach()
        grown = loss(pruned.state_dict["weight"]) - loss(weight)
        assert abs(float(grown) - pruned.loss_increase) < 1e-10
        assert pruned.loss_increase <= cap
        if cap < 1e9:
            more = prune(posterior, sparsity=(len(pruned.order) + 1) / 8)
            assert more.loss_increase > cap
    assert len(pruned.order) == 8
    held = [(x[:10], y[:10])]
    assert prune(posterior, sparsity=0.5, data=held).loss_increase != prune(posterior, sparsity=0.5).loss_increase
    assert len(prune(posterior, max_loss_increase=0.3, sparsity=0.25).order) == 2


def test_large_blocks_are_compensated_by_iteration(monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 15), nn.Tanh(), nn.Linear(15, 3)).double()
    x, y = torch.randn(60, 20).double(), torch.randint(0, 3, (60,))
    for options in ({}, {"eigenvalue_corrected": True}):
        posterior = lp.KFAC(net, "classification", **options).fit([(x, y)])
        expected = prune(posterior, sparsity=0.7)
        channels = prune(posterior, sparsity=0.5, unit="channel", criterion="evidence")
        monkeypatch.setattr(conditioning, "_MOST", 2**20 // 24)  # 315 and 48 entries: only the second one is joint
        found = prune(posterior, sparsity=0.7)
        for name, value in expected.state_dict.items():
            torch.testing.assert_close(found.state_dict[name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(found.state_dict[name] == 0, value == 0)
        assert torch.equal(found.log_evidence_change.isnan(), found.order < 300)
        torch.testing.assert_close(prune(posterior, sparsity=0.5, unit="channel", criterion="evidence"), channels)
        scores = saliency(posterior, "evidence")["0.weight"]
        at = positions(posterior)["0.weight"]
        torch.testing.assert_close(-scores[2, 3], change(posterior, at[2, 3][None]), rtol=1e-8, atol=1e-9)
        with pytest.raises(lp.errors.UnsupportedError, match="unknown"):
            prune(posterior, stop="evidence")
        monkeypatch.undo()
    full = lp.Full(net, "classification").fit([(x, y)])
    expected = prune(full, sparsity=0.7)
    monkeypatch.setattr(conditioning, "_MOST", 2**20 // 24)
    for name, value in prune(full, sparsity=0.7).state_dict.items():
        torch.testing.assert_close(value, expected.state_dict[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(lp.errors.UnsupportedError, match="too large"):
        saliency(full, "evidence", "channel")


def test_many_weights_go_a_few_at_a_time():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    x, y = torch.randn(80, 10).double(), torch.randint(0, 2, (80,))
    posterior = lp.Full(net, "classification").fit([(x, y)])
    pruned = prune(posterior, sparsity=0.8, criterion="evidence")
    at = torch.where(pruned.order < 200, pruned.order, pruned.order + 20)  # past the bias
    torch.testing.assert_close(pruned.log_evidence_change.sum(), change(posterior, at), rtol=1e-7, atol=1e-6)
    torch.testing.assert_close(vector(posterior, pruned), compensated(posterior, at), rtol=1e-6, atol=1e-8)
    assert pruned.log_evidence_change.sum() > prune(posterior, sparsity=0.8).log_evidence_change.sum()


def test_the_model_stays_and_its_copy_has_everything():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
            self.drop, self.tied, self.last = nn.Dropout(), nn.Linear(8, 8), nn.Linear(8, 2)
            self.again = nn.Linear(8, 8)
            self.again.weight = self.tied.weight
            self.first.bias.requires_grad_(False)

        def forward(self, x):
            x = self.drop(self.norm(self.first(x)))
            return self.last(torch.tanh(self.again(torch.tanh(self.tied(x)))))

    torch.manual_seed(0)
    net = Net().train()
    before, x, y = copy.deepcopy(net.state_dict()), torch.randn(30, 3), torch.randint(0, 2, (30,))
    for cls in (lp.Diagonal, lp.KFAC, lp.Full):
        posterior = cls(net, "classification").fit([{"x": x, "labels": y}])
        for unit in ("weight", "channel", "neuron"):
            pruned = prune(
                posterior, sparsity=0.6, unit=unit, criterion="evidence" if unit == "channel" else "precision"
            )
            assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
            other = Net()
            other.load_state_dict(pruned.state_dict)
            assert torch.equal(other.tied.weight, other.again.weight)
            assert torch.equal(other.first.bias, net.first.bias)
            for name, parameter in other.named_parameters():
                mask = pruned.masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
                assert not parameter[~mask].any()
                if "norm" in name:
                    assert mask.all()
            assert math.isfinite(pruned.loss_increase)
            pruned.state_dict["last.weight"].zero_()  # a copy
    assert before["last.weight"].any() and net.last.weight.any()


def test_a_part_of_the_weights():
    posterior = network_problem(lp.Full, prior=1.0, parameters={"3.weight": torch.arange(48).view(3, 16) % 3 == 0})
    scores = saliency(posterior)
    assert list(scores) == ["3.weight"]
    assert torch.equal(scores["3.weight"].isnan(), torch.arange(48).view(3, 16) % 3 != 0)
    pruned = prune(posterior, sparsity=0.5)
    assert pruned.masks["3.weight"].sum() == 8
    moved = pruned.state_dict["3.weight"] != posterior.model[3].weight
    assert not moved[scores["3.weight"].isnan()].any() and moved.sum() == 16


def test_transposed_convolutions_and_embeddings_have_their_inputs_first():
    net = nn.Sequential(nn.Embedding(5, 6), nn.Unflatten(1, (6, 1)), nn.ConvTranspose1d(6, 2, 3), nn.Flatten())
    posterior = lp.Diagonal(net, "regression").fit([(torch.arange(5), torch.randn(5, 6))])
    sizes = {unit: [len(own) for own in saliency(posterior, unit=unit).values()] for unit in ("channel", "neuron")}
    assert sizes == {"channel": [6, 2], "neuron": [5, 6]}
    channel = prune(posterior, sparsity=1 / 8, unit="channel", criterion="magnitude")
    (gone,) = channel.order.tolist()
    assert gone >= 6 and not channel.state_dict["2.weight"][:, gone - 6].any() and not channel.masks["2.bias"].all()


def test_bad_input_is_refused():
    posterior, x, y = linear_problem()
    for options in ({}, {"sparsity": 1.5}, {"stop": "loss"}, {"max_loss_increase": -1}, {"sparsity": float("nan")}):
        with pytest.raises(lp.errors.ConfigurationError):
            prune(posterior, **options)
    for options in ({"criterion": "size"}, {"unit": "layer"}):
        with pytest.raises(lp.errors.ConfigurationError):
            prune(posterior, sparsity=0.5, **options)
    with pytest.raises(lp.errors.SelectionError):
        saliency(posterior, unit=["bias"])
    with pytest.raises(lp.errors.NotFittedError):
        saliency(lp.Full(posterior.model, "regression"))
    with pytest.raises(lp.errors.UnsupportedError):
        saliency(posterior.model)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    biases = lp.Diagonal(net, "regression", parameters=["*bias"]).fit([(torch.randn(4, 2), torch.randn(4, 1))])
    with pytest.raises(lp.errors.ConfigurationError, match="units to prune"):
        saliency(biases)
    weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
    posterior = lp.Full(weight_norm, "regression").fit([(torch.randn(4, 2), torch.randn(4, 1))])
    with pytest.raises(lp.errors.UnsupportedError, match="cannot be pruned"):
        prune(posterior, sparsity=0.5)
    iterator = lp.Full(net, "regression").fit(iter([(torch.randn(4, 2), torch.randn(4, 1))]))
    assert math.isnan(prune(iterator, sparsity=0.5).loss_increase)
    with pytest.raises(lp.errors.DataError):
        prune(iterator, max_loss_increase=0.1)
    with pytest.raises(lp.errors.DataError):
        prune(iterator, sparsity=0.5, data=iter([]))
