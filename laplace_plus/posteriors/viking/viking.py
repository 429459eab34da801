"""Variational inference with a kernel/image covariance (Roy, Miani, Krämer, Hauberg et al., 2025, *VIKING*).

See :mod:`laplace_plus.posteriors.viking.elbo` for the family, its divergence and the bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from os import PathLike
from typing import Any, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.curvature.kernel_rows import KINDS, KernelRows, Rows
from laplace_plus.curvature.linearization import Ways
from laplace_plus.curvature.streaming import same_sum
from laplace_plus.distributed import Distributed
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, DataError, SmoothnessWarning
from laplace_plus.geometry import kinks
from laplace_plus.likelihoods import Gaussian
from laplace_plus.linalg.kernel_projectors import ProjectionMethod
from laplace_plus.network import Network
from laplace_plus.posteriors.methods import check_count, exactly, positive
from laplace_plus.posteriors.null_space_noise import (
    KernelNoise,
    NoiseReport,
    check_single,
    draw_kernel_noise,
    noise_seed,
    projector_config,
    resolve_projector,
    survey,
    warn_unless_projected,
)
from laplace_plus.posteriors.ranks import digest
from laplace_plus.posteriors.resuming import Checkpoint, identity
from laplace_plus.posteriors.sample_based import KernelBased
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.posteriors.viking.elbo import ELBOTerms, terms_from_tensor, terms_to_tensor
from laplace_plus.posteriors.viking.scales import Bound, Expectation, ExpectedLoss, ScaleFit
from laplace_plus.posteriors.viking.training import ELBOTraining, KernelImageTraining, moved
from laplace_plus.predictive.deviations import pushed

WHY = "The evidence lower bound passes over the data again and again."

_EXPECTATIONS = ("linearized", "sampled")

Path = str | PathLike[str]


class VIKING(KernelBased):
    """A Gaussian with one scale where the data say nothing and another where they do, by variational inference.

    ``q = N(θ̂, σ_ker² P + σ_im² (I − P))`` with P the projector onto the kernel of the training data's rows and
    ``σ_ker = α^-½`` the prior's own scale; :meth:`fit` maximises the evidence lower bound. Choose it in place of
    :class:`NullSpace` where training data, too, should get error bars, and where the scales are to follow from a bound
    on the evidence rather than from the curvature at one point. Begin with the post-hoc mode, which costs what
    :class:`NullSpace` does.

    ``mode="post_hoc"`` leaves the mean at the trained weights and learns α and σ_im. ``mode="train"`` learns the mean,
    too, on a copy: the network itself is never changed, :attr:`mean` is the learnt vector and **not** the network's
    weights, and all predictions, sampled and linearised, are around it. At its end α and σ_im are fitted once more, at
    the learnt mean, as post hoc; what is stored is thus an optimum over them of the bound itself. Training from weights
    that fit well takes many noisy steps to gain on the post-hoc bound; compare ``elbo()`` of both.

    Memory is that of ``2 n_samples`` vectors of the network's size; time that of projecting half of them, with one
    Jacobian product in each direction over the data for each iteration, and in training mode of a projection onto the
    kernel of each batch's rows at each step, with one solve more for its gradient. The data come in the same batches,
    in the same order, each time.

    Args:
        mode: ``"post_hoc"``, ``"train"``, or :class:`ELBOTraining` with options.
        rows: The rows whose kernel P projects onto: ``"logit"``, ``"ggn"`` or ``"loss"``, as for :class:`NullSpace`; by
            default ``"logit"`` in regression and ``"loss"`` else.
        projector: ``"lsmr"``, ``"svd"`` (for small problems: exact), ``"alternating"``, or one with options.
        expectation: Whether the expected log-likelihood, and predictions by default, are those of the ``"linearized"``
            network (by default post hoc) or of ``"sampled"`` networks (in training).
        rank: The image's dimension in the divergence: ``"exact"``, which needs ``projector="svd"``; ``"stochastic"``,
            the unbiased ``mean ‖(I − P) ε‖²``; ``"auto"``, the former where it is known.
        kl_weight: The weight of the divergence. 1 gives a bound on the evidence (a batch of B then counts with
            B/N of the divergence); less gives a colder posterior.
        image_std: Where σ_im starts. α starts at ``prior_precision``.
        scale_fit: ``"lbfgs"``, ``"adam"``, or :class:`ScaleFit` with options: how α and σ_im are found at a fixed mean.
        n_samples: Number k of noise vectors that are projected and stored.
        chunk_size: Number of vectors that are pushed through the network at a time.
        *args: As for :class:`Posterior`.
        **kwargs: As for :class:`Posterior`.

    Raises:
        ConfigurationError: An unknown option, besides what :class:`Posterior` raises.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.VIKING(net, "regression", n_samples=5).fit([(x, 2 * x)])
        >>> bool(posterior.image_std < posterior.kernel_std)
        True
    """

    def __init__(
        self,
        *args: Any,
        mode: str | ELBOTraining | dict[str, Any] = "post_hoc",
        rows: Rows | None = None,
        projector: str | ProjectionMethod | dict[str, Any] = "lsmr",
        expectation: Expectation | None = None,
        rank: Literal["auto", "exact", "stochastic"] = "auto",
        kl_weight: float = 1.0,
        image_std: float = 0.1,
        scale_fit: str | ScaleFit | dict[str, Any] = "lbfgs",
        n_samples: int = 30,
        chunk_size: int = 16,
        **kwargs: Any,
    ):
        self.training = _resolve_mode(mode)
        chosen = ("linearized" if self.training is None else "sampled") if expectation is None else expectation
        _check_name(chosen, _EXPECTATIONS, "expectation")
        _check_name(rank, ("auto", "exact", "stochastic"), "rank")
        check_count(n_samples, "n_samples")
        check_count(chunk_size, "chunk_size")
        self.expectation: Expectation = chosen
        self.default_method = chosen
        self.rank, self.projector = rank, resolve_projector(projector)
        if rank == "exact" and projector_config(self.projector)["name"] != "svd":
            raise ConfigurationError(
                "Only a decomposition knows the rank.",
                expected='projector="svd" with rank="exact"',
                got=f"projector={projector_config(self.projector)['name']!r}",
            )
        self.kl_weight = float(positive(kl_weight, "kl_weight"))
        self._first_image_std = float(positive(image_std, "image_std"))
        self.scale_fit = _resolve_scale_fit(scale_fit)
        self.n_samples, self.chunk_size = n_samples, chunk_size
        super().__init__(*args, **kwargs)
        default: Rows = "logit" if isinstance(self.likelihood, Gaussian) else "loss"
        self.rows: Rows = default if rows is None else rows
        _check_name(self.rows, KINDS, "rows")
        check_single(self._prior_precision)
        self._first_precision = self._learnt_precision = self._prior_precision
        self._image_std: Tensor | None = None
        self._noise: KernelNoise | None = None
        self._history: list[ELBOTerms] = []
        self._moved: Network | None = None
        self._data_sum: float | None = None
        self._checkpoint_folder: Path | None = None
        self._ways = Ways()

    @override
    def options(self) -> dict[str, Any]:
        return {
            "mode": "post_hoc" if self.training is None else {"name": "train", **asdict(self.training)},
            "rows": self.rows,
            "projector": projector_config(self.projector),
            "expectation": self.expectation,
            "rank": self.rank,
            "kl_weight": self.kl_weight,
            "image_std": self._first_image_std,
            "scale_fit": asdict(self.scale_fit),
            "n_samples": self.n_samples,
            "chunk_size": self.chunk_size,
        }

    # -- fitting -------------------------------------------------------------------------------------------------------

    @override
    def fit(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
        checkpoint: Path | None = None,
    ) -> Self:
        """Maximise the evidence lower bound.

        Args:
            data: An iterable of the same batches, in the same order, each time.
            progress: Whether to show progress bars.
            generator: Source of the noise.
            distributed: As for :class:`Posterior`; this class is fitted by one process.
            checkpoint: A folder to which epochs of training and projected noise are written. A fit that finds some
                there goes on from them, to the posterior that an uninterrupted one would have given.

        Raises:
            CheckpointError: The checkpoint is of another network, other data or settings.
            ConfigurationError: The weights are all at the prior mean, where the bound has no optimum.
            DataError: Data that can be run over only once, besides what :class:`Posterior` raises.
            NonFiniteError: A term of the bound is NaN or infinite.
            UnsupportedError: The rows have no kernel: there are as many independent ones as parameters.

        Warns:
            ConvergenceWarning: A projection or the search for α and σ_im did not meet its tolerance.
            SmoothnessWarning: The mean is trained through projections of a network that is not twice differentiable.
        """
        self._checkpoint_folder = checkpoint
        try:
            return super().fit(data, progress=progress, generator=generator, distributed=distributed)
        finally:
            self._checkpoint_folder = None

    @override
    def _fit(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        require_restartable(data, WHY)
        n_data, n_outputs, data_summary = survey(self, data)
        if self._prior_precision is not self._learnt_precision:  # the caller has set it since
            self._first_precision = self._prior_precision
        checkpoint = self._checkpoint(n_data, data_summary)
        seed = noise_seed(checkpoint, generator)
        logs = torch.tensor([float(self._first_precision), self._first_image_std], dtype=torch.float64).log()
        history: list[ELBOTerms] = []
        center, other = self.network, None
        if self.training is not None:
            self._warn_of_kinks(data)
            trained = self._trainer(data, n_data).run(logs, seed, checkpoint, progress=progress)
            logs, history = trained.logs, trained.history
            center = other = moved(self.network, trained.theta)
        rows = KernelRows(center, self.likelihood, data, self.rows, chunk_size=self.chunk_size)
        noise = draw_kernel_noise(rows, self.projector, self.n_samples, seed, checkpoint, progress=progress)
        bound = self._bound_at(center, noise, data, n_data, n_outputs)
        logs, converged = bound.maximise(logs, self.scale_fit, history)
        self._noise, self._moved, self._vector, self._history = noise, other, center.vector(), history
        self.n_data, self.n_outputs, self._ways = n_data, n_outputs, Ways()
        self._data_sum = float(data_summary[0])
        self._take(logs)
        self._complain(converged)

    def _checkpoint(self, n_data: int, data_summary: list[str]) -> Checkpoint | None:
        if self._checkpoint_folder is None:
            return None
        start: dict[str, Any] = {"data": data_summary}
        start |= {"prior precision": digest(self._first_precision), "prior mean": digest(self._prior_mean)}
        return Checkpoint(self._checkpoint_folder, identity(self, n_data) | start)

    def _warn_of_kinks(self, data: Iterable[Any]) -> None:
        for batch in self._batches(data, progress=False, description=""):
            found = kinks(self.network, batch.inputs)
            if found:
                warnings.warn(
                    f"The network's {', '.join(found)} have no second derivative everywhere, which the gradient "
                    'through projections assumes. Prefer tanh, GELU or SiLU, or mode="post_hoc".',
                    SmoothnessWarning,
                    stacklevel=6,
                )
            return

    def _trainer(self, data: Iterable[Any], n_data: int) -> KernelImageTraining:
        assert self.training is not None
        return KernelImageTraining(
            self.network,
            self.likelihood,
            data,
            rows=self.rows,
            projector=self.projector,
            chunk_size=self.chunk_size,
            options=self.training,
            expectation=self.expectation,
            prior_mean=self._prior_mean,
            temperature=float(self._temperature.detach()),
            kl_weight=self.kl_weight,
            n_data=n_data,
        )

    def _bound_at(self, center: Network, noise: KernelNoise, data: Iterable[Any], n_data: int, n_outputs: int) -> Bound:
        mean = center.vector()
        distance = (mean - self._prior_mean.to(mean)).double().square().sum().cpu()
        if not distance > 0:
            raise ConfigurationError("The weights are all at the prior mean.", expected="others", got="‖θ̂ − μ‖ = 0")
        rank = noise.report.rank
        if self.rank == "stochastic":
            rank_value = float(noise.image.double().square().sum(-1).mean())
        else:
            rank_value = float(rank.value)
        loss = ExpectedLoss(
            center, self.likelihood, data, noise, self.expectation, float(self._temperature.detach()), n_outputs
        )
        return Bound(loss, distance, rank_value, self.kl_weight, n_data)

    def _take(self, logs: Tensor) -> None:
        assert self._vector is not None
        alpha, image = logs.exp()
        self._prior_precision = self._learnt_precision = alpha.to(self._vector.dtype)
        self._image_std = image

    def _complain(self, converged: bool) -> None:
        assert self._noise is not None
        warn_unless_projected(self._noise.report, 6)
        if not converged:
            warnings.warn(
                "The search for α and σ_im ended before the slope of the bound vanished; allow for more iterations.",
                ConvergenceWarning,
                stacklevel=6,
            )

    # -- the bound -----------------------------------------------------------------------------------------------------

    @property
    def image_std(self) -> Tensor:
        """σ_im, 0-d float64.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        self._require_fit()
        assert self._image_std is not None
        return self._image_std

    @image_std.setter
    def image_std(self, value: float | Tensor) -> None:
        self._image_std = positive(value, "image_std").detach().double().cpu()

    @property
    def kernel_std(self) -> Tensor:
        """``σ_ker = α^-½``, 0-d."""
        return self._prior_precision.rsqrt()

    @property
    def report(self) -> NoiseReport:
        """How the projections ended.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        self._require_fit()
        assert self._noise is not None
        return self._noise.report

    @property
    def history(self) -> list[ELBOTerms]:
        """The terms of the bound at each step of :meth:`fit`, those of training estimated from one batch."""
        return list(self._history)

    @exactly
    def elbo(self, data: Iterable[Any] | None = None) -> ELBOTerms:
        """The terms of the bound at the present α and σ_im, with the stored noise.

        Args:
            data: The training data; by default those of :meth:`fit`.

        Raises:
            NotFittedError: Before :meth:`fit`.
            DataError: The data are not known any more, or are others than those of the fit.
            NonFiniteError: A term is NaN or infinite.
        """
        self._require_fit()
        return self._bound(data).terms(self._logs())

    @exactly
    def fit_prior_precision(self, *, data: Iterable[Any] | None = None) -> Self:
        """Maximise the bound over α and σ_im once more, from where they are.

        That is what :meth:`fit` ends with; it is of use after the noise level, the temperature or the prior mean have
        changed. The mean stays, and there is no other criterion.

        Args:
            data: The training data; by default those of :meth:`fit`.

        Raises:
            NotFittedError: Before :meth:`fit`.
            DataError: The data are not known any more, or are others than those of the fit.

        Warns:
            ConvergenceWarning: The search did not converge.
        """
        self._require_fit()
        logs, converged = self._bound(data).maximise(self._logs(), self.scale_fit, self._history)
        self._take(logs)
        self._complain(converged)
        return self

    def _logs(self) -> Tensor:
        return torch.stack([self._prior_precision.double().cpu().reshape(()), self.image_std]).log()

    def _bound(self, data: Iterable[Any] | None) -> Bound:
        assert self._noise is not None
        again = self._data.again(data, WHY)
        n_data, n_outputs, data_summary = survey(self, again)
        known = self._data_sum is None or same_sum(self._data_sum, float(data_summary[0]))
        if n_data != self.n_data or not known:
            raise DataError(
                "These are not the data of the fit.",
                expected=f"the {self.n_data} examples of fit()",
                got=f"{n_data} examples" if known else f"{n_data} others",
            )
        return self._bound_at(self._center, self._noise, again, n_data, n_outputs)

    # -- what it gives -------------------------------------------------------------------------------------------------

    @property
    def _center(self) -> Network:
        """The network with the mean as its weights."""
        return self.network if self._moved is None else self._moved

    def _parts(self) -> tuple[Tensor, Tensor]:
        self._require_fit()
        assert self._noise is not None
        kernel, image = self._noise.kernel, self._noise.image
        return self.kernel_std.to(kernel) * kernel, self.image_std.to(image) * image

    @override
    def _deviations(self) -> Tensor:
        """The parts in the kernel and in the image as independent draws, ``[2k, P]``, whose mean square is q's."""
        return 2**0.5 * torch.cat(self._parts())

    @property
    @override
    def samples(self) -> Tensor:
        """The k independent draws ``θ̂ + σ_ker P ε + σ_im (I − P) ε`` that the posterior holds, ``[k, P]``."""
        kernel, image = self._parts()
        return self.mean + kernel + image

    @override
    def _pushed(self, x: Any) -> tuple[Tensor, Tensor]:
        center = self._center
        return pushed(center, self._deviations(), center.receive(x), n_outputs=self.n_outputs, ways=self._ways)

    # -- storage -------------------------------------------------------------------------------------------------------

    @override
    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        assert self._noise is not None
        tensors = {
            "vector": self.mean,
            "kernel": self._noise.kernel,
            "image": self._noise.image,
            "image_std": self.image_std,
            "first_precision": self._first_precision,
            "history": terms_to_tensor(self._history),
            **self.report.tensors(),
        }
        return {"ignored_rows": self.report.ignored_rows, "data_sum": self._data_sum}, tensors

    @override
    def _restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._noise = KernelNoise(tensors["kernel"], tensors["image"], NoiseReport.read(tensors, header))
        self._vector, self._image_std = tensors["vector"], tensors["image_std"].cpu()
        self._first_precision, self._learnt_precision = tensors["first_precision"].cpu(), self._prior_precision
        self._history = terms_from_tensor(tensors["history"])
        self._data_sum = header.get("data_sum")  # not in older files
        if self.training is not None:
            self._moved = moved(self.network, self._vector)


def _check_name(value: Any, known: Iterable[str], name: str) -> None:
    if value not in tuple(known):
        raise ConfigurationError(f"Unknown {name}.", expected=", ".join(known), got=repr(value))


def _resolve_mode(mode: str | ELBOTraining | dict[str, Any]) -> ELBOTraining | None:
    if isinstance(mode, ELBOTraining):
        return mode
    options = dict(mode) if isinstance(mode, dict) else {"name": mode}
    name = options.pop("name", "train")
    _check_name(name, ("post_hoc", "train"), "mode")
    return ELBOTraining(**options) if name == "train" else None


def _resolve_scale_fit(scale_fit: str | ScaleFit | dict[str, Any]) -> ScaleFit:
    if isinstance(scale_fit, ScaleFit):
        return scale_fit
    return ScaleFit(**scale_fit) if isinstance(scale_fit, dict) else ScaleFit(optimizer=scale_fit)
