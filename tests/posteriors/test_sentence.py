"""``fit(loader).fit_prior_precision().predictive(x)`` of every class on training data alone, and what it chooses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import CheckpointError, DataError, NoGainWarning
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.tuning import new_data
from laplace_plus.tuning.noise import noise_from_residuals
from laplace_plus.tuning.settings import DRAWS

CLASSES = {
    "Full": {},
    "KFAC": {},
    "Diagonal": {},
    "LowRank": {"rank": 5},
    "Subnetwork": {"selector": lp.LargestMagnitude(6)},
    "NullSpace": {"n_samples": 2},
    "VIKING": {"n_samples": 2},
    "Riemannian": {"n_samples": 2, "method": lp.Diffusion(n_steps=2, rank=2)},
    "MetricBNN": {"n_particles": 2, "n_steps": 4, "n_refinements": 1, "latent": {"epochs": 5}},
    "SampledLaplace": {"n_samples": 2},
    "ABNN": {"n_members": 2, "epochs": 1},
    "VariationalLastLayer": {},
    "SWAG": {"n_snapshots": 3, "rank": 2},
    "SpatialField": {"box": [[-4.0, -4.0], [4.0, 4.0]], "resolution": 2},
    "TrainingFreeLoRA": {"halvings": 2, "n_samples": 2},
}
KINDS = ("regression", "binary", "classification")


class Net(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def rows(kind, n=24):
    x = torch.randn(n, 2, generator=generator(1), dtype=torch.float64)
    if kind == "regression":
        return x, x[:, :1].sin() + 0.3 * torch.randn(n, 1, generator=generator(2), dtype=torch.float64)
    return (x, (x[:, :1] > 0).double()) if kind == "binary" else (x, (x > 0).long().sum(1))


def trained(kind, x, y, steps=40):
    model = Net(3 if kind == "classification" else 1).double()
    losses = {"regression": nn.MSELoss(), "binary": nn.BCEWithLogitsLoss(), "classification": nn.CrossEntropyLoss()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        losses[kind](model(x), y).backward()
        optimizer.step()
    return model.eval()


def with_adapter(model):
    peft = pytest.importorskip("peft", reason="adapters are those of peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["first"])).double()
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator(3), dtype=torch.float64) / 3
    return model


class Mappings:
    """Batches that are mappings, read again and again."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        for x, y in zip(self.x.split(12), self.y.split(12), strict=True):
            yield {"x": x, "labels": y}


FORMS = {
    "list": lambda x, y: list(zip(x.split(12), y.split(12), strict=True)),
    "loader": lambda x, y: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 12, shuffle=True),
    "mappings": Mappings,
}


def cases():
    """All classes, kinds and forms; one of them is quick for each class."""
    for number, name in enumerate(CLASSES):
        for kind in KINDS:
            for place, form in enumerate(FORMS):
                if (name, form) == ("SpatialField", "mappings"):
                    continue  # its inputs are rays
                quick = kind == KINDS[-1] and place == number % 3
                yield pytest.param(name, kind, form, marks=[] if quick else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "kind", "form"), list(cases()))
def test_every_class_takes_the_sentence(name, kind, form):
    x, y = rows(kind)
    model = trained(kind, x, y)
    model = with_adapter(model) if name == "TrainingFreeLoRA" else model
    torch.manual_seed(0)  # of shuffled loaders
    data = FORMS[form](x, y)
    posterior = lp.get_posterior(name)(model, kind, **CLASSES[name]).fit(data, generator=generator())
    both = "auto", "marginal_likelihood"  # the latter stands for the former where there is no evidence
    for tuner in both if both[1] in posterior.tuners else both[1:]:
        posterior.fit_prior_precision(tuner, generator=generator())
        prediction = posterior.predictive(x, generator=generator())
        assert prediction.mean.isfinite().all() and (kind != "regression" or (prediction.variance > 0).all())


def test_all_classes_of_the_package_are_tried():
    public = {name: own for name in lp.__all__ if isinstance(own := getattr(lp, name), type)}
    own = {name for name, cls in public.items() if issubclass(cls, lp.Posterior)} - {"Posterior", "GaussianPosterior"}
    assert own == CLASSES.keys() and all(lp.get_posterior(name) is public[name] for name in own)


# -- what the default chooses among settings ---------------------------------------------------------------------------


def swag(kind, x, y, sharper=1.0):
    """From snapshots around trained weights, of which the last ones are multiplied."""
    model, source = trained(kind, x, y, 200), generator(7)
    model.last.weight.data *= sharper
    posterior, moved = lp.SWAG(model, kind, rank=2), copy.deepcopy(model)
    for _ in range(3):
        for p, own in zip(moved.parameters(), model.parameters(), strict=True):
            p.data = own.detach() + 0.2 * torch.randn(p.shape, generator=source, dtype=torch.float64)
        posterior.collect(moved)
    return posterior.fit([(x, y)])


def drawn(posterior, x, scale, before):
    """The samples by which a scale is judged; their seed is drawn after ``before`` others from the tuning's source."""
    other = lp.SWAG(posterior.network.model, posterior.likelihood, rank=2)
    other.set_state(posterior.state)
    other.scale = scale
    source = generator(5)
    seed = [draw_seed(source) for _ in range(before + 1)][-1]
    return torch.stack(list(other.sampled_outputs(x, DRAWS, generator(seed))))


def test_regression_takes_the_widest_setting_of_least_loss_on_residuals_of_new_data():
    x, y = rows("regression", 60)
    posterior = swag("regression", x, y)
    fitted = lp.Diagonal(posterior.network.model, "regression").fit([(x, y)])
    estimate, f = noise_from_residuals(fitted), posterior.network.model(x).detach()
    moved = f + estimate.noise_std / estimate.residual_std * (y - f)
    assert float((moved - f).square().mean().sqrt()) == pytest.approx(float(estimate.noise_std))
    scales, losses = posterior.tunables()["scale"], []
    noises = [float(estimate.noise_std) * 2 ** (step / 4) for step in range(-4, 5)]
    for scale in scales:
        samples = drawn(posterior, x, scale, 1)
        logs = [torch.distributions.Normal(samples, noise).log_prob(moved).logsumexp(0) for noise in noises]
        losses.append([-float(one.mean()) + math.log(DRAWS) for one in logs])
    posterior.fit_prior_precision(generator=generator(5))
    least = torch.tensor(losses, dtype=torch.float64).amin(1)
    torch.testing.assert_close(posterior.tuning.losses, least, rtol=1e-9, atol=1e-9)
    place = next(k for k in range(len(scales)) if least[k] <= least.min() + 0.005)
    assert posterior.scale == scales[place] and posterior.tuning.value == pytest.approx(-float(least[place]))
    assert float(posterior.noise_std) == pytest.approx(noises[min(range(9), key=losses[place].__getitem__)])


def test_classes_take_the_setting_by_both_views():
    x, y = rows("classification", 60)
    y = torch.where(torch.rand(60, generator=generator(4)) < 0.3, (y + 1) % 3, y)
    posterior = swag("classification", x, y, sharper=4.0)
    posterior.fit_prior_precision(generator=generator(5))
    found, network = posterior.tuning, posterior.network
    data = new_data.rows_of(network, posterior.likelihood, [(x, y)], 60)
    told = new_data.left_out_outputs(
        new_data.unlearned_features(network, [x]), data.outputs - data.outputs.mean(1, keepdim=True)
    )
    scales, losses = posterior.tunables()["scale"], []
    for scale in scales:
        samples = drawn(posterior, x, scale, 0) + told - data.outputs
        losses.append(math.log(DRAWS) - samples.log_softmax(-1)[:, range(60), y].logsumexp(0).mean())
    losses.append(nn.functional.cross_entropy(told, y))
    torch.testing.assert_close(found.losses, torch.stack(losses), rtol=1e-9, atol=1e-9)
    total = (found.losses + 3 * found.between_losses) / 4
    place = scales.index(posterior.scale)
    assert place < 8 and found.value == pytest.approx(-float(total[place])) and total[place] < total[-1]
    assert f"scale = {posterior.scale:.3g}" in found.why and found.chosen == "new_data"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Noise of scale:UserWarning")
def test_wrong_labels_that_were_learnt_ask_for_noise_which_helps():
    x = torch.randn(1200, 2, generator=generator(1), dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    y = torch.where(torch.rand(1200, generator=generator(2)) < 0.2, 1 - y, y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 60), nn.Tanh(), nn.LayerNorm(60), nn.Linear(60, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, fused=True)
    for _ in range(1200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()
        optimizer.step()
    posterior = lp.ABNN(model.eval(), "classification", epochs=0, n_members=1).fit([(x[:100], y[:100])])
    posterior.fit_prior_precision(generator=generator())
    losses = -posterior.predictive(x[100:], generator=generator()).log_prob(y[100:])
    gain = nn.functional.cross_entropy(model(x[100:]), y[100:], reduction="none").detach() - losses
    assert gain.mean() > 1.5 + 3 * gain.std() / 1100**0.5


def test_without_data_to_compare_all_stays_with_a_warning():
    x, y = rows("classification")
    posterior = lp.SWAG(trained("classification", x, y), "classification")
    for _ in range(2):
        posterior.collect()
    posterior.fit(iter([(x, y)]))
    with pytest.warns(NoGainWarning, match="not at hand"):
        posterior.fit_prior_precision()
    assert posterior.scale == 0.5 and posterior.tuning.chosen == "fit"


def test_another_scale_has_its_own_statistics_of_normalisations(tmp_path):
    x, y = rows("classification")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    made = {}
    for scale in (0.5, 2.0):
        made[scale] = lp.SWAG(model, "classification", n_snapshots=3, rank=2, n_members=3, scale=scale)
        made[scale].fit([(x, y)], generator=generator())
    made[0.5].scale = 2.0
    one, other = (made[scale].predictive(x, n_samples=3, generator=generator()).mean for scale in (0.5, 2.0))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    made[0.5].save(tmp_path / "it")
    loaded = lp.load(tmp_path / "it", model)
    assert loaded.scale == 2.0
    with pytest.raises(DataError, match="other statistics"):
        loaded.scale = 1.0


def test_fresh_weights_are_told_to_load_theirs(tmp_path):
    x, y = rows("classification")
    lp.KFAC(trained("classification", x, y), "classification").fit([(x, y)]).save(tmp_path / "it")
    with pytest.raises(CheckpointError, match=r"6 of 6 tensors differ, 'first.weight' first") as failure:
        lp.load(tmp_path / "it", trained("classification", x, y, steps=3))
    assert "load_state_dict" in str(failure.value) and "float64 [4, 2] with other values" in str(failure.value)
