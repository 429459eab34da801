"""Frozen posteriors: plain tensor operations for ``torch.compile``, ``torch.export``, ONNX and tracing.

Of a linear last layer, ``J Σ Jᵀ`` is linear in the squared features in Σ's eigenbasis.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.applications.serving.graphs import Graph
from laplace_plus.errors import NETWORK_ERRORS, ConfigurationError, UnsupportedError
from laplace_plus.likelihoods.base import unknown_link, widen
from laplace_plus.likelihoods.categorical import LOGISTIC_SCALES, centring_weights, independent_variances
from laplace_plus.network import batches
from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import Gradients
from laplace_plus.posteriors.registry import ADDED
from laplace_plus.predictive.linearized import outputs_for
from laplace_plus.structured.blocks import IdentityBasis
from laplace_plus.structured.eigen import EigenFactor, KroneckerBasis
from laplace_plus.structured.layout import MATRIX, Layout
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


class _Pair(NamedTuple):
    """Of two classes ``p_k = ½ Σ_s w_s erfc((f_j − f_k) / (2 Var(f_j − f_k) + 2 s)^½)``, exact for a Gaussian f.

    Attributes:
        contrasts: What is taken of the outputs, ``[Q, 2]``: themselves, then ``f_j − f_k`` for each k and s.
        spread: Their variances, the latter doubled, of those of the outputs and of ``f_1 − f_2``, ``[Q, 3]``.
        scales: What is added to them: 0, then ``2 s``, ``[Q]``.
        shares: ``½ w_s`` of each class, ``[2, Q − 2]``.
    """

    contrasts: Tensor
    spread: Tensor
    scales: Tensor
    shares: Tensor

    @classmethod
    def create(cls) -> _Pair:
        scales, logarithms = LOGISTIC_SCALES[torch.float64]
        n, unit = len(scales), torch.eye(3, dtype=torch.float64, device="cpu")
        difference = (unit[1:2, :2] - unit[:1, :2]).expand(n, 2)
        return cls(
            torch.cat([unit[:2, :2], difference, -difference]),
            torch.cat([unit[:2], 2 * unit[2:].expand(2 * n, 3)]),
            torch.cat([torch.zeros_like(scales[:2]), 2 * scales, 2 * scales]),
            torch.block_diag(*[logarithms.exp()[None] / 2] * 2),
        )


class FrozenPosterior(nn.Module):
    """The linearised predictive at the default link, called as the network is; always in evaluation mode."""

    def __init__(self, posterior: Any, link: str, pair: _Pair | None):
        super().__init__()
        self.likelihood, self.link = posterior.likelihood, link
        noise = self.likelihood.noise_std
        self.has_noise, self.has_pair = noise is not None, pair is not None
        own = ({} if noise is None else {"noise": noise.square()}) | ({} if pair is None else pair._asdict())
        for name, value in own.items():
            self.register_buffer(name, value.to(widen(posterior.mean)))
        self.train(False)

    def functional(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The mean ``[B, *, C]`` of the outputs, and the covariance or the variances that the link needs."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> FrozenPosterior:
        """Stay in evaluation mode, whatever the argument."""
        return super().train(False)

    def forward(self, first: Any = None, /, *more: Any, **keywords: Any) -> FrozenPrediction:
        """The prediction for a batch's inputs, passed as to the network."""
        mean, covariance = self.functional(*(() if first is None else (first,)), *more, **keywords)
        own: dict[str, Any] = self._buffers  # a tenth of the time that attributes take, of which one input feels each
        if self.has_pair:
            if covariance.dim() > mean.dim():
                mean = F.linear(mean, own["contrasts"])
                covariance = F.linear(_with_difference(covariance), own["spread"], own["scales"])
            p = F.linear((mean[..., 2:] * covariance[..., 2:].rsqrt()).erfc(), own["shares"])
            return FrozenPrediction(p, torch.addcmul(p, p, p, value=-1), mean[..., :2], covariance[..., :2])
        variance = _variance(mean, covariance)
        if self.has_noise:
            return FrozenPrediction(mean, variance + own["noise"], mean, variance)
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
    pair = _Pair.create() if link == "gumbel" and posterior.n_outputs == 2 else None  # noqa: PLR2004
    if is_head and any(len(item.shape) > 1 for item in network.selected):
        frozen: FrozenPosterior = FrozenHead(posterior, link, pair, layouts[0], needed)
    else:
        frozen = FrozenGraph(posterior, link, pair, Graph(posterior, tries[0], needed))
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


def _with_difference(covariance: Tensor) -> Tensor:
    """Variances of two outputs and of their difference, ``[..., 3]``."""
    variances, shared = covariance.diagonal(dim1=-2, dim2=-1), covariance[..., 0, 1:] + covariance[..., 1, :1]
    return torch.cat([variances, (variances.sum(-1, keepdim=True) - shared).clamp_min(0.0)], -1)


class FrozenGraph(FrozenPosterior):
    """A recorded graph's outputs and covariance."""

    def __init__(self, posterior: Any, link: str, pair: _Pair | None, graph: Graph):
        super().__init__(posterior, link, pair)
        self.recording = graph

    @override
    def functional(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        mean, covariance = self.recording(*inputs, **keywords)
        return mean, covariance


class FrozenHead(FrozenPosterior):
    """Outputs and covariance of a last layer, from the features φ that the model gives without it."""

    def __init__(self, posterior: Any, link: str, pair: _Pair | None, layout: Layout, needed: Any):
        super().__init__(posterior, link, pair)
        model = copy.deepcopy(posterior.network.model).eval().requires_grad_(False)
        network, name, vector = posterior.network, posterior.network.layers[0], posterior.tangent_mean
        last = model.get_submodule(name)
        if name:
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], nn.Identity())
        self.body, self.arrange = model if name else nn.Identity(), network.arrange
        pads = any(len(item.shape) == 1 for item in network.selected)
        weight = layout.gather(network.vector() if vector is None else vector)[0]  # [C, i]
        bias = weight[:, -1] if pads else getattr(last, "bias", None)
        weight, size, width = weight[:, : weight.shape[1] - pads], len(weight), layout.shape[2]
        weight, shift = widen(weight), torch.zeros(size).to(widen(weight)) if bias is None else widen(bias)
        factor: Any = posterior.factors().get(layout.key)  # in a product's basis a diagonal, else dense
        left, right, table, dense, offset = None, None, None, None, None
        if isinstance(factor, EigenFactor) and isinstance(factor.basis, (KroneckerBasis, IdentityBasis)):
            left, right = (getattr(factor.basis, side, None) for side in ("left", "right"))
            table = factor.values[0].reciprocal()
            left, right = _formed(left, table[:, 0]), _formed(right, table[0])
            unit = torch.eye(size).to(table)
            if pair is not None:
                pair, needed = _Pair(*(own.to(table) for own in pair)), "diagonal"
                unit = torch.cat([unit, unit[:1] - unit[1:]])
            if needed == "diagonal":
                table = (unit if left is None else unit @ left).square() @ table
            elif needed == "full":
                own = unit if left is None else left
                table = torch.einsum("co,ko,oi->cki", own, own, table).flatten(0, 1)
            if right is None and pads:
                table, offset = table[:, :-1], table[:, -1]
            if pair is not None:
                weight, shift, table = pair.contrasts @ weight, pair.contrasts @ shift, pair.spread @ table
                size, offset = len(weight), pair.scales if offset is None else pair.scales + pair.spread @ offset
            if right is not None:  # one product for the outputs and for the features' coordinates
                weight = torch.cat([weight, right.mT[:, : width - pads]])
                shift = torch.cat([shift, right[-1] if pads else torch.zeros_like(right[-1])])
                if offset is not None:  # of one coordinate more, which is one: a product without an offset is quicker
                    weight, shift = F.pad(weight, (0, 0, 0, 1)), F.pad(shift, (0, 1), value=1.0)
                    table, offset = torch.cat([table, offset[:, None]], 1), None
        else:
            require_dense(posterior.n_parameters, posterior.mean.dtype, network.device)
            index = layout.index.flatten()
            dense = posterior.covariance_matrix()[index[:, None], index].view(size, -1, size, width)
            dense = dense.transpose(0, 1).flatten(1)  # [i, C C i]
        # What all outputs share drops out of their differences.
        left = left - left.mean(0) if left is not None and needed == "independent" else None
        self.size, self.pads, self.needed = size, pads, needed
        self.is_dense, self.rotates = dense is not None, right is not None
        every = {"weight": weight, "shift": shift, "left": left, "table": table, "offset": offset}
        for key, value in (every | {"dense": dense}).items():
            if value is not None:  # torch.export miscounts buffers that are None
                self.register_buffer(key, value.detach().clone())

    @override
    def functional(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
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
            mean, features = mean[..., : self.size], mean[..., self.size :]
        values = F.linear(features.square(), own["table"], own.get("offset"))
        if self.needed != "independent":
            return mean, values.unflatten(-1, (mean.shape[-1], -1)) if self.needed == "full" else values
        w, left = centring_weights(mean), own.get("left")
        if left is None:
            return mean, independent_variances(mean, values * (1 - 2 * w) + (w * w * values).sum(-1, keepdim=True))
        common = w @ left
        centred = values @ left.square().mT - 2 * (values * common) @ left.mT
        return mean, independent_variances(mean, centred + (values * common.square()).sum(-1, keepdim=True))
