"""The noise from left-out residuals on made regressions, beside all weights' tangent and errors on new data.

    python benchmarks/evidence/noise.py [part of a name]

``dense`` is the tangent's leave-one-out error by inverses, where R or P allow it. Seconds are those of one core.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
from sklearn.datasets import load_digits, make_friedman1
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import laplace_plus as lp
from laplace_plus.tuning import noise_from_residuals

LARGEST = 2500
"""Largest matrix that is inverted for ``dense``."""


def friedman(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Friedman's first function of ten inputs with noise of a fifth of the deviation."""
    x, y = make_friedman1(n, 10, noise=1.0, random_state=seed)
    return torch.tensor(x).float(), torch.tensor(y).float()[:, None]


def two(n: int) -> tuple[Tensor, Tensor]:
    """Two outputs, of other inputs and with other noise."""
    x, y = friedman(n)
    other = x.roll(2, 1)
    second = 10 * torch.sin(3 * other[:, :1] * other[:, 1:2]) + 5 * other[:, 2:3]
    return x, torch.cat([y, second + torch.randn(n, 1, generator=torch.Generator().manual_seed(1))], 1)


def images(n: int) -> tuple[Tensor, Tensor]:
    """Where the ink of a digit is, and noise."""
    x = torch.tensor(load_digits().images).float()[:n] / 16
    place = (x * torch.linspace(-1, 1, 8)).sum((1, 2)) / x.sum((1, 2))
    return x[:, None], (place / place.std() + 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(1)))[:, None]


def mlp(act: type[nn.Module], *sizes: int) -> nn.Sequential:
    """A multilayer perceptron."""
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """Two convolutions, the second one with 4 640 weights."""
    convolutions = nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Conv2d(16, 32, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(128, 1))


# name: training rows, rows in all, data, network, weight decay, epochs
CELLS = {
    "tanh 600": (600, 3000, friedman, lambda: mlp(nn.Tanh, 10, 20, 20, 1), 1e-2, 100),
    "relu 600": (600, 3000, friedman, lambda: mlp(nn.ReLU, 10, 20, 20, 1), 1e-2, 100),
    "relu 600 interpolates": (600, 3000, friedman, lambda: mlp(nn.ReLU, 10, 100, 100, 1), 0.0, 300),
    "tanh 2500": (2500, 5000, friedman, lambda: mlp(nn.Tanh, 10, 50, 50, 1), 1e-2, 40),
    "relu 2500": (2500, 5000, friedman, lambda: mlp(nn.ReLU, 10, 50, 50, 1), 1e-2, 40),
    "two outputs 1200": (1200, 4000, two, lambda: mlp(nn.Tanh, 10, 50, 50, 2), 1e-2, 60),
    "digits 1000, convolutions": (1000, 1797, images, cnn, 1e-2, 30),
    "tanh 2400 wide": (2400, 5000, friedman, lambda: mlp(nn.Tanh, 10, 220, 220, 1), 1e-2, 30),
    "relu 20000 few weights": (20000, 23000, friedman, lambda: mlp(nn.ReLU, 10, 20, 20, 1), 1e-2, 8),
    "tanh 20000": (20000, 23000, friedman, lambda: mlp(nn.Tanh, 10, 50, 50, 1), 1e-2, 8),
    "tanh 20000 wide": (20000, 23000, friedman, lambda: mlp(nn.Tanh, 10, 220, 220, 1), 1e-2, 8),
    "relu 20000 wide": (20000, 23000, friedman, lambda: mlp(nn.ReLU, 10, 220, 220, 1), 1e-2, 8),
}


def trained(net: nn.Sequential, x: Tensor, y: Tensor, decay: float, epochs: int) -> nn.Sequential:
    """The network after AdamW with a cosine of step sizes."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
            optimizer.step()
        schedule.step()
    return net.eval()


def dense(net: nn.Sequential, x: Tensor, y: Tensor) -> float:
    """The tangent's least leave-one-out error over ridges a factor two apart; one noise level."""
    n, size = y.shape
    parameters = {name: parameter.detach().double() for name, parameter in net.named_parameters()}
    vector = torch.cat([value.flatten() for value in parameters.values()])

    def output(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(net, values, row[None])[0]

    tree = vmap(jacrev(output), (None, 0), chunk_size=250)(parameters, x.double())
    jacobian = torch.cat([block.reshape(n * size, -1) for block in tree.values()], 1)
    outputs = functional_call(net, parameters, x.double())
    targets = (y.double() - outputs).flatten() + jacobian @ vector
    wide = len(jacobian) <= jacobian.shape[1]
    layers = [sum(one.numel() for one in layer.parameters()) for layer in net if len(list(layer.parameters()))]
    for layer in jacobian.split(layers, 1):
        layer /= layer.square().sum(1).mean().sqrt()
    gram = jacobian @ jacobian.T if wide else jacobian.T @ jacobian

    def error(ridge: float) -> float:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge * torch.eye(len(gram)).double()))
        if wide:
            matrix = inverse.view(n, size, n, size)
            residual, block = inverse @ targets, matrix[torch.arange(n), :, torch.arange(n)]
        else:
            mapped = jacobian @ inverse
            residual = targets - mapped @ (jacobian.T @ targets)
            products = mapped.view(n, size, -1) @ jacobian.view(n, size, -1).mT
            block = torch.eye(size).double() - products
        return float(torch.linalg.solve(block, residual.view(n, size, 1)).square().mean().sqrt())

    start = float(gram.trace()) * 2.0**-14
    found = {0: error(start)}
    for step in (-1, 1):
        at = 0
        while found[at] == min(found.values()):
            at += step
            found[at] = error(start * 2.0**at)
    return min(found.values())


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout.write(
        "| network, rows | weights | training residual | new data | estimate | dense | seconds | problem |\n"
    )
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    for name, (n, total, data, make, decay, epochs) in CELLS.items():
        if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
            continue
        x, y = data(total)
        x, y = (x - x[:n].mean()) / x[:n].std(), (y - y[:n].mean(0)) / y[:n].std(0)
        torch.manual_seed(0)
        net = trained(make(), x[:n], y[:n], decay, epochs)
        weights = sum(parameter.numel() for parameter in net.parameters())
        posterior = lp.Diagonal(net, lp.Gaussian(1.0), parameters="all")
        posterior.fit(list(zip(x[:n].split(250), y[:n].split(250), strict=True)))
        start = time.process_time()
        found = noise_from_residuals(posterior)
        seconds = time.process_time() - start
        small = min(n * y.shape[1], weights) <= LARGEST
        exact = f"{dense(net, x[:n], y[:n]):.4f}" if small else ""
        with torch.no_grad():
            new = float((net(x[n:]) - y[n:]).square().mean().sqrt())
        row = f"{name} | {weights} | {float(found.residual_std):.4f} | {new:.4f} | {float(found.noise_std):.4f}"
        sys.stdout.write(f"| {row} | {exact} | {seconds:.1f} | {found.problem} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
