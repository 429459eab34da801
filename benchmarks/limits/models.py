"""The networks with their data, and plain passes through them.

Networks of ten classes are trained on scikit-learn's digits, enlarged and shifted by up to two pixels. The regression
network learns Friedman's function, the network of 1000 classes noisy copies of 1000 smooth random images, the U-Net
noisy patches of 21 colours. Trained weights are kept in a folder, so that each network is trained once. GPT-2,
DistilBERT and their tokens are random, and so are ResNet-50 and the multilayer perceptron of 1000 classes with their
inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Problem:
    """A network in evaluation mode with data to fit to.

    Attributes:
        name: One of :data:`RECIPES`.
        model: The network.
        likelihood: ``"classification"`` or ``"regression"``.
        inputs: ``[N, …]``.
        targets: ``[N]`` classes or ``[N, C]`` values.
        batch_size: Of the fit.
        test_inputs: ``[M, …]``, to predict at.
        n_outputs: C.
        batched: Whether a batched backward pass is the quicker one; else one pass for each direction is.
    """

    name: str
    model: nn.Module
    likelihood: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    batch_size: int
    n_outputs: int
    batched: bool

    @property
    def batches(self) -> Batches:
        """The data, cut."""
        return list(zip(self.inputs.split(self.batch_size), self.targets.split(self.batch_size), strict=True))

    def take(self, n: int) -> Problem:
        """The same with the first n data only."""
        return Problem(**(vars(self) | {"inputs": self.inputs[:n], "targets": self.targets[:n]}))

    def double(self) -> Problem:
        """A copy of everything in float64: where two ways to compute something are compared."""
        targets = self.targets.double() if self.targets.is_floating_point() else self.targets
        changed = {"model": copy.deepcopy(self.model).double(), "inputs": self.inputs.double(), "targets": targets}
        changed["test_inputs"] = self.test_inputs.double()
        return Problem(**(vars(self) | changed))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over examples."""
        if self.likelihood == "classification":
            return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
        return (outputs - targets).square().sum() / 2

    def forward(self) -> None:
        """A plain forward pass over the data, without gradients."""
        with torch.no_grad():
            for inputs, _ in self.batches:
                self.model(inputs)

    def epoch(self) -> None:
        """A forward and a backward pass over the data, as in training."""
        for inputs, targets in self.batches:
            self.loss(self.model(inputs), targets).backward()
            self.model.zero_grad()

    def probe(self, n: int) -> Tensor:
        """N test inputs."""
        return self.test_inputs[:n]


def multilayer(*sides: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A multilayer perceptron."""
    hidden = [layer for a, b in pairwise(sides[:-1]) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*hidden, nn.Linear(sides[-2], sides[-1]))


def lenet() -> nn.Module:
    """LeNet-5, 62 thousand weights."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2)]
    features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2)]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *head)


def resnet18(n_classes: int) -> nn.Module:
    """Torchvision's ResNet-18."""
    from torchvision.models import resnet18 as build  # noqa: PLC0415  -- an extra

    return build(num_classes=n_classes)


def resnet50() -> nn.Module:
    """Torchvision's ResNet-50."""
    from torchvision.models import resnet50 as build  # noqa: PLC0415  -- an extra

    return build()


def vit_tiny() -> nn.Module:
    """Timm's ViT-tiny for 32 × 32 images in patches of 4 × 4: 65 tokens, 5.4 million weights."""
    from timm import create_model  # noqa: PLC0415  -- an extra

    return create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)


class UNet(nn.Module):
    """Three resolutions with 32 channels and more, and a convolution as its head, whose pixels come last."""

    def __init__(self, n_classes: int, width: int = 32):
        super().__init__()
        w = width

        def block(a: int, b: int) -> nn.Module:
            layers = [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

        self.down = nn.ModuleList([block(3, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.up = nn.ModuleList([block(6 * w, 2 * w), block(3 * w, w)])
        self.head = nn.Conv2d(w, n_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Images ``[B, 3, H, W]`` to logits ``[B, H, W, C]``."""
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        for block, before in zip(self.up, (second, first), strict=True):
            x = block(torch.cat([before, nn.functional.interpolate(x, scale_factor=2)], 1))
        return self.head(x).permute(0, 2, 3, 1)


class GPT2(nn.Module):
    """GPT-2 small, whose head has the weights of its table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415  -- an extra

        self.model = GPT2LMHeadModel(GPT2Config())

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[B, T]`` to logits ``[B, T, 50257]``."""
        return self.model(x).logits


class DistilBERT(nn.Module):
    """DistilBERT with a head of two classes, and on request adapters (LoRA) beside the queries and values."""

    def __init__(self, *, adapters: bool = False) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification  # noqa: PLC0415  -- an extra

        self.model = DistilBertForSequenceClassification(DistilBertConfig())
        if adapters:
            from peft import LoraConfig, get_peft_model  # noqa: PLC0415  -- an extra

            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules=["q_lin", "v_lin"]))
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:  # zero at first
                    nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[B, T]`` to logits ``[B, 2]``."""
        return self.model(input_ids=x).logits


Data = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""Draws that many inputs and targets."""


def digits(*shape: int) -> Data:
    """Scikit-learn's digits with so many channels and so large, shifted at random, in random order."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(labels)
    channels, side = (shape[0], shape[1]) if len(shape) == 3 else (1, 28)
    large = nn.functional.interpolate(images, size=(side, side), mode="bilinear").expand(-1, channels, -1, -1)

    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(large), (n,), generator=generator)
        shifts = torch.randint(-2, 3, (n, 2), generator=generator).tolist()
        moved = [image.roll(tuple(shift), (1, 2)) for image, shift in zip(large[chosen], shifts, strict=True)]
        return torch.stack(moved).reshape(n, *shape), labels[chosen]

    return draw


def friedman(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Friedman's first function of five of eight uniform inputs, in units of its deviation, with noise of a tenth."""
    x = torch.rand(n, 8, generator=generator)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    noise = 0.1 * torch.randn(n, generator=generator)
    return x, ((y - 14.4) / 4.9 + noise)[:, None]


def halves(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The same inputs, and whether the function is above its mean."""
    x, y = friedman(n, generator)
    return x, (y[:, 0] > 0).long()


def thousand_classes(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy copies of 1000 smooth random images."""
    own = torch.Generator().manual_seed(1000)
    prototypes = torch.randn(1000, 3, 8, 8, generator=own)
    labels = torch.randint(1000, (n,), generator=generator)
    images = nn.functional.interpolate(prototypes[labels], size=(32, 32), mode="bilinear")
    return images + 0.3 * torch.randn(images.shape, generator=generator), labels


def patches(side: int) -> Data:
    """Images of that side in patches of 16 pixels, each of one of 21 colours, with noise."""
    colours = torch.randn(21, 3, generator=torch.Generator().manual_seed(21))

    def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(21, (n, side // 16, side // 16), generator=generator)
        labels = labels.repeat_interleave(16, 1).repeat_interleave(16, 2)
        images = colours[labels].permute(0, 3, 1, 2)
        return images + 0.3 * torch.randn(images.shape, generator=generator), labels

    return draw


def tokens(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of 128 random tokens, and others to predict."""
    drawn = torch.randint(50257, (n, 2, 128), generator=generator)
    return drawn[:, 0], drawn[:, 1]


def noise(*shape: int) -> Data:
    """White noise of that shape, and any of 1000 classes."""
    return lambda n, generator: (
        torch.randn(n, *shape, generator=generator),
        torch.randint(1000, (n,), generator=generator),
    )


def sentences(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences of 128 random tokens in two classes."""
    return torch.randint(30522, (n, 128), generator=generator), torch.randint(2, (n,), generator=generator)


@dataclass(frozen=True)
class Recipe:
    """How a problem is made.

    Attributes:
        make: What builds the network.
        data: What draws its data.
        n_outputs: C.
        n_data: N, to fit to.
        batch_size: Of the fit.
        batched: Whether a batched backward pass is the quicker one.
        steps: Of training with Adam, on fresh batches of 128; without any, weights are random.
        learning_rate: Of training; it falls to zero along a cosine.
        training: What draws these batches, where it is not ``data``.
    """

    make: Callable[[], nn.Module]
    data: Data
    n_outputs: int
    n_data: int
    batch_size: int
    batched: bool
    steps: int
    learning_rate: float = 1e-3
    training: Data | None = None

    @property
    def likelihood(self) -> str:
        """By the number of outputs."""
        return "regression" if self.n_outputs == 1 else "classification"

    def trained(self) -> nn.Module:
        """The network after training, in evaluation mode."""
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        model = self.make().train()
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate, weight_decay=1e-5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        loss_of = nn.functional.mse_loss if self.n_outputs == 1 else nn.functional.cross_entropy
        for _ in range(self.steps):
            inputs, targets = (self.training or self.data)(128, generator)
            optimizer.zero_grad()
            outputs = model(inputs)
            flat = outputs.flatten(0, -2), targets.flatten(0, outputs.ndim - 2)
            loss_of(*flat).backward()
            optimizer.step()
            schedule.step()
        return model.eval()


IMAGE = (3, 32, 32)
RECIPES: dict[str, Recipe] = {
    "mlp32": Recipe(lambda: multilayer(8, 32, 32, 1, activation=nn.Tanh), friedman, 1, 200, 100, True, 1000, 1e-2),
    "mlp32_2": Recipe(lambda: multilayer(8, 32, 32, 2, activation=nn.Tanh), halves, 2, 200, 100, True, 1000, 1e-2),
    "mlp50": Recipe(lambda: multilayer(8, 50, 50, 1, activation=nn.Tanh), friedman, 1, 1000, 100, True, 2000, 1e-2),
    "mlp1024": Recipe(lambda: multilayer(784, 1024, 1024, 10), digits(784), 10, 2000, 64, True, 400),
    "lenet": Recipe(lenet, digits(1, 28, 28), 10, 2000, 64, True, 800, 2e-3),
    "resnet18": Recipe(lambda: resnet18(10), digits(*IMAGE), 10, 64, 64, False, 60),
    "vit_tiny": Recipe(vit_tiny, digits(*IMAGE), 10, 64, 64, False, 80, 5e-4),
    "resnet18_1000": Recipe(lambda: resnet18(1000), thousand_classes, 1000, 256, 64, False, 150, 2e-3),
    "mlp_1000": Recipe(lambda: multilayer(784, 512, 512, 1000), noise(784), 1000, 128, 64, True, 0),
    "resnet50": Recipe(resnet50, noise(3, 224, 224), 1000, 8, 8, False, 0),
    "unet": Recipe(lambda: UNet(21), patches(256), 21, 2, 2, False, 60, 3e-3, patches(32)),
    "gpt2": Recipe(GPT2, tokens, 50257, 4, 4, False, 0),
    "distilbert": Recipe(DistilBERT, sentences, 2, 16, 8, False, 0),
    "lora": Recipe(lambda: DistilBERT(adapters=True), sentences, 2, 16, 8, False, 0),
}
_TEST = 256
"""Inputs to predict at."""


def train(name: str, folder: Path) -> None:
    """Train a network and keep its weights, unless they are there."""
    path = folder / f"{name}.safetensors"
    if RECIPES[name].steps and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(RECIPES[name].trained().state_dict(), path)


def build(name: str, folder: Path) -> Problem:
    """The problem of that name; its network has been trained by :func:`train`."""
    recipe = RECIPES[name]
    model = recipe.make().eval() if recipe.steps else recipe.trained()
    if recipe.steps:
        model.load_state_dict(load_file(folder / f"{name}.safetensors"))
    inputs, targets = recipe.data(recipe.n_data, torch.Generator().manual_seed(1))
    test_inputs, _ = recipe.data(min(_TEST, 16 * recipe.n_data), torch.Generator().manual_seed(2))
    return Problem(
        name,
        model,
        recipe.likelihood,
        inputs,
        targets,
        test_inputs,
        recipe.batch_size,
        recipe.n_outputs,
        recipe.batched,
    )
