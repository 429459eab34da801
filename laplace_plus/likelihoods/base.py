"""The likelihood: how targets are distributed given a network's outputs.

Reduction and scaling: the loss is the negative log-likelihood *summed* over the data, constants included. A likelihood
works on flattened observations: one row of ``C`` outputs ``f`` for every example, or for every token or pixel of one,
of at least single precision (:meth:`Likelihood.rows`).
Its curvature is ``Λ = -∂² log p(y|f) / ∂f²``, one ``[C, C]`` matrix for each row, given by a root ``S``, ``S Sᵀ = Λ``.

A likelihood with observation noise factors its curvature: ``Λ`` is given at *unit* noise, and the columns of the root
fall into ``K`` groups (:meth:`Likelihood.output_groups`), which :meth:`Likelihood.curvature_weights` scales. Tuning the
noise therefore never recomputes curvature.

A custom likelihood needs only :meth:`Likelihood.log_density`; everything else has a default by automatic
differentiation and Monte Carlo.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, MultivariateNormal

from laplace_plus import checks
from laplace_plus.checks import describe
from laplace_plus.errors import LabelError, OutputError, UnsupportedError
from laplace_plus.likelihoods.marginal import Marginal, uniform_mixture
from laplace_plus.likelihoods.sampling import global_randomness


class UnnamedAxis(int):
    """An axis that the caller has not named."""


LAST_AXIS = UnnamedAxis(-1)


def widen(values: Tensor) -> Tensor:
    """Half precision to ``float32``, where probabilities and squared errors keep their digits; other types as is."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def each(function: Callable[[Tensor], Any], targets: Any) -> Any:
    """A function of a target, or of each of several in a tuple, list or mapping."""
    if isinstance(targets, Mapping):
        return {name: each(function, own) for name, own in targets.items()}
    if isinstance(targets, (tuple, list)):
        return getattr(targets, "_make", type(targets))([each(function, own) for own in targets])
    return function(targets)


def spread(weight: Tensor, shape: torch.Size) -> Tensor:
    """Weights ``[B]`` or ``[B, *]`` of each position of a shape ``[B, *]``."""
    return weight.reshape(weight.shape + (1,) * (len(shape) - weight.dim())).expand(shape)


def observed_log_prob(law: Distribution, targets: Tensor) -> Tensor:
    """``log p`` of targets without their NaN: of each entry, 0 where it is NaN, or of a joint normal's others."""
    missing = targets.isnan()
    if not isinstance(law, MultivariateNormal):
        return law.log_prob(filled(targets)).where(~missing, 0.0)
    if not bool(missing.any()):
        return law.log_prob(targets)
    # Missing entries become independent standard normals at their mean, and their densities are taken out.
    apart = missing.unsqueeze(-1) | missing.unsqueeze(-2)
    identity = torch.eye(targets.shape[-1], dtype=law.loc.dtype, device=law.loc.device)
    law = MultivariateNormal(law.loc, torch.where(apart, identity, law.covariance_matrix), validate_args=False)
    constant = 0.5 * math.log(2 * math.pi) * missing.sum(-1)
    return law.log_prob(torch.where(missing, law.loc, targets)) + constant


def filled(targets: Tensor) -> Tensor:
    """Targets with a valid number for NaN, since derivatives at NaN would be NaN even where they are left out."""
    return torch.where(targets.isnan(), torch.ones_like(targets), targets)


def refuse_several_targets(likelihood: Likelihood, targets: Any) -> NoReturn:
    """Raise LabelError for several tensors as a target, of which joint likelihoods alone know what they mean."""
    raise LabelError(
        f"{type(likelihood).__name__} has one tensor as its target.",
        expected="batches (x, y) with a tensor y",
        got=describe(targets),
        fix="Let the network return torch.cat(outputs, -1) and pass the joint log-density, lp.LogDensity(lambda f, y: "
        "...), which takes several targets y as they are; lp.GivenNoise for (values, their noise_std); a likelihood "
        "with weighted=True, such as lp.Categorical(weighted=True), for (y, weights of examples).",
    )


def refuse_targets(wrong: Tensor, targets: Tensor, message: str, *, expected: str, fix: str) -> NoReturn:
    """Raise a LabelError that names the first wrong target and counts them."""
    got = f"{targets[wrong][0].item()} ({int(wrong.sum())} of {targets.numel()} targets of {targets.dtype})"
    raise LabelError(message, expected=expected, got=got, fix=fix)


@dataclass(frozen=True)
class OutputCurvature:
    """Hessians with structure: ``Λ_n = diag(s_n)``, or ``diag(s_n) − s_n s_nᵀ`` with ``Σ_c s_nc = 1`` if ``coupled``.

    ``scales`` are ``s [N, C]``, zero for ignored rows; ``diagonal`` is ``Λ_n,cc [N, C]``, without cancellation.
    """

    scales: Tensor
    diagonal: Tensor
    coupled: bool

    def sum(self) -> Tensor:
        """``Σ_n Λ_n``, ``[C, C]``."""
        diagonal = self.diagonal.sum(0)
        if not self.coupled:
            return torch.diag(diagonal)
        return torch.diagonal_scatter(-self.scales.mT @ self.scales, diagonal)


class Likelihood(ABC):
    """How targets are distributed given a network's outputs. Objects are immutable.

    Attributes:
        output_axis: Where the ``C`` outputs lie in what the network returns: ``-1``, or ``1`` for networks that return
            ``[B, C, H, W]``. Targets of ``C`` numbers lie likewise.
        links: Names of the ways to integrate over the outputs, the default first; ``"mc"`` is Monte Carlo.
        couples_outputs: Whether ``E[y|f]`` or ``Var(y|f)`` of one target entry depends on several outputs, so that
            Monte Carlo needs their covariances and not only their variances.
        is_classifier: Whether targets are classes, with probabilities from :meth:`class_probabilities`.
        is_gaussian: Whether ``p(y|f) = N(f, σ²)``, with squared errors as statistics.
        couples_rows: Whether the log-density of a row depends on the outputs of other rows, as in rankings and Cox's
            partial likelihood. Each batch is then one observation: data are the batches as the loader cuts them.
        positive_part: Whether a log-density that is not concave has the positive part of its Hessian as its curvature.
        n_noise: Number ``K`` of noise groups.
        weighted: Whether each target comes with a weight ``w ≥ 0``, in batches ``(x, (y, w))`` with w ``[B]``, or one
            for each position, ``[B, *]``. It is a factor on the target's log-density: a whole number counts as so many
            equal rows, in curvature, evidence, noise, tuning and calibration. An option of all likelihoods of this
            package, an attribute of custom ones. Predictions are of targets y without weights.
        per_output: Names of options of one number, or one for each output.
        training_options: Options that predictions are without, and their values then.
        config_name: The name in :meth:`config` of a likelihood of this package; ``None`` for custom ones.

    Example:
        >>> class Laplacian(Likelihood):
        ...     def log_density(self, outputs, targets):
        ...         return torch.distributions.Laplace(outputs, 1.0).log_prob(targets).sum(-1)
        >>> Laplacian().gradient(torch.tensor([[2.0]]), torch.tensor([[0.5]]))
        tensor([[1.]])
    """

    output_axis: int = LAST_AXIS
    links: tuple[str, ...] = ("mc",)
    couples_outputs: bool = True
    is_classifier: bool = False
    is_gaussian: bool = False
    couples_rows: bool = False
    positive_part: bool = False
    n_noise: int = 1
    weighted: bool = False
    per_output: ClassVar[tuple[str, ...]] = ()
    training_options: ClassVar[Mapping[str, Any]] = {}
    config_name: str | None = None

    @abstractmethod
    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log p(y|f)`` of rows ``[N, C]`` and targets ``[N, ...]``, all constants included, ``[N]`` in nats.

        It must be twice differentiable in the outputs, and each row's its own matter, unless ``couples_rows`` says that
        it is not: then the sum over all rows is the log-density of the batch.
        """

    def arrange(self, raw: Tensor) -> Tensor:
        """Move the outputs to the last axis, as a view ``[B, *, C]``; ``[B]`` is one output for each example.

        OutputError if the network returned no floating tensor with the axis ``output_axis``.
        """
        real = isinstance(raw, Tensor) and raw.is_floating_point()
        if real and raw.dim() == 1:
            return raw.unsqueeze(-1)
        if not real or not -raw.dim() < self.output_axis < raw.dim() or self.output_axis == 0:
            expected = f"a floating tensor [B, *, C] with the C outputs at axis {self.output_axis}, after the batch"
            raise OutputError("The network's output has no axis for the outputs.", expected=expected, got=describe(raw))
        return raw if self.output_axis == -1 else raw.movedim(self.output_axis, -1)

    def validate(self, outputs: Tensor, targets: Any) -> None:
        """Refuse arranged outputs ``[B, *, C]`` and targets, as the loader gave them, that do not fit this likelihood.

        OutputError or LabelError if they do not, NonFiniteError for NaN or infinity among the outputs.
        """
        checks.finite("The network's output", outputs)
        targets, weight = self.separate(targets, outputs)
        if weight is not None:
            self.require_own_rows("Rows that depend on each other have no weights.")
            checks.numbers("A weight of a target", weight, least=0.0, error=LabelError)
        for name in self.per_output:
            n = 1 if getattr(self, name) is None else torch.as_tensor(getattr(self, name)).numel()
            if n not in (1, outputs.shape[-1]):
                expected, got = f"{n} outputs, or one {name}", describe(outputs)
                raise OutputError(f"{name} does not fit the outputs.", expected=expected, got=got)
        self.check_targets(outputs, targets)

    def check_targets(self, outputs: Tensor, targets: Any) -> None:
        """Refuse targets without weights that do not fit; here of another leading shape, or rows that need others."""
        lead, found = outputs.shape[:-1], list[torch.Size]()
        each(lambda own: found.append(own.shape[: len(lead)]), targets)
        if {*found} != {lead}:
            expected = f"leading shape {list(lead)}"
            raise LabelError("The targets do not pair with the outputs.", expected=expected, got=describe(targets))
        if not self.couples_rows:
            self._check_rows(outputs, targets)
        if bool(self.of_new_targets.log_densities(outputs.detach(), targets).isnan().any()):
            fix = "Where targets were not observed, have it give 0, such as by log_prob.where(~targets.isnan(), 0)."
            raise LabelError("The log-density is NaN.", expected="numbers", got=describe(targets), fix=fix)

    def separate(self, targets: Any, outputs: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """A batch's targets without their weights, and these; None where the likelihood is not :attr:`weighted`.

        LabelError for targets without weights, or, with the outputs, weights of another shape than theirs.
        """
        if not self.weighted:
            return targets, None
        weight: Any = targets[1] if isinstance(targets, (tuple, list)) and len(targets) == 2 else None  # noqa: PLR2004
        shapes = None if outputs is None else (outputs.shape[:1], outputs.shape[:-1])
        if not isinstance(weight, Tensor) or shapes and weight.shape not in shapes:
            raise LabelError(
                "These are no targets with weights.",
                expected=f"batches (x, (y, w)), w {list(shapes[0]) if shapes else '[B]'} or one for each position",
                got=describe(targets),
                fix="Pass w.squeeze(-1) for an extra axis. Leave weighted=True out where there are no weights.",
            )
        return targets[0], weight

    @property
    def of_new_targets(self) -> Likelihood:
        """What predictions are of: the likelihood without what belongs to training, weights and smoothing."""
        plain = {"weighted": False, **self.training_options}
        for name, value in plain.items():
            if getattr(self, name) != value:
                found = copy.copy(self)
                vars(found).update(plain)  # also of frozen dataclasses
                return found
        return self

    def rows(self, outputs: Tensor, targets: Any) -> tuple[Tensor, Any, Tensor]:
        """Flatten a batch ``[B, *, C]``, tokens and pixels included, to one row for each observation.

        These are outputs ``[N, C]``, targets ``[N, ...]`` and weights ``[N]``: 1 or the target's own, and 0 for ignored
        rows. Entries of a target that were not observed are NaN. Of several targets, in a tuple or mapping, it is each.
        """
        targets, own = self.separate(targets, outputs)
        flat = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).reshape(-1, outputs.shape[-1])
        targets, counts = self.prepare(outputs, targets, flat)
        weight = torch.ones_like(flat[:, 0]) if counts is None else counts.reshape(-1).to(flat)
        if own is not None:
            weight = weight * spread(own, outputs.shape[:-1]).reshape(-1).to(weight)
        return flat, targets, weight

    def prepare(self, outputs: Tensor, targets: Any, flat: Tensor) -> tuple[Any, Tensor | None]:
        """Of ``flat [N, C]`` outputs the targets ``[N, ...]``, and which ``[B, *]`` of them count; None for all."""

        def rows(own: Tensor) -> Tensor:
            own = own.reshape(len(flat), *own.shape[outputs.dim() - 1 :])
            return own.to(flat.dtype) if own.is_floating_point() else own

        return each(rows, targets), None

    def log_densities(self, outputs: Tensor, targets: Any) -> Tensor:
        """``w_n log p(y_n|f_n)`` of a batch's :meth:`rows`, ``[N]``, 0 where ignored."""
        flat, targets, weight = self.rows(outputs, targets)
        return (self.log_density(flat, targets) * weight).where(weight > 0, 0.0)

    def _check_rows(self, outputs: Tensor, targets: Any) -> None:
        """Refuse rows that depend on each other: the Hessian's products with some rows are zero at all others."""
        with torch.inference_mode(False):
            rows, targets, _ = self.of_new_targets.rows(outputs.detach(), each(torch.clone, targets))
            probe = 0.5 + torch.linspace(0, rows.numel() * 0.618034, rows.numel()).to(rows).view(rows.shape) % 1.0
            # Any two rows differ in some bit of their numbers.
            bits = range(max(len(rows) - 1, 0).bit_length())
            some = [(torch.arange(len(rows), device=rows.device) >> bit) % 2 == 1 for bit in bits]
            products = _second_derivatives(self, rows, targets, (probe * own.unsqueeze(-1) for own in some))
            for own, product in zip(some, products, strict=True):
                apart, within = product[~own].abs().max(), product[own].abs().max()
                if apart > torch.finfo(rows.dtype).eps ** (2 / 3) * within:
                    raise UnsupportedError(
                        "The log-densities of some rows depend on the outputs of other rows.",
                        expected="each row's log-density to be its own matter, or couples_rows=True",
                        got=f"second derivatives of {float(apart):.3g} between different rows",
                        fix="Pass lp.LogDensity(function, couples_rows=True), or set couples_rows = True in your "
                        "class: each batch is then one observation.",
                    )

    def require_own_rows(self, what: str) -> None:
        """Raise UnsupportedError, of which ``what`` is the first sentence, where rows depend on each other."""
        if self.couples_rows:
            raise UnsupportedError(what, expected="rows that are independent given their outputs", got=repr(self))

    @property
    def noise_std(self) -> Tensor | None:
        """Standard deviation of the observation noise, 0-d or ``[C]``, ``float64``; ``None`` without such noise."""
        return None

    def with_noise(self, noise_std: float | Tensor) -> Likelihood:
        """A copy with another observation noise; :class:`UnsupportedError` if there is none."""
        expected, got = "noise_std of lp.Gaussian alone", f"noise_std = {noise_std}"
        self.lacks("has no observation noise", expected=expected, got=got, fix="Leave the noise, or its fit, out.")

    def lacks(
        self, what: str, *, expected: str | None = None, got: str | None = None, fix: str | None = None
    ) -> NoReturn:
        """Raise UnsupportedError of something that this likelihood does not have."""
        raise UnsupportedError(f"{type(self).__name__} {what}.", expected=expected, got=got or repr(self), fix=fix)

    def curvature_weights(self, noise_std: float | Tensor | None = None) -> Tensor:
        """Factors ``[K]`` on the curvature at unit noise, ``float64``, at the given or the own noise."""
        if noise_std is not None:
            self.with_noise(noise_std)
        return torch.ones(1, dtype=torch.float64)

    def output_groups(self, n_columns: int) -> Tensor:
        """The noise group of each of the root's ``V`` columns, ``[V]``: one for all, or one for each output."""
        return torch.arange(n_columns) if self.n_noise > 1 else torch.zeros(n_columns, dtype=torch.long)

    # Derivatives of the log-density ----------------------------------------------------------------------------------

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``-∂ log p(y|f) / ∂f`` of every row at unit noise, ``[N, C]``."""
        _, attached, gradient = _negative_gradient(self, outputs, targets)
        return gradient if attached else gradient.detach()

    def output_curvature(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> OutputCurvature | None:
        """Hessians of rows ``[N, C]`` at unit noise, times weights ``[N]``, with structure; None without."""
        return None

    def output_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A root of the curvature, ``S Sᵀ = Λ`` at unit noise, ``[N, C, V]``.

        Of its positive part with ``positive_part``; otherwise UnsupportedError if the log-density is not concave.
        """
        self.require_own_rows("Rows that depend on each other have no curvature of their own.")
        # One backward pass for each output. vmap cannot follow the data-dependent checks of torch.distributions.
        units = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        units = units.unsqueeze(1).expand(-1, len(outputs), -1)
        return self._root(torch.stack([*_second_derivatives(self, outputs, targets, units)], -1))

    def batch_root(self, outputs: Tensor, targets: Any, weight: Tensor) -> Tensor:
        """With ``couples_rows`` a root ``[N·C, N·C]`` of the Hessian of a batch's ``-Σ_n w_n log p_n`` by all outputs.

        Errors as of :meth:`output_root`.
        """
        n, fix = outputs.numel(), "Each batch is one observation: let the loader give smaller ones."
        units = checks.zeros("The Hessian of a batch", n, n, outputs, fix).fill_diagonal_(1).view(n, *outputs.shape)
        hessian = torch.stack([*_second_derivatives(self, outputs, targets, units, weight)]).flatten(1)
        return self._root(hessian)

    def _root(self, hessian: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh((hessian + hessian.mT) / 2)
        if values.numel() and not self.positive_part:
            eps = torch.finfo(values.dtype).eps
            if bool(values.min() < -(eps**0.5) * values.abs().max() - 10 * eps * values.shape[-1]):
                what = "The log-density is not concave at these outputs."
                got = f"an eigenvalue of {float(values.min()):.3g}"
                fix = "For the positive part of the Hessian pass lp.LogDensity(function, positive_part=True), or set "
                fix += 'positive_part = True in your class; or take backend=lp.Native("empirical_fisher")'
                raise UnsupportedError(what, expected="a positive semi-definite -∂² log p(y|f) / ∂f²", got=got, fix=fix)
        return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sufficient statistics ``[k]`` of a batch: ``float64``, additive over batches; here ``[Σ log p(y|f)]``."""
        return self.log_densities(outputs, targets).double().sum().reshape(1)

    def n_terms(self, targets: Tensor, weight: Tensor, n_outputs: int) -> float:
        """By what the mean of torch's loss for classes divides, of a batch's :meth:`rows`."""
        return float(weight.sum()) * (1 if self.couples_outputs else n_outputs)

    def log_likelihood(self, statistics: Tensor, noise_std: float | Tensor | None = None) -> Tensor:
        """The log-likelihood of the data with these statistics: 0-d ``float64`` in nats, constants included.

        ``noise_std`` replaces the likelihood's own (differentiable); only for likelihoods that have noise.
        """
        if noise_std is not None:
            self.with_noise(noise_std)
        return statistics[0].double()

    def distribution(self, outputs: Tensor) -> Distribution:
        """``p(y|f)`` for outputs ``[..., C]``; UnsupportedError: if the likelihood only gives its log-density."""
        expected = "a method distribution(outputs), or distribution= of LogDensity"
        self.lacks("only gives its log-density", expected=expected)

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from ``p(y|f)``, one for every row of outputs ``[..., C]``."""
        distribution = self.distribution(outputs)
        with global_randomness(outputs.device, generator):  # torch.distributions use the global generators alone
            return distribution.sample()

    def sample_targets(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from ``p(y|f)`` at *unit* noise, whose gradients have the covariance ``Λ``.

        UnsupportedError with weights of classes or smoothing, as gradients at drawn targets have another one.
        """
        if any(getattr(self, name) != value for name, value in self.training_options.items()):
            self.lacks("cannot draw weighted or smoothed labels", fix='Use the exact curvature: backend="native".')
        return self.sample(outputs, generator=generator)

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mean and variance of ``p(y|f)``, ``[..., K]`` of classes ``p`` and ``p (1 - p)``; or outputs and ``None``."""
        try:
            distribution = self.distribution(outputs)
        except UnsupportedError:
            return outputs, None
        if isinstance(distribution, Categorical):
            return distribution.probs, distribution.probs * (1 - distribution.probs)
        mean, variance = distribution.mean, distribution.variance
        return (mean[..., None], variance[..., None]) if mean.dim() < outputs.dim() else (mean, variance)

    def class_probabilities(self, mean: Tensor) -> Tensor:
        """Probabilities ``[N, K]`` of the classes of each observed label, from means ``E[y] [B, *, C]``."""
        self.lacks("has no classes", expected="a Categorical or Bernoulli likelihood")

    def mixture(self, outputs: Tensor) -> Distribution:
        """The average of ``p(y|f)`` over samples of the outputs ``[S, ..., C]``; here an event is one whole target."""
        components = self.distribution(outputs.movedim(0, -2))  # [..., S, C]
        extra = len(components.batch_shape) - (outputs.dim() - 1)
        return uniform_mixture(Independent(components, extra) if extra > 0 else components, like=outputs)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``p(y) = ∫ p(y|f) N(f|mean, covariance) df`` in closed form, by one of ``links`` other than ``"mc"``.

        For means ``[..., C]`` and covariances ``[..., C, C]``, or variances ``[..., C]`` where the link needs no more.
        """
        self.lacks(f"has no closed form for {link!r}", expected=", ".join(self.links))

    def marginal_log_density(self, marginal: Marginal, targets: Tensor) -> Tensor:
        """``log p(y)`` under a marginal of :meth:`predict`, ``[...]``, of targets as :meth:`rows` has them."""
        law = marginal.distribution if marginal.together is None else marginal.together
        found, lead = observed_log_prob(law, targets), marginal.mean.dim() - 1
        return found.flatten(lead).sum(-1) if found.dim() > lead else found

    def predict_joint(self, mean: Tensor, covariance: Tensor) -> Distribution | None:
        """``p(y)`` of several inputs together, for ``[N, C]`` and ``[N C, N C]``; ``None`` without a closed form."""
        return None

    def config(self) -> dict[str, Any]:
        """A JSON-able description that ``likelihood_from_config`` reads: ``{"name": …, option: value, …}``."""
        if self.config_name and is_dataclass(self):
            options = {name: int(own) if isinstance(own, UnnamedAxis) else own for name, own in asdict(self).items()}
            return {"name": self.config_name, **options}
        return {"name": "custom", "class": f"{type(self).__module__}.{type(self).__qualname__}"}


def _negative_gradient(
    likelihood: Likelihood, outputs: Tensor, targets: Any, weight: Tensor | None = None
) -> tuple[Tensor, bool, Tensor]:
    """Outputs that require gradients, whether the caller needs a graph back to them, and ``-∂ log p / ∂f`` there."""
    attached = outputs.requires_grad and torch.is_grad_enabled()
    f = outputs if attached else outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        log_density = likelihood.log_density(f, targets)
        name = f"The log-density of {type(likelihood).__name__}, one number for each row,"
        fix = "Of one number for a batch as a whole pass lp.LogDensity(function, couples_rows=True)"
        log_density = checks.shape(name, log_density, [len(outputs)], fix)
        log_density = log_density if weight is None else log_density * weight
        (gradient,) = torch.autograd.grad(-log_density.sum(), f, create_graph=True, materialize_grads=True)
    return f, attached, gradient


def _second_derivatives(
    likelihood: Likelihood, outputs: Tensor, targets: Any, cotangents: Iterable[Tensor], weight: Tensor | None = None
) -> Iterator[Tensor]:
    """The Hessian of ``-Σ_n w_n log p_n`` by the outputs ``[N, C]``, times each cotangent of that shape."""
    f, attached, gradient = _negative_gradient(likelihood, outputs, targets, weight)
    options: Any = {"create_graph": attached, "retain_graph": True, "materialize_grads": True}
    for cotangent in cotangents:
        if gradient.requires_grad:
            yield torch.autograd.grad(gradient, f, cotangent, **options)[0]
        else:  # the log-density is linear in the outputs
            yield torch.zeros_like(f)
