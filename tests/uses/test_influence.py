"""Attribution: against retraining, closed forms and dense covariances."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import laplace_plus as lp
from laplace_plus.applications.uses import influence, self_influence


def linear_problem(n=20, seed=0, cls=lp.Full):
    """A ridge regression at its optimum, with what it computes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    y = y + 0.3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    net = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(solution(x, y).T)
    likelihood = lp.Gaussian(0.3)
    return cls(net, likelihood, prior_precision=2.0).fit([(x[:9], y[:9]), (x[9:], y[9:])]), x, y


def solution(x, y):
    return torch.linalg.solve(x.T @ x / 0.09 + 2 * torch.eye(3).double(), x.T @ y / 0.09)


def networks(n_networks=1):
    torch.manual_seed(0)
    x, y = torch.randn(30, 2).double(), torch.randint(0, 3, (30,))
    made = []
    for _ in range(n_networks):
        net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
        made.append(lp.Full(net, "classification").fit([(x, y)]))
    return made, x, y


def test_leverage_equals_retraining_for_each_datum():
    posterior, x, y = linear_problem()
    at = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).double()
    found = influence(posterior, [(at, at[:, :1])], method="leverage", of=lambda f, _: f[:, 0])
    truth = []
    for i in range(len(x)):
        kept = torch.arange(len(x)) != i
        truth.append(at @ (solution(x[kept], y[kept]) - solution(x, y)))
    torch.testing.assert_close(found.mean, torch.cat(truth, 1), rtol=0, atol=1e-10)
    assert found.mean.abs().max() > 1e-3
    assert found.indices[0].tolist() == list(range(len(x)))
    assert found.p_value.isnan().all()


def test_first_order_scores_sum_to_the_pull_of_the_prior():
    posterior, x, _ = linear_problem()
    found = influence(posterior, [(x[:3], x[:3, :1])], of=lambda f, _: f[:, 0]).mean.sum(1)
    expected = -x[:3] @ posterior.covariance_matrix() @ (2 * posterior.mean)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_linear_scores_are_those_of_dense_gradients():
    (posterior,), x, y = networks()
    net = posterior.network

    def losses(vector):
        return cross_entropy(net(x, net.substitute(vector)), y, reduction="none")

    gradients = torch.func.jacrev(losses)(net.vector())
    expected = gradients @ posterior.covariance_matrix() @ gradients.T
    found = influence(posterior, [(x[:5], y[:5])])
    torch.testing.assert_close(found.mean, expected[:5], rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(self_influence(posterior), expected.diagonal(), rtol=1e-8, atol=1e-12)
    logits = influence(posterior, [(x[:5], y[:5])], of="logit")
    rows = torch.func.jacrev(lambda v: net(x[:5], net.substitute(v)).gather(1, y[:5, None])[:, 0])(net.vector())
    torch.testing.assert_close(logits.mean, rows @ posterior.covariance_matrix() @ gradients.T, rtol=1e-8, atol=1e-12)


def test_several_networks_give_a_t_test_and_the_largest_are_kept():
    members, x, y = networks(4)
    query = [(x[:2], y[:2])]
    single = torch.stack([influence(member, query).mean for member in members])
    found = influence(members, query)
    torch.testing.assert_close(found.mean, single.mean(0))
    torch.testing.assert_close(found.std, single.std(0))
    scipy = pytest.importorskip("scipy.stats")
    expected = scipy.ttest_1samp(single.numpy(), 0).pvalue
    torch.testing.assert_close(found.p_value, torch.from_numpy(expected))
    batches = [(x[i : i + 7], y[i : i + 7]) for i in range(0, 30, 7)]
    few = influence(members, query, data=batches, top=3)
    order = found.mean.abs().argsort(1, descending=True)[:, :3]
    assert few.indices.tolist() == order.tolist()
    torch.testing.assert_close(few.mean, found.mean.gather(1, order))


def test_flipped_labels_stand_out():
    torch.manual_seed(0)
    y = torch.arange(300) % 3
    x = torch.randn(300, 5) + 2 * torch.nn.functional.one_hot(y, 5)
    flipped = torch.rand(300) < 0.1
    noisy = torch.where(flipped, (y + 1) % 3, y)
    net = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(net(x), noisy).backward()
        optimizer.step()
    posterior = lp.KFAC(net, "classification", prior_precision=0.3).fit([(x, noisy)])
    scores = self_influence(posterior)
    auroc = (scores[flipped][:, None] > scores[~flipped]).double().mean()
    assert auroc > 0.85
