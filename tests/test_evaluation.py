"""Evaluation: every score against scikit-learn, closed forms or direct sums, in float64; verdicts; what is accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn import metrics as theirs
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus import metrics
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Same(nn.Module):
    """A network whose outputs are its inputs, with a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one * x


def labels_of(logits: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Labels of a probability that is less sharp than the logits say."""
    p = (logits / 2).softmax(-1)
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=torch.Generator().manual_seed(seed))
    return drawn.view(p.shape[:-1])


def close(score: lp.applications.evaluation.Score | float, wanted: float, rtol: float = 1e-9) -> None:
    assert_close(float(getattr(score, "value", score)), float(wanted), rtol=rtol, atol=1e-9)


LOGITS = 2 * normal(300, 4)
Y = labels_of(LOGITS)


@pytest.fixture(scope="module")
def classes() -> lp.Report:
    data = [(LOGITS[:100], Y[:100]), (LOGITS[100:], Y[100:])]
    return lp.evaluate(Same(), data, likelihood="classification", other=[LOGITS[:120] / 3])


def test_scores_of_classes(classes):
    p, y = LOGITS.softmax(1), Y.numpy()
    right, doubt = (p.argmax(1) == Y).numpy(), torch.distributions.Categorical(p).entropy().numpy()
    close(classes["accuracy"], theirs.accuracy_score(y, p.argmax(1)))
    close(classes["negative_log_likelihood"], theirs.log_loss(y, p.numpy()))
    close(classes["brier_score"], theirs.brier_score_loss(y, p.numpy(), scale_by_half=False))
    close(classes["error_auroc"], theirs.roc_auc_score(~right, doubt))
    close(classes["expected_calibration_error"], metrics.expected_calibration_error(p, Y))
    order = doubt.argsort()
    wrong = ~right[order]
    close(classes["surest_error"], wrong[:240].mean())
    close(classes["area_under_risk_coverage"], (wrong.cumsum() / np.arange(1, 301)).mean())
    strange = torch.distributions.Categorical(logits=LOGITS[:120] / 3).entropy().numpy()
    is_strange, both = np.r_[np.zeros(300), np.ones(120)], np.r_[doubt, strange]
    close(classes["ood_auroc"], theirs.roc_auc_score(is_strange, both))
    passing, tpr, _ = theirs.roc_curve(1 - is_strange, -both, drop_intermediate=False)
    close(classes["ood_fpr95"], passing[np.argmax(tpr >= 0.95)])


def test_sets_of_classes(classes):
    sizes, covered = [], []
    for p, y in zip(LOGITS.softmax(1).tolist(), Y.tolist(), strict=True):
        order, total, chosen = sorted(range(4), key=lambda k, p=p: -p[k]), 0.0, []
        while total < 0.9:
            chosen.append(order[len(chosen)])
            total += p[chosen[-1]]
        sizes.append(len(chosen))
        covered.append(y in chosen)
    close(classes["size_90"], np.mean(sizes))
    close(classes["coverage_90"], np.mean(covered))


def test_standard_errors_of_means_and_of_an_auroc(classes):
    p = LOGITS.softmax(1)
    right = (p.argmax(1) == Y).double()
    close(classes["accuracy"].standard_error, right.std() / 300**0.5)
    doubt = torch.distributions.Categorical(p).entropy()
    sure, unsure = doubt[right == 1], doubt[right == 0]
    wins = (unsure[:, None] > sure).double()  # DeLong et al. (1988), up to their factors n/(n − 1)
    variance = wins.mean(1).var(correction=0) / len(unsure) + wins.mean(0).var(correction=0) / len(sure)
    close(classes["error_auroc"].standard_error, (variance * 300 / 299).sqrt())


def slopes(score, seed: int) -> tuple[float, float]:
    """A score of 300 doubts, and its standard error."""
    weight = torch.ones(300, dtype=torch.float64, requires_grad=True)
    doubt, u = normal(300, seed=seed), torch.rand(300, generator=torch.Generator().manual_seed(seed + 500))
    value = score(doubt, (u < doubt.sigmoid()).double(), weight)
    (slope,) = torch.autograd.grad(value, weight)
    return float(value.detach()), float(slope.square().sum().sqrt())


def test_standard_errors_of_scores_with_a_cut():
    """Of the surest 80 % the loss at the cut counts; of those that pass, the ratio of both densities there."""
    _, errors = np.array([slopes(lambda d, loss, w: metrics.selective_risk(d, loss, 0.8, w), k) for k in range(60)]).T
    grid = normal(200_000).clamp_max(norm.ppf(0.8)).unique()[:-1]
    at, risk = 1 / (1 + math.exp(-norm.ppf(0.8))), float(grid.sigmoid().mean())
    variance = (risk * (1 - risk) + 0.2 * (risk - at) ** 2) / 0.8 / 300
    assert errors.mean() == pytest.approx(variance**0.5, rel=0.03)

    def passing(doubt, _, weight):
        return metrics.ood_fpr95(doubt, normal(300, seed=int(1e6 * doubt[0].abs())) + 1, weight, weight)

    _, errors = np.array([slopes(passing, k) for k in range(60)]).T
    cut = norm.ppf(0.95)
    share, ratio = norm.cdf(cut - 1), norm.pdf(cut - 1) / norm.pdf(cut)
    assert errors.mean() == pytest.approx(((share * (1 - share) + ratio**2 * 0.95 * 0.05) / 300) ** 0.5, rel=0.1)


def test_the_standard_error_of_a_calibration_error_is_its_spread():
    found = [
        slopes(lambda d, loss, w: metrics.binned(0.5 + 0.5 * d.sigmoid(), 1 - loss, 5, w).error, k) for k in range(100)
    ]
    values, errors = np.array(found).T
    assert errors.mean() == pytest.approx(values.std(), rel=0.2)


def test_examples_of_several_tokens_count_once():
    logits, y = 2 * normal(40, 6, 3, seed=3), labels_of(2 * normal(40, 6, 3, seed=3))
    tokens = lp.evaluate(Same(), [(logits[:9], y[:9]), (logits[9:], y[9:])], likelihood="classification")
    right = (logits.argmax(-1) == y).double()
    close(tokens["accuracy"].standard_error, right.mean(1).std() / 40**0.5)
    assert tokens.n_examples == 40
    y[0, 2:] = -100
    ignored = lp.evaluate(Same(), [(logits, y)], likelihood="classification")
    close(ignored["accuracy"], right[y >= 0].mean())
    pixels = lp.evaluate(Same(), [(logits.movedim(-1, 1), y)], likelihood=lp.Categorical(output_axis=1))
    assert {name: own[:2] for name, own in pixels.items()} == {name: own[:2] for name, own in ignored.items()}


MEAN, TARGET = normal(200, 2, seed=4), normal(200, 2, seed=5)


def test_scores_of_numbers():
    report = lp.evaluate(Same(), [(MEAN, TARGET)], likelihood=lp.Gaussian(0.7), level=0.6)
    error = (TARGET - MEAN).numpy()
    close(report["root_mean_squared_error"], theirs.root_mean_squared_error(TARGET.flatten(), MEAN.flatten()))
    nll = -norm.logpdf(error, scale=0.7).sum(1)
    close(report["negative_log_likelihood"], nll.mean())
    close(report["negative_log_likelihood"].standard_error, nll.std(ddof=1) / 200**0.5)
    close(report["crps"], metrics.crps_gaussian(MEAN, torch.full_like(MEAN, 0.49), TARGET))
    for level in (0.5, 0.6, 0.9, 0.95):
        z = norm.ppf((1 + level) / 2)
        close(report[f"coverage_{100 * level:g}"], (abs(error) <= 0.7 * z).mean())
        close(report[f"width_{100 * level:g}"], 1.4 * z)
    levels = np.arange(1, 20) / 20
    below = (norm.cdf(error / 0.7)[..., None] <= levels).mean((0, 1))
    close(report["quantile_calibration_error"], abs(below - levels).mean())
    close(report["surest_error"], report["root_mean_squared_error"].value)  # all are as sure


def test_targets_that_are_missing_and_weights_of_examples():
    y = TARGET.clone()
    y[0, 0] = y[1] = math.nan
    missing = lp.evaluate(Same(), [(MEAN, y)], likelihood=lp.Gaussian(0.7))
    close(missing["root_mean_squared_error"], (y - MEAN).square().nanmean().sqrt())
    assert missing.n_examples == 199
    weight = torch.arange(200) % 3
    weighted = lp.Gaussian(0.7, weighted=True)
    found = lp.evaluate(Same(), [(MEAN, (TARGET, weight.double()))], likelihood=weighted)
    repeated = [(MEAN.repeat_interleave(weight, 0), TARGET.repeat_interleave(weight, 0))]
    wanted = lp.evaluate(Same(), repeated, likelihood=lp.Gaussian(0.7))
    for name in found:
        close(found[name], wanted[name].value)


def test_given_noise_is_that_of_each_target():
    noise = 0.5 + torch.rand(200, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = lp.evaluate(Same(), [(MEAN, (TARGET, noise))], likelihood=lp.GivenNoise(9.0))
    close(found["coverage_50"], (abs(TARGET - MEAN) <= noise * norm.ppf(0.75)).double().mean())
    close(found["crps"], metrics.crps_gaussian(MEAN, noise.square(), TARGET))


def test_other_likelihoods_have_what_makes_sense():
    binary = lp.evaluate(Same(), [(MEAN, (TARGET > 0).double())], likelihood="binary")
    assert binary.n_examples == 200
    assert len(binary.rows["network"]["right"]) == 400  # a row for each label
    close(binary["accuracy"], ((MEAN > 0) == (TARGET > 0)).double().mean())
    counts = lp.evaluate(Same(), [(MEAN[:, :1], (TARGET[:, :1] ** 2).round())], likelihood=lp.Poisson())
    assert {"root_mean_squared_error", "crps"} <= set(counts)
    assert "coverage_90" not in counts  # counts have no quantile function here
    own = lp.LogDensity(lambda f, y: -(f - y).abs().sum(-1))
    assert set(lp.evaluate(Same(), [(MEAN, TARGET)], likelihood=own)) == {"negative_log_likelihood"}


def fitted(sharpness: float = 3.0) -> tuple[lp.KFAC, list, nn.Module]:
    """A posterior of an overconfident network, and data that it has not seen."""
    x = normal(400, 2, seed=8)
    y = (x[:, 0] + 0.6 * normal(400, seed=9) > 0).long()
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(sharpness * torch.tensor([[-1.0, 0.5], [1.0, -0.5]]))
        model.bias.zero_()
    posterior = lp.KFAC(model, "classification", prior_precision=0.1).fit([(x[:20], y[:20])])
    return posterior, [(x[20:], y[20:])], model


def test_differences_are_paired():
    posterior, data, model = fitted()
    ((x, y),) = data
    report = lp.evaluate(posterior, data)
    own = -posterior.predictive(x).log_prob(y)
    plain = nn.functional.cross_entropy(model(x), y, reduction="none").detach()
    score = report["negative_log_likelihood"]
    close(score.network, plain.mean())
    close(score.difference, (own - plain).mean())
    close(score.difference_standard_error, (own - plain).std() / 380**0.5)
    assert score.standard_error > score.difference_standard_error


def test_groups_are_reports():
    posterior, data, _ = fitted()
    ((x, y),) = data
    report = lp.evaluate(posterior, data, by=lambda x: (x[:, 1] > 0).long())
    alone = lp.evaluate(posterior, [(x[x[:, 1] > 0], y[x[:, 1] > 0])])
    for name, score in alone.items():
        assert report.groups[1][name] == pytest.approx(score)
    assert {*lp.evaluate(posterior, data, by="class").groups} == {0, 1}
    assert "group 1:" in str(report)


def test_verdicts():
    posterior, data, model = fitted()
    helps = lp.evaluate(posterior, data).verdict
    assert "The posterior predicts better by" in helps
    assert "is better calibrated by" in helps
    assert "refusing 1 in" in helps
    assert "tuned" not in helps  # the precision was given
    none = lp.evaluate(posterior, data, link="network").verdict
    assert none.startswith("It does not help here: within two standard errors the network has the same accuracy, NLL")
    strange = lp.evaluate(posterior, data, other=[4 * data[0][0]])
    assert ("unfamiliar data look less uncertain" in strange.verdict) == (strange["ood_auroc"].value < 0.5)
    assert "unfamiliar data look less uncertain" in strange.verdict
    assert not lp.applications.evaluation.Score(1.0, 0.1, 1.0, 0.1, 5e-5, 1e-6).differs
    x, _ = data[0]
    certain = [(x, model(x).argmax(1))]
    assert lp.evaluate(posterior, certain).verdict.startswith("It does harm here: the posterior predicts worse by")
    untuned = lp.KFAC(model, "classification").fit(data)
    assert "it was never tuned: call fit_prior_precision()." in lp.evaluate(untuned, data).verdict
    assert "tuned" not in lp.evaluate(untuned.fit_prior_precision("marginal_likelihood"), data).verdict
    alone = lp.evaluate(model, data, likelihood="classification")
    assert alone.verdict.startswith("This is the network by itself")
    assert math.isfinite(alone["accuracy"].standard_error)
    assert math.isnan(alone["accuracy"].difference)


def test_all_kinds_of_posteriors():
    posterior, data, model = fitted()
    ((x, y),) = data
    held_out, rest = [(x[:150], y[:150])], [(x[150:], y[150:])]
    conformal = lp.conformalize(posterior, held_out, level=0.8)
    report = lp.evaluate(conformal, rest)
    sets = conformal.predict_set(x[150:])
    close(report["size_80"], sets.sum(1).double().mean())
    close(report["coverage_80"], sets.gather(1, y[150:, None]).double().mean())
    with torch.inference_mode():
        plain = lp.evaluate(model, rest, likelihood="classification")["negative_log_likelihood"].value
    for own in (
        lp.calibrate(posterior, held_out, "temperature"),
        lp.Ensemble([model, nn.Linear(2, 2).double()], "classification"),
        lp.Mixture([posterior, posterior]),
        lp.through(posterior, model, "classification"),
        lp.calibrate(model, held_out, "temperature", likelihood="classification"),
    ):
        found = lp.evaluate(own, rest)
        p = own.predictive(x[150:]).mean
        close(found["negative_log_likelihood"], metrics.negative_log_likelihood(p, y[150:]), 1e-6)
        close(found["negative_log_likelihood"].network, plain)
    rule = lp.abstain(posterior, held_out, risk=0.4)
    assert lp.evaluate(rule, rest).scores == lp.evaluate(posterior, rest).scores


def test_noise_and_intervals_of_numbers():
    x = normal(300, 1, seed=10)
    y = 2 * x + x.abs() * normal(300, 1, seed=11)
    posterior = lp.Full(nn.Linear(1, 1).double(), "regression").fit([(x[:100], y[:100])])
    noisy = lp.learn_noise(posterior, [(x[100:200], y[100:200])])
    prediction, rest = noisy.predictive(x[200:]), [(x[200:], y[200:])]
    report = lp.evaluate(noisy, rest)
    close(report["negative_log_likelihood"], -prediction.log_prob(y[200:]).mean())
    conformal = lp.conformalize(posterior, [(x[100:200], y[100:200])], level=0.9)
    low, high = conformal.interval(x[200:])
    found = lp.evaluate(conformal, rest)
    close(found["width_90"], (high - low).mean())
    close(found["coverage_90"], ((low <= y[200:]) & (y[200:] <= high)).double().mean())
    drawn = lp.evaluate(posterior, rest, method="sampled", generator=torch.Generator().manual_seed(0))
    assert drawn["coverage_50"].value == pytest.approx(lp.evaluate(posterior, rest)["coverage_50"].value, abs=0.1)


def test_a_report_is_a_mapping_a_frame_a_figure_and_a_page(tmp_path, classes):
    posterior, data, _ = fitted()
    report = lp.evaluate(posterior, data, other=[(9 * data[0][0], data[0][1])])
    frame = pytest.importorskip("pandas") and report.to_frame()
    assert frame.loc["accuracy", "value"] == report["accuracy"].value
    titles = [panel.get_title() for panel in report.plot().axes]
    assert titles[1].startswith("KFAC\nECE")
    assert titles[2:] == ["refusing the least sure", "unfamiliar data"]
    report.to_html(tmp_path / "new" / "report.html")
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert report.verdict in page
    assert "data:image/png;base64," in page
    assert [own.name for own in (tmp_path / "new").iterdir()] == ["report.html"]
    numbers = lp.evaluate(Same(), [(MEAN, TARGET)], likelihood=lp.Gaussian(0.7))
    assert len(numbers.plot().axes) == 2
    assert "network" in str(classes)


def test_what_cannot_be_evaluated():
    posterior, data, model = fitted()
    for wrong, options in ((model, {}), (posterior, {"likelihood": "binary"}), (None, {})):
        with pytest.raises(ConfigurationError, match="does not predict"):
            lp.evaluate(wrong, data, **options)
    with pytest.raises(UnsupportedError, match="no noise level"):
        lp.evaluate(model, data, likelihood="regression")
    with pytest.raises(ConfigurationError, match="grouping"):
        lp.evaluate(posterior, data, by="label")
    with pytest.raises(DataError, match="Soft labels"):
        lp.evaluate(posterior, [(data[0][0], torch.full((380, 2), 0.5).double())])
    with pytest.raises(ConfigurationError, match="targets that count"):
        lp.evaluate(posterior, [(data[0][0], torch.full((380,), -100))])
    coupled = lp.LogDensity(lambda f, y: -(f - y).square().sum(-1), couples_rows=True)
    with pytest.raises(UnsupportedError, match="depend on each other"):
        lp.evaluate(Same(), [(MEAN, TARGET)], likelihood=coupled)


def test_metrics_take_predictions_and_arrays():
    p, y = LOGITS.softmax(1), Y.clone()
    y[:50] = -100
    prediction = lp.Ensemble([Same()], "classification").predictive(LOGITS)
    for score in (metrics.accuracy, metrics.brier_score, metrics.expected_calibration_error):
        close(score(prediction, y.numpy()), score(p[50:], y[50:]))
        close(score(p.numpy(), Y.numpy()), score(p, Y))
    close(metrics.accuracy(prediction, Y, weight=(torch.arange(300) < 20).numpy()), metrics.accuracy(p[:20], Y[:20]))
    numbers = lp.Ensemble([Same()], lp.Gaussian(0.7)).predictive(MEAN)
    close(metrics.crps_gaussian(numbers, TARGET), metrics.crps_gaussian(MEAN, torch.full_like(MEAN, 0.49), TARGET))
    close(metrics.crps_gaussian(mean=numbers, targets=TARGET), metrics.crps_gaussian(numbers, TARGET))
    close(metrics.root_mean_squared_error(mean=numbers, targets=TARGET), (MEAN - TARGET).square().mean().sqrt())
    strange = lp.Ensemble([Same()], "classification").predictive(LOGITS / 2)
    doubts = metrics.uncertainty(prediction), metrics.uncertainty(strange)
    close(metrics.ood_auroc(prediction, strange), metrics.ood_auroc(*doubts))
    close(metrics.ood_auroc(doubts[0].numpy(), doubts[1].numpy()), metrics.ood_auroc(*doubts))


def test_several_targets_have_a_density_alone():
    x, targets = normal(9, 2), {"a": normal(9, seed=1), "b": normal(9, seed=2)}

    def density(f, y):
        return -(f - torch.stack([y["a"], y["b"]], 1)).square().sum(1)

    posterior = lp.Full(nn.Linear(2, 2).double(), density).fit([(x, targets)])
    report = lp.evaluate(posterior, [(x, targets)])
    close(report["negative_log_likelihood"].network, -density(posterior.network.forward(x), targets).mean())
    with pytest.raises(UnsupportedError, match=r"several targets.*log_prob"):
        lp.conformalize(posterior, [(x, targets)])


def test_several_outputs_of_one_number():
    def law(f):
        return torch.distributions.Normal(f[..., 0], f[..., 1].exp())

    x, y = normal(12, 3), normal(12, seed=1)
    likelihood = lp.LogDensity(lambda f, y: law(f).log_prob(y), law, positive_part=True)
    posterior = lp.Full(nn.Linear(3, 2).double(), likelihood).fit([(x, y)])
    own, prediction = law(posterior.network.forward(x)), posterior.predictive(x)
    close(lp.evaluate(posterior, [(x, y)])["crps"].network, metrics.crps_gaussian(own.mean, own.variance, y))
    assert prediction.mean.shape == prediction.std.shape == prediction.quantile(0.5).shape == (12, 1)
    close(metrics.root_mean_squared_error(prediction, y), (prediction.mean[:, 0] - y).square().mean().sqrt())
    assert lp.conformalize(posterior, [(x, y)], level=0.8).interval(x)[0].shape == (12, 1)


def test_inputs_of_another_length_than_the_targets():
    x, y = (torch.arange(11) % 6, torch.tensor([0, 4, 6])), torch.tensor([0, 1, 1])
    posterior = lp.Full(nn.EmbeddingBag(6, 2).double(), "classification").fit([(x, y)])
    report = lp.evaluate(posterior, [(x, y)], other=[(x, y)])
    close(report["negative_log_likelihood"].network, nn.functional.cross_entropy(posterior.network.forward(x), y))
    many, prior = lp.Full(posterior.model, "classification").fit([(x, y)], n_trained=30), torch.eye(12).double()
    assert report.n_examples == 3
    assert_close(many.precision_matrix() - prior, 10 * (posterior.precision_matrix() - prior))
