"""The backends of other libraries against the native one, which has dense oracles of its own."""

from __future__ import annotations

import pytest
import torch
from problems import whole_tensors
from torch import nn

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
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock

RTOL = 1e-10
STRUCTURES: dict[str, Structure] = {
    "full": FullStructure(),
    "diagonal": DiagonalStructure(),
    "expand": KroneckerStructure("expand"),
    "reduce": KroneckerStructure("reduce"),
}
BACKENDS: dict[str, type[Backend]] = {"backpack": BackPack, "curvlinops": Curvlinops}
N, C = 5, 3


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


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
    generator: torch.Generator | None = None,
) -> Curvature:
    network = Network(model, selection, likelihood.arrange)  # type: ignore[arg-type]
    batch = Batch(inputs, targets)
    curvature, outputs = backend.curvature(network, likelihood, batch, STRUCTURES[structure], generator=generator)
    torch.testing.assert_close(outputs, network.forward(inputs))
    return curvature


def assert_same(mine: Curvature, native: Curvature) -> None:
    """The same blocks under the same keys, made of the same tensors, and the same entries at some weights."""
    if any(
        isinstance(block, SoftmaxOutputBlock) for _, block in native
    ):  # the native backend has a form of its own for heads
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


DETERMINISTIC = [
    (backend, kind, structure, likelihood, network)
    for backend, cls in BACKENDS.items()
    for kind in ("ggn", "empirical_fisher", "hessian")
    for structure, form in STRUCTURES.items()
    for likelihood in LIKELIHOODS
    for network in NETWORKS
    if (kind, form.name) in cls.supported
    and not (likelihood == "gaussian per output" and kind != "ggn")
    # What BackPACK refuses is tested below.
    and not (backend == "backpack" and form.name == "KFAC" and (network == "cnn" or "per output" in likelihood))
]


@pytest.mark.parametrize(("backend", "kind", "structure", "likelihood_name", "network_name"), DETERMINISTIC)
def test_equals_native(backend, kind, structure, likelihood_name, network_name):
    make, shape = NETWORKS[network_name]
    likelihood, n_outputs, targets = likelihood_case(likelihood_name)
    model, inputs = make(n_outputs), torch.randn(N, *shape)
    mine = compute(BACKENDS[backend](kind), model, likelihood, inputs, targets, structure)
    assert_same(mine, compute(Native(kind), model, likelihood, inputs, targets, structure))


QUICK = {  # each likelihood and each structure once
    *(("backpack", *case) for case in (("full", "bernoulli"), ("diagonal", "gaussian"), ("expand", "categorical"))),
    *(("curvlinops", *case) for case in (("expand", "bernoulli"), ("reduce", "gaussian"), ("full", "categorical"))),
    ("backpack", "reduce", "categorical"),
    ("curvlinops", "full", "gaussian per output"),
}
MONTE_CARLO = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for backend, cls in BACKENDS.items()
    for structure, form in STRUCTURES.items()
    for likelihood in LIKELIHOODS
    if ("ggn_mc", form.name) in cls.supported and not (backend == "backpack" and "per output" in likelihood)
    for case in [(backend, structure, likelihood)]
]


@pytest.mark.parametrize(("backend", "structure", "likelihood_name"), MONTE_CARLO)
def test_monte_carlo_is_right_in_expectation(backend, structure, likelihood_name):
    likelihood, n_outputs, targets = likelihood_case(likelihood_name)
    model, inputs = mlp(n_outputs), torch.randn(N, 4)
    generator = torch.Generator().manual_seed(1)
    weights = torch.linspace(1, 2, likelihood.n_noise)
    exact = compute(Native(), model, likelihood, inputs, targets, structure).dense(weights)
    # A few functionals of the matrix rather than all of its entries, some of which would be beyond four errors.
    probes = torch.randn(4, len(exact), generator=generator)

    def functionals(matrix: torch.Tensor) -> torch.Tensor:
        return torch.cat([matrix.diagonal().sum()[None], ((probes @ matrix) * probes).sum(1)])

    backend_object = BACKENDS[backend]("ggn_mc", n_samples=10)
    draws = torch.stack(
        [
            functionals(
                compute(backend_object, model, likelihood, inputs, targets, structure, generator=generator).dense(
                    weights
                )
            )
            for _ in range(30)
        ]
    )
    error = draws.std(0) / len(draws) ** 0.5
    assert (error > 0).all()
    assert ((draws.mean(0) - functionals(exact)).abs() < 4 * error).all()


@pytest.mark.parametrize(("backend", "structure"), [("backpack", "full"), ("backpack", "diagonal"),
                                                    ("backpack", "expand"), ("curvlinops", "full"),
                                                    ("curvlinops", "expand")])  # fmt: skip
def test_monte_carlo_draws_from_the_generator_alone(backend, structure):
    likelihood, n_outputs, targets = likelihood_case("categorical")
    model, inputs = mlp(n_outputs), torch.randn(N, 4)
    state = torch.random.get_rng_state()

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        cls = BACKENDS[backend]
        curvature = compute(cls("ggn_mc"), model, likelihood, inputs, targets, structure, generator=generator)
        return curvature.dense(torch.ones(1))

    first = draw(0)
    torch.rand(3)
    assert torch.equal(first, draw(0))
    assert not torch.allclose(first, draw(1))
    torch.random.set_rng_state(state)
    draw(0)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("selection", ["last_layer", ["0.bias"], ["0.weight", "2.bias"]], ids=str)
@pytest.mark.parametrize(("backend", "structure"), [("backpack", "full"), ("backpack", "diagonal"),
                                                    ("backpack", "expand"), ("curvlinops", "full"),
                                                    ("curvlinops", "expand"), ("curvlinops", "reduce")])  # fmt: skip
def test_selections(backend, structure, selection):
    likelihood, n_outputs, targets = likelihood_case("categorical")
    model, inputs = mlp(n_outputs), torch.randn(N, 4)
    mine = compute(BACKENDS[backend](), model, likelihood, inputs, targets, structure, selection)
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, structure, selection))


class Residual(nn.Module):
    """What BackPACK's first-order extensions see although its second-order ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.second(torch.relu(x + self.act(self.first(x)))))


@pytest.mark.parametrize("structure", ["full", "diagonal"])
@pytest.mark.parametrize("likelihood", [lp.Categorical(), lp.Poisson()], ids=str)
def test_backpack_empirical_fisher_takes_any_network_and_likelihood(structure, likelihood):
    model, inputs = Residual(), torch.randn(N, 4)
    targets = torch.randint(0, C, (N,) if isinstance(likelihood, lp.Categorical) else (N, C))
    mine = compute(BackPack("empirical_fisher"), model, likelihood, inputs, targets, structure)
    assert_same(mine, compute(Native("empirical_fisher"), model, likelihood, inputs, targets, structure))


def test_backpack_empirical_fisher_of_pixels():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, C, 1))
    likelihood = lp.Categorical(ignore_index=255, output_axis=1)
    inputs, targets = torch.randn(N, 2, 4, 4), torch.randint(0, C, (N, 4, 4))
    targets[0, 1, 1] = 255
    mine = compute(BackPack("empirical_fisher"), model, likelihood, inputs, targets, "full")
    assert_same(mine, compute(Native("empirical_fisher"), model, likelihood, inputs, targets, "full"))


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_curvlinops_full_with_pixels_and_ignored_targets(kind):
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, C, 1))
    likelihood = lp.Categorical(ignore_index=255, output_axis=1)
    inputs, targets = torch.randn(N, 2, 4, 4), torch.randint(0, C, (N, 4, 4))
    targets[0, 1, 1] = 255
    mine = compute(Curvlinops(kind), model, likelihood, inputs, targets, "full")
    assert_same(mine, compute(Native(kind), model, likelihood, inputs, targets, "full"))


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


# -- accumulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "structure"), [("backpack", "full"), ("backpack", "diagonal"),
                                                    ("backpack", "expand"), ("curvlinops", "full"),
                                                    ("curvlinops", "expand"), ("curvlinops", "reduce")])  # fmt: skip
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


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize(("posterior_class", "backend", "options"), [
    (lp.Full, "backpack", {}),
    (lp.Full, "curvlinops", {}),
    (lp.Diagonal, "backpack", {}),
    (lp.KFAC, "backpack", {}),
    (lp.KFAC, "curvlinops", {}),
    (lp.KFAC, "curvlinops", {"weight_sharing": "reduce"}),
    (lp.Full, BackPack("empirical_fisher"), {}),
    (lp.KFAC, Curvlinops("empirical_fisher"), {}),
])  # fmt: skip
def test_posteriors_agree(posterior_class, backend, options, task):
    model, inputs = mlp(), torch.randn(12, 4)
    targets = torch.randint(0, C, (12,)) if task == "classification" else torch.randn(12, C)
    likelihood = lp.Gaussian() if task == "regression" else task  # which BackPACK gives one noise level for KFAC
    loader = [(inputs[:5], targets[:5]), (inputs[5:], targets[5:])]
    native = Native(backend.kind) if isinstance(backend, Backend) else "native"
    mine = posterior_class(model, likelihood, backend=backend, **options).fit(loader)
    expected = posterior_class(model, likelihood, backend=native, **options).fit(loader)
    for posterior in (mine, expected):
        posterior.fit_prior_precision("marginal_likelihood")
    torch.testing.assert_close(mine.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-8, atol=0)
    torch.testing.assert_close(mine.prior_precision, expected.prior_precision, rtol=1e-5, atol=0)
    x = torch.randn(3, 4)
    torch.testing.assert_close(mine.predictive(x).mean, expected.predictive(x).mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(mine.predictive(x).variance, expected.predictive(x).variance, rtol=1e-5, atol=1e-8)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(
    backend: Backend,
    model: nn.Module,
    likelihood: Likelihood,
    inputs: object,
    targets: torch.Tensor,
    structure: str,
    selection: object = "all",
) -> str:
    with pytest.raises(UnsupportedError) as caught:
        compute(backend, model, likelihood, inputs, targets, structure, selection)
    text = str(caught.value)
    assert backend.name in text
    assert "native" in text or "Native" in text or "lp." in text
    return text


@pytest.mark.parametrize(("backend", "kind", "structure"), [
    ("curvlinops", "ggn", "diagonal"),
    ("curvlinops", "hessian", "diagonal"),
    ("curvlinops", "hessian", "expand"),
    ("backpack", "hessian", "full"),
    ("backpack", "hessian", "expand"),
    ("backpack", "empirical_fisher", "expand"),
])  # fmt: skip
def test_combinations_that_a_library_does_not_have_are_refused(backend, kind, structure):
    likelihood, n_outputs, targets = likelihood_case("categorical")
    text = refused(BACKENDS[backend](kind), mlp(n_outputs), likelihood, torch.randn(N, 4), targets, structure)
    assert kind in text


def test_noise_levels_are_refused_where_a_library_cannot_tell_outputs_apart():
    likelihood, n_outputs, targets = likelihood_case("gaussian per output")
    model, inputs = mlp(n_outputs), torch.randn(N, 4)
    for kind, structure in (("ggn", "expand"), ("ggn_mc", "full"), ("ggn_mc", "diagonal")):
        assert "3 noise levels" in refused(BackPack(kind), model, likelihood, inputs, targets, structure)  # type: ignore[arg-type]


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
ASKED = [
    *(("backpack", kind, structure) for kind in ("ggn", "empirical_fisher") for structure in ("full", "diagonal")),
    ("backpack", "ggn", "expand"),
    *(("curvlinops", "ggn", structure) for structure in ("full", "expand", "reduce")),
    ("curvlinops", "hessian", "full"),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("backend", "kind", "structure"), ASKED)
@pytest.mark.parametrize("name", ODD)
def test_odd_networks_are_right_or_refused(backend, kind, structure, name):
    make, shape = ODD[name]
    likelihood, _, targets = likelihood_case("categorical")
    model, inputs = make(), torch.randn(N, *shape)
    mine, reason = None, ""
    try:
        mine = compute(BACKENDS[backend](kind), model, likelihood, inputs, targets, structure)
    except UnsupportedError as error:
        reason = str(error)
    if mine is not None:
        assert_same(mine, compute(Native(kind), model, likelihood, inputs, targets, structure))
        return
    assert backend in reason and "native" in reason.lower()
    assert (backend, kind, structure) != ("curvlinops", "ggn", "full"), "which sees functions, not modules"


@pytest.mark.parametrize("kind", ["ggn", "ggn_mc"])
def test_what_backpack_would_get_wrong_is_found(kind):
    likelihood, _, targets = likelihood_case("categorical")
    make, shape = ODD["a divisor"]
    text = refused(BackPack(kind), make(), likelihood, torch.randn(N, *shape), targets, "diagonal")
    assert "computes another curvature" in text


def test_backpack_refuses_other_outputs_than_rows():
    model, inputs = mlp(2), torch.randn(N, 4)
    text = refused(BackPack(), model, lp.Bernoulli(), inputs, torch.ones(N, 2), "full")
    assert "C = 2" in text
    text = refused(BackPack(), model, lp.Categorical(), torch.randn(N, 3, 4), torch.zeros(N, 3).long(), "full")
    assert "[B, C]" in text
    text = refused(BackPack(), model, lp.Categorical(), inputs, torch.tensor([0, 1, -100, 0, 1]), "diagonal")
    assert "ignored" in text


def test_curvlinops_refuses_positions_and_ignored_targets_where_they_count():
    model, likelihood = mlp(), lp.Categorical()
    tokens, labels = torch.randn(N, 3, 4), torch.zeros(N, 3).long()
    for kind, structure in (("ggn", "expand"), ("empirical_fisher", "full"), ("ggn_mc", "reduce")):
        assert "[B, C]" in refused(Curvlinops(kind), model, likelihood, tokens, labels, structure)  # type: ignore[arg-type]
    inputs, targets = torch.randn(N, 4), torch.tensor([0, 1, -100, 0, 1])
    for kind, structure in (("ggn", "expand"), ("empirical_fisher", "expand"), ("ggn_mc", "full")):
        assert "ignored" in refused(Curvlinops(kind), model, likelihood, inputs, targets, structure)  # type: ignore[arg-type]
    for kind, structure in (("ggn", "full"), ("empirical_fisher", "full")):
        mine = compute(Curvlinops(kind), model, likelihood, inputs, targets, structure)  # type: ignore[arg-type]
        assert_same(mine, compute(Native(kind), model, likelihood, inputs, targets, structure))  # type: ignore[arg-type]


def test_curvlinops_refuses_the_padding_row_of_an_embedding():
    model = nn.Sequential(nn.Embedding(6, 2, padding_idx=0), nn.Flatten(), nn.Linear(8, C))
    likelihood, _, targets = likelihood_case("categorical")
    inputs = torch.randint(0, 6, (N, 4))
    assert "'0.weight'" in refused(Curvlinops(), model, likelihood, inputs, targets, "full")
    mine = compute(Curvlinops(), model, likelihood, inputs, targets, "full", "last_layer")
    assert_same(mine, compute(Native(), model, likelihood, inputs, targets, "full", "last_layer"))


# -- the user's model --------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> list[tuple]:
    """Everything about a model that a careless library might change."""
    state = [
        (
            name,
            sorted(vars(module)),
            module.training,
            *(
                list(hooks.items())
                for key, hooks in sorted(vars(module).items())
                if "hooks" in key and hooks is not None
            ),
        )
        for name, module in model.named_modules()
    ]
    parameters = [
        (name, id(p), p.data_ptr(), p._version, p.requires_grad, p.grad is None, sorted(vars(p)))
        for name, p in model.named_parameters()
    ]
    return [*state, *parameters]


@pytest.mark.parametrize("case", [
    "backpack full", "backpack diagonal", "backpack expand", "backpack diagonal hessian",
    "backpack full empirical_fisher", "curvlinops full", "curvlinops expand", "curvlinops full hessian",
    "backpack full fails", "backpack expand fails", "curvlinops expand fails", "curvlinops full fails",
])  # fmt: skip
def test_the_model_stays_as_it_is(case):
    backend_name, structure, *rest = case.split()
    fails = rest == ["fails"]
    kind = rest[0] if rest and not fails else "ggn"
    likelihood, _, targets = likelihood_case("categorical")
    inputs = torch.randn(N, 4, requires_grad=True)

    class Failing(nn.Module):
        """Runs, but has no derivative of the kind that the libraries ask for."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OnceDifferentiable.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Failing() if fails else nn.Identity(), nn.Linear(4, C))
    if kind == "hessian":
        model[2] = nn.Tanh()
    if fails and case.startswith("curvlinops expand"):
        model[2] = nn.Tanh()
        model[0].forward = lambda input: nn.functional.linear(input, model[0].weight, model[0].bias)
        model[0].register_forward_pre_hook(lambda module, args, kwargs: ((), {"input": args[0]}), with_kwargs=True)
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape) and None)
    model[1].eval()
    before, weights = snapshot(model), {key: value.clone() for key, value in model.state_dict().items()}
    backend = BACKENDS[backend_name](kind)
    if fails:
        with pytest.raises(UnsupportedError):
            compute(backend, model, likelihood, inputs, targets, structure)
    else:
        compute(backend, model, likelihood, inputs, targets, structure)
    assert snapshot(model) == before
    assert inputs.grad is None
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key])


class OnceDifferentiable(torch.autograd.Function):
    """The identity for ordinary backward passes only."""

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
