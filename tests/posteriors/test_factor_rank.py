"""KFAC with factors of limited rank against dense matrices made of the truncated factors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, NotFittedError, UnsupportedError
from laplace_plus.testing import GaussianConformance


class TestFactorRank(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.KFAC(model, likelihood, factor_rank=2, **options)

    def test_batches_may_be_split_anyhow(self):
        """Exactly the traces; what is left out depends on the order."""
        posterior, model, data = self.fitted()
        whole = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
        other = self.make(model, "classification").fit(whole)
        for (_, one), (_, two) in zip(posterior.state.curvature, other.state.curvature, strict=True):
            if hasattr(one, "right_sum"):
                found = [own.right_sum.leading() for own in (one, two)]
                assert_close(*(kept.square().sum((1, 2)) + lost for kept, lost in found))


def network(dtype=torch.float64, sizes=(40, 24, 20, 3)):
    torch.manual_seed(0)
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double().to(dtype)


def batches(dtype=torch.float64, n=100, size=40, each=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=generator, dtype=torch.float64) / torch.arange(1, size + 1)
    y = torch.randint(0, 3, (n,), generator=generator)
    return list(zip(x.to(dtype).split(each), y.split(each), strict=True))


def fitted(rank, dtype=torch.float64, likelihood="classification", **options):
    data = batches(dtype)
    if likelihood != "classification":
        data = [(x, torch.stack([x[:, 0], 3 * x[:, 1], y.to(dtype)], 1)) for x, y in data]
    return lp.KFAC(network(dtype), likelihood, factor_rank=rank, **options).fit(data), data


def dense(posterior):
    """The posterior precision, written out from the factors that are kept."""
    matrix = torch.diag(posterior.prior().vector().to(posterior.mean))
    weights = posterior.laplace_model().weights()
    for layout, block in posterior.state.curvature:
        own = torch.kron(torch.tensordot(weights, block.left.double(), 1)[0], block.right[0] / block.count)
        places = layout.index.flatten()
        matrix[places[:, None], places] += own
    return matrix


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rank_as_large_as_the_factors_is_kfac(dtype):
    (ours, data), (whole, _) = fitted(41, dtype), fitted(None, dtype)
    assert ours.log_marginal_likelihood() == whole.log_marginal_likelihood()
    assert torch.equal(ours.predictive(data[0][0]).mean, whole.predictive(data[0][0]).mean)
    assert set(ours.discarded_trace.values()) == {0.0}


def test_data_of_a_lower_rank_give_whole_factors():
    """Of which none is multiplied out."""
    model, generator = network(), torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator).double() @ torch.randn(6, 40, generator=generator).double()
    data = [(x[i : i + 10], torch.arange(10) % 3) for i in range(0, 60, 10)]
    ours, whole = (
        lp.KFAC(model, "classification", parameters=["0.weight"], factor_rank=k).fit(data) for k in (24, None)
    )
    ((_, block),) = ours.state.curvature
    assert block.right_sum.rank == 24 and block.left_sums[0].rank is None
    assert_close(ours.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-12, atol=0)
    for joint in (False, True):
        found, expected = (p.functional_posterior(x[:7] + 1, joint=joint).covariance for p in (ours, whole))
        assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert max(ours.discarded_trace.values()) < 1e-12


@pytest.mark.parametrize("rank", [1, 3, 9])
def test_everything_is_that_of_the_dense_truncated_factors(rank):
    data = batches(size=12)
    posterior = lp.KFAC(network(sizes=(12, 10, 7, 3)), "classification", factor_rank=rank, prior_precision=3.0).fit(
        data
    )
    precision, x = dense(posterior), data[0][0][:4]
    assert_close(posterior.precision_matrix(), precision, rtol=1e-11, atol=1e-11)
    covariance = torch.linalg.inv(precision)
    assert_close(posterior.variance(), covariance.diagonal(), rtol=1e-10, atol=1e-12)
    jacobian = torch.func.jacrev(lambda v: posterior.network(x, posterior.network.substitute(v)))(posterior.mean)
    expected = torch.einsum("ncp,pq,mdq->ncmd", jacobian, covariance, jacobian)
    assert_close(posterior.functional_posterior(x, joint=True).covariance, expected, rtol=1e-10, atol=1e-13)
    own = torch.einsum("ncnd->ncd", expected)
    assert_close(posterior.functional_posterior(x).covariance, own, rtol=1e-10, atol=1e-13)
    diagonal = posterior.functional_posterior(x, outputs="diagonal").covariance
    assert_close(diagonal, own.diagonal(dim1=1, dim2=2), rtol=1e-10, atol=1e-13)
    evidence = posterior.laplace_model().log_likelihood() - 1.5 * posterior.mean.square().sum()
    evidence = evidence - precision.logdet() / 2 + len(precision) * math.log(3.0) / 2
    assert_close(posterior.log_marginal_likelihood(), evidence, rtol=1e-12, atol=0)
    drawn = posterior.sample(4000, generator=torch.Generator().manual_seed(0)) - posterior.mean
    whitened = drawn @ torch.linalg.cholesky(precision)  # of unit covariance; its squared norms are χ² with P degrees
    assert abs(float(whitened.square().mean()) - 1) < 4.5 * math.sqrt(2 / whitened.numel())
    along = whitened @ torch.linalg.eigh(precision)[1][:, [0, -1]]
    assert ((along.mT @ along / len(along) - torch.eye(2)).abs() < 4.5 * math.sqrt(2 / len(along))).all()


@pytest.mark.slow
def test_more_rank_lowers_the_evidence_to_that_of_whole_factors_and_takes_variance():
    """``log det`` gains terms: the evidence of truncated factors is an upper bound."""
    whole, data = fitted(None)
    evidences, variances, shares = [], [], []
    for rank in (1, 2, 4, 8, 16, 30):
        posterior, _ = fitted(rank)
        evidences.append(float(posterior.log_marginal_likelihood()))
        variances.append(float(posterior.functional_posterior(data[0][0]).covariance.diagonal(dim1=1, dim2=2).sum()))
        share = posterior.discarded_trace["0.weight"]
        (_, ours), (_, theirs) = posterior.state.curvature.blocks[0], whole.state.curvature.blocks[0]
        traces = [float(b.left[0, 0].trace() * b.right[0].trace()) for b in (ours, theirs)]
        assert share == pytest.approx(1 - traces[0] / traces[1], abs=1e-12)
        shares.append(share)
    evidences.append(float(whole.log_marginal_likelihood()))
    variances.append(float(whole.functional_posterior(data[0][0]).covariance.diagonal(dim1=1, dim2=2).sum()))
    assert evidences == sorted(evidences, reverse=True) and variances == sorted(variances, reverse=True)
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.3 > 0.01 > shares[-1]
    assert f"rank-1 factors, 24 × 41 (matrix), {shares[0]:.1%} of its trace left out" in str(fitted(1)[0].summary())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_networks_of_lower_precision(dtype, tolerance):
    (ours, data), (exact, _) = fitted(5, dtype), fitted(5)
    x = data[0][0]
    assert {block.right_sum.dtype for _, block in ours.state.curvature} == {torch.float32}
    shift = ours.log_marginal_likelihood() - exact.log_marginal_likelihood()
    assert abs(float(shift)) < tolerance * abs(float(exact.log_marginal_likelihood()))
    found, expected = ours.functional_posterior(x).covariance, exact.functional_posterior(x.double()).covariance
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


class Largest(TorchDispatchMode):
    """The largest tensor, in numbers, that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numbers = max(
            self.numbers,
            *(x.untyped_storage().nbytes() // 8 for x in tree_leaves(result) if isinstance(x, torch.Tensor)),
            0,
        )
        return result


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")  # the network is not trained
def test_no_square_of_a_wide_side_is_formed(tmp_path):
    """Neither in a fit nor afterwards; the sides are those of an adapter, 400 inputs to 3 and back."""
    width, rank = 400, 4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 3), nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)).double()
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, width, generator=generator).double(), torch.arange(8) % 2) for _ in range(3)]
    with Largest() as largest:
        posterior = lp.KFAC(model, "classification", factor_rank=rank).fit(data)
        posterior.fit_prior_precision("marginal_likelihood", structure="layerwise").fit_prior_precision()
        posterior.predictive(data[0][0])
        posterior.functional_posterior(data[0][0], joint=True)
        posterior.sample(2)
        posterior.variance()
        posterior.summary()
        posterior.save(tmp_path / "saved")
        lp.load(tmp_path / "saved", model).update(data[:1]).predictive(data[0][0])
    assert largest.numbers < width**2 / 2
    with Largest() as largest:
        lp.KFAC(model, "classification").fit(data * 40)
    assert largest.numbers >= width**2


def test_updates_of_a_loaded_posterior_go_on_to_the_same_bits(tmp_path):
    posterior, data = fitted(3)
    posterior.save(tmp_path / "saved")
    loaded, more = lp.load(tmp_path / "saved", posterior.network.model), batches(seed=5)
    assert loaded.discarded_trace == posterior.discarded_trace
    for one in (posterior, loaded):
        one.update(more)
    assert torch.equal(posterior.log_marginal_likelihood(), loaded.log_marginal_likelihood())
    assert torch.equal(posterior.predictive(data[0][0]).mean, loaded.predictive(data[0][0]).mean)
    assert posterior.n_data == 200


def test_several_noise_levels():
    posterior, data = fitted(3, likelihood=lp.Gaussian(noise_std=torch.tensor([0.5, 1.0, 2.0])))
    precision, x = dense(posterior), data[0][0][:4]
    assert_close(posterior.precision_matrix(), precision, rtol=1e-11, atol=1e-11)
    jacobian = torch.func.jacrev(lambda v: posterior.network(x, posterior.network.substitute(v)))(posterior.mean)
    expected = torch.einsum("ncp,pq,ndq->ncd", jacobian, torch.linalg.inv(precision), jacobian)
    assert_close(posterior.functional_posterior(x).covariance, expected, rtol=1e-10, atol=1e-13)
    noise = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    value = posterior.log_marginal_likelihood(noise_std=noise)
    assert_close(value, posterior.log_marginal_likelihood(), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda s: posterior.log_marginal_likelihood(noise_std=s), noise, rtol=1e-5)


def test_what_does_not_go_together_is_refused():
    model = network()
    for rank in (0, 2.5, True):
        with pytest.raises(ConfigurationError, match="factor_rank"):
            lp.KFAC(model, "classification", factor_rank=rank)
    with pytest.raises(ConfigurationError, match="whole factors"):
        lp.KFAC(model, "classification", factor_rank=3, eigenvalue_corrected=True)
    with pytest.raises(NotFittedError):
        _ = lp.KFAC(model, "classification", factor_rank=3).discarded_trace
    for backend in ("curvlinops", "backpack"):
        pytest.importorskip({"backpack": "backpack"}.get(backend, backend))
        with pytest.raises(UnsupportedError, match="Kronecker factors as they are"):
            lp.KFAC(model, "classification", factor_rank=3, backend=backend).fit(batches())


def test_weights_without_curvature_keep_the_prior():
    """As those of an adapter's A while its B is zero."""
    model = network()
    model[2].weight.data.zero_()
    posterior = lp.KFAC(model, "classification", parameters=["0.weight", "2.weight"], factor_rank=3).fit(batches())
    assert posterior.discarded_trace["0.weight"] == 0.0
    assert "zero: keeps the prior" in str(posterior.summary())
    assert_close(posterior.variance()[:960], torch.ones(960, dtype=torch.float64))


class Tokens(nn.Module):
    """Maps tokens ``[B, T, d]`` one by one, and averages."""

    def __init__(self, width, inner):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)).mean(1))


@pytest.mark.diagonal
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("width", "inner", "tokens"), [(12, 7, 9), (6, 14, 9), (6, 5, 20), (20, 18, 3)])
def test_tokens(sharing, width, inner, tokens):
    """Whichever order of products is the cheaper one."""
    model, generator = Tokens(width, inner).double(), torch.Generator().manual_seed(1)
    x = torch.randn(30, tokens, width, generator=generator, dtype=torch.float64)
    posterior = lp.KFAC(model, "classification", factor_rank=3, weight_sharing=sharing)
    posterior.fit([(x[:20], torch.arange(20) % 3), (x[20:], torch.arange(10) % 3)])
    assert_close(posterior.precision_matrix(), dense(posterior), rtol=1e-11, atol=1e-11)
    covariance, few = torch.linalg.inv(dense(posterior)), x[:4]
    jacobian = torch.func.jacrev(lambda v: posterior.network(few, posterior.network.substitute(v)))(posterior.mean)
    expected = torch.einsum("ncp,pq,mdq->ncmd", jacobian, covariance, jacobian)
    assert_close(posterior.functional_posterior(few, joint=True).covariance, expected, rtol=1e-9, atol=1e-13)
    own = torch.einsum("ncnd->ncd", expected)
    assert_close(posterior.functional_posterior(few).covariance, own, rtol=1e-9, atol=1e-13)
    diagonal = posterior.functional_posterior(few, outputs="diagonal").covariance
    assert_close(diagonal, own.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-13)
