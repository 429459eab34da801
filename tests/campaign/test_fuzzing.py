"""Random sequences of what users do with a Gaussian posterior, against dense linear algebra in float64."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from campaign.cases import X, seeded
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from problems import categorical_hessian, close, jacobian, occam
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError

pytestmark = pytest.mark.slow

SEQUENCES, STEPS = 220, 8
"""Of each class."""
SUBSET = 9
MOST = 20
"""Parts of the data, after which no tasks are added: sums that grow without end round ever more."""
INPUTS = torch.randn(20, 3, generator=seeded(7), dtype=torch.float64)
LABELS = torch.arange(20) % 3
PARTS = [slice(0, 7), slice(7, 9), slice(9, 15), slice(15, 20)]
parts = st.lists(st.sampled_from(range(4)), min_size=1, max_size=4)
precisions = st.floats(0.05, 50.0)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3)] if name == "KFAC" else [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


class Reference:
    """The curvature of each row of data, written out, as a class keeps it."""

    def __init__(self, name: str):
        self.name, net = name, network(name)
        self.net, self.index = net, None
        self.theta = torch.cat([p.detach().flatten() for p in net.parameters()])
        if name == "Subnetwork":
            chosen = self.theta.abs().topk(SUBSET).indices.sort().values
            self.index, self.theta = chosen, self.theta[chosen]
        self.rows = self.entries(jacobian(net, INPUTS))
        self.outputs = net(INPUTS).detach()
        self.hessians = categorical_hessian(self.outputs)
        self.queries = self.entries(jacobian(net, X[:3]))

    def entries(self, rows: Tensor) -> Tensor:
        return rows if self.index is None else rows[..., self.index]

    def curvature(self, seen: list[int]) -> Tensor:
        rows = torch.cat([torch.arange(20)[PARTS[part]] for part in seen])
        if self.name == "KFAC":  # of one linear layer; weights first, then the bias
            inputs = torch.cat([INPUTS[rows], torch.ones(len(rows), 1, dtype=torch.float64)], 1)
            both = torch.kron(self.hessians[rows].sum(0), inputs.T @ inputs) / len(rows)
            order = torch.tensor([4 * o + i for o in range(3) for i in range(3)] + [3, 7, 11])
            return both[order][:, order]
        dense = torch.einsum("ncp,ncd,ndq->pq", self.rows[rows], self.hessians[rows], self.rows[rows])
        return torch.diag(dense.diagonal()) if self.name == "Diagonal" else dense

    def evidence(self, seen: list[int], precision: float) -> float:
        rows = torch.cat([torch.arange(20)[PARTS[part]] for part in seen])
        fit = -nn.functional.cross_entropy(self.outputs[rows], LABELS[rows], reduction="sum")
        prior = torch.full_like(self.theta, precision)
        return float(fit + occam(self.curvature(seen), self.theta, prior))

    def covariance(self, seen: list[int], precision: float) -> Tensor:
        total = self.curvature(seen) + precision * torch.eye(len(self.theta), dtype=torch.float64)
        return torch.einsum("ncp,pq,ndq->ncd", self.queries, torch.linalg.inv(total), self.queries)


MAKE: dict[str, Any] = {
    "Full": lp.Full,
    "KFAC": lp.KFAC,
    "Diagonal": lp.Diagonal,
    "LowRank": lambda net, likelihood: lp.LowRank(net, likelihood, rank=31, remainder_probes=0),
    "Subnetwork": lambda net, likelihood: lp.Subnetwork(net, likelihood, lp.LargestMagnitude(SUBSET)),
}


def batches(seen: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(INPUTS[PARTS[part]], LABELS[PARTS[part]]) for part in seen]


class Machine(RuleBasedStateMachine):
    name: ClassVar[str]
    reference: ClassVar[Reference]
    sequences: ClassVar[int] = 0
    steps: ClassVar[int] = 0

    @initialize(seen=parts)
    def start(self, seen: list[int]) -> None:
        type(self).sequences += 1
        self.folder = Path(tempfile.mkdtemp())
        self.posterior = MAKE[self.name](self.reference.net, "classification").fit(batches(seen))
        self.seen, self.precision, self.earlier, self.loaded = list(seen), 1.0, list[int](), False
        self.others: list[tuple[Any, list[int], float]] = []

    @rule(seen=parts)
    def fit(self, seen: list[int]) -> None:
        if self.earlier and self.loaded:  # the file has the sum over all tasks
            with pytest.raises(ConfigurationError, match="cannot be fitted again"):
                self.posterior.fit(batches(seen))
            return
        self.posterior.fit(batches(seen))
        self.seen = self.earlier + seen

    @rule(seen=parts)
    def update(self, seen: list[int]) -> None:
        if self.name != "LowRank":  # whose pairs would outgrow the dimension
            self.posterior.update(batches(seen))
            self.seen = self.seen + seen

    @rule(seen=parts)
    def learn_on(self, seen: list[int]) -> None:
        """The next task, whose prior is what was seen so far."""
        if self.name != "LowRank" and len(self.seen) < MOST:
            self.posterior = self.posterior.continue_on(self.reference.net).fit(batches(seen))
            self.earlier, self.seen, self.loaded = self.seen, self.seen + seen, False

    @rule(precision=precisions)
    def set_precision(self, precision: float) -> None:
        self.posterior.prior_precision = self.precision = precision

    @rule(how=st.sampled_from(["marginal_likelihood", "mackay"]))
    def tune(self, how: str) -> None:
        self.posterior.fit_prior_precision(how, structure="scalar")
        self.precision = float(self.posterior.prior_precision)
        best = self.reference.evidence(self.seen, self.precision)
        if 1e-4 < self.precision < 1e4:
            assert all(best > self.reference.evidence(self.seen, self.precision * factor) for factor in (0.8, 1.25))

    @rule(how=st.sampled_from([copy.copy, copy.deepcopy]))
    def copy(self, how: Any) -> None:
        other = copy.copy(self.posterior) if how is copy.copy else how(self.posterior)
        self.others = [*self.others[-2:], (self.posterior, self.seen, self.precision)]
        self.posterior = other if how is copy.copy else copy.copy(self.posterior)
        if how is copy.deepcopy:
            self.others = [*self.others[-2:], (other, self.seen, self.precision)]

    @rule()
    def save_and_load(self) -> None:
        self.posterior.save(self.folder / "it")
        self.posterior, self.loaded = lp.load(self.folder / "it", self.reference.net), True

    @rule(method=st.sampled_from(["linearized", "sampled"]))
    def predict(self, method: str) -> None:
        mean = self.posterior.predictive(X[:3], method=method, n_samples=5, generator=seeded()).mean
        assert torch.allclose(mean.sum(-1), torch.ones(3, dtype=mean.dtype))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "posterior"):
            return
        type(self).steps += 1
        for posterior, seen, precision in [(self.posterior, self.seen, self.precision), *self.others]:
            assert posterior.n_data == sum(len(LABELS[PARTS[part]]) for part in seen)
            wanted = self.reference.evidence(seen, precision)
            assert abs(float(posterior.log_marginal_likelihood()) - wanted) < 1e-7 * max(1.0, abs(wanted))
            found = posterior.functional_posterior(X[:3]).covariance
            close(found, self.reference.covariance(seen, precision), 1e-7)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("name", MAKE)
def test_sequences(name: str) -> None:
    machine = type(name, (Machine,), {"name": name, "reference": Reference(name)})
    began = time.monotonic()
    options = settings(
        max_examples=SEQUENCES,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_state_machine_as_test(machine, settings=options)
    took = time.monotonic() - began
    sys.stdout.write(f"\nfuzzing {name}: {machine.sequences} sequences, {machine.steps} states in {took:.0f} s\n")
    assert machine.sequences >= 200
