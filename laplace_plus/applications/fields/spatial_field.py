"""Laplace over a displacement of a field's inputs (Goli et al., 2024, "Bayes' Rays", arXiv:2309.03185)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.applications.fields.displaced import Displaced, Grid, Render, rows
from laplace_plus.curvature import Curvature, Layout, Native, Structure
from laplace_plus.errors import ConfigurationError, DataError, NoGainWarning, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.categorical import independent_variances
from laplace_plus.network.batches import Batch, batch_size
from laplace_plus.network.network import Network, full_precision, refuse_unsuitable
from laplace_plus.network.shadow import unwrap
from laplace_plus.posteriors.gaussian import GaussianPosterior
from laplace_plus.posteriors.state import GaussianState
from laplace_plus.posteriors.variational_last_layer.bounds import climb
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, output_indices, wants_variances
from laplace_plus.structured import DenseBlock, DiagonalBlock
from laplace_plus.tuning import Auto, Tuner, TuningResult, Validation
from laplace_plus.tuning.base import tunes_noise

PARAMETER = "displacement"


@dataclass(frozen=True)
class Vertices(Structure):
    """One number, or one d × d block, for each vertex."""

    name: Literal["diagonal", "block"]


class SpatialField(GaussianPosterior):
    """Uncertainty of a trained radiance field, or any function of coordinates, as a displacement of its inputs.

    The model is ``f(x + D_θ(x))``. D interpolates vectors θ_v at the ``V = (G + 1)^d`` vertices of a grid; one more
    stands for all that is outside of the box. θ = 0 is the trained field. With ``J_v = ∂C/∂θ_v`` of what a ray renders,
    summed over its samples, and the likelihood's curvature Λ, the precision of θ_v is ``Σ_rays J_vᵀ Λ J_v`` plus the
    prior's, in 1/length². Where no ray says anything, the field may be moved freely. A fit takes one pass over the
    rays, with one backward pass for each channel.

    Predictions are of rendered rays; without a renderer, of the model's outputs: mean ``f(x)``, epistemic variance
    ``∂f/∂x Σ_u(x) ∂f/∂xᵀ``. The curvature is that of multilinear weights w. Queries, predictions and samples take
    ``w / ‖w‖``, as the authors do: between independent vertices the field would otherwise seem better known than there.
    The evidence always grows with the prior precision, as the mean is the prior's: ``fit_prior_precision()`` tunes the
    noise by it, and the precision only with held-out rays, ``data=``.

    Args:
        model: The trained field; :func:`laplace_plus.load` takes it, too.
        likelihood: That of the rendered outputs, such as ``lp.Gaussian(noise_std)``.
        box: Its lower and upper corner, ``[2, d]``, d = 1, 2 or 3. Points outside of it keep the prior.
        resolution: G, the number of cells along each axis.
        render: ``render(rays, displace) -> [R, C]``. It calls ``displace(x)`` on its sample points ``[R, ..., d]`` and
            the model on the result. It must be deterministic, and rays must not depend on each other. By default the
            model is called at the displaced inputs ``[R, d]``. Not stored: set ``posterior.field.render`` once loaded.
        structure: ``"diagonal"``, the authors': one precision for each vertex, the trace of its d × d block, which is
            that along the best known direction; or ``"block"``, the block itself.
        prior_precision: By default that of a standard deviation of one cell's longest edge, beyond which D may fold.
        **common: As for :class:`Posterior`; of ``parameters``, ``prior_mean`` and ``backend`` only ``"all"``, 0 and
            ``"native"`` with the exact Gauss-Newton curvature.

    Raises:
        ConfigurationError: Another box, structure, renderer, selection, prior mean or backend.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(0, 1, 20)[:, None]
        >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> field = lp.SpatialField(model, lp.Gaussian(0.1), box=[[0.0], [2.0]], resolution=4).fit([(x, x.sin())])
        >>> field.std(torch.tensor([[0.5], [1.9], [7.0]]))[1:]  # no ray has been there: the prior
        tensor([0.5000, 0.5000])
    """

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation, "auto": Auto}

    _covariance_cache: tuple[Any, Tensor] | None = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        box: Any,
        resolution: int = 64,
        render: Render | None = None,
        structure: Literal["diagonal", "block"] = "diagonal",
        prior_precision: float | Tensor | None = None,
        **common: Any,
    ):
        render = _missing if isinstance(render, str) else render  # loaded
        checks.choice("structure", structure, ("diagonal", "block"))
        selection = common.pop("parameters", "all")
        self.grid, self.structure = Grid.of(box, resolution), Vertices(structure)
        if prior_precision is None:
            edges = (high - low for low, high in zip(self.grid.lower, self.grid.upper, strict=True))
            prior_precision = (resolution / max(edges)) ** 2
        inner = unwrap(model)
        refuse_unsuitable(inner)
        common |= {"parameters": [PARAMETER], "prior_precision": prior_precision}
        super().__init__(Displaced(inner, self.grid, render), likelihood, **common)
        self.model = self.field.model
        self.options["render"] = render and "missing"  # functions are not stored
        is_plain = self.backend.config() == Native().config() and not self.prior_mean.any()
        if str(selection) not in ("all", f"['{PARAMETER}']") or not is_plain:
            expected = 'parameters="all", prior_mean=0 and backend="native" with the exact Gauss-Newton curvature'
            raise ConfigurationError("A spatial field takes no other arguments.", expected=expected)

    @property
    def field(self) -> Displaced:
        """The field as a function of its displacement; a loaded posterior waits for ``field.render`` to be set."""
        return cast(Displaced, self.network.model)

    # -- fitting -------------------------------------------------------------------------------------------------------

    @override
    def fit_batches(  # type: ignore[override]  # in one process
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        before: GaussianState | None = None,
    ) -> GaussianState:
        """Add up the curvature of the vertices over batches ``(rays, targets)``."""
        seen = torch.zeros((), dtype=torch.long)
        add = partial(self._accumulate, seen)
        state, _ = self.sums(data, before, progress=progress, generator=generator, accumulate=add)
        if not seen:
            fix = "Give the box that the field was trained in, in the units of its coordinates."
            expected = f"points from {list(self.grid.lower)} to {list(self.grid.upper)}"
            raise DataError("No sample point of any ray is in the box.", expected=expected, fix=fix)
        return state if before is None else before.plus(state)

    def _accumulate(
        self,
        seen: Tensor,
        total: Curvature | None,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        *_: Any,
        **__: Any,
    ) -> tuple[Curvature, Tensor]:
        """Add a batch's curvature, as a backend's method does, and the number of its derivatives to ``seen``."""
        d, n, blocks = self.grid.d, self.grid.n_vertices + 1, self.structure.name == "block"
        sums = torch.zeros(likelihood.n_noise, n, *(d, d) * blocks, dtype=network.dtype, device=network.device)

        def combine(values: Tensor) -> Tensor:
            likelihood.validate(values, batch.target)
            observed, targets, weight = likelihood.rows(values, batch.target)
            return likelihood.output_root(observed, targets) * weight.sqrt()[:, None, None].to(values.dtype)

        found = rows(network, batch.inputs, combine)
        inside = found.vertex < n - 1
        values, vertex = found.values[inside].to(network.dtype), found.vertex[inside]
        seen += len(vertex)
        checks.finite("A derivative of the rendered outputs by a sample point", values)
        groups = likelihood.output_groups(values.shape[1]).to(values.device)
        for k in range(likelihood.n_noise):
            own = values[:, groups == k]
            sums[k].index_add_(0, vertex, own.mT @ own if blocks else own.square().sum((1, 2)))
        layout = Layout(PARAMETER, (PARAMETER,), "per vertex", torch.arange(n * d).view(n, 1, d))
        block = DenseBlock(sums, (n, 1, d)) if blocks else DiagonalBlock(sums[:, :, None, None].repeat(1, 1, 1, d))
        curvature = Curvature([(layout, block)])
        return curvature if total is None else total.add_(curvature), found.outputs

    @override
    def run_tuner(self, tuner: Any, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What a tuner finds; without held-out rays the noise of most evidence, at the present prior precision."""
        if tuner.data is not None:
            return super().run_tuner(tuner, progress=progress, generator=generator)
        warn("The evidence tells no prior precision of displacements: it stays. Held-out data= would.", NoGainWarning)
        noise: Any = self.noise_std
        converged, own = True, self.log_marginal_likelihood
        if noise is not None and tunes_noise(self.likelihood, tuner.tune_noise):

            def evidence(at: list[Tensor], slope: bool) -> float:
                found = own(noise_std=at[0].exp().view(noise.shape))
                _ = slope and (-found).backward()
                return float(found.detach())

            (logs,), converged = climb(evidence, [self.laplace_model().residual_noise()], 500, progress)
            noise = logs.exp().view(noise.shape)
        value, precision = float(own(noise_std=noise)), self.prior_precision.detach()
        return TuningResult("marginal_likelihood", precision, noise, value, converged)

    # -- predictions ---------------------------------------------------------------------------------------------------

    @override
    def _exact(self, x: Any, *, joint: bool, outputs: Outputs, differentiable: bool) -> FunctionalPosterior | None:
        wants_variances(outputs, joint)  # refuses other texts
        size = batch_size(x)
        mean, slopes, ray, vertex = rows(self.network, x, spread=True, differentiable=differentiable)
        checks.finite("The network's output", mean)
        if outputs is not None and not isinstance(outputs, str):
            chosen = output_indices(outputs, mean.shape).to(mean.device).expand(size, -1)
            mean = mean.gather(-1, chosen)
            slopes = slopes.gather(1, chosen[ray][..., None].expand(-1, -1, self.grid.d))
        moved = slopes @ self._vertex_covariance().to(slopes.dtype)[vertex]  # [·, K, d]
        if joint:  # every ray's derivatives side by side, at the vertices that any of them touches
            touched, place = vertex.unique(return_inverse=True)
            empty = slopes.new_zeros(size, len(touched), *slopes.shape[1:])
            sides = (empty.index_put((ray, place), own).transpose(1, 2) for own in (moved, slopes))
            left, right = (own.reshape(mean.numel(), -1) for own in sides)
            return FunctionalPosterior(mean, (left @ right.mT).view(*mean.shape, *mean.shape))
        products = (moved * slopes).sum(-1) if outputs == "diagonal" else moved @ slopes.mT
        found = products.new_zeros(size, *products.shape[1:]).index_add(0, ray, products)
        return FunctionalPosterior(mean, independent_variances(mean, found) if outputs == "independent" else found)

    @full_precision
    def covariance(self, x: Tensor) -> Tensor:
        """Covariance ``[..., d, d]`` of the displacement at points ``[..., d]``, in units of length².

        ``Σ_u(x) = Σ_v w_v² Σ_v / Σ_v w_v²`` over the corners v of the cell; outside of the box, the prior's.

        Raises:
            NotFittedError: Before :meth:`fit`.
            DataError: Points of another dimension.
            NonFiniteError: NaN or Inf among them.
        """
        self.require_fit()
        own = self._vertex_covariance()
        points = self.grid.check(x).detach().to(own)
        checks.finite("A point", points)
        index, weights = self.grid.spread(points)
        return torch.einsum("...k,...kij->...ij", weights.square(), own[index])

    @full_precision
    def std(self, x: Tensor) -> Tensor:
        """Standard deviation ``[...]`` of the displacement at points ``[..., d]``, in units of length.

        It is that along the direction in which the field is known best: for a seen surface, along its normal. Errors
        as of :meth:`covariance`.
        """
        return self._least(self.covariance(x))

    def _least(self, covariance: Tensor) -> Tensor:
        """The smallest standard deviation of ``[..., d, d]``."""
        if self.structure.name == "diagonal":
            return covariance.diagonal(dim1=-2, dim2=-1).amin(-1).sqrt()
        return torch.linalg.eigvalsh(covariance)[..., 0].clamp_min(0).sqrt()

    def _vertex_covariance(self) -> Tensor:
        """Σ_v, ``[V + 1, d, d]``."""
        factor = self.factors()[PARAMETER]
        if self._covariance_cache is None or self._covariance_cache[0] is not factor:
            self._covariance_cache = factor, factor.covariance()
        return self._covariance_cache[1]

    @full_precision
    def render_uncertainty(self, weights: Tensor, x: Tensor) -> Tensor:
        """One standard deviation for each pixel, from those of the samples along its ray, in units of length.

        As the authors have it, ``10^(Σ_s w_s log₁₀ u(x_s))``: a geometric mean, which no sample dominates, and the
        standard deviation of nothing. The background, of weight ``1 − Σ_s w_s``, has the smallest u of all vertices.

        Args:
            weights: The renderer's weights of the samples ``[..., S]``, at least 0, with a sum of at most 1.
            x: The samples' positions ``[..., S, d]``; the result is ``[...]``.

        Raises:
            ConfigurationError: Weights that do not fit the points, are negative, or sum to more than 1.
        """
        u = self.std(x)
        weights = checks.shape("weights", weights, u.shape).detach().to(u)
        total = weights.sum(-1)
        checks.number("The least of the weights", float(weights.min()), least=0.0)
        checks.number("The largest sum of weights", float(total.max()), most=1.001)
        least = self._least(self._vertex_covariance()[:-1]).min()
        return 10 ** ((weights * u.log10()).sum(-1) + (1 - total).clamp_min(0) * least.log10())

    @full_precision
    def mask(self, threshold: float, x: Tensor | None = None) -> Tensor:
        """Where the field is known, ``std(x) <= threshold``, as booleans to multiply densities with.

        They are for points ``[..., d]``, or without any for the vertices, ``[G + 1, ...]``. The threshold is a length;
        ConfigurationError unless it is positive.
        """
        checks.positive("threshold", threshold)
        if x is not None:
            return self.std(x) <= threshold
        self.require_fit()
        known = self._least(self._vertex_covariance()[:-1]) <= threshold
        return known.unflatten(0, (self.grid.resolution + 1,) * self.grid.d)


def _missing(rays: Any, displace: Any) -> Any:
    """In place of a renderer, which is not stored."""
    fix = "Set posterior.field.render to the function that it was fitted with."
    raise ConfigurationError("This posterior was loaded without its renderer.", fix=fix)
