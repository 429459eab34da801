"""Likelihoods whose targets are numbers, one for each output: their checks, and their diagonal curvature."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace_plus.errors import LabelError
from laplace_plus.likelihoods.base import Likelihood, check_batch, describe, shape_text, uniform_mixture, widen


class Elementwise(Likelihood):
    """Targets of the outputs' shape, ``[B, *]`` also if there is one; a diagonal curvature, the same for all targets.

    Attributes:
        wrong_targets: What an error says of values that are no targets.
        valid_targets: What it says is expected.
        hint: How it says that such targets are repaired.
    """

    couples_outputs = False
    wrong_targets: str
    valid_targets: str
    hint: str

    @abstractmethod
    def is_valid(self, targets: Tensor) -> Tensor:
        """Which entries are targets, boolean of the same shape."""

    @abstractmethod
    def root_diagonal(self, outputs: Tensor) -> Tensor:
        """The diagonal ``[N, C]`` of :meth:`output_root`."""

    def n_targets(self, n_outputs: int) -> int:
        """The numbers in one target."""
        return n_outputs

    def align(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Targets ``[B, *, D]`` for outputs ``[B, *, C]``; ``[B, *]`` means ``[B, *, 1]``, and nothing is broadcast.

        Raises:
            LabelError: If the shapes do not fit.
        """
        observations, size = outputs.shape[:-1], self.n_targets(outputs.shape[-1])
        if size == 1 and targets.shape == observations:
            return targets.unsqueeze(-1)
        aligned = targets.movedim(self.output_axis, -1) if targets.dim() == outputs.dim() else targets
        if aligned.shape == (*observations, size):
            return aligned
        wanted = shape_text(torch.empty(*observations, size, device="meta").movedim(-1, self.output_axis).shape)
        expected = wanted + (f" or {shape_text(observations)}" if size == 1 else "") + ", as nothing is broadcast"
        what = "The targets do not have the shape of the outputs."
        raise LabelError(what, expected=expected, got=describe(targets), fix=self.hint)

    def validate(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse invalid targets, and targets of another shape than the outputs'."""
        check_batch(outputs, targets)
        aligned = self.align(outputs, targets)
        refuse_targets(~self.is_valid(aligned), aligned, self.wrong_targets, expected=self.valid_targets, fix=self.hint)

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Flatten a batch; targets become floating ``[N, D]``."""
        flat, aligned = widen(outputs).reshape(-1, outputs.shape[-1]), self.align(outputs, targets)
        return flat, aligned.reshape(-1, aligned.shape[-1]).to(flat.dtype), torch.ones_like(flat[:, 0])

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``Σ_c log p(y_c|f)``, ``[N]``."""
        log_density: Tensor = self.distribution(outputs).log_prob(targets)  # type: ignore[no-untyped-call]
        return log_density.sum(-1)

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squares of :meth:`root_diagonal`, ``[N, C, C]``."""
        return torch.diag_embed(self.root_diagonal(outputs).square())

    def output_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``diag`` of :meth:`root_diagonal`, ``[N, C, C]``."""
        return torch.diag_embed(self.root_diagonal(outputs))

    def mixture(self, outputs: Tensor) -> Distribution:
        """A mixture over samples ``[S, ..., C]`` for every entry of a target by itself."""
        given = self.distribution(outputs)
        last = {name: getattr(given, name).movedim(0, -1) for name in given.arg_constraints}
        return uniform_mixture(type(given)(**last, validate_args=False), like=widen(outputs))


def refuse_targets(wrong: Tensor, targets: Tensor, message: str, *, expected: str, fix: str) -> None:
    """Raise a ``LabelError`` if any target is wrong; it names the first one and counts them."""
    if bool(wrong.any()):
        got = f"{targets[wrong][0].item()} ({int(wrong.sum())} of {targets.numel()} targets of {targets.dtype})"
        raise LabelError(message, expected=expected, got=got, fix=fix)
