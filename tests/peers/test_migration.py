"""docs/from-laplace-torch.md names every argument and method of the peer, and its two columns give the same numbers."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import laplace_plus as lp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies' deprecations at import
    laplace = pytest.importorskip("laplace")
    from laplace.utils import subnetmask

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).parents[2] / "docs" / "from-laplace-torch.md").read_text()
UNNAMED = {"self", "args", "kwargs", "model", "x", "value", "Js", "state_dict", "method", "prior_prec", "likelihood"}
CLASSES = (laplace.FullLaplace, laplace.KronLaplace, laplace.DiagLaplace, laplace.FullLLLaplace, laplace.SubnetLaplace)


def arguments(function):
    return set(inspect.signature(function).parameters)


def test_the_page_names_every_argument_and_method():
    names = arguments(laplace.Laplace) | arguments(laplace.marglik_training)
    for cls in CLASSES:
        names |= arguments(cls.__init__)
    for name, member in inspect.getmembers(laplace.ParametricLaplace):
        if not name.startswith("_") or name == "__call__":
            names |= {name.strip("_").replace("call", "la(x)")} | (arguments(member) if callable(member) else set())
    names |= {name for name in vars(subnetmask) if name.endswith("SubnetMask")}
    names -= {"SubnetMask", "ScoreBasedSubnetMask"}  # base classes
    assert [name for name in sorted(names - UNNAMED) if name not in PAGE] == []


def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 3, generator=generator).double()
    labels = (inputs + torch.randn(60, 3, generator=generator)).argmax(-1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
    return model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), 20), inputs[:5]


def test_both_columns_of_the_first_lines_agree():
    """Without biases, of which the two packages make different blocks."""
    model, train_loader, x = data()
    names = {"Laplace": laplace.Laplace, "lp": lp, "model": model, "train_loader": train_loader, "x": x}
    theirs, ours = dict(names), dict(names)
    first, second = re.findall(r"```python\n(?!>>>)(.*?)```", PAGE, re.DOTALL)
    exec(first.replace('"marglik"', '"marglik", n_steps=2000, lr=0.05'), theirs)
    exec(second, ours)
    precisions = theirs["la"].prior_precision.item(), ours["posterior"].prior_precision.item()
    assert precisions[0] == pytest.approx(precisions[1], rel=0.02)
    assert (theirs["probabilities"] - ours["probabilities"]).abs().max() < 2e-3


def test_the_tables_quantities_agree():
    model, train_loader, x = data()
    la = laplace.Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="full", prior_precision=0.5
    )
    la.fit(train_loader)
    posterior = lp.Full(model, "classification", prior_precision=0.5).fit(train_loader)
    prior, precision = posterior.prior().vector(), posterior.precision_matrix()
    displacement = posterior.mean - posterior.prior_mean
    assert torch.allclose(la.log_likelihood, posterior.laplace_model().log_likelihood(), rtol=1e-4)
    assert torch.allclose(la.scatter, displacement @ (prior * displacement), rtol=1e-4)
    assert torch.allclose(la.log_det_ratio, precision.logdet() - prior.log().sum(), rtol=1e-4)
    assert torch.allclose(la.prior_precision_diag, prior)
    assert torch.allclose(la.posterior_precision, precision, rtol=1e-4, atol=1e-6)
    value = posterior.sample(1)[0]
    gaussian = torch.distributions.MultivariateNormal(posterior.mean, precision_matrix=precision)
    assert torch.allclose(la.log_prob(value), gaussian.log_prob(value), rtol=1e-4)
    assert torch.allclose(la(x, link_approx="probit"), posterior.predictive(x, link="probit").mean, atol=1e-5)
