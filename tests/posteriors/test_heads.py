"""Linear heads with many outputs against dense float64 matrices, in memory, and in storage."""

from __future__ import annotations

import pytest
import torch
from problems import LargestTensor, categorical_hessian, generator, occam, relative_error
from torch import nn

import laplace_plus as lp
from laplace_plus.curvature import structures
from laplace_plus.errors import ConfigurationError
from laplace_plus.structured import DenseGradients, OuterGradients, softmax_output
from laplace_plus.structured.gram_sum import DiagonalSum
from laplace_plus.structured.one_hot import OutputLayerGradients
from laplace_plus.structured.softmax_output import SoftmaxOutputBlock, SoftmaxOutputFactor, SoftmaxOutputRows

TIGHT = 1e-10
D, C = 5, 4


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    """Heads this small are kept as up to 15 rows, C^(2/3) (D + 1)."""
    monkeypatch.setattr(softmax_output, "_EVALUATIONS", 1)


def problem(n: int, *, likelihood: str = "classification", seed: int = 0):
    """A network with a head of C outputs and D + 1 inputs (the bias's among them), and data."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, D), nn.Tanh(), nn.Linear(D, C)).double()
    x = torch.randn(n, 3, generator=generator(seed), dtype=torch.float64)
    if likelihood == "classification":
        return net, x, torch.randint(0, C, (n,), generator=generator(seed))
    return net, x, torch.randint(0, 2, (n, C), generator=generator(seed)).double()


def features(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    inner = net[1](net[0](x)).detach()
    return torch.cat([inner, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def oracle(net: nn.Module, x: torch.Tensor, *, likelihood: str = "classification") -> torch.Tensor:
    """The head's curvature, ``[C·(D+1), C·(D+1)]`` with the features varying fastest."""
    phi, outputs = features(net, x), net(x).detach()
    hessian = categorical_hessian(outputs)
    if likelihood == "binary":
        p = outputs.sigmoid()
        hessian = torch.diag_embed(p * (1 - p))
    return torch.einsum("ncd,ni,nj->cidj", hessian, phi, phi).reshape(C * (D + 1), C * (D + 1))


def in_head_order(posterior, vector: torch.Tensor) -> torch.Tensor:
    """Vectors over the parameters as vectors over the head's ``[C, D + 1]`` array."""
    weight, bias = vector[..., : C * D].unflatten(-1, (C, D)), vector[..., C * D :]
    return torch.cat([weight, bias[..., None]], -1).flatten(-2)


def block_of(posterior):
    ((_, block),) = posterior.laplace_model().curvature
    return block


def jacobian(net, x):
    phi = features(net, x)
    return torch.einsum("cd,bi->bcdi", torch.eye(C, dtype=x.dtype), phi).flatten(2)


CASES = [("classification", 3), ("classification", 11), ("classification", 23), ("binary", 7)]


# -- Full --------------------------------------------------------------------------------------------------------------


@pytest.mark.diagonal
@pytest.mark.parametrize(("likelihood", "n"), [*CASES, ("classification", 30)])
@pytest.mark.parametrize("prior", ["scalar", "diagonal"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_full_equals_the_dense_matrix(likelihood, n, prior, temperature):
    net, x, y = problem(n, likelihood=likelihood)
    size = C * (D + 1)
    delta = torch.tensor(0.7, dtype=torch.float64)
    if prior == "diagonal":
        delta = 0.2 + torch.rand(size, generator=generator(1), dtype=torch.float64)
    options = {"prior_precision": delta, "temperature": temperature, "parameters": "last_layer"}
    posterior = lp.Full(net, likelihood, **options).fit([(x[:2], y[:2]), (x[2:], y[2:])])
    assert isinstance(block_of(posterior), SoftmaxOutputBlock)
    assert ("features" not in block_of(posterior).tensors()) == (n > 15)
    curvature = oracle(net, x, likelihood=likelihood) / temperature
    diagonal = in_head_order(posterior, delta.expand(size))
    covariance = torch.linalg.inv(curvature + torch.diag(diagonal))
    test = torch.randn(6, 3, generator=generator(2), dtype=torch.float64)
    rows = jacobian(net, test)
    want = torch.einsum("bcp,pq,bdq->bcd", rows, covariance, rows)
    assert relative_error(posterior.functional_posterior(test).covariance, want) < TIGHT
    variances = posterior.functional_posterior(test, outputs="diagonal").covariance
    assert relative_error(variances, want.diagonal(dim1=1, dim2=2)) < TIGHT
    some = posterior.functional_posterior(test, outputs=[2, 0]).covariance
    assert relative_error(some, want[:, [2, 0]][:, :, [2, 0]]) < TIGHT
    joint = posterior.functional_posterior(test, joint=True).covariance
    assert relative_error(joint, torch.einsum("bcp,pq,edq->bced", rows, covariance, rows)) < TIGHT
    got = posterior.covariance_matrix()
    order = in_head_order(posterior, torch.arange(size).double()).long()
    assert relative_error(got[order][:, order], covariance) < TIGHT
    assert relative_error(in_head_order(posterior, posterior.variance()), covariance.diagonal()) < TIGHT
    deviation = in_head_order(posterior, posterior.mean)
    fit = posterior.laplace_model().log_likelihood().item() / temperature
    evidence = fit + occam(curvature, deviation, diagonal).item()
    assert posterior.log_marginal_likelihood().item() == pytest.approx(evidence, rel=TIGHT)


@pytest.mark.parametrize(("likelihood", "n"), CASES)
def test_derivatives_of_the_evidence(likelihood, n):
    net, x, y = problem(n, likelihood=likelihood)
    posterior = lp.Full(net, likelihood, parameters="last_layer").fit([(x, y)])
    size = posterior.n_parameters
    curvature, deviation = oracle(net, x, likelihood=likelihood), in_head_order(posterior, posterior.mean)
    fit = posterior.laplace_model().log_likelihood().item()
    for shape in ((), (size,)):
        precision = (0.3 + torch.rand(shape, generator=generator(3), dtype=torch.float64)).requires_grad_()
        temperature = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        value = posterior.log_marginal_likelihood(precision, temperature=temperature)
        got = torch.autograd.grad(value, (precision, temperature))
        diagonal = in_head_order(posterior, precision.expand(size))
        total = curvature / temperature + torch.diag(diagonal)
        scatter = (diagonal * deviation.square()).sum()
        want = fit / temperature - (scatter + torch.logdet(total) - diagonal.log().sum()) / 2
        assert value.item() == pytest.approx(want.item(), rel=TIGHT)
        for mine, theirs in zip(got, torch.autograd.grad(want, (precision, temperature)), strict=True):
            assert relative_error(mine, theirs) < 1e-9


@pytest.mark.parametrize("likelihood", ["classification", "binary"])
@pytest.mark.parametrize("prior", ["scalar", "diagonal"])
def test_samples_have_the_posteriors_covariance_exactly(likelihood, prior):
    # The map from noise to samples is linear: its matrix times its transpose is the covariance, without any sampling.
    net, x, y = problem(9, likelihood=likelihood)
    size = C * (D + 1)
    delta = torch.tensor(0.4, dtype=torch.float64)
    if prior == "diagonal":
        delta = 0.2 + torch.rand(size, generator=generator(1), dtype=torch.float64)
    posterior = lp.Full(net, likelihood, parameters="last_layer", prior_precision=delta, temperature=0.6).fit([(x, y)])
    (factor,) = posterior.factors().values()
    noise = torch.eye(size, dtype=torch.float64).view(size, 1, C, D + 1)
    columns = factor.sample(noise).flatten(1)
    diagonal = in_head_order(posterior, delta.expand(size))
    want = torch.linalg.inv(oracle(net, x, likelihood=likelihood) / 0.6 + torch.diag(diagonal))
    assert relative_error(columns.T @ columns, want) < TIGHT
    draws = posterior.sample(4000, generator=generator(5)) - posterior.mean
    assert relative_error(draws.square().mean(0), posterior.variance()) < 6 * (2 / 4000) ** 0.5


@pytest.mark.parametrize("n", [8, 26])
def test_update_and_storage(n, tmp_path):
    net, x, y = problem(n)
    whole = lp.Full(net, "classification", parameters="last_layer").fit([(x, y)])
    grown = lp.Full(net, "classification", parameters="last_layer").fit([(x[:5], y[:5])])
    before = grown.log_marginal_likelihood()
    other = lp.Full(net, "classification", parameters="last_layer").fit([(x[:5], y[:5])])
    grown.update([(x[5:], y[5:])])
    torch.testing.assert_close(other.log_marginal_likelihood(), before)
    torch.testing.assert_close(grown.precision_matrix(), whole.precision_matrix(), rtol=TIGHT, atol=TIGHT)
    torch.testing.assert_close(grown.log_marginal_likelihood(), whole.log_marginal_likelihood())
    grown.save(tmp_path / "head")
    back = lp.load(tmp_path / "head", net)
    torch.testing.assert_close(back.predictive(x).mean, whole.predictive(x).mean)
    torch.testing.assert_close(back.precision_matrix(), grown.precision_matrix())
    back.update([(x, y)])
    assert back.n_data == 2 * n


def test_variances_follow_updates_storage_and_hyperparameters(tmp_path):
    net, x, y = problem(14)
    test = torch.randn(20, 3, generator=generator(2), dtype=torch.float64)
    rows = jacobian(net, test)

    def check(posterior, seen, precision):
        total = oracle(net, seen) + precision * torch.eye(C * (D + 1), dtype=torch.float64)
        want = torch.einsum("bcp,pq,bcq->bc", rows, torch.linalg.inv(total), rows)
        for _ in range(2):
            got = posterior.functional_posterior(test, outputs="diagonal").covariance
            assert relative_error(got, want) < TIGHT
        full = posterior.functional_posterior(test).covariance  # still answered exactly, from the same inverses
        assert relative_error(full.diagonal(dim1=1, dim2=2), want) < TIGHT

    posterior = lp.Full(net, "classification", parameters="last_layer", prior_precision=1.0).fit([(x[:9], y[:9])])
    check(posterior, x[:9], 1.0)
    check(posterior.update([(x[9:], y[9:])]), x, 1.0)
    posterior.save(tmp_path / "head")
    check(lp.load(tmp_path / "head", net), x, 1.0)
    posterior.prior_precision = 0.3
    check(posterior, x, 0.3)


def test_tuning_finds_the_dense_optimum(monkeypatch):
    net, x, y = problem(14)
    short = lp.Full(net, "classification", parameters="last_layer").fit([(x, y)])
    assert "rows of data" in str(short.summary())
    short.fit_prior_precision("marginal_likelihood")
    monkeypatch.setattr(lp.Categorical, "output_curvature", lambda self, *_: None)
    dense = lp.Full(net, "classification", parameters="last_layer").fit([(x, y)])
    dense.fit_prior_precision("marginal_likelihood")
    torch.testing.assert_close(short.prior_precision, dense.prior_precision, rtol=1e-3, atol=0)
    torch.testing.assert_close(short.log_marginal_likelihood(), dense.log_marginal_likelihood(), rtol=1e-6, atol=1e-6)


def factor_of(n: int, *, coupled: bool = True, dtype: torch.dtype = torch.float64, precision: float = 0.5, scale=1.0):
    phi = scale * torch.randn(n, D, generator=generator(4), dtype=torch.float64).to(dtype)
    scales = torch.randn(n, C, generator=generator(6), dtype=torch.float64).softmax(-1).to(dtype)
    rows = SoftmaxOutputRows(phi, scales, coupled)
    return SoftmaxOutputFactor(rows, torch.tensor(1.3, dtype=dtype), torch.tensor(precision, dtype=dtype)), rows


@pytest.mark.parametrize("mode", ["full", "diagonal", "joint"])
@pytest.mark.parametrize("coupled", [False, True])
def test_all_forms_of_gradients_give_the_same_covariances(mode, coupled):
    factor, rows = factor_of(7, coupled=coupled)
    phi = torch.randn(3, D, generator=generator(7), dtype=torch.float64)
    outputs = torch.tensor([3, 1])
    gradients = OutputLayerGradients(phi, outputs, C)
    dense = DenseGradients(gradients.dense(slice(None)))
    matrix = torch.linalg.inv(1.3 * rows.dense() + 0.5 * torch.eye(C * D, dtype=torch.float64))
    flat = dense.values.flatten(2)
    joint = torch.einsum("vbp,pq,wcq->bvcw", flat, matrix, flat)
    own = joint.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    want = {"joint": joint, "full": own, "diagonal": own.diagonal(dim1=1, dim2=2)}[mode]
    one_hot = torch.eye(C, dtype=torch.float64)[outputs][:, None, None, None].expand(-1, 3, -1, -1, -1)
    outer = OuterGradients(phi[:, None, None], one_hot)
    each = OutputLayerGradients(phi, outputs.expand(3, 2), C)
    for same in (gradients, dense, outer, each):
        assert relative_error(factor.quadratic_form(factor.basis.coordinates(same), mode), want) < TIGHT
    # and a basis of its own in which a dense matrix is diagonal
    values, vectors = torch.linalg.eigh(matrix)
    weights = values.view(1, C, D)
    for same in (gradients, each, dense):
        rotated = lp.structured.DenseBasis(vectors[None]).coordinates(same)
        assert relative_error(rotated.quadratic(weights, mode), want) < TIGHT


@pytest.mark.parametrize("mode", ["full", "diagonal", "joint"])
def test_output_layer_gradients_equal_their_dense_forms(mode):
    phi = torch.randn(3, D, generator=generator(7), dtype=torch.float64)
    weights = torch.rand(1, C, D, generator=generator(8), dtype=torch.float64)
    matrices = torch.randn(2, 1, C, D, generator=generator(9), dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(k, k, generator=generator(k), dtype=torch.float64)).Q for k in (C, D))
    basis = lp.structured.KroneckerBasis(left[None], right[None])
    for outputs in (torch.tensor([3, 1, 0]), torch.arange(C), torch.tensor([[0, 1], [2, 3], [1, 0]])):
        gradients = OutputLayerGradients(phi, outputs, C)
        dense = DenseGradients(gradients.dense(slice(None)))
        assert relative_error(gradients.quadratic(weights, mode), dense.quadratic(weights, mode)) < TIGHT
        assert relative_error(gradients.project(matrices), dense.project(matrices)) < TIGHT
        squares = [torch.zeros(1, C, D, dtype=torch.float64) for _ in range(2)]
        gradients.add_squares_(squares[0])
        dense.add_squares_(squares[1])
        assert relative_error(*squares) < TIGHT
        got = basis.coordinates(gradients).quadratic(weights, mode)
        assert relative_error(got, basis.coordinates(dense).quadratic(weights, mode)) < TIGHT
        picked = gradients.select(torch.tensor([1]))
        assert relative_error(picked.dense(slice(1, 3)), dense.dense(slice(1, 3))[[1]]) < TIGHT


@pytest.mark.parametrize("coupled", [False, True])
def test_rank_deficient_and_ill_conditioned_rows(coupled):
    factor, rows = factor_of(12, coupled=coupled, precision=1.0, scale=1e5)
    want = torch.linalg.slogdet(1.3 * rows.dense() + torch.eye(C * D, dtype=torch.float64)).logabsdet
    assert factor.log_determinant().item() == pytest.approx(want.item(), rel=1e-6)


def test_single_precision_rows_are_computed_in_double_precision():
    single, double = factor_of(9, dtype=torch.float32)[0], factor_of(9)[0]
    gradients = OutputLayerGradients(torch.randn(3, D, generator=generator(7), dtype=torch.float64), torch.arange(C), C)
    got = single.quadratic_form(gradients.in_dtype(torch.float32), "full").double()
    assert relative_error(got, double.quadratic_form(gradients, "full")) < 1e-5


# -- KFAC with a diagonal output factor --------------------------------------------------------------------------------


def test_the_diagonal_output_factor_equals_the_dense_product():
    net, x, y = problem(13)
    posterior = lp.KFAC(net, "classification", parameters="last_layer", output_factor="diagonal", prior_precision=0.6)
    posterior.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    assert isinstance(block_of(posterior).left_sums[0], DiagonalSum)
    assert "diagonal output factor" in str(posterior.summary())
    phi, hessian = features(net, x), categorical_hessian(net(x).detach())
    left, right = torch.diag(hessian.sum(0).diagonal()), phi.T @ phi / len(x)
    curvature = torch.kron(left, right)
    covariance = torch.linalg.inv(curvature + 0.6 * torch.eye(len(curvature), dtype=torch.float64))
    rows = jacobian(net, x)
    want = torch.einsum("bcp,pq,bdq->bcd", rows, covariance, rows)
    assert relative_error(posterior.functional_posterior(x).covariance, want) < TIGHT
    variances = posterior.functional_posterior(x, outputs="diagonal").covariance
    assert relative_error(variances, want.diagonal(dim1=1, dim2=2)) < TIGHT
    deviation = in_head_order(posterior, posterior.mean)
    evidence = posterior.laplace_model().log_likelihood().item()
    evidence += occam(curvature, deviation, torch.full((len(curvature),), 0.6, dtype=torch.float64)).item()
    assert posterior.log_marginal_likelihood().item() == pytest.approx(evidence, rel=TIGHT)
    (factor,) = posterior.factors().values()
    noise = torch.eye(len(curvature), dtype=torch.float64).view(-1, 1, C, D + 1)
    columns = factor.sample(noise).flatten(1)
    assert relative_error(columns.T @ columns, covariance) < TIGHT
    assert relative_error(in_head_order(posterior, posterior.variance()), covariance.diagonal()) < TIGHT
    assert relative_error(block_of(posterior).dense(torch.ones(1, dtype=torch.float64))[0], curvature) < TIGHT


def test_the_diagonal_output_factor_is_bounded_by_the_dense_one():
    # G ≤ 2 diag G, and a diagonal block of an inverse is at least the inverse of the diagonal block.
    net, x, y = problem(13)
    options = {"parameters": "last_layer", "prior_precision": 0.6}
    dense = lp.KFAC(net, "classification", output_factor="dense", **options).fit([(x, y)])
    diagonal = lp.KFAC(net, "classification", output_factor="diagonal", **options).fit([(x, y)])
    identity = 0.6 * torch.eye(dense.n_parameters, dtype=torch.float64)
    larger = 2 * (diagonal.precision_matrix() - identity) - (dense.precision_matrix() - identity)
    assert torch.linalg.eigvalsh(larger).min() > -1e-12
    least = diagonal.functional_posterior(x, outputs="diagonal").covariance
    assert bool((dense.functional_posterior(x, outputs="diagonal").covariance >= least).all())


def test_the_diagonal_output_factor_is_updated_stored_and_chosen_by_size(tmp_path, monkeypatch):
    net, x, y = problem(9)
    whole = lp.KFAC(net, "classification", parameters="last_layer", output_factor="diagonal").fit([(x, y)])
    monkeypatch.setattr(structures, "DENSE_OUTPUTS", C - 1)
    grown = lp.KFAC(net, "classification", parameters="last_layer").fit([(x[:5], y[:5])]).update([(x[5:], y[5:])])
    assert isinstance(block_of(grown).left_sums[0], DiagonalSum)
    torch.testing.assert_close(grown.precision_matrix(), whole.precision_matrix())
    grown.save(tmp_path / "head")
    back = lp.load(tmp_path / "head", net)
    torch.testing.assert_close(back.predictive(x).mean, whole.predictive(x).mean)
    torch.testing.assert_close(back.update([(x, y)]).precision_matrix(), whole.update([(x, y)]).precision_matrix())
    back.fit_prior_precision("marginal_likelihood")
    assert back.tuning.converged
    corrected = lp.KFAC(net, "classification", parameters="last_layer", eigenvalue_corrected=True).fit([(x, y)])
    assert not isinstance(block_of(corrected).left_sums[0], DiagonalSum)


@pytest.mark.parametrize(
    "options", [{"output_factor": "sparse"}, {"output_factor": "diagonal", "eigenvalue_corrected": True}]
)
def test_unknown_output_factors_are_refused(options):
    net, _, _ = problem(3)
    with pytest.raises(ConfigurationError, match="output_factor"):
        lp.KFAC(net, "classification", **options)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_no_class_by_class_matrix_of_the_data_is_ever_written_out():
    """With 5000 outputs, a matrix over pairs of them would take 100 MB, and one direction for each more."""
    n_outputs, width, n = 5000, 6, 10
    torch.manual_seed(0)
    net = nn.Linear(width, n_outputs)
    x, y = torch.randn(n, width), torch.randint(0, n_outputs, (n,))
    largest = 8 * max(n_outputs * (width + 1), n_outputs * n, n_outputs * n**2)
    with LargestTensor() as seen:
        for make in (lp.KFAC, lp.Diagonal, lp.Full):
            posterior = make(net, "classification", prior_precision=2.0).fit([(x[:6], y[:6]), (x[6:], y[6:])])
            posterior.log_marginal_likelihood(torch.tensor(1.0, requires_grad=True)).backward()
            prediction = posterior.predictive(x[:4])
            assert prediction.mean.shape == (4, n_outputs)
    assert seen.bytes <= 4 * largest


def test_written_out_rows_keep_their_digits_beside_certain_classes():
    """In float32 ``1 − p`` of a certain class is a rounding; the matrix stays semi-definite all the same."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3, generator=generator, dtype=torch.float64) + 15 * torch.eye(3)[torch.arange(40) % 3]
    features = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    p = logits.softmax(1)
    exact = SoftmaxOutputRows(features, p, True).dense()
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    torch.testing.assert_close(exact, torch.einsum("ncd,ni,nj->cidj", curvature, features, features).reshape(15, 15))
    found = SoftmaxOutputRows(features.float(), logits.float().softmax(1), True).dense().double()
    assert (found - exact).norm() < 1e-5 * exact.norm()
    assert torch.linalg.eigvalsh(found)[0] > -1e-5 * torch.linalg.eigvalsh(exact)[-1]
