"""Tuners and uses give the same of a network whether or not it sorts, or splits, the rows of a batch by their data."""

from __future__ import annotations

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp

pytestmark = [pytest.mark.usefixtures("double"), pytest.mark.filterwarnings("ignore:Which rows belong")]


class Net(nn.Module):
    """Two layers, whose rows ``how`` moves and puts back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.hidden, self.output = nn.Linear(3, 5), nn.Linear(5, 3)

    def rows(self, layer, h, key):
        if self.how == "sorted":
            order = key.argsort()
            return layer(h[order])[order.argsort()]
        if self.how == "split":
            first = key > 0
            result = h.new_zeros(len(h), layer.out_features)
            result[first], result[~first] = layer(h[first]), layer(h[~first])
            return result
        return layer(h)

    def forward(self, x):
        return self.rows(self.output, torch.tanh(self.rows(self.hidden, x, x[:, 0])), x[:, 1])


def tuned(tuner, cls=lp.KFAC):
    def result(model, loader, query):
        posterior = cls(model, "classification").fit(loader)
        posterior.fit_prior_precision(tuner(loader) if callable(tuner) else tuner)
        return posterior.predictive(query[0]).variance

    return result


def used(use, cls=lp.KFAC):
    return lambda model, loader, query: use(cls(model, "classification", prior_precision=3.0).fit(loader), query)


RESULTS = {
    "marginal_likelihood": tuned("marginal_likelihood"),
    "tangent": tuned("tangent", lp.Full),
    "leave_one_out": tuned(lambda _: lp.LeaveOneOut(training_prior_precision=3.0), lp.Full),
    "validation": tuned(lambda loader: lp.Validation(loader), lp.Diagonal),
    "influence": used(lambda p, query: lp.uses.influence(p, [query], method="leverage").mean),
    "self_influence": used(lambda p, _: lp.uses.self_influence(p)),
    "select": used(lambda p, query: lp.uses.select(p, query[0], 3, generator=generator()).scores),
    "prune": used(lambda p, _: lp.uses.prune(p, sparsity=0.3).log_evidence_change),
    "leave_one_out_losses": used(lambda p, _: lp.leave_one_out(p).mean, lp.Full),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("how", ["sorted", "split"])
def test_moved_rows_change_nothing(how, name):
    torch.manual_seed(0)
    x, y = torch.randn(24, 3), torch.randint(3, (24,))
    still = Net("still")
    optimizer = torch.optim.Adam(still.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(still(x), y).backward()
        optimizer.step()
    loader, query = [(x[:13], y[:13]), (x[13:], y[13:])], (torch.randn(5, 3), torch.randint(3, (5,)))
    expected = RESULTS[name](still, loader, query)
    model = Net(how)
    model.load_state_dict(still.state_dict())
    torch.testing.assert_close(RESULTS[name](model, loader, query), expected, rtol=1e-7, atol=1e-10)
