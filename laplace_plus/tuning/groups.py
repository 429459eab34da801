"""Which entries of the parameter vector share a prior precision, and in which proportions.

Of a layer whose output goes into a normalisation, ``y = norm(W x + b)``, the scale is arbitrary: multiplying ``(W, b)``
by k > 0 leaves the network's function unchanged. With a single prior precision predictions depend on that scale. With
a precision for each such layer they do not (Antorán et al., "Adapting the linearised Laplace model evidence for modern
deep learning", 2022).

A trace of the executed operations finds these groups; module types play no role. Each tensor carries the set of
parameters in which it is jointly homogeneous: multiplying all of them by k > 0 multiplies the tensor by k.

- Linear maps give their output the set of weight and bias.
- Reshaping, pooling, rectifiers and products with other tensors keep the set.
- Sums and concatenations unite sets, so that all summands of a residual stream are normalised together.
- A normalisation removes the scale of its input's set. After any other operation, no set is known.

So it proposes groups. Each is rescaled on trial, and those that change the outputs are dropped: those whose scale
matters elsewhere, too, or on which the network has hidden an operation.

For batch normalisation the running statistics belong to the rescaled group: as (W, b) → k (W, b), the mean goes to
k · mean and the variance to k² · variance. For the other normalisations ``J θ_group = 0``. The ε in a normalisation's
denominator makes all of this inexact where activations are small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laplace_plus import checks
from laplace_plus.network import batches
from laplace_plus.network.network import Network
from laplace_plus.network.selection import layer_of
from laplace_plus.priors import LAYERWISE, STRUCTURES, Groups
from laplace_plus.tuning.laplace import LaplaceModel

NAME = "normalized_groups"
"""Name of these groups, and of the prior structure over them."""

REST = "rest"
"""The group of what is neither normalised nor the last layer."""


def check_structure(structure: Any) -> None:
    """Raise :class:`ConfigurationError` unless a value is the name of a prior structure, or :class:`Groups`."""
    if not isinstance(structure, Groups):
        checks.choice("prior structure, other than lp.Groups", structure, (*STRUCTURES, NAME))


def chosen_groups(posterior: Any, structure: str | Groups, data: Iterable[Any] | None = None) -> Groups:
    """The groups of ``"layerwise"``, ``"normalized_groups"`` or given groups, for a posterior's network.

    One batch of ``data``, by default of the fit's, finds normalised groups; :class:`DataError` if there are none.
    """
    check_structure(structure)
    network = posterior.network
    if isinstance(structure, Groups):
        structure.check_size(network.n_parameters)
        return structure
    if structure == LAYERWISE:
        return Groups(LAYERWISE, network.layers, network.layer_index())
    if posterior.prior_groups.name == NAME:
        return posterior.prior_groups
    why = "Normalised groups are found by running the network on a batch."
    data = posterior.training_data.again(data, why, part=True)
    batch = next(iter(batches.iterate(data, device=network.device, progress=False)))
    return normalized_groups(network, batch.inputs)


def curvature_diagonal(model: LaplaceModel, weights: Tensor) -> Tensor:
    """``diag(H)`` at component weights ``[K]``, ``[P]`` float64."""
    diagonal = torch.empty(len(model.vector), dtype=torch.float64, device=model.vector.device)
    for layout, block in model.curvature:
        model.places[layout.key].scatter_(diagonal, block.diagonal(weights))
    return diagonal


_LINEAR: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.bilinear: ("input1", "input2", "weight", "bias"),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), ("input", "weight", "bias")),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), ("input", "weight", "bias")),
    F.embedding: ("input", "weight"),
    torch.addmm: ("bias", "input", "weight"),
    F.multi_head_attention_forward: (),
}
"""Functions that are homogeneous in weight and bias, with the names of their first arguments."""

_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    F.normalize: ("input", "p", "dim", "eps"),
    torch._weight_norm: ("input", "weight", "dim"),
}
"""Functions that remove their input's scale, with the names of their first arguments."""

_KEEPING = frozenset(
    """
    __get__ __getitem__ __neg__ abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d alpha_dropout amax amin avg_pool1d avg_pool2d avg_pool3d bfloat16
    broadcast_to channel_shuffle chunk clone contiguous cumsum detach diagonal double dropout dropout1d dropout2d
    dropout3d expand expand_as feature_dropout flatten flip float fold gather half index_select interpolate
    leaky_relu lp_pool1d lp_pool2d max_pool1d max_pool2d max_pool3d mean moveaxis movedim nan_to_num narrow neg
    permute pixel_shuffle pixel_unshuffle relu repeat repeat_interleave requires_grad_ reshape reshape_as roll rot90
    rrelu select split split_with_sizes squeeze sum swapaxes swapdims t tile to transpose tril triu type type_as
    unbind unflatten unfold unsqueeze upsample view view_as
    """.split()  # noqa: SIM905
)
"""Names of functions of one tensor that are positively homogeneous in it."""

_SUMS = frozenset("add cat concat concatenate hstack maximum minimum rsub stack sub vstack where".split())  # noqa: SIM905
"""Names of functions that are positively homogeneous in all of their tensors together."""

_PRODUCTS = frozenset({"bmm", "div", "divide", "einsum", "matmul", "mm", "mul", "multiply", "mv", "true_divide"})
"""Names of functions that are linear in each of their tensors (a quotient in the first one)."""

_OPERATORS = {"truediv": "div", "itruediv": "div"} | {
    prefix + name: name for prefix in "ri" for name in ("add", "sub", "mul", "matmul")
}
"""Names of operators' special methods, and those of the functions that they stand for."""

_TOLERANCE = 1e-3
"""Largest relative change of outputs, when a group is doubled, that counts as rounding: 8000 float32 epsilons."""

_NO_EPSILON = 1e-30
"""Replaces the ε of normalisations on trial, so that doubling a group changes no digit."""


def normalized_groups(network: Network, inputs: Any) -> Groups:
    """One group for each layer whose scale a normalisation takes away, one for the last layer, and one for the rest.

    Args:
        network: The network; of its selected parameters.
        inputs: A batch's inputs, for one forward pass.

    Returns:
        Groups named after the layers; the rest, if any, comes last as ``"rest"``. A layer owns its weight and bias.
        Layers that are normalised only together, such as those that add to one residual stream, have a group each.

    Example:
        >>> from laplace_plus.likelihoods import Categorical
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(2, 4), torch.nn.LayerNorm(4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
        ... )
        >>> normalized_groups(Network(net, "all", Categorical().arrange), torch.randn(5, 2)).names
        ('0', '3', 'rest')
    """
    inputs, tracer = network.receive(inputs), _Tracer(network.parameters)
    with torch.no_grad(), tracer:
        network.raw(inputs, tracer.parameters)
    free = {name for group in tracer.proposed() if _is_free(network, inputs, group) for name in group}
    last = None if tracer.last_used is None else layer_of(tracer.last_used)
    apart = [item.name in free or item.layer == last for item in network.selected]
    keys = [f"layer {item.layer}" if own else REST for item, own in zip(network.selected, apart, strict=True)]
    order = sorted(dict.fromkeys(keys), key=lambda key: key == REST)
    number = {key: i for i, key in enumerate(order)}
    sizes = [item.size for item in network.selected]
    index = torch.cat([torch.full((n,), number[key]) for n, key in zip(sizes, keys, strict=True)])
    return Groups(NAME, tuple(key.removeprefix("layer ") for key in order), index)


def _is_free(network: Network, inputs: Any, names: list[str]) -> bool:
    """Whether doubling some parameters leaves the outputs unchanged."""
    doubled = {name: 2 * network.parameters[name] for name in names}
    with torch.no_grad(), _BatchStatistics():
        raw = [network.raw(inputs, network.parameters | changed) for changed in ({}, doubled)]
    before, after = (network.arrange(batches.output_tensor(output)).double() for output in raw)
    return bool((after - before).abs().max() <= _TOLERANCE * before.abs().max())


class _BatchStatistics(TorchFunctionMode):
    """Normalises by the batch's own statistics, since running ones would have to be rescaled, and without an ε."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NORMS or "eps" not in _NORMS[func]:
            return func(*args, **(kwargs or {}))
        given = dict(zip(_NORMS[func], args, strict=False)) | (kwargs or {}) | {"eps": _NO_EPSILON}
        if func not in (F.batch_norm, F.instance_norm):
            return func(**given)
        norm = torch.batch_norm if func is F.batch_norm else torch.instance_norm
        return norm(given["input"], given.get("weight"), given.get("bias"), None, None, True, 0.0, _NO_EPSILON, False)


class _Tracer(TorchFunctionMode):
    """Records in which of the network's parameters each tensor is homogeneous."""

    def __init__(self, parameters: dict[str, Tensor]):
        super().__init__()
        self.parameters = parameters
        self.last_used: str | None = None
        self._own = {id(tensor): name for name, tensor in parameters.items()}
        self._sets: dict[int, frozenset[str]] = {key: frozenset([name]) for key, name in self._own.items()}
        # Ids are unique among living tensors only: keep every tensor that has a set.
        self._alive: list[Tensor] = list(parameters.values())
        self._leader = {name: name for name in parameters}
        self._normalised: set[str] = set()

    def proposed(self) -> list[list[str]]:
        """Sets of parameters whose common scale a normalisation removes somewhere."""
        leaders = sorted({self._find(name) for name in self._normalised})
        return [[name for name in self.parameters if self._find(name) == leader] for leader in leaders]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Collected before the call, since in-place functions change their inputs.
        tensors = batches.tensors_in((args, kwargs))
        own = [self._own[id(tensor)] for tensor in tensors if id(tensor) in self._own]
        output = func(*args, **kwargs)
        produced = batches.tensors_in(output)
        if own and produced:
            self.last_used = own[-1]
        if produced:
            known = any(id(tensor) in self._sets for tensor in tensors)
            names = self._follow(func, args, kwargs, tensors) if known else frozenset()
            for tensor in produced:  # written to in place, or new
                if names and tensor.is_floating_point():
                    self._sets[id(tensor)] = names
                    self._alive.append(tensor)
                else:
                    self._sets.pop(id(tensor), None)
        return output

    def _follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> frozenset[str]:
        """The set of what a function returns."""
        name, floating = getattr(func, "__name__", ""), [tensor for tensor in tensors if tensor.is_floating_point()]
        if name not in _KEEPING:  # the same for a function, method, operator and what works in place
            name = _OPERATORS.get(name.strip("_"), name.strip("_"))
        if func in _LINEAR:
            names = _LINEAR[func] or F.multi_head_attention_forward.__code__.co_varnames
            given = dict(zip(names, args, strict=False)) | kwargs
            weight = next(given[name] for name in ("out_proj_weight", "weight", "mat2") if name in given)
            bias = given.get("out_proj_bias", given.get("bias"))
            rescaled = given.get("max_norm") is not None  # the table itself
            return frozenset() if rescaled else self._together([part for part in (weight, bias) if part is not None])
        if func in _NORMS:
            given = dict(zip(_NORMS[func], args, strict=False)) | kwargs
            self._normalised |= self._set(given["input"])
            return self._together([given[name] for name in ("weight", "bias") if given.get(name) is not None])
        if func is F.scaled_dot_product_attention:
            return self._set(kwargs["value"] if "value" in kwargs else args[2])
        if name in _KEEPING or name == "pad" and kwargs.get("value") in (None, 0) and len(args) < 4:  # noqa: PLR2004
            return self._together(floating[:1])
        if name in _SUMS:
            return self._together(floating)
        return self._product(name, tensors) if name in _PRODUCTS else frozenset()

    def _product(self, name: str, tensors: list[Tensor]) -> frozenset[str]:
        with_set = [tensor for tensor in tensors if self._set(tensor)]
        # In an activation times a bare parameter, such as a layer scale, follow the activation.
        activations = [tensor for tensor in with_set if id(tensor) not in self._own]
        chosen = activations if len(activations) == 1 else with_set
        quotient = name.endswith(("div", "divide"))
        return (
            self._set(chosen[0]) if len(chosen) == 1 and not (quotient and chosen[0] is not tensors[0]) else frozenset()
        )

    def _together(self, parts: list[Tensor]) -> frozenset[str]:
        """The joint set of some tensors, if each has one; from now on its parameters are rescaled together only."""
        sets = [self._set(part) for part in parts]
        names: frozenset[str] = frozenset().union(*sets) if all(sets) else frozenset()
        for name in names:
            self._leader[self._find(name)] = self._find(min(names))
        return names

    def _find(self, name: str) -> str:
        while self._leader[name] != name:
            name = self._leader[name]
        return name

    def _set(self, value: Any) -> frozenset[str]:
        return self._sets.get(id(value), frozenset())
