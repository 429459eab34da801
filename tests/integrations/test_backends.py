"""The backends of other libraries against the native one, which has dense oracles of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import whole_tensors
from torch import nn
from zoo.test_untouched import Watch

import laplace_plus as lp
from laplace_plus.curvature import (
    Backend,
    BackPack,
    Curvature,
    Curvlinops,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Native,
    Structure,
    register_backend,
)
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network
from laplace_plus.structured.blocks import block_from_tensors
from laplace_plus.structured.softmax_output import SoftmaxOutputBlock

RTOL = 1e-10
STRUCTURES: dict[str, Structure] = {
    "full": FullStructure(),
    "diagonal": DiagonalStructure(),
    "expand": KroneckerStructure("expand"),
    "reduce": KroneckerStructure("reduce"),
}
BACKENDS: dict[str, type[Backend]] = {"backpack": BackPack, "curvlinops": Curvlinops}
N, C = 5, 3


pytestmark = pytest.mark.usefixtures("double")


def mlp(n_outputs: int = C) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, n_outputs))


def cnn(n_outputs: int = C) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 2, bias=False, dilation=2),
        nn.MaxPool2d(1),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4, n_outputs),
    )


NETWORKS = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 5, 5))}


def likelihood_case(name: str, n: int = N) -> tuple[Likelihood, int, torch.Tensor]:
    """A likelihood, its number of outputs, and targets."""
    if name == "categorical":
        return lp.Categorical(), C, torch.randint(0, C, (n,))
    if name == "bernoulli":
        return lp.Bernoulli(), 1, torch.randint(0, 2, (n, 1))
    if name == "gaussian":
        return lp.Gaussian(0.3), C, torch.randn(n, C)
    assert name == "gaussian per output"
    return lp.Gaussian(torch.tensor([0.3, 1.0, 2.0])), C, torch.randn(n, C)


LIKELIHOODS = ["categorical", "bernoulli", "gaussian", "gaussian per output"]


def compute(
    backend: Backend,
    model: nn.Module,
    likelihood: Likelihood,
    inputs: object,
    targets: torch.Tensor,
    structure: str,
    selection: object = "all",
) -> Curvature:
    network = Network(model, selection, likelihood.arrange)  # type: ignore[arg-type]
    curvature, outputs = backend.accumulate(None, network, likelihood, Batch(inputs, targets), STRUCTURES[structure])
    torch.testing.assert_close(outputs, network.forward(inputs))
    return curvature


def assert_same(mine: Curvature, native: Curvature) -> None:
    """The same blocks under the same keys, made of the same tensors, and the same entries at some weights."""
    if any(isinstance(block, SoftmaxOutputBlock) for _, block in native):  # the native form of heads
        weights = torch.ones(1, dtype=torch.float64)
        torch.testing.assert_close(mine.dense(weights), native.dense(weights), rtol=1e-8, atol=1e-10)
        return
    assert [layout.key for layout, _ in mine] == [layout.key for layout, _ in native]
    for (layout, block), (expected_layout, expected) in zip(mine, native, strict=True):
        assert torch.equal(layout.index, expected_layout.index)
        assert type(block) is type(expected)
        assert block.shape == expected.shape
        assert block.n_components == expected.n_components
        for name, tensor in whole_tensors(expected).items():
            scale = tensor.abs().max().item()
            torch.testing.assert_close(whole_tensors(block)[name], tensor, rtol=RTOL, atol=RTOL * scale)
        # Rebuilding takes storage and shape, as loading a posterior does.
        again = block_from_tensors(block.storage, block.shape, block.tensors())
        weights = torch.linspace(1, 2, block.n_components)
        torch.testing.assert_close(again.dense(weights), expected.dense(weights), rtol=1e-8, atol=1e-10)


PAIRS = [
    (backend, structure)
    for backend, cls in BACKENDS.items()
    for structure, form in STRUCTURES.items()
    if ("ggn", form.name) in cls.supported
]
each_pair = pytest.mark.parametrize(("backend", "structure"), PAIRS)


@pytest.mark.diagonal
@pytest.mark.quick("mlp-gaussian per output-backpack-diagonal")
@each_pair
@pytest.mark.parametrize("likelihood_name", LIKELIHOODS)
@pytest.mark.parametrize("network_name", NETWORKS)
def test_equals_native(backend, structure, likelihood_name, network_name):
    make, shape = NETWORKS[network_name]
    likelihood, n_outputs, targets = likelihood_case(likelihood_name)
    arguments = make(n_outputs), likelihood, torch.randn(N, *shape), targets, structure
    known = network_name == "mlp" and "per output" not in likelihood_name
    if backend == "backpack" and STRUCTURES[structure].name == "KFAC" and not known:
        assert "factors" in refused(BackPack(), *arguments)
        return
    assert_same(compute(BACKENDS[backend](), *arguments), compute(Native(), *arguments))


@pytest.mark.diagonal
@pytest.mark.parametrize("selection", ["last_layer", ["0.bias"], ["0.weight", "2.bias"]], ids=str)
@each_pair
def test_selections(backend, structure, selection):
    likelihood, n_outputs, targets = likelihood_case("categorical")
    model, inputs = mlp(n_outputs), torch.randn(N, 4)
    mine = compute(BACKENDS[backend](), model, likelihood, inputs, targets, structure, selection)
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, structure, selection))


def test_curvlinops_full_with_pixels_and_ignored_targets():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, C, 1))
    likelihood = lp.Categorical(ignore_index=255, output_axis=1)
    inputs, targets = torch.randn(N, 2, 4, 4), torch.randint(0, C, (N, 4, 4))
    targets[0, 1, 1] = 255
    mine = compute(Curvlinops(), model, likelihood, inputs, targets, "full")
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, "full"))


@pytest.mark.parametrize(
    "likelihood", [lp.Categorical(), lp.Gaussian(0.5), lp.Gaussian(torch.tensor([0.5, 1.0, 2.0]))], ids=str
)
def test_curvlinops_full_of_a_transformer(likelihood):
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    model = nn.Sequential(nn.Linear(2, 4), layer, nn.Linear(4, C))
    inputs = torch.randn(3, 4, 2)
    targets = torch.randint(0, C, (3, 4)) if isinstance(likelihood, lp.Categorical) else torch.randn(3, 4, C)
    mine = compute(Curvlinops(), model, likelihood, inputs, targets, "full")
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, "full"))


@each_pair
def test_batches_add_up(backend, structure):
    likelihood, n_outputs, targets = likelihood_case("categorical", 7)
    make, shape = NETWORKS["mlp" if backend == "backpack" else "cnn"]
    model, inputs = make(n_outputs), torch.randn(7, *shape)
    parts = [
        compute(BACKENDS[backend](), model, likelihood, inputs[rows], targets[rows], structure)
        for rows in (slice(0, 2), slice(2, 7))
    ]
    parts[0].add_(parts[1])
    assert_same(parts[0], compute(Native(), model, likelihood, inputs, targets, structure))


# -- through the public interface --------------------------------------------------------------------------------------


@pytest.mark.diagonal
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(("posterior_class", "backend", "options"), [
    (lp.Full, "backpack", {}),
    (lp.Full, "curvlinops", {}),
    (lp.Diagonal, "backpack", {}),
    (lp.KFAC, "backpack", {}),
    (lp.KFAC, "curvlinops", {}),
    (lp.KFAC, "curvlinops", {"weight_sharing": "reduce"}),
])  # fmt: skip
def test_posteriors_agree(posterior_class, backend, options, task):
    model, inputs = mlp(), torch.randn(12, 4)
    targets = torch.randint(0, C, (12,)) if task == "classification" else torch.randn(12, C)
    likelihood = lp.Gaussian() if task == "regression" else task  # which BackPACK gives one noise level for KFAC
    loader = [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])]
    mine = posterior_class(model, likelihood, backend=backend, **options).fit(loader)
    expected = posterior_class(model, likelihood, **options).fit(loader)
    for posterior in (mine, expected):
        posterior.fit_prior_precision("marginal_likelihood")
    torch.testing.assert_close(mine.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-8, atol=0)
    torch.testing.assert_close(mine.prior_precision, expected.prior_precision, rtol=1e-5, atol=0)
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine.predictive(x).mean, expected.predictive(x).mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(mine.predictive(x).variance, expected.predictive(x).variance, rtol=1e-5, atol=1e-8)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(backend: Backend, *arguments: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        compute(backend, *arguments)
    text = str(caught.value)
    assert backend.name in text
    assert "native" in text or "Native" in text or "lp." in text
    return text


def test_combinations_that_a_library_does_not_have_are_refused():
    likelihood, n_outputs, targets = likelihood_case("categorical")
    cases = (Curvlinops("ggn"), "diagonal"), (Curvlinops("hessian"), "full"), (BackPack("ggn_mc"), "full")
    for backend, structure in cases:
        text = refused(backend, mlp(n_outputs), likelihood, torch.randn(N, 4), targets, structure)
        assert f'Native(kind="{backend.kind}")' in text


@pytest.mark.parametrize("backend", [BackPack(), Curvlinops()], ids=lambda b: b.name)
@pytest.mark.parametrize("likelihood", [lp.Poisson(), lp.LogDensity(lambda f, y: -(f - y).square().sum(-1))], ids=repr)
def test_other_likelihoods_are_refused(backend, likelihood):
    text = refused(backend, mlp(), likelihood, torch.randn(N, 4), torch.ones(N, C), "full")
    assert type(likelihood).__name__ in text


class Functional(nn.Module):
    """Tanh between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Reused(Functional):
    """One activation for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.second(self.act(self.first(x))))


class Skipping(Reused):
    """The second layer takes something else than the output of the module before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.act(h)
        return self.second(h)


class Recurrent(Reused):
    """A layer that is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(self.act(self.first(x)))))


class Tied(Reused):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


class ByFunction(Reused):
    """A layer's weight used behind the layer's back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(nn.functional.linear(x, self.first.weight, self.first.bias)))


class Transposing(Functional):
    """Examples along the second axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


def image_net(*modules: nn.Module) -> nn.Module:
    body = nn.Sequential(*modules, nn.Flatten())
    return nn.Sequential(*body, nn.Linear(body.eval()(torch.randn(1, 2, 5, 5)).shape[1], C))


ODD = {
    "functions between modules": (Functional, (4,)),
    "a module used twice": (Reused, (4,)),
    "a module passed over": (Skipping, (4,)),
    "a layer used twice": (Recurrent, (4,)),
    "tied weights": (Tied, (4,)),
    "a weight used by a function": (ByFunction, (4,)),
    "examples along the second axis": (Transposing, (3, 4)),
    "GELU": (lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, C)), (4,)),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, C)), (4,)),
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, C)), (4,)),
    "positions": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(6, C)), (3, 4)),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, C)), (2, 4)),
    "groups": (lambda: image_net(nn.Conv2d(2, 4, 3, groups=2)), (2, 5, 5)),
    "padding by name": (lambda: image_net(nn.Conv2d(2, 3, (4, 3), padding="same")), (2, 5, 5)),
    "circular padding": (lambda: image_net(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), (2, 5, 5)),
    "a divisor": (lambda: image_net(nn.Conv2d(2, 3, 3), nn.AvgPool2d(2, divisor_override=3)), (2, 5, 5)),
}


@pytest.mark.diagonal
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@each_pair
@pytest.mark.parametrize("name", ODD)
def test_odd_networks_are_right_or_refused(backend, structure, name):
    make, shape = ODD[name]
    likelihood, _, targets = likelihood_case("categorical")
    arguments = make(), likelihood, torch.randn(N, *shape), targets, structure
    mine, reason = None, ""
    try:
        mine = compute(BACKENDS[backend](), *arguments)
    except UnsupportedError as error:
        reason = str(error)
    if mine is None:
        assert backend in reason and "native" in reason
        assert (backend, structure) != ("curvlinops", "full"), "which sees functions, not modules"
        return
    assert_same(mine, compute(Native(), *arguments))


def test_what_backpack_would_get_wrong_is_found():
    likelihood, _, targets = likelihood_case("categorical")
    make, shape = ODD["a divisor"]
    text = refused(BackPack(), make(), likelihood, torch.randn(N, *shape), targets, "diagonal")
    assert "computes another curvature" in text


class Merging(nn.Sequential):
    """Adds rows to others before the last layer, unless all inputs have the same sign."""

    def forward(self, x):
        first, act, last = self
        h, is_mixed = act(first(x)), (x > 0).any() & (x < 0).any()
        return last(torch.where(is_mixed, h + 0.1 * h.flip(0), h))


@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.parametrize(("backend", "structure"), [("backpack", "diagonal"), ("curvlinops", "expand")])
def test_rows_that_only_a_later_batch_shares_are_refused(backend, structure):
    likelihood, _, targets = likelihood_case("categorical")
    model, inputs, total = Merging(*mlp()), torch.rand(N, 4), None
    options = Network(model, "all", likelihood.arrange), likelihood
    if backend == "curvlinops":  # backpack refuses any function between modules
        total, _ = Curvlinops().accumulate(total, *options, Batch(inputs, targets), STRUCTURES[structure])
    with pytest.raises(UnsupportedError, match="native"):
        BACKENDS[backend]().accumulate(total, *options, Batch(inputs - 0.5, targets), STRUCTURES[structure])


def test_backpack_refuses_other_outputs_than_rows():
    model, inputs = mlp(2), torch.randn(N, 4)
    text = refused(BackPack(), model, lp.Bernoulli(), inputs, torch.ones(N, 2), "full")
    assert "[B, 1]" in text
    text = refused(BackPack(), model, lp.Categorical(), torch.randn(N, 3, 4), torch.zeros(N, 3).long(), "full")
    assert "[B, C]" in text
    text = refused(BackPack(), model, lp.Categorical(), inputs, torch.tensor([0, 1, -100, 0, 1]), "diagonal")
    assert "ignored" in text


def test_curvlinops_refuses_positions_and_ignored_targets_where_they_count():
    model, likelihood = mlp(), lp.Categorical()
    tokens, labels = torch.randn(N, 3, 4), torch.zeros(N, 3).long()
    inputs, targets = torch.randn(N, 4), torch.tensor([0, 1, -100, 0, 1])
    for structure in ("expand", "reduce"):
        assert "[B, C]" in refused(Curvlinops(), model, likelihood, tokens, labels, structure)
        assert "ignored" in refused(Curvlinops(), model, likelihood, inputs, targets, structure)
    mine = compute(Curvlinops(), model, likelihood, inputs, targets, "full")
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, "full"))


def test_curvlinops_refuses_the_padding_row_of_an_embedding():
    model = nn.Sequential(nn.Embedding(6, 2, padding_idx=0), nn.Flatten(), nn.Linear(8, C))
    likelihood, _, targets = likelihood_case("categorical")
    inputs = torch.randint(0, 6, (N, 4))
    assert "'0.weight'" in refused(Curvlinops(), model, likelihood, inputs, targets, "full")
    mine = compute(Curvlinops(), model, likelihood, inputs, targets, "full", "last_layer")
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, "full", "last_layer"))


# -- the user's model --------------------------------------------------------------------------------------------------


@each_pair
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_stays_as_it_is(backend, structure, fails):
    likelihood, _, targets = likelihood_case("categorical")
    inputs = torch.randn(N, 4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), OnceDifferentiable() if fails else nn.Tanh(), nn.Linear(4, C))
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape) and None)
    model[1].eval()
    watch = Watch(model)
    try:
        compute(BACKENDS[backend](), model, likelihood, inputs, targets, structure)
    except UnsupportedError:
        assert fails
    watch.assert_same()
    assert inputs.grad is None


class OnceDifferentiable(nn.Module):
    """Runs, but has no derivative of the kind that the libraries ask for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Identity.apply(x)


class Identity(torch.autograd.Function):
    """For ordinary backward passes only."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_backend_of_another_package_is_found_by_name_and_survives_saving(tmp_path):
    class Doubled(Native):
        name = "doubled"

        def accumulate(self, total, *args, **kwargs):
            once, outputs = super().accumulate(None, *args, **kwargs)
            once = once.add_(once.clone())
            return once if total is None else total.add_(once), outputs

    register_backend("doubled", lambda: Doubled)
    model, data = nn.Linear(4, 3), [(torch.randn(N, 4), torch.randint(3, (N,)))]
    posterior = lp.Diagonal(model, "classification", backend="doubled").fit(data)
    plain = lp.Diagonal(model, "classification").fit(data)
    torch.testing.assert_close(1 / posterior.variance() - 1, 2 * (1 / plain.variance() - 1))
    posterior.save(tmp_path / "doubled")
    assert isinstance(lp.load(tmp_path / "doubled", model).backend, Doubled)
    with pytest.raises(ConfigurationError, match="taken"):
        register_backend("doubled", Native)
