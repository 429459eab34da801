"""Choosing data: against dense covariances and posteriors that were updated with the chosen data."""

import math

import torch

import laplace_plus as lp
import laplace_plus.applications.uses.selection as selection
from laplace_plus.applications.uses import select


def problem(likelihood="regression", outputs=1, hidden=5):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, outputs)).double()
    x, pool = torch.randn(12, 2).double(), torch.randn(15, 2).double()
    y = torch.randn(12, outputs).double() if likelihood == "regression" else torch.arange(12) % outputs
    return lp.Full(net, likelihood).fit([(x, y)]), pool


def dense(posterior, pool):
    return posterior.functional_posterior(pool, joint=True).covariance.flatten(0, 1).flatten(1)


def test_greedy_gain_is_the_drop_of_entropy_and_update_gives_the_same_kernel():
    posterior, pool = problem()
    chosen = select(posterior, pool, 5)
    kernel, noise = dense(posterior, pool), posterior.likelihood.noise_std.double() ** 2
    own = kernel[chosen.indices][:, chosen.indices]
    gain = torch.logdet(torch.eye(5).double() + own / noise) / 2
    torch.testing.assert_close(chosen.scores.sum(), gain, rtol=1e-10, atol=0)
    before = torch.logdet(posterior.covariance_matrix())
    posterior.update([(pool[chosen.indices], torch.zeros(5, 1).double())])
    torch.testing.assert_close((before - torch.logdet(posterior.covariance_matrix())) / 2, gain, rtol=1e-8, atol=0)
    left = kernel - kernel[:, chosen.indices] @ torch.linalg.solve(own + noise * torch.eye(5), kernel[chosen.indices])
    torch.testing.assert_close(dense(posterior, pool), left, rtol=1e-8, atol=1e-12)


def test_each_pick_of_determinant_and_targets_is_the_best_of_the_updated_posterior():
    for method in ("determinant", "targets"):
        posterior, pool = problem()
        chosen = select(posterior, pool, 3, method=method).indices.tolist()
        for place, best in enumerate(chosen):
            kernel, noise = dense(posterior, pool), posterior.likelihood.noise_std.double() ** 2
            if method == "determinant":
                value = kernel.diagonal().clone()
            else:
                value = kernel.square().sum(0) / (kernel.diagonal() + noise)
            value[chosen[:place]] = -math.inf
            assert int(value.argmax()) == best
            posterior.update([(pool[[best]], torch.zeros(1, 1).double())])


def test_classes_use_the_curvature_of_the_softmax():
    posterior, pool = problem("classification", 3)
    chosen = select(posterior, pool, 4)
    size = len(pool)
    blocks = dense(posterior, pool).view(size, 3, size, 3)
    p = posterior.network.forward(pool).softmax(-1).detach()
    weights = torch.block_diag(*(torch.diag(p[i]) - torch.outer(p[i], p[i]) for i in chosen.indices))
    own = blocks[chosen.indices][:, :, chosen.indices].reshape(12, 12)
    gain = torch.logdet(torch.eye(12).double() + weights @ own) / 2
    torch.testing.assert_close(chosen.scores.sum(), gain, rtol=1e-10, atol=0)


def test_one_pick_is_the_largest_variance_and_the_order_of_the_pool_does_not_matter():
    posterior, pool = problem()
    assert select(posterior, pool, 1).indices == select(posterior, pool, 1, method="variance").indices
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(1))
    for method in ("variance", "determinant", "targets", "max_distance", "lcmd"):
        first, second = (select(posterior, x, 4, method=method).indices for x in (pool, pool[order]))
        assert first.tolist() == order[second].tolist(), method


def test_a_duplicate_is_not_chosen_where_diversity_counts():
    posterior, pool = problem()
    posterior.likelihood = posterior.likelihood.with_noise(1e-6)
    best = select(posterior, pool, 1).indices
    twice = torch.cat([pool, pool[best]])
    assert set(select(posterior, twice, 2, method="variance").indices.tolist()) == {int(best), len(pool)}
    for method in ("determinant", "targets", "max_distance", "lcmd", "kmeans++"):
        chosen = select(posterior, twice, 8, method=method, generator=torch.Generator().manual_seed(0)).indices.tolist()
        assert len(set(chosen)) == 8
        assert not {int(best), len(pool)} <= set(chosen), method


def test_distances_are_those_of_gradients():
    posterior, pool = problem()
    net, (train, _) = posterior.network, posterior.training_data.first[0]
    both = torch.cat([train, pool])
    jacobian = torch.func.jacrev(lambda v: net(both, net.substitute(v)))(net.vector())
    seen, found = jacobian[:, 0].split([12, 15])
    distance = torch.cdist(found, seen).square()
    chosen = select(posterior, pool, 2, method="max_distance")
    assert chosen.indices[0] == distance.min(1).values.argmax()
    torch.testing.assert_close(chosen.scores[0], distance.min(1).values.max())
    nearest, clusters = distance.argmin(1), torch.zeros(12).double()
    clusters.index_add_(0, nearest, distance.min(1).values)
    inside = distance.min(1).values.masked_fill(nearest != clusters.argmax(), -1)
    assert select(posterior, pool, 1, method="lcmd").indices[0] == inside.argmax()


def test_kmeans_draws_in_proportion_to_squared_distances():
    posterior, pool = problem()
    pool, generator = pool[:3], torch.Generator().manual_seed(0)
    drawn = torch.cat([select(posterior, pool, 1, method="kmeans++", generator=generator).indices for _ in range(60)])
    far = [select(posterior, pool[[i]], 1, method="max_distance").scores[0] for i in range(3)]
    share = torch.stack(far) / sum(far)
    error = (drawn.bincount(minlength=3) / 60 - share) / (share * (1 - share) / 60).sqrt()
    assert error.abs().max() < 4


def test_sketches_are_right_in_expectation_on_any_posterior():
    posterior, pool = problem()
    exact = select(posterior, pool, 1, method="variance").scores[0]
    found = torch.stack(
        [
            select(
                posterior, pool, len(pool), method="variance", n_features=20, generator=torch.Generator().manual_seed(s)
            ).scores.sum()
            for s in range(40)
        ]
    )
    whole = select(posterior, pool, len(pool), method="variance").scores
    assert exact == whole[0]
    assert abs(found.mean() - whole.sum()) < 4 * found.std() / math.sqrt(40)
    other = lp.KFAC(posterior.model, "regression").fit(posterior.training_data.first)
    assert len(select(other, pool, 3, n_features=4, generator=torch.Generator()).indices) == 3


def test_parts_of_a_pool_change_nothing(monkeypatch):
    posterior, pool = problem()
    expected = select(posterior, pool, 4)
    monkeypatch.setattr(selection, "_ENTRIES", 3 * posterior.n_parameters)
    torch.testing.assert_close(select(posterior, pool, 4), expected)
