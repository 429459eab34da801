"""Uses that would give wrong numbers without a word, each refused or noticed."""

from __future__ import annotations

import warnings

import pytest
import torch
from problems import ekfac, relative_error
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConvergenceWarning, LabelError, NoGainWarning, OutputError, SelectionError
from laplace_plus.likelihoods.doubts import Doubts

EXACT = 1e-11  # float64, small networks


def null_space(*args, **kwargs):
    return lp.NullSpace(*args, n_samples=2, projector="svd", **kwargs)


def sampled(*args, **kwargs):
    return lp.SampledLaplace(*args, n_samples=2, **kwargs)


GAUSSIAN = [lp.Full, lp.KFAC, ekfac, lp.Diagonal, lp.LowRank]


def classes(n=12, inputs=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, inputs, generator=generator, dtype=torch.float64), torch.arange(n) % 3


# -- causal language models --------------------------------------------------------------------------------------------

VOCABULARY = 11
IDS = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(0))
SHIFTED = torch.cat([IDS[:, 1:], torch.full_like(IDS[:, :1], -100)], 1)


class Plain(nn.Module):
    """Not of transformers, but with inputs of the same name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.table(input_ids).cumsum(1).tanh())


def test_labels_that_repeat_the_tokens_are_refused():
    """Transformers shifts them inside its own loss. Here the target would be to copy the token."""
    posterior = lp.KFAC(Plain(), "classification", parameters="last_layer")
    padded = IDS.clone()
    padded[0, 3:] = -100
    mask = torch.ones_like(IDS)
    for labels in (IDS.clone(), padded):
        with pytest.raises(LabelError, match=r"repeat 'input_ids'.*Expected: .*the next token.*Fix: .*labels\[:, 1:\]"):
            posterior.fit([{"input_ids": IDS, "attention_mask": mask, "labels": labels}])
    assert not posterior.is_fitted
    assert posterior.fit([{"input_ids": IDS, "attention_mask": mask, "labels": SHIFTED}]).n_data == len(IDS)


def test_few_labels_that_repeat_the_tokens_are_refused_at_the_end():
    with pytest.raises(LabelError, match="repeat 'input_ids'"):
        lp.KFAC(Plain(), "classification").fit([{"input_ids": IDS[:1, :3], "labels": IDS[:1, :3]}])


def test_labels_that_repeat_some_tokens_are_taken():
    """Of a masked language model's targets, a tenth are the tokens in the input; those of one token over and over."""
    few = torch.full_like(IDS, -100)
    few[0, 1], few[1, 2] = IDS[0, 1], (IDS[1, 2] + 1) % VOCABULARY
    same = torch.full_like(IDS, 3)
    copied = ({"input_ids": IDS}, IDS)
    for item in ({"input_ids": IDS, "labels": few}, {"input_ids": same, "labels": same}, (IDS, IDS)):
        assert lp.Diagonal(Plain(), "classification").fit([item]).n_data == len(IDS)
    with pytest.raises(LabelError, match="repeat 'input_ids'"):
        lp.Diagonal(Plain(), "classification").fit([copied])


def tied():
    model = Plain()
    model.head = nn.Linear(4, VOCABULARY, bias=False)
    model.head.weight = model.table.weight
    return model


def test_summary_says_which_weights_are_tied():
    """Of a head that is the table of the tokens, too: the head's use alone is the last layer."""
    posterior = lp.KFAC(tied(), "classification", parameters="last_layer")
    posterior.fit([{"input_ids": IDS, "labels": SHIFTED}])
    ((name, _, _, treatment),) = posterior.summary().rows
    assert name == "head.weight"
    assert treatment.endswith("this use alone, tied to table.weight")
    whole = lp.Diagonal(tied(), "classification", parameters=["table.weight"])
    ((name, _, _, treatment),) = whole.fit([{"input_ids": IDS, "labels": SHIFTED}]).summary().rows
    assert name == "table.weight"
    assert treatment.endswith("tied to head.weight")


# -- the last layer ----------------------------------------------------------------------------------------------------


CALLS = [0]
"""Forward passes of :class:`Auxiliary`."""


class Auxiliary(nn.Module):
    """A head, and layers without influence on the output that are defined and run after it."""

    def __init__(self, how, depth=1):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.how = nn.Linear(3, 4), nn.Linear(4, 3), how
        self.auxiliary = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])
        self.double()

    def forward(self, x):
        CALLS[0] += 1
        hidden = self.body(x).tanh()
        outputs = self.head(hidden)
        if self.how == "no_grad":
            with torch.no_grad():
                self.auxiliary(hidden)
            return outputs
        if self.how == "detached":
            return outputs + 0 * self.auxiliary(hidden)[:, :3].detach()
        if self.how == "reshaped":
            outputs = outputs.view(-1, 3, 1).squeeze(-1)
        return {"out": outputs, "aux": self.auxiliary(hidden)}


@pytest.mark.diagonal
@pytest.mark.parametrize("how", ["output", "reshaped", "no_grad", "detached"])
@pytest.mark.parametrize("posterior_class", [lp.Full, lp.KFAC, lp.LowRank, sampled])
def test_a_layer_without_influence_is_not_the_last_one(posterior_class, how):
    x, y = classes()
    model = Auxiliary(how)
    posterior = posterior_class(model, "classification", parameters="last_layer").fit([(x[:6], y[:6]), (x[6:], y[6:])])
    assert posterior.parameter_names == ("head.weight", "head.bias")
    if posterior_class in GAUSSIAN:
        named = posterior_class(model, "classification", parameters=["head"]).fit([(x[:6], y[:6]), (x[6:], y[6:])])
        assert relative_error(posterior.covariance_matrix(), named.covariance_matrix()) < EXACT


@pytest.mark.parametrize("posterior_class", [lp.Full, lp.KFAC])
def test_updates_after_loading_keep_the_last_layer(posterior_class, tmp_path):
    x, y = classes()
    model = Auxiliary("output")
    posterior_class(model, "classification", parameters="last_layer").fit([(x, y)]).save(tmp_path / "posterior")
    again = lp.load(tmp_path / "posterior", model).update([(x, y)])
    assert again.parameter_names == ("head.weight", "head.bias")
    assert again.n_data == 2 * len(x)


def passes(model, batches):
    """Forward passes of a fit of the last layer."""
    before = CALLS[0]
    lp.KFAC(model, "classification", parameters="last_layer").fit(batches)
    return CALLS[0] - before


@pytest.mark.parametrize(("depth", "extra"), [(1, 2), (20, 2)])
def test_finding_the_last_layer_takes_few_passes_of_one_batch(depth, extra):
    x, y = classes()
    assert passes(Auxiliary("output", depth), [(x, y)] * 5) == 5 + extra


def test_ordinary_networks_take_one_pass_for_each_batch():
    x, y = classes()
    model = Auxiliary("none", 0)
    del model.auxiliary
    model.forward = lambda x: (CALLS.insert(0, CALLS.pop() + 1), model.head(model.body(x).tanh()))[1]
    assert passes(model, [(x, y)] * 5) == 5


def test_segmentation_network_with_an_auxiliary_head():
    fcn = pytest.importorskip("torchvision.models.segmentation.fcn")
    torch.manual_seed(0)
    names = {"0": "aux", "1": "out"}
    backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3))
    layers = pytest.importorskip("torchvision.models._utils").IntermediateLayerGetter(backbone, names)
    model = fcn.FCN(layers, fcn.FCNHead(8, 3), fcn.FCNHead(4, 3)).eval()
    images, pixels = torch.randn(2, 1, 8, 8), torch.randint(3, (2, 8, 8))
    posterior = lp.Diagonal(model, lp.Categorical(output_axis=1), parameters="last_layer").fit([(images, pixels)])
    assert posterior.layer_names == ("classifier.4",)
    assert posterior.functional_posterior(images).covariance.diagonal(dim1=-2, dim2=-1).min() > 1e-3


# -- zero curvature ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior_class", [*GAUSSIAN, sampled, null_space])
def test_parameters_without_any_influence_are_refused_by_name(posterior_class):
    posterior = posterior_class(Auxiliary("output"), "classification", parameters=["auxiliary"])
    with pytest.raises(SelectionError, match=r"is zero: auxiliary.0.weight, auxiliary.0.bias\."):
        posterior.fit([classes()])
    assert not posterior.is_fitted


@pytest.mark.parametrize("posterior_class", GAUSSIAN)
def test_data_without_any_target_are_refused(posterior_class):
    x, y = classes()
    with pytest.raises(SelectionError, match="curvature of all selected parameters is zero.*ignored targets"):
        posterior_class(Auxiliary("output"), "classification").fit([(x, torch.full_like(y, -100))])


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal, lp.Subnetwork])
def test_a_last_layer_without_any_target_is_refused(cls):
    x, y = classes()
    posterior = (
        cls(perceptron(), "classification", "2.*", "Full")
        if cls is lp.Subnetwork
        else cls(perceptron(), "classification", parameters="last_layer")
    )
    with pytest.raises(SelectionError, match="curvature of all selected parameters is zero.*ignored targets"):
        posterior.fit([(x, torch.full_like(y, -100))])
    half = torch.where(torch.arange(len(y)) % 2 == 0, -100, y)
    assert posterior.fit([(x, torch.full_like(y, -100)), (x, half)]).is_fitted


def perceptron(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), *last).double()


@pytest.mark.parametrize("posterior_class", [lp.Full, lp.KFAC, lp.Diagonal])
def test_logits_that_leave_no_curvature_are_refused(posterior_class):
    model = perceptron()
    model[2].bias.data = torch.tensor([0.0, 2e3, -2e3]).double()
    with pytest.raises(SelectionError, match="exactly 0 or 1"):
        posterior_class(model, "classification").fit([classes()])


def test_summary_names_layers_that_are_never_active():
    model = perceptron()
    model[0].bias.data.fill_(-100.0)
    rows = lp.KFAC(model, "classification").fit([classes()]).summary().rows
    assert ["zero: keeps the prior" in row[3] for row in rows] == [True, True, False, False]


# -- probabilities in place of logits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("posterior_class", [*GAUSSIAN, sampled, null_space])
def test_a_network_that_ends_in_a_softmax_is_refused(posterior_class):
    x, y = classes()
    with pytest.raises(OutputError, match=r"returns probabilities.*logits.*softmax or sigmoid out of the network"):
        posterior_class(perceptron(nn.Softmax(-1)), "classification").fit([(x[:6], y[:6]), (x[6:], y[6:])])


def test_half_precision_and_pixels_do_not_hide_a_softmax():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Softmax(1)).to(torch.bfloat16)
    batch = torch.randn(2, 1, 4, 4, dtype=torch.bfloat16), torch.randint(3, (2, 4, 4))
    with pytest.raises(OutputError, match="returns probabilities"):
        lp.Diagonal(model, lp.Categorical(output_axis=1)).fit([batch])


def test_logits_are_not_taken_for_probabilities():
    """Neither logarithms of probabilities, nor logits that lie on the simplex in some batches, nor real numbers."""
    x, y = classes()
    lp.KFAC(perceptron(nn.LogSoftmax(-1)), "classification").fit([(x, y)])
    identity = nn.Linear(3, 3, bias=False).double()
    identity.weight.data = torch.eye(3).double()
    inside = x.softmax(-1)
    lp.KFAC(identity, "classification").fit([(inside, y), (x, y)])
    lp.KFAC(identity, "regression").fit([(inside, inside)])
    with pytest.raises(OutputError, match="returns probabilities"):
        lp.KFAC(identity, "classification").fit([(inside, y)])


def binary(n, probability):
    """A network whose only output is its input, with targets of that probability."""
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    return model, (torch.rand(n, generator=torch.Generator().manual_seed(2)).double() < probability).double()


@pytest.mark.parametrize("posterior_class", [lp.KFAC, sampled])
def test_a_network_that_ends_in_a_sigmoid_is_noticed(posterior_class):
    p = torch.linspace(0.02, 0.98, 60).double()
    model, y = binary(60, p)
    with pytest.warns(UserWarning, match="returns probabilities, and Bernoulli takes logits.*nats better"):
        posterior_class(model, "binary").fit([(p[::2, None], y[::2, None]), (p[1::2, None], y[1::2, None])])


@pytest.mark.parametrize("seed", range(5))
def test_small_logits_are_not_taken_for_those_of_a_sigmoid(seed):
    """All in [0, 1]: those of a class that is a little more frequent, and those of an untrained network."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.rand(200, 1, generator=generator).double()
    model, _ = binary(1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for probability in (logits.sigmoid(), 0.1, 0.5, 0.9):
            y = (torch.rand(200, 1, generator=generator) < probability).double()
            lp.KFAC(model, "binary").fit([(logits, y)])


def test_evidence_for_another_scale():
    p = torch.tensor([[0.9], [0.2]]).double()
    y = torch.tensor([[1.0], [0.0]]).double()
    as_logits = p[0].sigmoid().log() + (1 - p[1].sigmoid()).log()  # better than a constant of ½
    excess = float((0.9 * torch.tensor(0.8)).log() - as_logits)
    own = lp.LogDensity(lambda f, y: f.sum(-1))
    for likelihood, outputs, wanted in (
        (lp.Bernoulli(), p, pytest.approx(excess, rel=1e-6)),
        (lp.Bernoulli(), p + 0.2, -torch.inf),
        (own, p, -torch.inf),
    ):
        doubts = Doubts(likelihood)
        doubts.add(outputs, y)
        assert doubts.scale == wanted


def test_warnings_point_at_the_line_that_called():
    torch.manual_seed(0)
    x = torch.randn(60, 2)
    data = [(x, (x[:, 0] > 0).long())]
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior, once = lp.KFAC(model, "classification").fit(data), {"name": "cg", "max_iterations": 1}
    calls = [
        posterior.fit_prior_precision,
        lambda: posterior.fit_prior_precision("mackay", max_iterations=1),
        lambda: posterior.fit_prior_precision("tangent", max_iterations=1),
        lambda: posterior.fit_prior_precision("validation", data=data, grid=torch.logspace(-6, -3, 4)),
        lambda: lp.SampledLaplace(model, "classification", n_samples=4, solver=once).fit(data),
        lambda: lp.SampledLaplace(model, "classification", n_samples=4).fit(data).fit_prior_precision(max_steps=1),
    ]
    for call in calls:
        with pytest.warns((ConvergenceWarning, NoGainWarning)) as caught:
            call()
        assert {warning.filename for warning in caught} == {__file__}
