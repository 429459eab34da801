"""The trained module as a pure function ``f(θ, x)`` of its parameters and inputs.

The user's model stays as it is: it runs through ``torch.func.functional_call`` in evaluation mode, on detached views of
its parameters and on copies of its buffers. Every mode is restored, also when the network fails.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import BaseTorchFunctionMode

from laplace_plus import batches
from laplace_plus._memory import memory_budget
from laplace_plus.differentiability import differentiable_kernels, eager, refuse_checkpointing
from laplace_plus.distributed import plain_module, refresh_, sharded_source
from laplace_plus.errors import ConfigurationError, InputError, NonFiniteError, UnsupportedError
from laplace_plus.example_gradients import per_example_gradients
from laplace_plus.selection import Selected, Selection, select, uses

_STRIDE = 251
"""Entries that share one weighted sum; a prime, so that it divides no common layer size."""

_SMALL = 2**16
"""Tensors with at most this many entries are summed together: one call for all biases costs less than one for each."""

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_registering = threading.Lock()


def turn(model: nn.Module) -> threading.RLock:
    """The re-entrant lock of a model; models that share modules share it."""
    with _registering:
        lock = _locks.get(model)
        if lock is None:
            modules = list(model.modules())
            lock = next((_locks[module] for module in modules if module in _locks), None) or threading.RLock()
            for module in modules:
                _locks.setdefault(module, lock)
        return lock


@contextmanager
def exact_arithmetic(network: Network, memory: int | None = None) -> Iterator[None]:
    """Run a public method without the caller's autocast and inference mode, one thread at a time.

    Only the network's own forward pass runs under the caller's autocast. Derivatives do not exist in inference mode, so
    it is switched off. Checkpointed activations, which fail deep inside torch, raise a clear error. Nested calls do
    nothing.

    Args:
        network: The network; other threads wait for its lock, see :func:`turn`.
        memory: Budget for intermediate results in bytes; None for the one in force, or else the device's default.
    """
    with turn(network.model):
        if network.ambient_autocast is not None:  # inside another public method of the same thread
            yield
            return
        device = network.device
        kind = device.type
        network.ambient_autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        try:
            with torch.inference_mode(False), torch.autocast(kind, enabled=False), memory_budget(memory, device):
                yield
        except RuntimeError as error:
            refuse_checkpointing(error)
            raise
        finally:
            network.ambient_autocast = network._dtype = network._seen = None


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers, which hide or scatter its operations.

    For a model whose parameters are sharded over ranks, a copy with whole parameters.
    """
    wrapper = "module" if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else "_orig_mod"
    inner = getattr(model, wrapper, None)
    return unwrap(inner) if isinstance(inner, nn.Module) else plain_module(model)


class Network:
    """A trained network as a function of some of its parameters.

    Args:
        model: The trained module; it stays as it is.
        parameters: Which parameters; see :mod:`laplace_plus.selection`.
        arrange: Brings the network's raw output to the shape ``[B, *, C]``, usually a likelihood's ``arrange``.

    Attributes:
        model: The module, without wrappers.
        selected: The selected parameters.
        parameter_names: Their names, in the order in which they fill the parameter vector.
        n_parameters: P, the number of selected entries.
        offsets: Start of each selected parameter in the parameter vector.
        layers: Names of the modules that own selected parameters, in order; one precision each in a layer-wise prior.
        sharded: The source of a model whose parameters are sharded over ranks; None for any other.

    Raises:
        ConfigurationError: ``model`` is not an ``nn.Module``.
        UnsupportedError: The module cannot run as a pure function (TorchScript), or an example's output depends on
            the other examples of its batch (batch statistics in evaluation mode).
        SelectionError: See :func:`laplace_plus.selection.select`.
    """

    def __init__(self, model: nn.Module, parameters: Selection, arrange: Callable[[Any], Tensor]):
        if not isinstance(model, nn.Module):
            expected, got = "a trained torch.nn.Module", type(model).__name__
            raise ConfigurationError("The model is not a module.", expected=expected, got=got)
        # A compiled module hides its operations; the module inside is the same function of the same parameters.
        self.model: nn.Module = unwrap(model)
        self.sharded = sharded_source(model)
        self.selection = parameters
        self.arrange = arrange
        self._dtype: torch.dtype | None = None
        with turn(self.model):
            _refuse_unsuitable(self.model)
            self.select_last_layer(None)
        # Whether a gradient of the outputs reaches a parameter, where autograd had to be asked.
        self.reached: dict[str, bool] = {}
        # Memory of one example's forward pass and of one cotangent's gradients; None before the first batch.
        self.bytes_per_example: int | None = None
        # Whether a batch's examples may run apart from each other; None while unknown.
        self.can_cut: bool | None = None
        # The caller's autocast while a public method runs; None outside.
        self.ambient_autocast: tuple[bool, torch.dtype] | None = None
        # State of the weights in the public method that runs.
        self._seen: tuple[Any, ...] | None = None

    def selecting(self, parameters: Selection) -> Network:
        """The same network with other parameters selected."""
        other = Network(self.model, parameters, self.arrange)
        other.ambient_autocast = self.ambient_autocast
        return other

    def select_last_layer(self, layer: str | None) -> None:
        """Select the parameters; a batch may have shown which layer is last (None: the last one defined)."""
        self.selected: tuple[Selected, ...] = select(self.model, self.selection, last_layer=layer)
        self.parameter_names = tuple([item.name for item in self.selected])
        self.layers: tuple[str, ...] = tuple(dict.fromkeys([item.layer for item in self.selected]))
        # Further names of tied parameters that are not selected as a whole: each use is told apart.
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._apart = [n for n, p in uses(self.model).items() if first[id(p)] not in (n, *self.parameter_names)]
        self.offsets: dict[str, int] = {}
        self.n_parameters = 0
        for item in self.selected:
            self.offsets[item.name] = self.n_parameters
            self.n_parameters += item.size
        self._layer_index: Tensor | None = None
        # What curvature.gradients learns about the network: the example axis of each call, and each block's positions
        # in the parameter vector.
        self.example_axes: dict[str, Any] = {}
        self.layouts: dict[Any, Any] = {}

    # -- the parameter vector ------------------------------------------------------------------------------------------

    def layer_index(self) -> Tensor:
        """The layer number of each entry of the parameter vector: ``[P]`` integers."""
        if self._layer_index is None:
            number = {layer: i for i, layer in enumerate(self.layers)}
            self._layer_index = torch.cat([torch.full((item.size,), number[item.layer]) for item in self.selected])
        return self._layer_index

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Detached views of all parameters, selected or not; of tied ones that are not selected, one for each use."""
        result = {}
        for name, parameter in self.model.named_parameters():
            result[name] = parameter.detach()
        for name in self._apart:
            result[name] = attrgetter(name)(self.model).detach()
        return result

    def vector(self) -> Tensor:
        """The network's current selected entries, ``[P]``, at least float32."""
        parameters, slices = self.parameters, []
        for item in self.selected:
            flat = parameters[item.name].flatten()
            flat = flat if item.mask is None else flat[item.mask.to(flat.device)]
            slices.append(flat.to(self.dtype))
        return torch.cat(slices)

    def substitute(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameter tensors with the selected entries taken from ``vector [P]``; differentiable."""
        parameters, result = self.parameters, {}
        for item, entries in zip(self.selected, vector.split([item.size for item in self.selected]), strict=True):
            original = parameters[item.name]
            entries = entries.to(original.dtype)
            if item.mask is not None:
                index = item.mask.to(original.device).nonzero().squeeze(-1)
                entries = original.flatten().index_copy(0, index, entries)
            result[item.name] = entries.view(item.shape)
        return result

    @property
    def dtype(self) -> torch.dtype:
        """The type that factorisations use: that of the selected parameters, at least float32."""
        if self._dtype is not None:
            return self._dtype
        dtype = torch.float32
        for item in self.selected:
            dtype = torch.promote_types(dtype, attrgetter(item.name)(self.model).dtype)
        if self.ambient_autocast is not None:  # nothing changes the model while a public method runs
            self._dtype = dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the first selected parameter; batches are moved there."""
        return attrgetter(self.parameter_names[0])(self.model).device

    def receive(self, inputs: Any) -> Any:
        """Inputs moved to the network's device."""
        return batches.to_device(inputs, self.device)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def raw(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
        """What the model returns, with some parameters substituted.

        Raises:
            InputError: The network fails on these inputs.
        """
        model = self.model
        # Nothing is compiled before torch._dynamo is imported, which takes a second.
        with evaluation_mode(model), eager if "torch._dynamo" in sys.modules else nullcontext():
            arguments, keywords = batches.bind(model, inputs)
            known = parameters or {}
            values: dict[int, Tensor] = {}  # by identity: tied tensors have one value, unless their use has its own
            for name, parameter in model.named_parameters():
                values[id(parameter)] = known[name] if name in known else parameter.detach()
            for name, buffer in model.named_buffers():  # copies: some modules write to them even in evaluation mode
                values[id(buffer)] = known[name] if name in known else buffer.clone()
            # torch's own tie_weights=True looks tensors up by name. If the model holds a module object twice, torch
            # then replaces its tensors twice, and restores the first replacement instead of the original.
            state: dict[str, Tensor] = {}
            for prefix, module in model.named_modules():  # each object once
                for named in (module.named_parameters, module.named_buffers):
                    for name, tensor in named(prefix=prefix, recurse=False, remove_duplicate=False):
                        state[name] = known[name] if name in known else values[id(tensor)]
            enabled, dtype = self.ambient_autocast or (False, torch.bfloat16)
            with torch.autocast(self.device.type, dtype=dtype) if enabled else nullcontext():
                try:
                    return functional_call(model, state, arguments, keywords, tie_weights=False)
                except (torch.OutOfMemoryError, ConfigurationError):  # the latter comes from a rule of a layer
                    raise
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    raise InputError(
                        f"The network failed on a batch: {error}.",
                        expected="inputs that model(inputs) takes",
                        got=batches.describe(inputs),
                        fix="Look at the error above this one, and call the model on such a batch yourself.",
                    ) from error

    def __call__(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Outputs ``[B, *, C]`` at the network's own parameters, or with some substituted."""
        # Transformer modules leave their fused inference kernels, which have no derivatives, while any mode is active.
        with BaseTorchFunctionMode():
            return self.arrange(batches.output_tensor(self.raw(inputs, parameters)))

    def forward(self, inputs: Any) -> Tensor:
        """Outputs ``[B, *, C]`` without derivatives."""
        with torch.no_grad():
            return self.arrange(batches.output_tensor(self.raw(inputs)))

    def tangent(self, inputs: Any, tangent: Tensor) -> Tensor:
        """``J(x) v`` for a tangent ``v [P]`` in parameter space, ``[B, *, C]``."""
        vector = self.vector()
        # Two backward passes, since many operations (fused attention, recurrent layers) have no forward derivative.
        with torch.enable_grad(), differentiable_kernels(self.model):
            point = vector.requires_grad_()
            outputs = self(inputs, self.substitute(point))
            dummy = torch.zeros_like(outputs, requires_grad=True)
            (pulled,) = torch.autograd.grad(outputs, point, dummy, create_graph=True)
            (pushed,) = torch.autograd.grad(pulled, dummy, tangent.to(pulled))
        return pushed.detach()

    def per_example_gradients(self, inputs: Any, names: tuple[str, ...], cotangents: Tensor) -> dict[str, Tensor]:
        """Vector-Jacobian products of each example on its own: ``[V, B, *shape]`` for each named parameter.

        The general path for parameters whose use in the network no rule describes. ``cotangents`` is ``[V, B, *, C]``.
        """
        return per_example_gradients(self, inputs, {name: self.parameters[name] for name in names}, cotangents)

    def refresh(self) -> None:
        """Take up the present weights of a model that is :attr:`sharded` over ranks; to be called on all of them."""
        refresh_(self.model, self.sharded)
        self._seen = None

    # -- guards --------------------------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Raise :class:`NonFiniteError` if any parameter, selected or not, is NaN or infinite."""
        if math.isfinite(sum(self.state()[1])):
            return
        for name, parameter in self.parameters.items():
            # Eight-bit floats cannot be compared.
            finite = torch.isfinite(parameter.float() if parameter.itemsize == 1 else parameter)
            if not bool(finite.all()):
                raise NonFiniteError(
                    f"Parameter {name!r} is not finite.",
                    expected="a trained network with finite weights",
                    got=f"{int((~finite).sum())} NaN or Inf among {parameter.numel()} entries",
                    fix="The training diverged; train again, e.g. with a smaller learning rate.",
                )

    def state(self) -> tuple[Any, ...]:
        """Names, identities and checksums of all weights and buffers; equal states have equal values.

        Costs one pass over them in each public method, a small part of a forward pass. Writes through ``.data``, NumPy
        or a custom kernel leave no other trace. Another device or number of threads may also show, by rounding.
        """
        with turn(self.model):
            if self._seen is not None:
                return self._seen
            names, tensors = [], []
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                names.append((name, id(tensor)))
                tensors.append(tensor)
            state = names, checksums(tensors)
            if self.ambient_autocast is not None:  # nothing changes the model while a public method runs
                self._seen = state
            return state


def _refuse_unsuitable(model: nn.Module) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        what, fix = "A TorchScript module hides its operations.", "Pass the module that was scripted."
        raise UnsupportedError(what, expected="a plain nn.Module", got="a torch.jit.ScriptModule", fix=fix)
    for name, module in model.named_modules():
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ConfigurationError(
                f"Lazy module {name!r} is not initialised.", fix="Run the model once on a batch before wrapping it."
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise UnsupportedError(
                f"Module {name!r} normalises by the statistics of the batch, so examples depend on each other.",
                expected="batch normalisation with running statistics",
                got="track_running_stats=False",
                fix="Train with track_running_stats=True, or replace it by group or layer normalisation.",
            )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every submodule into evaluation mode, and restore its mode and its tensors afterwards.

    ``training`` is set directly, because a custom ``train()`` may do more, e.g. merge adapter weights. A forward pass
    may store tensors that exist in this call only: recurrent layers keep a list of their weights, weight normalisation
    sets the weight, and some networks remember activations. Attributes that hold tensors are therefore restored; other
    attributes, such as counters, stay as the network left them.
    """
    with turn(model):
        before = []
        for module in model.modules():
            attributes = dict(vars(module))
            lists = {}
            for name, value in attributes.items():
                if type(value) is list and _holds_tensors(value):
                    lists[name] = list(value)
            before.append((module, module.training, attributes, lists))
            module.training = False
        try:
            yield
        finally:
            for module, training, attributes, lists in before:
                module.training = training
                now = vars(module)
                for name in [*now]:
                    if name not in attributes and _holds_tensors(now[name]):
                        del now[name]
                for name, value in attributes.items():
                    if now.get(name) is not value and (_holds_tensors(value) or _holds_tensors(now.get(name))):
                        now[name] = value
                for name, content in lists.items():
                    now[name][:] = content


def _holds_tensors(value: Any) -> bool:
    """Whether an attribute is a tensor, or a list or tuple of tensors or (in recurrent layers) weak references."""
    if type(value) not in (list, tuple):
        return isinstance(value, Tensor)
    return any(isinstance(entry, (Tensor, weakref.ReferenceType)) for entry in value)


def checksums(tensors: Sequence[Tensor]) -> list[float]:
    """Weighted sums of all entries, which tell permutations apart: one for each large tensor, one for all small ones.

    A NaN or infinity makes its sum non-finite. Sparse tensors count with their stored entries and indices. The sums
    depend on the number of threads and on the device, by rounding.
    """
    large: list[Tensor] = []
    small: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = [tensor.detach()]
        if tensor.layout != torch.strided:  # which might not fit in memory as a dense tensor
            coalesced = values[0].to_sparse_coo().coalesce()
            values = [coalesced.indices(), coalesced.values()]
        for stored in values:
            if stored.numel() > _SMALL:
                large.append(stored.flatten() if stored.is_floating_point() else stored.flatten().double())
            else:
                small.setdefault(stored.device, []).append(stored.flatten().double())
    for several in small.values():
        large.append(torch.cat(several))
    sums = []
    for flat in large:
        columns = len(flat) // _STRIDE
        whole = columns * _STRIDE
        ramp = _ramp(0.5, _STRIDE, flat.dtype, flat.device)
        total = (ramp @ flat[:whole].view(_STRIDE, columns)).double() @ _ramp(1.0, columns, torch.float64, flat.device)
        sums.append(float(total + (flat[whole:] * ramp[: len(flat) - whole]).double().sum()))
    return sums


@lru_cache(maxsize=64)
def _ramp(start: float, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights that rise linearly from ``start`` to ``start + 1``."""
    with torch.inference_mode(False):
        return torch.linspace(start, start + 1, length, dtype=dtype, device=device)
