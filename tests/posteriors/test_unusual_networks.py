"""Networks that switch parts by batch, differentiate themselves, compute in complex numbers, or return tuples.

Against the dense Gauss-Newton matrix of plain derivatives.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import laplace_plus as lp
from laplace_plus.errors import InputError, UnsupportedError

D = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore:Which rows belong"),
    pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning"),
]


class Heads(nn.Module):
    """Two of three heads, mixed by weights of the batch's task."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = nn.Linear(3, 4), nn.Embedding(3, 2)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, task):
        hidden, gate, t = torch.tanh(self.body(x)), self.gate(task).softmax(-1), int(task[0])
        return gate[:, :1] * self.heads[t](hidden) + gate[:, 1:] * self.heads[(t + 1) % 3](hidden)


class Residual(nn.Module):
    """The residual of a differential equation, by second derivatives in the inputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.net(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return first[:, 1:] - second[:, :1] + u


class Hamilton(nn.Module):
    """A vector field from an energy, by torch.func."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(2, 5), nn.Softplus(), nn.Linear(5, 1))

    def forward(self, x):
        slope = torch.func.vmap(torch.func.grad(lambda z: self.energy(z).squeeze(-1)))(x)
        return torch.stack([slope[:, 1], -slope[:, 0]], 1)


class Forces(nn.Module):
    """The slope of an energy in the inputs, which come to require gradients, or in a layer's outputs."""

    def __init__(self, inner=False):
        super().__init__()
        self.lift, self.energy, self.inner = nn.Linear(2, 4), nn.Linear(4, 1), inner

    def forward(self, x):
        hidden = torch.tanh(self.lift(x if self.inner else x.requires_grad_()))
        (slope,) = torch.autograd.grad(
            self.energy(hidden).square().sum(), hidden if self.inner else x, create_graph=True
        )
        return slope


class Spectral(nn.Module):
    """A spectral convolution with complex weights, or with real ones that are read as complex."""

    def __init__(self, is_complex):
        super().__init__()
        self.lift, self.out = nn.Linear(1, 2), nn.Linear(2, 2)
        weight = torch.randn(2, 2, 3, 2, dtype=D) / 3
        self.scale = nn.Parameter(torch.ones(1, dtype=D))  # after which the weight begins at an odd place
        self.weight = nn.Parameter(torch.view_as_complex(weight) if is_complex else weight)

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        v = self.scale * self.lift(x[..., None]).movedim(-1, 1)
        modes = torch.fft.rfft(v)
        kept = torch.zeros_like(modes)
        kept[..., :3] = torch.einsum("bim,iom->bom", modes[..., :3], weight)
        return self.out(torch.tanh(torch.fft.irfft(kept, n=x.shape[-1]) + v).mean(-1))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(6, 3, sparse=True, max_norm=1.0)
        self.items = nn.Embedding(5, 3, scale_grad_by_freq=True)  # which is no derivative
        self.out = nn.Linear(6, 2)

    def forward(self, user, item):
        return self.out(torch.cat([self.users(user), self.items(item)], 1))


class Recurrent(nn.Module):
    """A recurrent layer or cell, or attention that returns its weights."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        options = {} if kind.endswith("Cell") else {"batch_first": True}
        sizes = (4, 2) if kind == "MultiheadAttention" else (4, 3)
        self.layer, self.out = getattr(nn, kind)(*sizes, **options), nn.Linear(sizes[-1] if sizes[-1] == 3 else 4, 2)

    def forward(self, x):
        if self.kind == "MultiheadAttention":
            y, weights = self.layer(x, x, x, need_weights=True)
            return self.out(y.mean(1)) + weights.square().mean((1, 2))[:, None]
        if not self.kind.endswith("Cell"):
            return self.out(self.layer(x)[0][:, -1])
        state = None
        for step in x.unbind(1):
            state = self.layer(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


def normal(*shape):
    return torch.randn(*shape, dtype=D)


def cases():
    torch.manual_seed(0)
    users, items = torch.randint(0, 6, (8,)), torch.randint(0, 5, (8,))
    labels = torch.arange(8) % 2
    tasks = [((normal(4, 3), torch.full((4,), t)), labels[:4]) for t in (1, 0, 1)]
    rows = [(normal(1, 3, 4), labels[k : k + 1]) for k in range(4)]
    found = {
        "heads": (Heads(), tasks),
        "residual": (Residual(), [(normal(6, 2), normal(6, 1)) for _ in range(2)]),
        "hamilton": (Hamilton(), [(normal(6, 2), normal(6, 2)) for _ in range(2)]),
        "forces": (Forces(), [(normal(6, 2), normal(6, 2)) for _ in range(2)]),
        "complex": (Spectral(True), [(normal(5, 8), normal(5, 2)) for _ in range(2)]),
        "read as complex": (Spectral(False), [(normal(5, 8), normal(5, 2)) for _ in range(2)]),
        "recommender": (Recommender(), [((users[:5], items[:5]), labels[:5]), ((users[5:], items[5:]), labels[5:])]),
    }
    for kind in ("GRU", "RNN", "LSTM", "LSTMCell", "GRUCell", "MultiheadAttention"):
        found[kind] = Recurrent(kind), rows
    return found


NAMES = list(cases())


def trained(name, parameter):
    return not parameter.is_complex()


def problem(name):
    model, data = cases()[name]
    likelihood = "classification" if data[0][1].dtype == torch.long else lp.Gaussian()
    return model.double() if name != "complex" else _double(model), likelihood, data


def _double(model):
    model.lift.double(), model.out.double()
    return model


def dense(model, inputs):
    """Outputs and their Jacobian in the real weights, by one plain backward pass for each output."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        module.sparse = module.scale_grad_by_freq = False
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if trained(n, p)}
    used = {name: leaf.clone() for name, leaf in leaves.items()}  # a largest norm writes to them
    outputs = functional_call(model, used, inputs if isinstance(inputs, tuple) else (inputs,))
    rows = []
    for value in outputs.flatten():
        found = torch.autograd.grad(value, [*leaves.values()], retain_graph=True, allow_unused=True)
        pairs = zip(found, leaves.values(), strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if own is None else own).flatten() for own, p in pairs]))
    return outputs.detach(), torch.stack(rows).view(*outputs.shape, -1).detach()


def ggn(model, likelihood, data):
    total = 0
    for inputs, _ in data:
        outputs, jacobian = dense(model, inputs)
        p = outputs.softmax(-1)
        inner = p.diag_embed() - p[:, :, None] * p[:, None]
        inner = torch.eye(outputs.shape[1], dtype=D).expand_as(inner) if likelihood != "classification" else inner
        total = total + torch.einsum("ncp,nck,nkq->pq", jacobian, inner, jacobian)
    return total


ALIKE = ("GRU", "RNN", "GRUCell", "read as complex")


@pytest.mark.quick("heads", "residual", "forces", "complex", "recommender", "LSTM")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in NAMES])
def test_the_curvature_is_that_of_plain_derivatives(name):
    model, likelihood, data = problem(name)
    want = ggn(model, likelihood, data)
    precision = want + torch.eye(len(want), dtype=D)
    full = lp.Full(model, likelihood, parameters=trained).fit(data)
    torch.testing.assert_close(full.precision_matrix(), precision, rtol=1e-8, atol=1e-8)
    outputs, jacobian = dense(model, data[0][0])
    mean, covariance = full.functional_posterior(data[0][0])
    torch.testing.assert_close(mean, outputs)
    torch.testing.assert_close(covariance, jacobian @ precision.inverse() @ jacobian.mT, rtol=1e-7, atol=1e-9)
    diagonal = lp.Diagonal(model, likelihood, parameters=trained).fit(data)
    torch.testing.assert_close(diagonal.variance(), 1 / precision.diagonal())
    corrected = lp.KFAC(model, likelihood, parameters=trained, eigenvalue_corrected=True).fit(data)
    torch.testing.assert_close(corrected.precision_matrix().trace(), precision.trace())
    low = lp.LowRank(model, likelihood, parameters=trained, rank=len(want)).fit(data)
    torch.testing.assert_close(low.covariance_matrix(), precision.inverse(), rtol=1e-6, atol=1e-7)


@pytest.mark.quick("read as complex-KFAC", "heads-KFAC", "LSTM-KFAC", "complex-SWAG", "recommender-subnetwork")
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        *((name, lp.KFAC) for name in ("heads", "residual", "read as complex", "recommender", "LSTM")),
        *((name, lp.SWAG) for name in ("heads", "complex")),
        *((name, "subnetwork") for name in ("residual", "recommender")),
    ],
)
def test_they_are_tuned_and_predict(name, cls):
    model, likelihood, data = problem(name)
    if cls == "subnetwork":
        posterior = lp.Subnetwork(model, likelihood, lp.LargestVariance(9), lp.KFAC, parameters=trained)
    else:
        posterior = cls(model, likelihood, parameters=trained)
    posterior.fit(data)
    if "marginal_likelihood" in posterior.tuners:
        posterior.fit_prior_precision("marginal_likelihood")
        torch.testing.assert_close(posterior.functional_posterior(data[0][0]).mean, dense(model, data[0][0])[0])
    assert bool(posterior.predict(data).mean.isfinite().all())
    assert bool(posterior.predictive(data[0][0], method="sampled").mean.isfinite().all())


@pytest.mark.parametrize("cls", [lp.Full, lp.Diagonal, lp.KFAC, lp.LowRank, lp.NullSpace])
@pytest.mark.parametrize("options", [{}, {"joint": True}, {"outputs": "diagonal"}])
def test_outputs_that_use_no_selected_parameter_are_certain(cls, options):
    model, _, data = problem("heads")  # of tasks 1, 0, 1, of which 0 alone uses the first head
    posterior = cls(model, "classification", parameters=lambda name, _: name.startswith("heads.0")).fit(data)
    certain, uncertain = (posterior.functional_posterior(inputs, **options).covariance for inputs, _ in data[:2])
    assert certain.shape == uncertain.shape
    assert not certain.any()
    assert cls is lp.NullSpace or uncertain.any()


class Padded(nn.Module):
    """A transformer whose evaluation in fused kernels, without derivatives, gives zeros for padding."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.table, self.body, self.head = nn.Embedding(9, 4), nn.TransformerEncoder(layer, 1), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.body(self.table(tokens), src_key_padding_mask=tokens == 0).mean(1))


def test_outputs_are_those_with_derivatives_where_fused_kernels_have_others():
    torch.manual_seed(0)
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 2]])
    model = Padded().double()
    trained = model(tokens).detach()
    posterior = lp.KFAC(model.eval(), "classification").fit([(tokens, torch.tensor([0, 1, 0]))])
    torch.testing.assert_close(posterior.network.forward(tokens), trained)
    torch.testing.assert_close(posterior.functional_posterior(tokens).mean, trained)


def test_parameters_that_are_made_anew_are_refused():
    class Anew(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            self.weight = nn.Parameter(self.weight.detach())
            return super().named_parameters(*args, **kwargs)

    with pytest.raises(UnsupportedError, match="makes its parameters anew"):
        lp.KFAC(Anew(2, 2), "classification")


def test_the_error_says_what_to_write_where_weights_are_constants():
    with pytest.raises(InputError, match=r"Weights are constants.*h.requires_grad_\(\)"):
        lp.Full(Forces(inner=True).double(), lp.Gaussian()).fit([(normal(6, 2), normal(6, 4))])


@pytest.mark.parametrize("options", [{}, {"eigenvalue_corrected": True}])
def test_further_data_may_use_other_parts(options):
    model, likelihood, data = problem("heads")
    posterior = lp.KFAC(model, likelihood, **options).fit(data[:1]).update(data[1:])
    whole = lp.KFAC(model, likelihood, **options).fit(data)
    torch.testing.assert_close(posterior.precision_matrix().trace(), whole.precision_matrix().trace())
    assert posterior.predictive(data[1][0]).mean.shape == (4, 2)
