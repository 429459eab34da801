"""Outputs that mean something else than the likelihood takes them for: along another axis, or on another scale."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import OutputError
from laplace_plus.likelihoods.doubts import Doubts


class Positions(nn.Module):
    """Numbers at positions, as logits ``[B, *, C]`` or ``[B, C, *]`` of the nearest of C numbers."""

    def __init__(self, n_classes, axis, sharpness=1.0):
        super().__init__()
        self.last, self.axis = nn.Linear(1, n_classes), axis
        centres = torch.arange(n_classes).float()
        self.last.weight.data = sharpness * 2 * centres[:, None]
        self.last.bias.data = -sharpness * centres.square()

    def forward(self, x):
        return self.last(x.unsqueeze(-1)).movedim(-1, self.axis)


def numbers(*shape, n_classes):
    torch.manual_seed(0)
    y = torch.randint(0, n_classes, shape)
    return y + 0.1 * torch.randn(shape), y


CLASSES = [lp.Full, lp.KFAC, lp.Diagonal, lp.LowRank, lp.SampledLaplace, lp.SWAG]


@pytest.mark.diagonal
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
@pytest.mark.parametrize("cls", CLASSES)
def test_classes_before_as_many_positions_are_noticed(cls, parameters):
    x, y = numbers(12, 4, n_classes=4)
    with pytest.raises(OutputError, match=r"axis.*output_axis=1.*output_axis=-1"):
        cls(Positions(4, 1), "classification", parameters=parameters).fit([(x[:7], y[:7]), (x[7:], y[7:])])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        named = cls(Positions(4, 1), lp.Categorical(output_axis=1), parameters=parameters).fit([(x, y)])
        last = cls(Positions(4, -1), "classification", parameters=parameters).fit([(x, y)])
    if cls is lp.Full:
        assert_close(named.precision_matrix(), last.precision_matrix())


@pytest.mark.parametrize("shape", [(6, 3, 3), (6, 3, 5)])
def test_maps_of_as_many_rows_as_classes(shape):
    x, y = numbers(*shape, n_classes=3)
    with pytest.raises((OutputError, lp.errors.LabelError), match="output_axis=1"):
        lp.KFAC(Positions(3, 1), "classification").fit([(x, y)])
    lp.KFAC(Positions(3, 1), lp.Categorical(output_axis=1)).fit([(x, y)])
    lp.KFAC(Positions(3, -1), "classification").fit([(x, y)])


def test_what_labels_do_not_tell_is_refused_unless_it_is_named():
    x, y = numbers(6, 3, n_classes=3)
    flat = Positions(3, -1, sharpness=0.0)
    for likelihood in ("classification", lp.LogDensity(lambda f, y: -cross_entropy(f, y, reduction="none"))):
        with pytest.raises(OutputError, match="cannot be told"):
            lp.KFAC(flat, likelihood).fit([(x, y)])
    for axis in (-1, 1, 2):
        lp.KFAC(flat, lp.Categorical(output_axis=axis)).fit([(x, y)])
    more = numbers(2, 5, n_classes=3)  # positions of another number than the classes tell the axis
    lp.KFAC(flat, "classification").fit([(x, y), more])


def test_an_axis_stays_unnamed_in_copies():
    for own in (copy.deepcopy(lp.Categorical()), pickle.loads(pickle.dumps(lp.Categorical()))):
        doubts = Doubts(own)
        doubts.add(torch.zeros(2, 3, 3), torch.zeros(2, 3).long())
        with pytest.raises(OutputError):
            doubts.settle()
    assert repr(lp.Categorical()) == repr(lp.Categorical(output_axis=-1))


class Heteroscedastic(nn.Module):
    """The mean x and a spread in some form."""

    def __init__(self, form):
        super().__init__()
        self.form, self.last = form, nn.Linear(1, 2)
        self.last.weight.data, self.last.bias.data = torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, -1.0])

    def forward(self, x):
        mean, raw = self.last(x).chunk(2, -1)
        return torch.cat([mean, self.form(raw)], -1)


@pytest.mark.diagonal
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.LowRank, lp.SampledLaplace])
@pytest.mark.parametrize("form", ["softplus", "exp", "deviation"])
def test_variances_in_place_of_log_variances_are_noticed(cls, form):
    forms = {"softplus": nn.functional.softplus, "exp": torch.exp, "deviation": lambda raw: (raw / 2).exp()}
    net, x = Heteroscedastic(forms[form]), torch.randn(80, 1)
    spread = net(x)[:, 1:].detach()
    y = x + torch.randn(80, 1) * (spread if form == "deviation" else spread.sqrt())
    message = r"returns variances or deviations, and HeteroscedasticGaussian takes log-variances.*torch.log"
    with pytest.warns(UserWarning, match=message):
        cls(net, lp.HeteroscedasticGaussian()).fit([(x[:50], y[:50]), (x[50:], y[50:])])


@pytest.mark.parametrize("level", [-3.0, 0.1, 1.0, 3.0])
def test_log_variances_are_not_taken_for_variances(level):
    torch.manual_seed(0)
    net, x = Heteroscedastic(lambda raw: 0 * raw + level), torch.randn(200, 1)
    y = x + torch.randn(200, 1) * (torch.tensor(level) / 2).exp()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        lp.KFAC(net, lp.HeteroscedasticGaussian()).fit([(x, y)])


def test_rates_in_place_of_log_rates_are_noticed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 1), nn.Softplus())
    x = 3 * torch.rand(60, 1) + 1
    y = torch.poisson(net(x).detach())
    with pytest.warns(UserWarning, match=r"returns rates, and Poisson takes log-rates"):
        lp.KFAC(net, lp.Poisson()).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        lp.KFAC(net, lp.Poisson()).fit([(x, torch.poisson(net(x).detach().exp()))])
