"""What must hold whatever the data: additivity over batches, exact Kronecker cases, unbiased estimates, types."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import categorical_hessian, ekfac, ggn, jacobian, relative_error
from scipy.stats import t as student
from torch import nn

import laplace_plus as lp

ROUNDING = 1e-12  # float64 sums of some hundred terms


def reduce(*args, **kwargs):
    return lp.KFAC(*args, weight_sharing="reduce", **kwargs)


CLASSES = {"Full": lp.Full, "KFAC": lp.KFAC, "KFAC-reduce": reduce, "EKFAC": ekfac, "Diagonal": lp.Diagonal}


class Positions(nn.Module):
    """A matrix, a normalisation, a bare parameter and a pooling over positions: every kind of block."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.inner(x)) + self.shift).mean(1))


def network(seed=0):
    torch.manual_seed(seed)
    return Positions().double()


def data(n, seed=1, task="classification"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, 2, generator=generator, dtype=torch.float64)
    if task == "classification":
        return x, torch.randint(0, 3, (n,), generator=generator)
    return x, torch.randn(n, 3, generator=generator, dtype=torch.float64)


def batches(x, y, sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def partitions(total):
    """Ways to cut ``total`` examples into batches, ragged ones and single examples among them."""
    return st.lists(st.integers(1, total), min_size=1, max_size=total).map(lambda cuts: _sizes(cuts, total))


def _sizes(cuts, total):
    sizes, left = [], total
    for cut in cuts:
        if left == 0:
            break
        sizes.append(min(cut, left))
        left -= sizes[-1]
    return sizes + [left] if left else sizes


NET = network()
SUPPORTED = [
    (name, kind)
    for name in CLASSES
    for kind in ("ggn", "empirical_fisher", "hessian")
    if kind != "hessian" or name in ("Full", "Diagonal")
]


def fit(name, kind, loader, task="classification", net=None):
    likelihood = lp.Gaussian(0.6) if task == "regression" else task
    # The prior keeps an indefinite Hessian's posterior proper.
    posterior = CLASSES[name](net or NET, likelihood, prior_precision=50.0, backend=lp.Native(kind))
    return posterior.fit(loader)


WHOLE = {}


def whole(name, kind, task):
    if (name, kind, task) not in WHOLE:
        WHOLE[name, kind, task] = fit(name, kind, [data(9, task=task)], task)
    return WHOLE[name, kind, task]


@settings(max_examples=8, deadline=None)
@given(
    combination=st.sampled_from(SUPPORTED), sizes=partitions(9), task=st.sampled_from(["classification", "regression"])
)
def test_cutting_into_batches_changes_nothing(combination, sizes, task):
    name, kind = combination
    x, y = data(9, task=task)
    once, cut = whole(name, kind, task), fit(name, kind, batches(x, y, sizes), task)
    assert cut.n_data == once.n_data == 9
    assert relative_error(cut.precision_matrix(), once.precision_matrix()) < ROUNDING
    assert cut.log_marginal_likelihood().item() == pytest.approx(once.log_marginal_likelihood().item(), rel=ROUNDING)


@pytest.mark.parametrize(("name", "kind"), [pair for pair in SUPPORTED if pair[0] != "EKFAC"])
def test_update_is_a_fit_to_everything(name, kind):
    x, y = data(9)
    posterior = fit(name, kind, [(x[:4], y[:4])])
    posterior.update([(x[4:5], y[4:5])]).update(batches(x[5:], y[5:], [3, 1]))
    once = whole(name, kind, "classification")
    assert posterior.n_data == 9
    assert relative_error(posterior.precision_matrix(), once.precision_matrix()) < ROUNDING
    assert posterior.log_marginal_likelihood().item() == pytest.approx(
        once.log_marginal_likelihood().item(), rel=ROUNDING
    )


def test_update_keeps_the_basis_of_corrected_eigenvalues_and_adds_all_curvature():
    """The Kronecker basis stays that of the first fit, in which the trace is still exact."""
    x, y = data(9)
    posterior = fit("EKFAC", "ggn", [(x[:4], y[:4])]).update([(x[4:], y[4:])])
    exact = whole("Full", "ggn", "classification").precision_matrix().trace().item()
    assert posterior.n_data == 9
    assert posterior.precision_matrix().trace().item() == pytest.approx(exact, rel=ROUNDING)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
@pytest.mark.parametrize("name", CLASSES)
def test_seven_times_the_same_datum(name, kind):
    x, y = data(1)
    prior = 50 * torch.eye(fit(name, kind, [(x, y)]).n_parameters, dtype=torch.float64)
    one = fit(name, kind, [(x, y)]).precision_matrix() - prior
    for loader in ([(x, y)] * 7, [(x.repeat(7, 1, 1), y.repeat(7))]):
        seven = fit(name, kind, loader)
        assert seven.n_data == 7
        assert relative_error(seven.precision_matrix() - prior, 7 * one) < 1e-11  # the prior of 50 is subtracted


# -- dense references of every curvature -------------------------------------------------------------------------------


def references(task="classification"):
    x, y = data(9, task=task)
    jac, f = jacobian(NET, x), NET(x).detach()
    if task == "classification":
        residual = f.softmax(-1) - nn.functional.one_hot(y, 3)
        return ggn(jac, categorical_hessian(f)), torch.einsum("ncp,nc->np", jac, residual)
    return ggn(jac, torch.eye(3, dtype=torch.float64).expand(9, 3, 3)) / 0.36, torch.einsum(
        "ncp,nc->np", jac, (f - y) / 0.36
    )


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
def test_full_and_diagonal_against_jacobians(kind, task):
    """The empirical Fisher of a regression is the outer product of gradients of the log-likelihood, r/σ² and not 2r."""
    matrix, gradients = references(task)
    want = matrix if kind == "ggn" else gradients.T @ gradients
    prior = 50 * torch.eye(len(want), dtype=torch.float64)
    assert relative_error(whole("Full", kind, task).precision_matrix() - prior, want) < ROUNDING * 50
    diagonal = whole("Diagonal", kind, task).precision_matrix()
    assert relative_error(diagonal - prior, torch.diag(want.diagonal())) < ROUNDING * 50


def test_hessian_by_double_differentiation():
    x, y = data(9)
    names = [name for name, _ in NET.named_parameters()]
    shapes = [p.shape for p in NET.parameters()]

    def loss(vector):
        parts = [
            piece.view(shape) for piece, shape in zip(vector.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        outputs = torch.func.functional_call(NET, dict(zip(names, parts, strict=True)), (x,))
        return nn.functional.cross_entropy(outputs, y, reduction="sum")

    vector = torch.cat([p.detach().flatten() for p in NET.parameters()])
    want = torch.autograd.functional.hessian(loss, vector) + 50 * torch.eye(len(vector), dtype=torch.float64)
    assert relative_error(whole("Full", "hessian", "classification").precision_matrix(), want) < ROUNDING
    diagonal = whole("Diagonal", "hessian", "classification").precision_matrix().diagonal()
    assert relative_error(diagonal, want.diagonal()) < ROUNDING


@pytest.mark.diagonal
@pytest.mark.quick("Diagonal-ggn-selection2")
@pytest.mark.parametrize("selection", [["inner"], ["norm", "shift"], {"head.weight": torch.eye(3, dtype=torch.bool)}])
@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher", "hessian"])
@pytest.mark.parametrize("name", ["Full", "Diagonal"])
def test_selections_are_principal_blocks(name, kind, selection):
    x, y = data(9)
    posterior = CLASSES[name](
        NET, "classification", parameters=selection, prior_precision=50.0, backend=lp.Native(kind)
    )
    got = posterior.fit([(x[:5], y[:5]), (x[5:], y[5:])]).precision_matrix()
    offset, chosen = 0, []
    for parameter_name, parameter in NET.named_parameters():
        if isinstance(selection, dict):
            mask = selection.get(parameter_name)
        else:
            mask = torch.ones(parameter.shape, dtype=torch.bool) if parameter_name.split(".")[0] in selection else None
        if mask is not None:
            chosen.append(offset + mask.flatten().nonzero().squeeze(-1))
        offset += parameter.numel()
    chosen = torch.cat(chosen)
    want = whole(name, kind, "classification").precision_matrix()[chosen[:, None], chosen]
    assert relative_error(got, want) < ROUNDING
    variance = posterior.functional_posterior(x, outputs="diagonal").covariance
    jac = jacobian(NET, x)[:, :, chosen]
    assert relative_error(variance, torch.einsum("ncp,pq,ncq->nc", jac, torch.linalg.inv(want), jac)) < 1e-11


# -- exact cases of Kronecker factors (Martens and Grosse, 2015; Eschenhagen et al., 2023) -----------------------------


def layer_blocks(matrix, posterior):
    """The matrix without what lies between layers."""
    layers = posterior.network.layer_index()
    return matrix * (layers[:, None] == layers)


def curvature_of(posterior):
    return posterior.precision_matrix() - posterior.prior_precision * torch.eye(posterior.n_parameters)


def deep_linear(pool=False):
    torch.manual_seed(2)
    layers = [nn.Linear(2, 3), nn.Linear(3, 3)]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = *layers, nn.Linear(3, 2)

        def forward(self, x):
            h = self.middle(self.first(x))
            return self.last(h.mean(1) if pool else h)

    return Net().double()


def identity_ggn(net, x, names=None, output_axis=-1):
    jac = jacobian(net, x, names, output_axis=output_axis)
    return ggn(jac, torch.eye(jac.shape[1], dtype=torch.float64).expand(len(x), -1, -1))


@pytest.mark.parametrize("name", ["KFAC", "KFAC-reduce", "EKFAC"])
def test_deep_linear_regression_is_exact(name):
    net, x = deep_linear(), torch.randn(11, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    posterior = CLASSES[name](net, "regression").fit([(x, torch.zeros(11, 2).double())])
    want = layer_blocks(identity_ggn(net, x), posterior)
    assert relative_error(curvature_of(posterior), want) < ROUNDING


def test_loss_at_every_position_is_exact_when_expanded():
    net, x = deep_linear(), torch.randn(5, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = [(x[:2], torch.zeros(2, 4, 2).double()), (x[2:], torch.zeros(3, 4, 2).double())]
    exact = identity_ggn(net, x)
    posterior = lp.KFAC(net, "regression").fit(loader)
    assert relative_error(curvature_of(posterior), layer_blocks(exact, posterior)) < ROUNDING
    other = reduce(net, "regression", parameters=["first"]).fit(loader)
    assert relative_error(curvature_of(other), identity_ggn(net, x, ["first.weight", "first.bias"])) > 0.1


def test_pooled_deep_linear_is_exact_when_reduced():
    net = deep_linear(pool=True)
    x = torch.randn(5, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loader = [(x[:2], torch.zeros(2, 2).double()), (x[2:], torch.zeros(3, 2).double())]
    exact = identity_ggn(net, x)
    posterior = reduce(net, "regression").fit(loader)
    assert relative_error(curvature_of(posterior), layer_blocks(exact, posterior)) < ROUNDING
    other = lp.KFAC(net, "regression", parameters=["first"]).fit(loader)
    assert relative_error(curvature_of(other), identity_ggn(net, x, ["first.weight", "first.bias"])) > 0.1


@pytest.mark.parametrize("name", ["KFAC", "KFAC-reduce", "EKFAC"])
def test_one_datum_is_exact_whatever_the_network(name):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 3)).double()
    x = torch.randn(1, 2, dtype=torch.float64)
    posterior = CLASSES[name](net, "classification").fit([(x, torch.tensor([1]))])
    want = layer_blocks(ggn(jacobian(net, x), categorical_hessian(net(x).detach())), posterior)
    assert relative_error(curvature_of(posterior), want) < ROUNDING


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_convolution_of_one_pixel_is_exact(groups):
    """With a diagonal loss Hessian nothing links the groups, so their own factors are all there is."""
    torch.manual_seed(4)
    net = nn.Conv2d(4, 8, 1, groups=groups).double()
    x = torch.randn(1, 4, 1, 1, dtype=torch.float64)
    posterior = lp.KFAC(net, lp.Gaussian(output_axis=1)).fit([(x, torch.zeros(1, 8, 1, 1).double())])
    assert relative_error(curvature_of(posterior), identity_ggn(net, x, output_axis=1)) < ROUNDING


def test_groups_of_a_hidden_convolution():
    """Each group's own block is exact for one datum at one position; between groups KFAC has nothing."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2), nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(1, 4, 1, 1, dtype=torch.float64)
    posterior = lp.KFAC(net, "classification", parameters=["0"]).fit([(x, torch.tensor([0]))])
    exact = ggn(jacobian(net, x, ["0.weight", "0.bias"]), categorical_hessian(net(x).detach()))
    group = torch.tensor([0] * 4 + [1] * 4 + [0, 0, 1, 1])  # weight [4, 2, 1, 1], then bias [4]
    same = group[:, None] == group
    assert relative_error(curvature_of(posterior), exact * same) < ROUNDING
    assert (exact * ~same).abs().max() > 1e-3 * exact.abs().max()


class Convolutional(nn.Module):
    def __init__(self, groups=1):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 2, groups=groups), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=groups))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).mean((2, 3)))


@pytest.mark.parametrize("groups", [1, 2])
def test_corrected_eigenvalues(groups):
    """The trace of each layer is exact, and no matrix with this eigenbasis is closer (George et al., 2018)."""
    torch.manual_seed(5)
    net = Convolutional(groups).double()
    x, y = torch.randn(6, 2, 4, 4, dtype=torch.float64), torch.arange(6) % 3
    exact = ggn(jacobian(net, x), categorical_hessian(net(x).detach()))
    loader = batches(x, y, [4, 2])
    plain, corrected = (cls(net, "classification").fit(loader) for cls in (lp.KFAC, ekfac))
    layers = plain.network.layer_index()
    for layer in range(int(layers.max()) + 1):
        block = (layers == layer).nonzero()
        want = exact[block, block.T]
        distance = {
            name: (curvature_of(posterior)[block, block.T] - want).norm().item()
            for name, posterior in {"plain": plain, "corrected": corrected}.items()
        }
        trace = curvature_of(corrected)[block, block.T].trace().item()
        assert trace == pytest.approx(want.trace().item(), rel=ROUNDING)
        assert distance["corrected"] <= distance["plain"] * (1 + ROUNDING)
    assert (curvature_of(plain).trace() / exact.trace() - 1).abs() > 1e-3  # plain KFAC's is only approximate


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 6))
def test_corrected_eigenvalues_of_random_networks(seed, n):
    net, (x, y) = network(seed), data(n, seed + 1)
    exact = layer_blocks(
        ggn(jacobian(net, x), categorical_hessian(net(x).detach())), fit("Full", "ggn", [(x, y)], net=net)
    )
    plain, corrected = (curvature_of(fit(name, "ggn", [(x, y)], net=net)) for name in ("KFAC", "EKFAC"))
    assert corrected.trace().item() == pytest.approx(exact.trace().item(), rel=1e-11)  # the prior of 50 is subtracted
    assert (corrected - exact).norm() <= (plain - exact).norm() + 1e-11 * exact.norm()


# -- Monte Carlo -------------------------------------------------------------------------------------------------------


@pytest.mark.quick("Categorical-Tensor", "Poisson-Tensor", "Gaussian-Tensor1")
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (lp.Categorical(), torch.tensor([0, 2, 1])),
        (lp.Bernoulli(), torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 1]])),
        (lp.Gaussian(0.6), torch.zeros(3, 3).double()),
        (lp.Gaussian(torch.tensor([0.5, 1.0, 2.0])), torch.zeros(3, 3).double()),
        (lp.Poisson(), torch.tensor([[0, 1, 2], [0, 0, 1], [3, 1, 0]])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sampled_labels_are_unbiased(likelihood, targets):
    """The mean of many Monte-Carlo curvatures lies within four standard errors of the GGN in (nearly) every entry."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    x = torch.randn(3, 2, dtype=torch.float64)
    exact = lp.Full(net, likelihood).fit([(x, targets)]).precision_matrix()
    generator, repeats = torch.Generator().manual_seed(0), 40
    posterior = lp.Full(net, likelihood, backend=lp.Native("ggn_mc", n_samples=15))
    draws = torch.stack([posterior.fit([(x, targets)], generator=generator).precision_matrix() for _ in range(repeats)])
    error = draws.std(0) / math.sqrt(repeats)
    upper = torch.triu_indices(*exact.shape)
    z = ((draws.mean(0) - exact) / error.clamp_min(1e-12))[upper[0], upper[1]]
    assert (z.abs() < 4).float().mean() > 0.99
    # The largest of 120 correlated entries, at a chance of 1e-6; averages of 15 skewed terms are nearly normal.
    assert z.abs().max() < 1.2 * student.isf(1e-6 / (2 * z.numel()), repeats - 1)


def test_more_sampled_labels_are_closer():
    x, y = data(9)
    exact = whole("Full", "ggn", "classification").precision_matrix()
    errors = []
    for n_samples in (1, 100):
        backend = lp.Native("ggn_mc", n_samples=n_samples)
        posterior = lp.Full(NET, "classification", prior_precision=50.0, backend=backend)
        generator = torch.Generator().manual_seed(0)
        errors.append((posterior.fit([(x, y)], generator=generator).precision_matrix() - exact).norm().item())
    assert errors[1] < errors[0] / 4  # ten times, in expectation


# -- types -------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A body in half precision under a head in single precision."""

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = nn.Linear(2, 4).to(body), nn.Linear(4, 3).to(head)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.to(self.body.weight.dtype))).to(self.head.weight.dtype))


TYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16, 0.1),
    "float16": (torch.float16, torch.float16, 0.02),
    "float32": (torch.float32, torch.float32, 1e-5),
    "float64": (torch.float64, torch.float64, 1e-13),
    "bfloat16 body": (torch.bfloat16, torch.float32, 0.1),
    "float64 head": (torch.float32, torch.float64, 1e-5),
}
# Some ten units of the coarsest type's last place (2⁻⁸, 2⁻¹¹, 2⁻²⁴, 2⁻⁵³), which the forward and backward pass add up.


def repeats_others(name, dtypes):
    """KFAC has all types; the other classes have the coarsest, and two types in one network."""
    return name != "KFAC" and dtypes not in ("bfloat16", "float64 head")


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        pytest.param(name, dtypes, marks=[pytest.mark.slow] if repeats_others(name, dtypes) else [])
        for name in CLASSES
        for dtypes in TYPES
    ],
)
def test_types(name, dtypes):
    body, head, tolerance = TYPES[dtypes]
    torch.manual_seed(7)
    net = Mixed(body, head)
    x, y = torch.randn(12, 2), torch.arange(12) % 3
    posterior = CLASSES[name](net, "classification").fit([(x[:8], y[:8]), (x[8:], y[8:])])
    wide = torch.promote_types(torch.promote_types(body, head), torch.float32)
    assert posterior.mean.dtype == posterior.variance().dtype == wide
    assert all(
        torch.finfo(t.dtype).bits >= 32 for t in posterior.laplace_model().curvature.blocks[0][1].tensors().values()
    )
    reference = Mixed(torch.float64, torch.float64)
    reference.load_state_dict({key: value.double() for key, value in net.state_dict().items()})
    want = CLASSES[name](reference, "classification").fit([(x.double(), y)])
    assert relative_error(posterior.precision_matrix().double(), want.precision_matrix()) < tolerance
    evidence = posterior.log_marginal_likelihood()
    assert evidence.dtype == torch.float64
    assert evidence.item() == pytest.approx(want.log_marginal_likelihood().item(), rel=tolerance)
    got, expected = posterior.predictive(x), want.predictive(x.double())
    assert got.mean.dtype in (torch.float32, torch.float64)
    assert (got.mean.double() - expected.mean).abs().max() < tolerance
    posterior.fit_prior_precision("marginal_likelihood")
    assert posterior.tuning.converged
    assert torch.isfinite(posterior.sample(3)).all()
    assert torch.isfinite(posterior.predictive(x, method="sampled", n_samples=3).mean).all()
    assert [p.dtype for p in net.parameters()] == [body, body, head, head]
