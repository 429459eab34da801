"""Arguments that are wrong are refused with what would be right, and unusual ones that are right are understood."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from problems import categorical_hessian, ggn, jacobian, relative_error
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import laplace_plus as lp
from laplace_plus import linalg
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    NonFiniteError,
    OperatorError,
    SelectionError,
    UnsupportedError,
)
from laplace_plus.network.selection import last_layer_of, layer_of, select
from laplace_plus.posteriors.storing import get_posterior
from laplace_plus.priors import GaussianPrior, as_hyperparameter

EXACT = 1e-11  # float64, small networks


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(n=12):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(n) % 3


@pytest.fixture(scope="module")
def fitted():
    return lp.Full(perceptron(), "classification").fit([batch()])


def says(error: pytest.ExceptionInfo, *parts: str) -> bool:
    message = str(error.value)
    return all(part in message for part in ("Expected: ", "Got: ", *parts))


# -- wrapped networks --------------------------------------------------------------------------------------------------

# torch's compiler takes seconds to import
each_wrapper = pytest.mark.parametrize("wrap", [nn.DataParallel, pytest.param(torch.compile, marks=pytest.mark.slow)])


@each_wrapper
def test_masked_posteriors_fit_and_load_onto_wrapped_networks(wrap, tmp_path):
    mask = torch.zeros(5, 4, dtype=torch.bool)
    mask[1:3, ::2] = True
    own, wrapped = (
        lp.Full(net, "classification", parameters={"0.weight": mask}).fit([batch()])
        for net in (perceptron(), wrap(perceptron()))
    )
    own.save(tmp_path / "posterior")
    x = batch()[0]
    for posterior in (wrapped, lp.load(tmp_path / "posterior", wrap(perceptron()))):
        assert posterior.n_parameters == 4
        assert torch.equal(posterior.predictive(x).mean, own.predictive(x).mean)


@each_wrapper
def test_names_that_a_wrapped_network_prints_select_its_parameters(wrap):
    wrapped = wrap(perceptron())
    names = [name for name, _ in wrapped.named_parameters()]
    assert names[0] not in ("0.weight", "0.bias")
    prefix = names[0].removesuffix("0.weight")
    for selection, want in (
        ([names[0], names[3]], ("0.weight", "2.bias")),
        (prefix + "2", ("2.weight", "2.bias")),
        (prefix + "*.bias", ("0.bias", "2.bias")),
        ({names[3]: torch.tensor([True, False, True])}, ("2.bias",)),
    ):
        assert lp.Diagonal(wrapped, "classification", parameters=selection).parameter_names == want


# -- arguments of the wrong kind ---------------------------------------------------------------------------------------


NOT_NUMBERS = ["a", None, ["a"], {}, object(), 1j, torch.tensor(1j), [[1.0], [1.0, 2.0]], [[1.0]], 10**400, True]


@pytest.mark.parametrize("value", NOT_NUMBERS)
@pytest.mark.parametrize("argument", ["prior_precision", "prior_mean", "temperature"])
def test_hyperparameters_are_numbers(argument, value):
    if argument == "prior_precision" and value is None:  # the default
        return
    with pytest.raises(ConfigurationError) as error:
        lp.Diagonal(perceptron(), "classification", **{argument: value})
    assert says(error, "a number")


@pytest.mark.parametrize("argument", ["prior_precision", "temperature"])
def test_hyperparameters_that_are_set_later_are_numbers(argument, fitted):
    before = getattr(fitted, argument)
    for value in ("a", None):
        with pytest.raises(ConfigurationError):
            setattr(fitted, argument, value)
    assert getattr(fitted, argument) is before


@pytest.mark.parametrize(
    "value", ["a", "1.2", None, {}, 1j, torch.ones(2, 2), [], 0.0, -1.0, float("nan"), float("inf")]
)
def test_a_noise_level_is_a_number(value):
    with pytest.raises(ConfigurationError) as error:
        lp.Gaussian(noise_std=value)
    assert says(error, "number")


def test_one_prior_precision_for_each_weight_is_refused_where_a_layer_takes_one():
    each = torch.ones(43, dtype=torch.float64)
    with pytest.raises(UnsupportedError) as error:
        lp.KFAC(perceptron(), "classification", prior_precision=each)
    assert says(error, "lp.Diagonal", "'0.weight'")
    posterior = lp.KFAC(perceptron(), "classification").fit([batch()])
    with pytest.raises(UnsupportedError):
        posterior.prior_precision = each
    assert posterior.prior_precision.ndim == 0
    norms = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()
    lp.KFAC(norms, "classification", parameters="0", prior_precision=each[:8]).fit([batch()]).predictive(batch()[0])


def test_whole_numbers_and_floating_tensors_are_hyperparameters():
    tensor = torch.tensor(2.0, requires_grad=True)
    assert as_hyperparameter(tensor) is tensor
    for whole in (2, torch.tensor(2)):
        assert torch.equal(as_hyperparameter(whole), torch.tensor(2.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("precision", "mean", "parts"),
    [
        (1.0, float("nan"), ("mean", "Got: nan.")),
        (1.0, torch.tensor([0.0, float("inf"), 1.0]), ("mean", "Got: 3 numbers from 0 to inf.")),
        (-2.0, float("nan"), ("precision", "Got: -2.")),
        (torch.tensor([1.0, 0.0, 3.0]), 0.0, ("precision", "Got: 3 numbers from 0 to 3.")),
        (float("inf"), 0.0, ("precision", "Got: inf.")),
    ],
)
def test_an_improper_prior_says_what_is_wrong(precision, mean, parts):
    with pytest.raises(ConfigurationError) as error:
        GaussianPrior.create(precision, mean, torch.tensor([0, 0, 1]))
    assert says(error, *parts)
    assert ("precision" in str(error.value)) != ("mean" in str(error.value))


@pytest.mark.parametrize(
    ("selection", "got"),
    [
        (5, "Got: int."),
        (None, "Got: NoneType."),
        ({"0.weight": None}, "Got: NoneType."),
        ({"0.weight": torch.ones(5, 4)}, "Got: torch.float32 of shape (5, 4)."),
        ({0: torch.ones(5, 4, dtype=torch.bool)}, "Got: 0."),
        (perceptron(), "Got: Sequential."),
    ],
)
def test_selections_are_of_a_known_kind(selection, got):
    with pytest.raises(SelectionError) as error:
        lp.Diagonal(perceptron(), "classification", parameters=selection)
    assert says(error, got)


def test_loading_takes_a_path_and_a_module(fitted, tmp_path):
    fitted.save(tmp_path / "posterior")
    for path, model, got in ((None, perceptron(), "NoneType"), (tmp_path / "posterior", {}, "dict")):
        with pytest.raises(ConfigurationError) as error:
            lp.load(path, model)
        assert says(error, got)
    assert lp.load(str(tmp_path / "posterior"), perceptron()).n_data == 12


@pytest.mark.parametrize("thing", [3, dict, "Full", lambda: lp.Full])
def test_only_posterior_classes_are_registered(thing):
    with pytest.raises(ConfigurationError) as error:
        lp.register("NotAPosterior", thing)
    assert says(error, "fit, predictive, sample")
    with pytest.raises(ConfigurationError, match="Unknown posterior"):
        get_posterior("NotAPosterior")


# -- some of the outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "want"),
    [
        (torch.tensor([True, False, True]), [0, 2]),
        ([False, False, True], [2]),
        (torch.tensor([0, 2], dtype=torch.uint8), [0, 2]),
        ([-1, 0], [2, 0]),
        (range(1, 3), [1, 2]),
        (slice(1, None), [1, 2]),
        (slice(None, None, -1), [2, 1, 0]),
    ],
)
def test_outputs_are_chosen_by_index_mask_or_slice(fitted, outputs, want):
    x = batch(2)[0]
    everything, some = fitted.functional_posterior(x), fitted.functional_posterior(x, outputs=outputs)
    assert torch.equal(some.mean, everything.mean[:, want])
    assert relative_error(some.covariance, everything.covariance[:, want][:, :, want]) < EXACT


@pytest.mark.parametrize("outputs", [[0.5], [], [3], 1, slice(3, None), torch.tensor([True, False])])
def test_outputs_that_do_not_exist_are_refused(fitted, outputs):
    with pytest.raises(ConfigurationError) as error:
        fitted.functional_posterior(batch(2)[0], outputs=outputs)
    assert says(error, "below 3")


# -- tensors and networks without values, and numbers that no memory holds ---------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x, y):
        return self.layer(x + y.to_dense())


NOT_DENSE = {
    "sparse": lambda x: x.to_sparse(),
    "rows": lambda x: x.to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_inputs_that_are_no_dense_tensors_are_refused(kind, fitted):
    x, y = batch()
    odd = NOT_DENSE[kind](x)
    members = lp.ABNN(normalised(), "classification", epochs=0).fit([(x, y)])
    calls = [lambda: fitted.predictive(odd), lambda: fitted.functional_posterior(odd), lambda: members.predictive(odd)]
    for cls in (lp.KFAC, lp.LowRank, lp.SampledLaplace, lp.MetricBNN, lp.NullSpace):
        calls.append(lambda cls=cls: cls(perceptron(), "classification").fit([(odd, y)]))
        calls.append(lambda cls=cls: cls(Mixed(), "classification").fit([((x, odd), y)]))
    for call in calls:
        with pytest.raises(DataError) as error:
            call()
        assert says(error, "dense tensors", "Fix: ")


@pytest.mark.parametrize("part", ["weights", "buffer"])
def test_networks_on_the_meta_device_are_refused(part):
    net = perceptron().to("meta") if part == "weights" else perceptron()
    net.register_buffer("scale", torch.ones(2, device="meta"))
    with pytest.raises(ConfigurationError) as error:
        lp.KFAC(net, "classification")
    assert says(error, "meta device", "Fix: ")


TRILLION = 10**12


def fit(cls, **options):
    return cls(perceptron(), "classification", **options).fit([batch()])


def normalised():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().eval()


def test_a_rank_beyond_the_number_of_weights_means_all_of_them():
    full = fit(lp.Full)
    assert relative_error(fit(lp.LowRank, rank=TRILLION).precision_matrix(), full.precision_matrix()) < 1e-9


@pytest.mark.parametrize("generator", [7, np.random.default_rng(0), "0"])
def test_generators_are_those_of_torch(generator, fitted):
    for call in (
        lambda: fitted.predictive(batch()[0], generator=generator),
        lambda: fitted.sample(2, generator=generator),
        lambda: lp.KFAC(perceptron(), "classification").fit([batch()], generator=generator),
    ):
        with pytest.raises(ConfigurationError, match=r"torch\.Generator"):
            call()


@pytest.mark.parametrize("tangent", ["MetricBNN", lp.MetricBNN, "Riemannian"])
def test_a_tangent_is_gaussian(tangent):
    with pytest.raises(ConfigurationError) as error:
        lp.Riemannian(perceptron(), "classification", tangent=tangent)
    assert says(error, "Gaussian")


# -- what was accepted, or failed deep inside --------------------------------------------------------------------------

REFUSED = {
    "dense limit": lambda fitted: fit(lp.KFAC, dense_limit=-1),
    "tolerance": lambda fitted: fit(lp.LowRank, tolerance="tight"),
    "size of a subnetwork": lambda fitted: lp.LargestMagnitude(0),
    "share of a subnetwork": lambda fitted: lp.LargestVariance(1.5),
    "number at random": lambda fitted: lp.Random(-1),
    "option of a solver": lambda fitted: lp.SampledLaplace(
        perceptron(), "classification", solver={"name": "cg", "x": 1}
    ),
    "temperatures": lambda fitted: fitted.log_marginal_likelihood(temperature=torch.ones(2)),
    "temperature with an axis": lambda fitted: lp.KFAC(perceptron(), "classification", temperature=[2.0]),
    "negative temperature": lambda fitted: fitted.log_marginal_likelihood(temperature=-1.0),
    "count of probes": lambda fitted: linalg.draw_probes("gaussian", -1, 3),
    "generator of probes": lambda fitted: linalg.draw_probes("gaussian", 1, 3, generator=3),
    "no data": lambda fitted: lp.LowRank(perceptron(), "classification").fit(None),
    "nothing to predict": lambda fitted: fitted.predictive(batch()[0][:0], method="sampled"),
    "points of another space": lambda fitted: landscape().gradient(torch.zeros(1, 3)),
    "scheme": lambda fitted: lp.geometry.diffuse(None, torch.zeros(2), torch.zeros(1, 1, 2), scheme="leapfrog"),
}


def landscape():
    return lp.geometry.LossLandscape(perceptron(), "classification", [batch()])


@pytest.mark.parametrize("kind", REFUSED)
def test_calls_that_make_no_sense_are_refused(kind, fitted):
    with pytest.raises((ConfigurationError, DataError, OperatorError)) as error:
        REFUSED[kind](fitted)
    assert says(error)


@pytest.mark.parametrize("given", [{}, {"labels": torch.zeros(3)}], ids=["nothing", "labels alone"])
def test_predictions_need_inputs(fitted, given):
    with pytest.raises(DataError) as error:
        fitted.predictive(**given)
    assert says(error, "There are no inputs.")
    with pytest.raises(DataError, match="There are no inputs"):
        fitted.predict([given])


def test_infinite_data_of_a_saturated_network_are_refused():
    """Its outputs are finite, and the gradients of its first layer are not."""
    x, y = batch()
    x[0, 1] = float("inf")
    for cls in (lp.KFAC, lp.Full, lp.Diagonal, lp.SampledLaplace):
        with pytest.raises(NonFiniteError):
            cls(perceptron(), "classification").fit([(x, y)])


@pytest.mark.parametrize("method", ["linearized", "sampled"])
def test_an_example_without_a_batch_axis_is_refused(fitted, method):
    """Its logits would else be taken for three examples of one class, which has probability one."""
    with pytest.raises(DataError) as error:
        fitted.predictive(batch()[0][0], method=method)
    assert says(error, "x[None]")


# -- layers of parametrized modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("2.weight", "2"),
        ("weight", ""),
        ("encoder.block.0.bias", "encoder.block.0"),
        ("2.parametrizations.weight.original", "2"),
        ("2.parametrizations.weight.original1", "2"),
        ("parametrizations.weight.original0", ""),
        ("a.parametrizations.weight.0.scale", "a"),
        ("a.b.parametrizations.weight_hh_l0.1.net.parametrizations.bias.original0", "a.b"),
        ("parametrizations.0.weight", "parametrizations.0"),  # a list that happens to have this name
        ("my_parametrizations.weight.original0", "my_parametrizations.weight"),
    ],
)
def test_the_layer_of_a_parameter(name, layer):
    assert layer_of(name) == layer


class Scaled(nn.Module):
    """A parametrization that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, weight):
        return self.scale * weight


def scaled(layer):
    parametrize.register_parametrization(layer, "weight", Scaled())
    return layer


PARAMETRIZED = {
    "weight_norm": (parametrizations.weight_norm, {"original0", "original1"}),
    "spectral_norm": (parametrizations.spectral_norm, {"original"}),
    "orthogonal": (lambda layer: parametrizations.orthogonal(layer, use_trivialization=False), {"original"}),
    "scaled": (scaled, {"original", "0.scale"}),
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_the_last_layer_has_all_of_a_parametrized_weight(kind):
    parametrization, tensors = PARAMETRIZED[kind]
    net = perceptron()
    net[2] = parametrization(net[2])
    names = {"2.bias", *(f"2.parametrizations.weight.{tensor}" for tensor in tensors)}
    assert last_layer_of(net) == "2"
    assert {s.name for s in select(net, "last_layer")} == names
    assert {s.layer for s in select(net, "all")} == {"0", "2"}
    assert last_layer_of(net[2]) == ""
    assert {s.name for s in select(net[2], "last_layer")} == {name.removeprefix("2.") for name in names}


def test_the_last_layer_of_weight_normalisation_equals_the_dense_curvature():
    net = perceptron()
    net[2] = parametrizations.weight_norm(net[2])
    x, y = batch()
    precision = torch.tensor([2.0], dtype=torch.float64)
    posterior = lp.Full(net, "classification", parameters="last_layer", prior_precision=precision).fit([(x, y)])
    names = list(posterior.parameter_names)
    assert set(names) == {"2.bias", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"}
    assert posterior.layer_names == ("2",)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # of the reference
        jacobians = jacobian(net, x, names)
    curvature = ggn(jacobians, categorical_hessian(net(x).detach()))
    want = curvature + 2 * torch.eye(len(curvature), dtype=torch.float64)
    assert relative_error(posterior.precision_matrix(), want) < EXACT


def test_a_layer_wise_prior_keeps_a_parametrized_weight_and_its_bias_together():
    net = perceptron()
    net[2] = parametrizations.weight_norm(net[2])
    posterior = lp.Diagonal(net, "classification", prior_precision=torch.tensor([1.0, 3.0])).fit([batch()])
    assert posterior.layer_names == ("0", "2")
    second = torch.cat(
        [torch.full((p.numel(),), name.startswith("2."), dtype=torch.bool) for name, p in net.named_parameters()]
    )
    assert torch.equal(posterior.prior().vector(), torch.where(second, 3.0, 1.0))


def test_further_names_of_tied_parameters_mean_one_use_alone():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    net[2].weight = net[0].weight

    def names(selection):
        return [s.name for s in select(net, selection)]

    assert names("last_layer") == names(["2.weight", "2.bias"]) == ["2.weight", "2.bias"]
    assert names(["2.weight", "0"]) == names(["0.weight", "0.bias", "2.weight"]) == ["0.weight", "0.bias"]
    every = torch.ones(3, 3, dtype=torch.bool)
    assert names({"2.weight": every}) == ["2.weight"]
    with pytest.raises(SelectionError, match="has a mask already"):
        select(net, {"0.weight": every, "2.weight": every})
    assert lp.Diagonal(net, "classification").layer_names == ("0", "2")  # the second has its bias alone


def test_messages_about_names_show_how_to_find_them():
    with pytest.raises(SelectionError, match=re.escape("named_parameters()")):
        select(perceptron(), "module.nothing")


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


def last_layer(**options):
    return lp.VariationalLastLayer(nn.Linear(3, 3), "classification", max_iterations=5, **options)


INPUTS, LABELS = torch.ones(6, 3), torch.arange(6) % 3
OTHERS = {
    "ABNN, detached": (
        lambda: lp.ABNN(nn.Sequential(nn.LayerNorm(3), Detached(3, 3)), "classification").fit([(INPUTS, LABELS)]),
        "is zero",
    ),
    "field, lazy": (lambda: lp.SpatialField(nn.LazyLinear(3), "regression", box=[[0.0], [1.0]]), "not initialised"),
    "no labels": (lambda: last_layer().fit([(INPUTS, torch.full_like(LABELS, -100))]), "is zero"),
    "prior mean": (lambda: last_layer(prior_mean=torch.zeros(7)).fit([(INPUTS, LABELS)]), "prior mean"),
    "odd samples": (lambda: last_layer(n_samples=3), "Expected"),
    "no input": (lambda: last_layer().fit([(INPUTS, LABELS)]).predictive(INPUTS[:0]), "at least one example"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_bad_input_to_other_classes_is_refused(case):
    call, said = OTHERS[case]
    with pytest.raises(lp.errors.LaplacePlusError, match=said):
        call()
