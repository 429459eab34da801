"""Training the mean of the kernel/image family together with its scales, one batch at a time.

A step needs noise ε split into its parts in the kernel of *all* rows and beside it. Two ways to come by it:

* projected: at the start of each epoch a few vectors ξ are projected, as precisely as the projector does it, and each
  step takes a random combination of them; what it takes from the kernel is projected once more onto the kernel of the
  batch's rows, since the mean has moved meanwhile.
* alternating: the stochastic alternating projections of Roy et al. (2025), ``u = √γ e + √(1−γ) η`` with fresh normal
  η, ``k = Π_b u`` with the projector onto the kernel of the batch's own rows, and ``e ← k``. It costs no passes but one
  for each epoch. But alternating projections converge slowly where rows of different batches are correlated, and of
  fresh noise most is then still to be taken away when it is forgotten: part of what counts as kernel noise is not.

The gradient in the mean passes through the projection onto the kernel of the batch's own rows, which is all of them
where there is one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.batches import Batch, iterate
from laplace_plus.curvature.batch_rows import BatchRows
from laplace_plus.curvature.kernel_rows import KernelRows, Rows
from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import vector_norm
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.kernel_projectors import ProjectionMethod
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network import Network
from laplace_plus.posteriors.null_space_noise import image_rank
from laplace_plus.posteriors.resuming import Checkpoint
from laplace_plus.posteriors.viking.elbo import ELBOTerms, kernel_image_kl, terms_from_tensor, terms_to_tensor
from laplace_plus.posteriors.viking.scales import Expectation, weighed

NOISES = ("projected", "alternating")


@dataclass(frozen=True)
class ELBOTraining:
    """How the mean is trained.

    Args:
        epochs: Passes over the data.
        scale_epochs: Passes before them in which only α and σ_im are learnt.
        learning_rate: Of Adam, for the mean.
        scale_learning_rate: Of Adam, for log α and log σ_im.
        noise: ``"projected"``: what is projected onto the kernel of all rows, so that steps estimate the bound itself.
            ``"alternating"``: stochastic alternating projections; the image noise of a step is then what the batch's
            own projection takes away, and the divergence that of the batch's exact rank.
        n_projected: Vectors that are projected at the start of each epoch.
        gamma: γ of alternating projections, how much of the noise is kept from one batch to the next.
        n_samples: Sampled networks for each batch.

    Raises:
        ConfigurationError: Numbers out of range, or another kind of noise.
    """

    epochs: int = 50
    scale_epochs: int = 5
    learning_rate: float = 1e-3
    scale_learning_rate: float = 1e-2
    noise: Literal["projected", "alternating"] = "projected"
    n_projected: int = 8
    gamma: float = 0.5
    n_samples: int = 1

    def __post_init__(self) -> None:
        good = min(self.epochs, self.n_samples, self.n_projected) >= 1 and self.scale_epochs >= 0
        good = good and min(self.learning_rate, self.scale_learning_rate) > 0 and 0 <= self.gamma <= 1
        if not good:
            raise ConfigurationError(
                "There is no such training.",
                expected="epochs, n_samples, n_projected >= 1; scale_epochs >= 0; learning rates > 0; 0 <= gamma <= 1",
                got=str(self),
            )
        if self.noise not in NOISES:
            raise ConfigurationError("Unknown noise.", expected=", ".join(NOISES), got=repr(self.noise))


@dataclass
class TrainingState:
    """What a training has come to.

    Attributes:
        theta: The mean, ``[P]``.
        logs: ``(log α, log σ_im)``, float64.
        history: The terms of each step.
    """

    theta: Tensor
    logs: Tensor
    history: list[ELBOTerms] = field(default_factory=list)


@dataclass
class _Noise:
    """Normal vectors ``[m, P]``: what is left of them in the kernel, and as they were drawn; and the image's rank."""

    kernel: Tensor
    whole: Tensor
    rank: float


class KernelImageTraining:
    """Trains on a copy; the network given is left alone.

    Args:
        network: The trained network, where the mean starts.
        likelihood: Its likelihood.
        data: Batches that can be started again.
        rows: What the kernel is of.
        projector: How noise is projected onto the kernel of all rows.
        chunk_size: Number of vectors that are pushed through the network at a time.
        options: Epochs, rates and the like.
        expectation: Whether samples go through the network or its linearisation.
        prior_mean: μ.
        temperature: T.
        kl_weight: The weight of the divergence beside the whole data's likelihood.
        n_data: N.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        *,
        rows: Rows,
        projector: ProjectionMethod,
        chunk_size: int,
        options: ELBOTraining,
        expectation: Expectation,
        prior_mean: Tensor,
        temperature: float,
        kl_weight: float,
        n_data: int,
    ):
        self._network, self._likelihood, self._data, self._rows = network, likelihood, data, rows
        self._projector, self._chunk_size = projector, chunk_size
        self._options, self._expectation = options, expectation
        self._prior_mean, self._temperature = prior_mean, temperature
        self._kl_weight, self._n_data = kl_weight, n_data

    def run(self, logs: Tensor, seed: int, checkpoint: Checkpoint | None, *, progress: bool) -> TrainingState:
        """Train, from the network's weights.

        Args:
            logs: Where ``(log α, log σ_im)`` start.
            seed: Of the noise.
            checkpoint: Where the state after each epoch is kept.
            progress: Whether to show a progress bar.

        Raises:
            NonFiniteError: The bound is not finite.
            UnsupportedError: The rows have no kernel.
        """
        options = self._options
        state = TrainingState(self._network.vector().requires_grad_(), logs.detach().clone().requires_grad_())
        optimizers = [
            torch.optim.Adam([state.theta], lr=options.learning_rate),
            torch.optim.Adam([state.logs], lr=options.scale_learning_rate),
        ]
        first = 0 if checkpoint is None else self._resume(checkpoint, state, optimizers)
        total = options.scale_epochs + options.epochs
        for epoch in progress_bar(range(first, total), enabled=progress, description="VIKING: epochs"):
            source = torch.Generator().manual_seed((seed + (epoch + 1) * 0x9E3779B97F4A7C15) % 2**63)
            noise = self._start(state.theta.detach(), source)
            for batch in self._batches():
                state.history.append(self._step(batch, state, noise, source, optimizers, epoch >= options.scale_epochs))
            if checkpoint is not None:
                self._keep(checkpoint, epoch + 1, state, optimizers)
        state.theta, state.logs = state.theta.detach(), state.logs.detach()
        return state

    def _start(self, theta: Tensor, source: torch.Generator) -> _Noise:
        """Noise that is projected onto the kernel of all rows, or by one pass of alternating projections."""
        options = self._options
        if options.noise == "projected":
            noise = self._normal(options.n_projected, theta, source)
            center = moved(self._network, theta)
            whole = KernelRows(center, self._likelihood, self._data, self._rows, chunk_size=self._chunk_size)
            projector = self._projector.prepare(whole.whole, whole.parts)
            kernel, rank = projector.project(noise).value, projector.rank
        else:
            noise = self._normal(options.n_samples, theta, source)
            kernel, rank = noise, None
            for batch in self._batches():
                rows = BatchRows(self._network, self._likelihood, batch, self._rows, theta)
                with torch.no_grad():
                    kernel = rows.project(kernel).value
        squares = vector_norm(noise - kernel).double().square()
        return _Noise(kernel, noise, float(image_rank(kernel, squares, rank).value))

    def _split(
        self, rows: BatchRows, noise: _Noise, source: torch.Generator, learn_mean: bool
    ) -> tuple[Tensor, Tensor, float]:
        """A step's kernel and image noise ``[m, P]``, differentiable in the mean, and the image's rank."""
        options = self._options
        if options.noise == "alternating":
            fresh = self._normal(options.n_samples, noise.kernel[0], source)
            before = options.gamma**0.5 * noise.kernel + (1 - options.gamma) ** 0.5 * fresh
            kernel = rows.project(before).value
            noise.kernel = kernel.detach()
            return kernel, before - kernel, float(rows.rank())
        weights = self._normal(options.n_samples, noise.kernel[:, 0], source)
        weights = weights / weights.norm(dim=-1, keepdim=True)  # unit combinations of normal vectors are normal
        before, whole = weights @ noise.kernel, weights @ noise.whole
        if not learn_mean:
            kernel = rows.project(before).value
            return kernel, whole - kernel, noise.rank
        value, through = rows.project(torch.cat([before, whole])).value.chunk(2)
        # The derivative of P in the mean turns image noise into kernel noise, too, of which ``before`` holds none.
        kernel = value.detach() + through - through.detach()
        return kernel, whole - kernel, noise.rank

    def _step(
        self,
        batch: Batch,
        state: TrainingState,
        noise: _Noise,
        source: torch.Generator,
        optimizers: list[torch.optim.Adam],
        learn_mean: bool,
    ) -> ELBOTerms:
        logs = state.logs
        theta = state.theta if learn_mean else state.theta.detach()
        rows = BatchRows(self._network, self._likelihood, batch, self._rows, theta)
        kernel, image, rank = self._split(rows, noise, source, learn_mean)
        deviations = (-logs[0] / 2).exp().to(kernel) * kernel + logs[1].exp().to(kernel) * image
        if self._expectation == "linearized":
            tangents = rows.push(deviations)
            outputs = torch.cat([rows.outputs + tangents, rows.outputs - tangents])  # cancels all odd terms
        else:
            sampled = [self._network(batch.inputs, self._network.substitute(theta + one)) for one in deviations]
            outputs = torch.stack(sampled)
        scale = self._n_data / batch.size
        nll = scale * weighed(self._likelihood, outputs, batch.target, self._temperature).to(logs.device)
        distance = (theta - self._prior_mean.to(theta)).double().square().sum().to(logs.device)
        kl = kernel_image_kl(distance, rank, logs[0].exp(), logs[1].exp())
        alpha, image_std = logs.detach().exp().tolist()
        parts = float(nll.detach()), float(kl.detach())
        terms = ELBOTerms(*parts, alpha, image_std, rank, self._kl_weight).require_finite()
        for optimizer in optimizers:
            optimizer.zero_grad()
        ((nll + self._kl_weight * kl) / scale).backward()  # the batch's sum, and B/N of the divergence
        for optimizer in optimizers if learn_mean else optimizers[1:]:
            optimizer.step()
        return terms

    @staticmethod
    def _normal(count: int, like: Tensor, source: torch.Generator) -> Tensor:
        """``[count, n]`` for a vector ``[n]`` of the same kind."""
        return draw_probes("gaussian", count, len(like), generator=source, dtype=like.dtype, device=like.device)

    def _batches(self) -> Iterable[Batch]:
        return iterate(self._data, device=self._network.device, progress=False, description="")

    def _resume(self, checkpoint: Checkpoint, state: TrainingState, optimizers: list[torch.optim.Adam]) -> int:
        """Take up the last epoch's state; its number, or 0."""
        saved = checkpoint.read("training", state.theta.device)
        if saved is None:
            return 0
        header, tensors = saved
        with torch.no_grad():
            state.theta.copy_(tensors["theta"])
            state.logs.copy_(tensors["logs"])
        state.history.extend(terms_from_tensor(tensors["history"]))
        for number, optimizer in enumerate(optimizers):
            prefix = f"adam.{number}."
            own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            if own:
                own["step"] = own["step"].cpu()
                optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: own}})
        return int(header["epochs"])

    @staticmethod
    def _keep(checkpoint: Checkpoint, epochs: int, state: TrainingState, optimizers: list[torch.optim.Adam]) -> None:
        tensors = {
            "theta": state.theta.detach(),
            "logs": state.logs.detach(),
            "history": terms_to_tensor(state.history),
        }
        for number, optimizer in enumerate(optimizers):
            own = optimizer.state_dict()["state"].get(0, {})
            tensors |= {f"adam.{number}.{name}": value.detach() for name, value in own.items()}
        checkpoint.write("training", {"epochs": epochs}, tensors)


def moved(network: Network, vector: Tensor) -> Network:
    """The same network with other weights, on a copy of the module.

    Args:
        network: The network.
        vector: The selected weights, ``[P]``.
    """
    other = copy.copy(network)
    other.model = copy.deepcopy(network.model)
    other.example_axes, other.layouts = {}, {}
    parameters = dict(other.model.named_parameters())
    with torch.no_grad():
        for name, value in network.substitute(vector.detach()).items():
            parameters[name].copy_(value)
    return other
