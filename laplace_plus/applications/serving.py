"""Posteriors as modules of plain tensor operations, for ``torch.compile``, ``torch.export``, ONNX and tracing.

Of a linear last layer, ``J Σ Jᵀ`` is linear in the squared features in Σ's eigenbasis.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, LaplacePlusError, UnsupportedError
from laplace_plus.likelihoods.base import widen
from laplace_plus.likelihoods.categorical import LOGISTIC_SCALES, centring_weights, independent_variances
from laplace_plus.network import batches
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.posteriors import GaussianPosterior, Posterior
from laplace_plus.predictive.linearized import outputs_for
from laplace_plus.structured.blocks import IdentityBasis
from laplace_plus.structured.eigen import EigenFactor
from laplace_plus.structured.gram_sum import formed
from laplace_plus.structured.kronecker import KroneckerBasis

__all__ = ["FrozenPosterior", "FrozenPrediction", "freeze"]

_PLAIN = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


class FrozenPrediction(NamedTuple):
    """Tensors ``[B, *, C]`` with the names and values that :class:`~laplace_plus.Prediction` has.

    Attributes:
        mean: ``E[y]``; for classes their probabilities by the posterior's default link.
        variance: ``Var[y]``, noise included.
        functional_mean: The network's outputs.
        functional_variance: Their epistemic variances: ``functional_covariance`` or its diagonal.
    """

    mean: Tensor
    variance: Tensor
    functional_mean: Tensor
    functional_variance: Tensor


class FrozenPosterior(nn.Module):
    """The linearised predictive at the default link, called as the network is; always in evaluation mode.

    Outputs and covariance of the last layer come from the features φ that the model gives without it.
    """

    def __init__(self, posterior: GaussianPosterior, link: str, last: nn.Module):
        super().__init__()
        self.likelihood, self.link, noise = posterior.likelihood, link, posterior.likelihood.noise_std
        network, name = posterior.network, posterior.network.layers[0]
        self.arrange, self.pads = network.arrange, any(len(item.shape) == 1 for item in network.selected)
        model = copy.deepcopy(network.model).requires_grad_(False)
        if name:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Identity())
        self.body = model if name else nn.Identity()
        index = _entries(network, self.pads)
        entries = (network.vector() if posterior.tangent_mean is None else posterior.tangent_mean)[index]
        heat = posterior.output_temperature
        bias: Any = entries[:, -1] if self.pads else last.bias
        weight = widen(entries[:, : entries.shape[1] - self.pads]) / heat
        shift = torch.zeros(len(weight)).to(weight) if bias is None else widen(bias) / heat
        needed: Any = outputs_for(link, posterior.n_outputs) or ("full" if link in ("gumbel", "bridge") else "diagonal")
        tensors: dict[str, Any] = {"noise": None if noise is None else noise.square().to(weight)}
        tensors |= {"weight": weight, "shift": shift, **pair_tables(link, weight)}
        factor = next(iter(posterior.factors().values()))
        self.rotates = False
        if isinstance(factor, EigenFactor) and isinstance(factor.basis, KroneckerBasis | IdentityBasis):
            table = factor.values[0].reciprocal() / heat**2
            tensors |= self._table(factor.basis, table, needed, weight, shift)
        else:
            covariance = posterior.covariance_matrix()[index.flatten()[:, None], index.flatten()]
            covariance = covariance.view(*index.shape, *index.shape).transpose(0, 1)
            tensors["dense"] = covariance.flatten(1) / heat**2  # [i, C C i]
        self.needed = needed
        self.has_noise, self.has_pair, self.is_dense = noise is not None, "shares" in tensors, "dense" in tensors
        for key, value in tensors.items():
            if value is not None:  # torch.export miscounts buffers that are None
                self.register_buffer(key, value.detach().clone())
        self.train(False)

    def _table(self, basis: Any, table: Tensor, needed: Any, weight: Tensor, shift: Tensor) -> dict[str, Tensor | None]:
        """Weights of the outputs and of the features in the eigenbasis, and what their squares are multiplied by."""
        size, offset = len(weight), None
        sides = (formed(getattr(basis, name, None)) for name in ("left", "right"))  # reflections of a limited rank, too
        left, right = (None if side is None else side[0] for side in sides)
        if needed == "diagonal":
            table = table if left is None else left.square() @ table
        elif needed == "full":
            own = torch.eye(size).to(table) if left is None else left
            table = torch.einsum("co,ko,oi->cki", own, own, table).flatten(0, 1)
        if right is None and self.pads:
            table, offset = table[:, :-1], table[:, -1]
        self.outputs, self.rotates = len(weight), right is not None
        if right is not None:  # one product for the outputs and for the features' coordinates
            weight = torch.cat([weight, right.mT[:, : len(right) - self.pads]])
            shift = torch.cat([shift, right[-1] if self.pads else torch.zeros_like(right[-1])])
            if offset is not None:  # of one coordinate more, which is one: a product without an offset is quicker
                weight, shift = F.pad(weight, (0, 0, 0, 1)), F.pad(shift, (0, 1), value=1.0)
                table, offset = torch.cat([table, offset[:, None]], 1), None
        # What all outputs share drops out of their differences.
        left = left - left.mean(0) if left is not None and needed == "independent" else None
        return {"weight": weight, "shift": shift, "left": left, "table": table, "offset": offset}

    def train(self, mode: bool = True) -> FrozenPosterior:
        """Stay in evaluation mode, whatever the argument."""
        return super().train(False)

    def functional(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The mean ``[B, *, C]`` of the outputs, and the covariance or the variances that the link needs."""
        own: dict[str, Any] = self._buffers
        features = self.arrange(batches.output_tensor(self._modules["body"](*inputs, **keywords)))  # type: ignore[misc]
        if features.dtype != own["weight"].dtype:
            features = features.to(own["weight"].dtype)
        mean = F.linear(features, own["weight"], own["shift"])
        if self.is_dense:
            rows = F.pad(features, (0, int(self.pads)), value=1.0)
            pairs = (rows @ own["dense"]).unflatten(-1, (*2 * mean.shape[-1:], -1))
            covariance = (pairs @ rows[..., None, :, None]).squeeze(-1)
            reduce = {"independent": independent_variances, "diagonal": _variance}.get(self.needed)
            return mean, covariance if reduce is None else reduce(mean, covariance)
        if self.rotates:
            mean, features = mean[..., : self.outputs], mean[..., self.outputs :]
        values = F.linear(features.square(), own["table"], own.get("offset"))
        if self.needed != "independent":
            return mean, values.unflatten(-1, (mean.shape[-1], -1)) if self.needed == "full" else values
        w, left = centring_weights(mean), own.get("left")
        if left is None:
            return mean, independent_variances(mean, values * (1 - 2 * w) + (w * w * values).sum(-1, keepdim=True))
        common = w @ left
        centred = values @ left.square().mT - 2 * (values * common) @ left.mT
        return mean, independent_variances(mean, centred + (values * common.square()).sum(-1, keepdim=True))

    def forward(self, first: Any = None, /, *more: Any, **keywords: Any) -> FrozenPrediction:
        """The prediction for a batch's inputs, passed as to the network."""
        mean, covariance = self.functional(*(() if first is None else (first,)), *more, **keywords)
        return FrozenPrediction(*self.predicted(mean, covariance), mean, _variance(mean, covariance))

    def predicted(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y, given those of the outputs."""
        own: dict[str, Any] = self._buffers  # a tenth of the time that attributes take, of which one input feels each
        if self.has_pair:  # p_k = ½ Σ_s w_s erfc((f_j − f_k) / (2 Var(f_j − f_k) + 2 s)^½), exact for a Gaussian f
            spread = _variance(mean, covariance).sum(-1, keepdim=True)
            if covariance.dim() > mean.dim():
                spread = (spread - covariance[..., 0, 1:] - covariance[..., 1, :1]).clamp_min(0.0)
            ahead = (mean[..., 1:] - mean[..., :1]) * (2 * spread + own["scales"]).rsqrt()
            p = torch.cat([ahead, -ahead], -1).erfc() @ own["shares"]
            return p, torch.addcmul(p, p, p, value=-1)
        if self.has_noise:  # a name for each output of an exported module
            return mean.clone(), _variance(mean, covariance) + own["noise"]
        marginal = self.likelihood.predict(mean, covariance, link=self.link)
        return marginal.mean, marginal.variance


def freeze(posterior: Posterior, x: Any = None, link: str | None = None) -> FrozenPosterior:
    """A module for serving, which ``torch.compile``, ``torch.export``, ONNX export and ``torch.jit.trace`` take.

    It holds copies, is called as the network is, and returns mean, variance, functional mean and its variance at
    ``link``, by default that of ``predictive``. It is compared with that on ``x`` or else training data:
    ``docs/serving.md``.

    Raises:
        NotFittedError: Before the fit.
        UnsupportedError: Anything but a Gaussian posterior over a linear last layer, or the link ``"mc"``.
        ConfigurationError: Without ``x``, if the training data are not at hand; an unknown link.
    """
    if hasattr(posterior, "freeze"):
        return posterior.freeze(x, link)
    posterior.require_fit()
    network, link = posterior.network, link or posterior.link or posterior.likelihood.links[0]
    checks.choice("link", link, posterior.likelihood.links)
    if not isinstance(posterior, GaussianPosterior) or link == "mc":
        what = f"{type(posterior).__name__} is no Gaussian of known covariance"
        raise _unsupported('the link "mc" draws samples' if link == "mc" else what)
    if x is None:
        if posterior.training_data.first is None:
            what = "There are no inputs to try a frozen posterior on."
            fix = "Pass some: lp.freeze(posterior, x)."
            raise ConfigurationError(what, got="no x, and no loader of the fit", fix=fix)
        x = next(batches.iterate(posterior.training_data.first, device=network.device)).inputs
    with exact_arithmetic(network), torch.no_grad():
        frozen = FrozenPosterior(posterior, link, _last_layer(network))
        inputs, size = network.receive(x), batches.batch_size(x)
        if batches.can_be_cut(x, size):
            inputs = batches.cut(inputs, [0, 1 % size, 2 % size])
        prediction: Any = posterior.predictive(inputs, link=link)
        args, keywords = batches.bind(network.model, inputs)
        try:
            found = frozen(*args, **keywords)
        except (LaplacePlusError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _unsupported(f"its copy fails ({error})") from error
    variance = _variance(prediction.functional_mean, prediction.functional_covariance)
    wanted = prediction.mean, prediction.variance, prediction.functional_mean, variance
    for own, other in zip(found, wanted, strict=True):
        tolerance = torch.finfo(network.dtype).eps ** 0.5 * (1e-3 + float(other.abs().max()))
        if own.shape != other.shape or not bool(((own - other).abs() <= tolerance).all()):
            raise _unsupported("its copy does not predict what it predicts on the inputs given")
    return frozen


def _last_layer(network: Network) -> nn.Module:
    """The layer of all selected parameters, which must be a linear one; UnsupportedError for any other selection."""
    layer, names = network.layers[0], {*network.parameter_names}
    module: Any = dict(network.model.named_modules()).get(layer)
    weight, bias = (f"{layer}.{name}" if layer else name for name in ("weight", "bias"))
    is_whole = weight in names and names <= {weight, bias} and all(item.mask is None for item in network.selected)
    if not is_whole or type(module).forward not in _PLAIN:  # another forward pass may prepare what it multiplies
        raise _unsupported(f"it is over {', '.join(network.parameter_names[:4])}")
    return module


def _unsupported(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"This posterior cannot be frozen: {why}.",
        expected="lp.KFAC, lp.Diagonal, lp.Full or lp.LowRank of a last layer, with a link in closed form",
        fix='Fit lp.KFAC(model, ..., parameters="last_layer"), or lp.distill(posterior, inputs).',
    )


def pair_tables(link: str, like: Tensor) -> dict[str, Tensor]:
    """Of two classes by ``"gumbel"``: ``2 s [Q]``, and what 2 Q values of erfc are multiplied by, ``[2 Q, 2]``."""
    if link != "gumbel" or len(like) != 2:  # noqa: PLR2004
        return {}
    scales, logarithms = LOGISTIC_SCALES
    shares = torch.block_diag(*[logarithms.exp()[:, None] / 2] * 2)
    return {"scales": (2 * scales).to(like), "shares": shares.to(like)}


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1) if covariance.dim() > mean.dim() else covariance


def _entries(network: Network, pads: bool) -> Tensor:
    """Places ``[C, i]`` of the layer's weights in the parameter vector, with the bias as the last column if it has."""
    start = {item.name.rpartition(".")[2]: network.offsets[item.name] for item in network.selected}
    shape = next(item.shape for item in network.selected if len(item.shape) > 1)
    index = start["weight"] + torch.arange(shape.numel(), device=network.device).view(shape[0], -1)
    if not pads:
        return index
    return torch.cat([index, start["bias"] + torch.arange(shape[0], device=network.device)[:, None]], 1)
