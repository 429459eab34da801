"""What is said at the door: of matrices that do not fit, of costs, of the network's own errors, of masks and graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus import checks
from laplace_plus.curvature import GGNOperator
from laplace_plus.curvature.structures import FullStructure, KroneckerStructure
from laplace_plus.errors import ConfigurationError, DataError, InputError, NonFiniteError
from laplace_plus.network.network import Network
from laplace_plus.structured.gradients import DenseGradients, OuterGradients
from laplace_plus.structured.layout import GENERAL, MATRIX, Layout
from laplace_plus.tuning.laplace import survey

D = torch.float64


def data(n=12, width=3):
    torch.manual_seed(0)
    return [(torch.randn(n, width), torch.arange(n) % 3)]


def net(width=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 3))


# -- matrices that are written out -------------------------------------------------------------------------------------


@pytest.mark.diagonal
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, lp.SWAG, lp.SampledLaplace, lp.VariationalLastLayer])
@pytest.mark.parametrize("view", ["precision_matrix", "covariance_matrix", "sample"])
def test_matrices_beyond_the_largest_are_refused(cls, view, monkeypatch):
    posterior = cls(net(), "classification").fit(data())
    if not hasattr(posterior, view):
        pytest.skip("no such view")
    arguments = (posterior.n_parameters,) if view == "sample" else ()
    found = getattr(posterior, view)(*arguments)
    monkeypatch.setattr(checks, "LARGEST", posterior.n_parameters**2 - 1)
    with pytest.raises(
        ConfigurationError, match=f"cannot be written out.*Got: {posterior.n_parameters} × .*last_layer"
    ):
        getattr(posterior, view)(*arguments)
    monkeypatch.setattr(checks, "LARGEST", posterior.n_parameters**2)
    assert getattr(posterior, view)(*arguments).shape == found.shape


def test_operators_beyond_the_largest_are_not_written_out(monkeypatch):
    operator = GGNOperator(net(), "classification", data())
    assert operator.dense().shape == (31, 31)
    monkeypatch.setattr(checks, "LARGEST", 31 * 31 - 1)
    with pytest.raises(ConfigurationError, match="operator cannot be written out"):
        operator.dense()
    coupled = lp.LogDensity(lambda f, y: -f.logsumexp(0).sum(), couples_rows=True)
    with pytest.raises(ConfigurationError, match="Hessian of a batch cannot.*smaller ones"):
        lp.Full(net(), coupled).fit(data())


def test_what_no_memory_holds_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "LARGEST", 2**80)
    with pytest.raises(ConfigurationError, match="GiB"):
        checks.zeros("The matrix", 2**28, 2**28, torch.zeros(1))


# -- costs -------------------------------------------------------------------------------------------------------------


def created(structure, rule, rows, columns):
    outer = OuterGradients(torch.zeros(1, 1, 1, columns), torch.zeros(1, 1, 1, 1, rows))
    gradients = outer if rule == MATRIX else DenseGradients(torch.zeros(1, 1, 1, rows, columns))
    layout = Layout("key", ("layer.weight",), rule, lambda: torch.zeros(1), (1, rows, columns))
    return structure.create(layout, gradients, 1, torch.float32)


@pytest.mark.parametrize(
    ("structure", "rule", "rows", "columns", "words"),
    [
        (FullStructure(), GENERAL, 1, 9546, "9,546 × 9,546.*lp.KFAC"),
        (KroneckerStructure(), MATRIX, 2, 8192, "factor of layer.weight is 8,192 × 8,192.*factor_rank=.*last_layer"),
        (KroneckerStructure(), MATRIX, 8192, 2, "8,192 × 8,192"),
        (FullStructure(), GENERAL, 1, 8191, None),
        (KroneckerStructure(), MATRIX, 4608, 4608, None),
        (KroneckerStructure(factor_rank=10), MATRIX, 2, 9000, None),
    ],
)
def test_a_fit_says_what_large_matrices_cost(structure, rule, rows, columns, words):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        created(structure, rule, rows, columns)
    assert len(seen) == (words is not None)
    if words is not None:
        with pytest.warns(UserWarning, match=words):
            created(structure, rule, rows, columns)


# -- the network's own errors ------------------------------------------------------------------------------------------


class Own(ValueError):
    pass


class Strict(nn.Module):
    """Raises when ``fails``, in its own words."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weight, self.fails = nn.Linear(3, 3), nn.Parameter(torch.eye(3)), None

    def forward(self, x):
        if self.fails is not None:
            raise self.fails("mine")
        return self.layer(x) @ self.weight


@pytest.mark.diagonal
@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, IndexError, KeyError, Own, ZeroDivisionError])
@pytest.mark.parametrize("call", ["fit", "predictive", "sampled", "tune", "stochastic"])
def test_what_a_network_raises_comes_out_as_it_is(error, call):
    model = Strict()
    posterior = lp.KFAC(model, "classification")
    x = data()[0][0]
    if call != "fit":
        posterior.fit(data())
    model.fails = error
    calls = {
        "fit": lambda: posterior.fit(data()),
        "predictive": lambda: posterior.predictive(x),
        "sampled": lambda: posterior.predictive(x, method="sampled"),
        "tune": posterior.fit_prior_precision,
        "stochastic": lambda: lp.SampledLaplace(model, "classification", n_samples=2).fit(data()),
    }
    with pytest.raises(error, match="mine") as raised:
        calls[call]()
    assert type(raised.value) is error
    model.fails = None
    if call != "fit":
        assert posterior.predictive(x).mean.isfinite().all()


@pytest.mark.parametrize("wrong", [torch.zeros(2, 7), torch.zeros(2, 3, dtype=torch.long)])
def test_inputs_that_operations_refuse_are_input_errors(wrong):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return x @ self.weight

    for model in (net(), Bare()):
        posterior = lp.KFAC(model, "classification").fit(data())
        for method in ("linearized", "sampled"):
            with pytest.raises(InputError, match="The network failed on a batch.*Expected.*Got"):
                posterior.predictive(wrong, method=method)


# -- augmented data ----------------------------------------------------------------------------------------------------


class Augmented:
    """As many examples in each pass, at other places."""

    def __init__(self):
        self.source = torch.Generator().manual_seed(0)

    def __iter__(self):
        for x, y in data():
            yield x + 0.1 * torch.rand(x.shape, generator=self.source), y


def test_augmented_data_are_told_from_others():
    augmented = Augmented()
    posterior = lp.KFAC(net(), "classification").fit(augmented)
    arguments = posterior.laplace_model(), posterior.network
    with pytest.raises(DataError, match="without random augmentation"):
        survey(*arguments, augmented, posterior.n_data)


# -- masks -------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, value, how):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.value, self.how = nn.Linear(3, 5), value, how

    def forward(self, x):
        logits = self.layer(x)
        mask = torch.tensor([False, True, False, True, False])
        return logits + mask.to(logits) * self.value if self.how == "added" else logits.masked_fill(mask, self.value)


@pytest.mark.diagonal
@pytest.mark.parametrize("how", ["added", "filled"])
@pytest.mark.parametrize("value", [torch.finfo(D).min / 4, torch.finfo(torch.float32).min, -1e9])
def test_masked_classes_have_no_probability_and_no_curvature(value, how):
    """The posterior is that of the network with the other classes alone."""
    model = Masked(value, how).double()
    x, y = torch.randn(20, 3, dtype=D), torch.arange(20) % 3
    few = nn.Linear(3, 3).double()
    kept = [0, 2, 4]
    few.load_state_dict({name: own[kept] for name, own in model.layer.state_dict().items()})
    masked = lp.Full(model, "classification").fit([(x, torch.tensor(kept)[y])])
    alone = lp.Full(few, "classification").fit([(x, y)])
    got, want = masked.predictive(x, link="probit").mean, alone.predictive(x, link="probit").mean
    torch.testing.assert_close(got[:, kept], want)
    assert not got[:, [1, 3]].any()
    for link in ("gumbel", "network"):
        prediction = masked.predictive(x, link=link)
        assert not prediction.mean[:, [1, 3]].any()
        torch.testing.assert_close(prediction.mean[:, kept], alone.predictive(x, link=link).mean, atol=1e-6, rtol=0)
    sampled = masked.predictive(x, link="mc", n_samples=10)
    assert bool(sampled.mean.isfinite().all()) and not sampled.mean[:, [1, 3]].any()
    a, b = masked.log_marginal_likelihood(), alone.log_marginal_likelihood()
    prior = 0.5 * sum(own[[1, 3]].double().square().sum() for own in model.layer.state_dict().values())
    torch.testing.assert_close(a + prior, b)


@pytest.mark.parametrize("n_open", [1, 2, 3, 5])
def test_the_gumbel_link_is_that_of_the_classes_that_are_not_masked(n_open):
    torch.manual_seed(0)
    mean, root = 2 * torch.randn(6, 5, dtype=D), torch.randn(6, 5, 5, dtype=D)
    mean[:, n_open:] = -1e4
    root[:, n_open:] = 0
    covariance = 3 * root @ root.mT
    got = lp.Categorical().predict(mean, covariance, link="gumbel").mean[:, :n_open]
    if n_open == 1:
        torch.testing.assert_close(got, torch.ones(6, 1, dtype=D))
        return
    own = mean[:, :n_open], covariance[:, :n_open, :n_open]
    want = lp.Categorical().predict(*own, link="gumbel").mean
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6 if n_open > 2 else 1e-3)  # integrals by other nodes


def test_infinite_masks_are_refused_by_name():
    with pytest.raises(NonFiniteError, match=r"Mask logits by torch.finfo\(logits.dtype\).min"):
        lp.Full(Masked(-torch.inf, "filled"), "classification").fit([(torch.randn(4, 3), torch.tensor([0, 2, 4, 0]))])


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_loaders_of_torch_geometric_are_told_of_the_adapter():
    Data = pytest.importorskip("torch_geometric.data").Data  # noqa: N806
    DataLoader = pytest.importorskip("torch_geometric.loader").DataLoader  # noqa: N806
    graphs = [Data(x=torch.randn(3, 2), edge_index=torch.tensor([[0, 1], [1, 2]]), y=torch.tensor([0]))] * 4
    for loader in (DataLoader(graphs, batch_size=2), graphs):
        with pytest.raises(DataError, match="GraphNetwork.*level='graph'.*GraphLoader"):
            lp.KFAC(net(), "classification").fit(loader)


def test_single_objects_say_that_lists_are_taken():
    with pytest.raises(DataError, match="Objects of your own.*come as a list"):
        lp.KFAC(net(), "classification").fit([(object(), torch.tensor([0, 1]))])


def test_shadows_of_networks_still_see_the_first_pass():
    network = Network(Strict(), "all", lambda raw: raw)
    assert network.forward(torch.zeros(1, 3)).shape == (1, 3)


@pytest.mark.parametrize("told", ["nothing", "given", "set", "tuned", "saved", "tangent", "another class"])
def test_a_prior_precision_that_is_a_guess_is_said(told, tmp_path):
    cls, given = (lp.SWAG if told == "another class" else lp.KFAC), {"prior_precision": 1.0} if told == "given" else {}
    posterior = cls(net(), "classification", **given).fit(data())
    if told == "set":
        posterior.prior_precision = 1.0
    if told in ("tuned", "saved", "tangent"):
        posterior.fit_prior_precision("marginal_likelihood")
    if told == "saved":
        posterior.save(tmp_path / "posterior")
        posterior = lp.load(tmp_path / "posterior", posterior.model)
    if told == "tangent":
        posterior = lp.Riemannian(posterior.model, "classification", tangent=posterior, n_samples=2).fit(data())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        posterior.predictive(data()[0][0])
    assert ["is a guess" in str(one.message) for one in found] == [True] * (told == "nothing")
