"""The networks that people take from torchvision and timm, at their real size and in float32."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from zoo.architecture import imported

import laplace_plus as lp

pytestmark = pytest.mark.zoo

C, N = 10, 2
MONTE_CARLO = lp.Native("ggn_mc", n_samples=1)


@dataclass(frozen=True)
class Model:
    """A named network and the size of the images that it is given.

    Attributes:
        name: Its name in its library.
        size: Height and width of the images.
        last_layer: The module that ``"last_layer"`` must find.
        general: The parameters that follow no rule.
        large: Whether fitting all of its parameters takes long.
    """

    name: str
    size: int
    last_layer: str
    general: tuple[str, ...] = ()
    large: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.name.startswith("timm/"):
            return imported("timm").create_model(self.name.removeprefix("timm/"), pretrained=False, num_classes=C)
        return getattr(imported("torchvision.models"), self.name)(weights=None, num_classes=C)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(N, 3, self.size, self.size, generator=generator)
        return images, torch.randint(0, C, (N,), generator=generator)


MODELS = [
    Model("resnet18", 64, "fc"),
    Model("mobilenet_v3_small", 64, "classifier.3"),
    Model("vit_b_16", 224, "heads.head", ("class_token", "encoder.pos_embedding"), large=True),
    Model("timm/vit_tiny_patch16_224", 224, "head", ("cls_token", "pos_embed"), large=True),
    Model("timm/convnext_atto", 64, "head.fc", ("*.gamma",)),
    Model("timm/swin_tiny_patch4_window7_224", 224, "head.fc", ("*.relative_position_bias_table",), large=True),
]
NAMES = [model.name.removeprefix("timm/") for model in MODELS]

each = pytest.mark.parametrize("model", MODELS, ids=NAMES)
the_first = pytest.mark.parametrize(
    "model", [MODELS[0], *(pytest.param(model, marks=pytest.mark.slow) for model in MODELS[1:])], ids=NAMES
)


def assert_probabilities(prediction: lp.Prediction) -> None:
    assert prediction.mean.shape == (N, C)
    assert prediction.mean.isfinite().all()
    assert prediction.mean.min() >= 0
    torch.testing.assert_close(prediction.mean.sum(-1), torch.ones(N))
    assert prediction.variance.isfinite().all()


def assert_covers(posterior: lp.Posterior, model: Model) -> None:
    rows = posterior.summary().rows
    assert [name for name, *_ in rows] == [name for name, _ in posterior.network.model.named_parameters()]
    assert sum(size for _, size, *_ in rows) == posterior.n_parameters
    general = [name for name, _, _, treatment in rows if "general" in treatment]
    assert all(any(fnmatchcase(name, glob) for glob in model.general) for name in general)


@pytest.mark.quick("Full-resnet18")
@the_first
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
def test_last_layer(model, cls):
    network = model.build()
    images, labels = model.batch()
    posterior = cls(network.train(), "classification", parameters="last_layer")
    if cls is lp.Full and posterior.n_parameters > 2000:
        pytest.skip("a dense matrix of that size takes minutes to diagonalise")
    posterior.fit([(images, labels)])
    assert network.training
    assert posterior.parameter_names == (f"{model.last_layer}.weight", f"{model.last_layer}.bias")
    posterior.fit_prior_precision("marginal_likelihood")
    assert_probabilities(posterior.predictive(images))


@pytest.mark.slow
@each
def test_diagonal(model):
    posterior = lp.Diagonal(model.build(), "classification", backend=MONTE_CARLO if model.large else "native")
    images, labels = model.batch()
    posterior.fit([(images, labels)])
    assert_covers(posterior, model)
    assert_probabilities(posterior.predictive(images))


@pytest.mark.slow  # diagonalising the factors takes a minute or more
@each
def test_kronecker(model):
    posterior = lp.KFAC(model.build(), "classification", backend=MONTE_CARLO)
    images, labels = model.batch()
    posterior.fit([(images, labels)])
    assert_covers(posterior, model)
    if model.name != "vit_b_16":  # whose factors take many minutes
        assert_probabilities(posterior.predictive(images))


@pytest.mark.slow
@each
def test_kronecker_of_a_part(model):
    """Exact factors of all layers, and a prediction from those whose factors are small."""
    network = model.build()
    images, labels = model.batch()
    posterior = lp.KFAC(network, "classification").fit([(images, labels)])
    assert_covers(posterior, model)
    small = {name for name, p in network.named_parameters() if p.numel() < 2**17}
    posterior = lp.KFAC(network, "classification", parameters=lambda name, p: name in small).fit([(images, labels)])
    assert set(posterior.parameter_names) == small
    assert_probabilities(posterior.predictive(images))
