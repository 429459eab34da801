"""Several threads at once get what one thread gets, and leave the network and the process as they were."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.network.differentiability import Shared, eager
from laplace_plus.testing import assert_untouched, snapshot

N_THREADS = 4


@pytest.fixture(autouse=True)
def _frequent_switches():
    """Threads take turns so often that what they have in common shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def problem(*, recurrent=False):
    torch.manual_seed(0)
    x, y = torch.randn(24, 5, 6, dtype=torch.float64), torch.arange(24) % 3
    body = nn.LSTM(6, 6, batch_first=True) if recurrent else nn.Linear(6, 6)
    return Model(body).double().train(), x, y


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.norm, self.drop, self.head = body, nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)

    def forward(self, x):
        result = self.body(x)
        result = result[0] if isinstance(result, tuple) else result
        return self.head(self.drop(self.norm(torch.tanh(result.mean(1)))))


def together(actions):
    """The results of actions that all run at once, in order."""
    barrier = Barrier(len(actions))

    def wait_and(action):
        barrier.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(wait_and, actions))


def settings():
    """What is set for the whole process."""
    sdp = torch.backends.cuda
    return (
        sdp.flash_sdp_enabled(),
        sdp.mem_efficient_sdp_enabled(),
        sdp.math_sdp_enabled(),
        torch.backends.cudnn.enabled,
    )


ACTIONS = {
    "linearised": lambda p, x: p.predictive(x).mean,
    "sampled": lambda p, x: p.predictive(x, method="sampled", n_samples=3, generator=generator(1)).mean,
    "functional": lambda p, x: p.functional_posterior(x).covariance,
    "mean": lambda p, x: p.mean,
    "evidence": lambda p, x: p.log_marginal_likelihood(torch.ones(2).new_tensor(2.0)),
}


@pytest.mark.parametrize("recurrent", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_calls_of_several_threads_equal_those_of_one(recurrent):
    net, x, y = problem(recurrent=recurrent)
    posterior = lp.KFAC(net, "classification").fit([(x, y)])
    other = lp.Diagonal(net, "classification", parameters="last_layer").fit([(x, y)])
    jobs = [(of, action) for of in (posterior, other) for action in ACTIONS.values()]
    expected = [action(of, x) for of, action in jobs]
    before, globally = snapshot(net), settings()
    parts = [jobs[number::N_THREADS] for number in range(N_THREADS)]
    found = together([lambda part=part: [[a(of, x) for of, a in part] for _ in range(2)] for part in parts])
    for number, rounds in enumerate(found):
        for results in rounds:
            for result, want in zip(results, expected[number::N_THREADS], strict=True):
                torch.testing.assert_close(result, want, rtol=1e-9, atol=1e-12)
    assert_untouched(net, before)
    assert settings() == globally
    torch.testing.assert_close(posterior.predictive(x).mean, expected[0])


def test_posteriors_are_fitted_loaded_and_saved_beside_predictions(tmp_path):
    net, x, y = problem()
    posterior = lp.KFAC(net, "classification").fit([(x, y)])
    expected, n_parameters, before = posterior.predictive(x).mean, posterior.n_parameters, snapshot(net)
    posterior.save(tmp_path / "first")

    def predict():
        return [posterior.predictive(x, method="sampled", n_samples=2).mean for _ in range(20)]

    def fit():
        return [lp.Diagonal(net, "classification").fit([(x, y)]).n_parameters for _ in range(8)]

    def load():
        return [lp.load(tmp_path / "first", net).predictive(x).mean for _ in range(8)]

    def save():
        for number in range(8):
            posterior.save(tmp_path / f"{number}")

    _, sizes, loaded, _ = together([predict, fit, load, save])
    assert sizes == [n_parameters] * 8
    for result in loaded:
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    assert_untouched(net, before)


class Meeting(nn.Module):
    """Lets no thread through its forward pass before all of them are in it."""

    def __init__(self, n_threads):
        super().__init__()
        self.inner, self.meet = nn.Linear(6, 3), Barrier(n_threads)

    def forward(self, x):
        if MEETS[0]:
            self.meet.wait(timeout=20)
        return self.inner(x)


MEETS = [False]


def test_eight_threads_predict_side_by_side():
    """Each call has modules of its own, so that no thread waits for another one."""
    torch.manual_seed(0)
    net, x, y = Meeting(8).double(), torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3
    posterior = lp.KFAC(net, "classification").fit([(x, y)])
    draws = [lambda s=s: posterior.network.several(x, posterior.sample(3, generator=generator(s))) for s in range(8)]
    expected = [draw() for draw in draws]
    try:
        MEETS[0] = True
        found = together(draws)
    finally:
        MEETS[0] = False
    for own, want in zip(found, expected, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-12)


def test_settings_of_the_process_are_put_back_by_the_last_to_leave():
    """However the threads that run different models overlap."""
    nets = [problem(recurrent=bool(number % 2)) for number in range(N_THREADS)]
    posteriors = [lp.KFAC(net, "classification").fit([(x, y)]) for net, x, y in nets]
    before = settings()
    together([lambda p=p: [p.predictive(nets[0][1]) for _ in range(2)] for p in posteriors])
    assert settings() == before

    class Setting:
        def __enter__(self):
            history.append("made")

        def __exit__(self, *_):
            history.append("put back")

    history = []
    shared = Shared(Setting)
    shared.__enter__()
    with shared, pytest.raises(KeyError), shared:
        raise KeyError
    assert history == ["made"]
    shared.__exit__(None, None, None)
    assert history == ["made", "put back"]


def test_references_to_none_stay():
    """torch before 2.8 takes some at each change of its compiler's stance, which ends Python 3.11 after a while."""
    with eager:  # which imports much
        gc.collect()
    before = sys.getrefcount(None)
    for _ in range(400):
        with eager:
            pass
    assert abs(sys.getrefcount(None) - before) < 500  # noqa: PLR2004 -- 1200 were lost
