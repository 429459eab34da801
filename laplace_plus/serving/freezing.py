"""Frozen posteriors: plain tensor operations for ``torch.compile``, ``torch.export``, ONNX and tracing.

Of a linear last layer, ``J Σ Jᵀ`` is linear in the squared features in Σ's eigenbasis.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_plus import batches
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.structures import MATRIX, Layout
from laplace_plus.errors import NETWORK_ERRORS, ConfigurationError, UnsupportedError
from laplace_plus.likelihoods.base import unknown_link
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.posteriors.registry import ADDED
from laplace_plus.predictive.linearized import outputs_for
from laplace_plus.serving.graphs import Graph
from laplace_plus.structured.blocks import IdentityBasis
from laplace_plus.structured.eigen import EigenFactor, KroneckerBasis
from laplace_plus.structured.softmax_output.block import require_dense

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
    """The linearised predictive at the default link, called as the network is; always in evaluation mode."""

    def __init__(self, functional: nn.Module, posterior: Any, link: str):
        super().__init__()
        self.functional, self.likelihood, self.link = functional, posterior.likelihood, link
        noise = self.likelihood.noise_std
        self.register_buffer("noise", None if noise is None else noise.square().to(posterior.mean))
        self.train(False)

    def train(self, mode: bool = True) -> FrozenPosterior:
        """Stay in evaluation mode, whatever the argument."""
        return super().train(False)

    def forward(self, first: Any = None, /, *more: Any, **keywords: Any) -> FrozenPrediction:
        """The prediction for a batch's inputs, passed as to the network."""
        mean, covariance = self.functional(*(() if first is None else (first,)), *more, **keywords)
        variance, noise = _variance(mean, covariance), cast(Any, self.noise)
        if noise is not None:
            return FrozenPrediction(mean, variance + noise, mean, variance)
        marginal = self.likelihood.predict(mean, covariance, link=self.link)
        return FrozenPrediction(marginal.mean, marginal.variance, mean, variance)


def freeze(posterior: Any, x: Any = None, link: str | None = None) -> FrozenPosterior:
    """See :meth:`laplace_plus.Posterior.freeze`."""
    posterior.require_fit()
    network, link = posterior.network, link or posterior.link or posterior.likelihood.links[0]
    if link not in posterior.likelihood.links:
        raise unknown_link(posterior.likelihood, link)
    if not hasattr(posterior, "factors"):
        raise _unsupported(f"{type(posterior).__name__} is no Gaussian of known covariance")
    if link == "mc" or any(item.mask is not None for item in network.selected):
        raise _unsupported('the link "mc" draws samples' if link == "mc" else "only parts of parameters are selected")
    if x is None:
        if posterior.training_data.first is None:
            what = "There are no inputs to try a frozen posterior on."
            raise ConfigurationError(what, got="no x, and no loader of the fit", fix="Pass some: posterior.freeze(x).")
        x = next(batches.iterate(posterior.training_data.first, device=network.device)).inputs
    tries, size = [network.receive(x)], batches.batch_size(x)
    if batches.can_be_cut(x, size):  # three examples, and one by itself
        tries = [batches.cut(tries[0], some) for some in ([0, 1 % size, 2 % size], [0])]
    capture = Capture(network, tries[0])
    layouts = Gradients(network, capture).layouts
    module = type(network.model.get_submodule(network.layers[0]))  # one of its own may prepare what it multiplies
    is_head = capture.pointwise and module.forward in _PLAIN and layouts[0].rule == MATRIX and layouts[0].shape[0] == 1
    needed = outputs_for(link, posterior.n_outputs) or ("full" if link in ("gumbel", "bridge") else "diagonal")
    if is_head and any(len(item.shape) > 1 for item in network.selected):
        functional: nn.Module = _Head(posterior, layouts[0], needed)
    else:
        functional = Graph(posterior, tries[0], needed)
    frozen = FrozenPosterior(functional, posterior, link)
    for inputs in tries:
        wanted: Any = posterior.predictive(inputs, link=link)
        mean, variance = wanted.functional_mean, _variance(wanted.functional_mean, wanted.functional_covariance)
        args, keywords = batches.bind(network.model, inputs)
        try:
            with torch.no_grad():
                found = frozen(*args, **keywords)
        except NETWORK_ERRORS as error:
            raise _unsupported(f"its copy fails ({error})") from error
        for own, other in zip(found, (wanted.mean, wanted.variance, mean, variance), strict=True):
            tolerance = torch.finfo(capture.outputs.dtype).eps ** 0.5 * (1e-3 + float(other.abs().max()))
            if own.shape != other.shape or not bool(((own - other).abs() <= tolerance).all()):
                raise _unsupported("its copy does not predict what it predicts on the inputs given")
    return frozen


ADDED["freeze"] = freeze


def _unsupported(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"This posterior cannot be frozen: {why}.",
        expected="lp.KFAC, lp.Diagonal, lp.Full or lp.LowRank of a last layer, with a link in closed form",
        fix='Fit lp.KFAC(model, ..., parameters="last_layer"), or serve posterior.predictive itself.',
    )


def _variance(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1) if covariance.dim() > mean.dim() else covariance


def _formed(side: Any, like: Tensor) -> Any:
    """The first group's eigenvectors, which a limited rank leaves as reflections."""
    return side if side is None else side[0] if isinstance(side, Tensor) else torch.eye(len(like)).to(like) @ side[0]


class _Head(nn.Module):
    """Outputs and covariance of a last layer, from the features φ that the model gives without it."""

    def __init__(self, posterior: Any, layout: Layout, needed: Any):
        super().__init__()
        model = copy.deepcopy(posterior.network.model).eval().requires_grad_(False)
        network, name, vector = posterior.network, posterior.network.layers[0], posterior.tangent_mean
        last = model.get_submodule(name)
        if name:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Identity())
        self.body, self.arrange, self.needed = model if name else nn.Identity(), network.arrange, needed
        self.pads = any(len(item.shape) == 1 for item in network.selected)
        weight = layout.gather(network.vector() if vector is None else vector)[0]  # [C, i]
        bias = weight[:, -1] if self.pads else getattr(last, "bias", None)
        dtype, size = network.parameters[network.parameter_names[0]].dtype, len(weight)
        factor: Any = posterior.factors().get(layout.key)  # in a product's basis a diagonal, else dense
        left, right, table, dense = None, None, None, None
        if isinstance(factor, EigenFactor) and isinstance(factor.basis, (KroneckerBasis, IdentityBasis)):
            left, right = (getattr(factor.basis, side, None) for side in ("left", "right"))
            table = factor.values[0].reciprocal()
            left, right = _formed(left, table[:, 0]), _formed(right, table[0])
            if needed == "full":
                left = torch.eye(size).to(table) if left is None else left
                table = torch.einsum("co,ko,oi->cki", left, left, table).flatten(0, 1)
            elif needed == "diagonal" and left is not None:
                table = left.square() @ table
        else:
            require_dense(posterior.n_parameters, posterior.mean.dtype, network.device)
            index = layout.index.flatten()
            dense = posterior.covariance_matrix()[index[:, None], index].view(size, -1, size, layout.shape[2])
            dense = dense.transpose(0, 1).flatten(1)  # [i, C C i]
        # What all outputs share drops out of their differences.
        left = left - left.mean(0) if left is not None and needed == "independent" else None
        weight, bias = (weight[:, :-1] if self.pads else weight).to(dtype), bias if bias is None else bias.to(dtype)
        own = {"weight": weight, "bias": bias, "left": left, "right": right, "table": table, "dense": dense}
        for key, value in own.items():
            self.register_buffer(key, None if value is None else value.detach().clone())

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The mean ``[B, *, C]``, and the covariance or the variances that the link needs."""
        own = cast(Any, self)
        features = self.arrange(batches.output_tensor(self.body(*inputs, **keywords)))
        mean = F.linear(features, own.weight, own.bias)
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))
        rows = F.pad(features.to(mean.dtype), (0, int(self.pads)), value=1.0)
        if own.dense is not None:
            pairs = (rows @ own.dense).unflatten(-1, (*2 * mean.shape[-1:], -1))
            covariance = (pairs @ rows[..., None, :, None]).squeeze(-1)
            reduce = {"independent": independent_variances, "diagonal": _variance}.get(self.needed)
            return mean, covariance if reduce is None else reduce(mean, covariance)
        rows = rows if own.right is None else rows @ own.right
        values = F.linear(rows.square(), own.table)
        if self.needed != "independent":
            return mean, values.unflatten(-1, (mean.shape[-1], -1)) if self.needed == "full" else values
        w = centring_weights(mean)
        if own.left is None:
            return mean, independent_variances(mean, values * (1 - 2 * w) + (w * w * values).sum(-1, keepdim=True))
        common = w @ own.left
        centred = values @ own.left.square().mT - 2 * (values * common) @ own.left.mT
        return mean, independent_variances(mean, centred + (values * common.square()).sum(-1, keepdim=True))
