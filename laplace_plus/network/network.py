"""The trained module as a pure function ``f(θ, x)`` of its parameters and inputs.

The user's model stays as it is: it runs in evaluation mode, with detached views of its parameters and copies of its
buffers in their places. All of them and every mode are restored, also when the network fails.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import _GeneratorContextManager, contextmanager, nullcontext, suppress
from operator import attrgetter, is_
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from laplace_plus._memory import CACHE_BYTES, budget, memory_budget, slices
from laplace_plus.distributed import plain_module, refresh_, sharded_source
from laplace_plus.errors import ConfigurationError, DataError, InputError, NonFiniteError, UnsupportedError
from laplace_plus.linalg.results import PRODUCTS
from laplace_plus.network import batches
from laplace_plus.network.adapters import MERGED, adapter_state
from laplace_plus.network.differentiability import Shared, differentiable_kernels, eager, refuse_checkpointing
from laplace_plus.network.entries import entries_of
from laplace_plus.network.example_gradients import per_example_gradients
from laplace_plus.network.selection import Selected, Selection, select, uses

_own_parameters, _own_buffers = attrgetter("_parameters"), attrgetter("_buffers")  # a module's, without its submodules'

_CONTEXTLIB = [_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__]

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_registering = threading.Lock()


def turn(model: nn.Module) -> threading.RLock:
    """The re-entrant lock of a model; models that share modules share it."""
    lock = _locks.get(model)
    if lock is None:
        with _registering:
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
        differentiates, modes = torch.is_grad_enabled(), torch.overrides._len_torch_function_stack()
        try:
            network.kept["inside"] = threading.get_ident()
            device, kind = network.device, network.device.type
            enabled = torch.is_autocast_enabled(kind)
            network.ambient_autocast = enabled, torch.get_autocast_dtype(kind)
            low = network.ambient_autocast[1] if enabled else network.held.places[network.parameter_names[0]][2].dtype
            PRODUCTS.set(torch.finfo(low).eps if low.itemsize == 2 else 0.0)  # noqa: PLR2004
            no_autocast = torch.autocast(kind, enabled=False) if enabled else nullcontext()
            plain = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
            with plain, no_autocast, memory_budget(memory, device):
                yield
        except BaseException as error:
            for frame, _ in walk_tb(error.__traceback__):
                if frame.f_code in _CONTEXTLIB:  # perhaps an interrupt came before it left a context
                    frame.f_locals["self"].gen.close()
            for shared in Shared.all:  # left behind by an interrupt on the way in or out
                shared.leave(0)
            while torch.overrides._len_torch_function_stack() > modes:
                torch.overrides._pop_mode()
            if isinstance(error, RuntimeError):
                refuse_checkpointing(error)
            raise
        finally:
            network.ambient_autocast = None
            network.kept.clear()
            PRODUCTS.set(0.0)
            torch.set_grad_enabled(differentiates)


class Held(NamedTuple):
    """A model's modules, each once; its tensors by their (first) names; the places of all by every name."""

    modules: list[nn.Module]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    places: dict[str, tuple[dict[str, Any], str, Tensor]]


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
        parameters: Which parameters; see :mod:`laplace_plus.network.selection`.
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
        SelectionError: See :func:`laplace_plus.network.selection.select`.
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
        # What is called in place of the model, for another output of the same weights.
        self.function: Callable[..., Any] | None = None
        # Found in the public method that runs, as nothing changes the model meanwhile; empty outside, and stays so.
        self.kept: dict[str, Any] = {}
        # Where the tensors were when their entries were last looked up, and views of these.
        self._entries: tuple[list[Any], list[list[Tensor]]] = [], []
        with turn(self.model):
            refuse_unsuitable(self.model)
            self.select_last_layer(None)
        # Whether a gradient of the outputs reaches a parameter, where autograd had to be asked.
        self.reached: dict[str, bool] = {}
        # Memory of one example's forward pass and of one cotangent's gradients (None before the first batch), and of
        # the forward pass alone.
        self.bytes_per_example: int | None = None
        self.bytes_forward = 0
        # Whether a batch's examples may run apart from each other; None while unknown.
        self.can_cut: bool | None = None
        # The caller's autocast while a public method runs; None outside.
        self.ambient_autocast: tuple[bool, torch.dtype] | None = None

    def selecting(self, parameters: Selection) -> Network:
        """The same network with other parameters selected."""
        other = Network(self.model, parameters, self.arrange)
        other.ambient_autocast = self.ambient_autocast
        return other

    def of(self, function: Callable[..., Any], arrange: Callable[[Any], Tensor]) -> Network:
        """The same weights with another function of the inputs, in which a caller uses the model."""
        result = copy.copy(self)
        result.function, result.arrange, result.selection = function, arrange, self.parameter_names
        result.kept, result.reached, result.example_axes, result.layouts = {}, {}, {}, {}
        result.bytes_per_example = result.can_cut = None
        return result

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
        self.kept.clear()
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
    def held(self) -> Held:
        """What the model holds, from one walk over its modules in each public method."""
        if "held" in self.kept:
            return self.kept["held"]
        held, seen = Held([], {}, {}, {}), set()
        for prefix, module in self.model.named_modules():
            held.modules.append(module)
            for named, own in (held.parameters, _own_parameters(module)), (held.buffers, _own_buffers(module)):
                for key, tensor in own.items():
                    if tensor is not None:
                        name = f"{prefix}.{key}" if prefix else key
                        held.places[name] = own, key, tensor
                        if id(tensor) not in seen:
                            named[name] = tensor
                            seen.add(id(tensor))
        if self.kept:
            self.kept["held"] = held
        return held

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Detached views of all parameters, selected or not; of tied ones that are not selected, one for each use."""
        result = {}
        for name, parameter in self.held.parameters.items():
            # Frozen ones of a class of their own stay as they are: quantised weights keep their scales as attributes.
            is_plain = parameter.requires_grad or type(parameter) is nn.Parameter
            result[name] = parameter.detach() if is_plain else parameter
        for name in self._apart:
            result[name] = self.held.places[name][2].detach()
        return result

    def vector(self) -> Tensor:
        """The network's current selected entries, ``[P]``, at least float32."""
        parameters, dtype, slices = self.parameters, self.dtype, []
        for item in self.selected:
            flat = parameters[item.name].flatten()
            flat = flat if item.mask is None else flat[item.mask.to(flat.device)]
            slices.append(flat.to(dtype))
        return torch.cat(slices)

    def substitute(self, vectors: Tensor) -> dict[str, Tensor]:
        """Parameter tensors with the selected entries taken from ``vectors [..., P]``; differentiable."""
        parameters, result, lead = self.parameters, {}, vectors.shape[:-1]
        for item, entries in zip(self.selected, vectors.split([item.size for item in self.selected], -1), strict=True):
            original = parameters[item.name]
            entries = entries.to(original.dtype)
            if item.mask is not None:
                index = item.mask.to(original.device).nonzero().squeeze(-1)
                entries = original.flatten().expand(*lead, -1).index_copy(-1, index, entries)
            result[item.name] = entries.view((*lead, *item.shape))
        return result

    @property
    def dtype(self) -> torch.dtype:
        """The type that factorisations use: that of the selected parameters, at least float32."""
        dtype, places = torch.float32, self.held.places
        for item in self.selected:
            dtype = torch.promote_types(dtype, places[item.name][2].dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the first selected parameter; batches are moved there."""
        return self.held.places[self.parameter_names[0]][2].device

    def receive(self, inputs: Any) -> Any:
        """Inputs moved to the network's device."""
        return batches.to_device(inputs, self.device)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def raw(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
        """What the model returns, with some parameters substituted; InputError: the network fails on these inputs."""
        return self.raw_each(inputs, [parameters or {}])[0]

    def raw_each(self, inputs: Any, parameters: Sequence[Mapping[str, Tensor]]) -> list[Any]:
        """As :meth:`raw`, with one set of parameters after the other."""
        held, found = self.held, []
        before: list[Any] = []
        enabled, dtype = self.ambient_autocast or (False, torch.bfloat16)
        with turn(self.model):
            try:
                try:
                    # Nothing is compiled before torch._dynamo is imported, which takes a second.
                    with (
                        eager if "torch._dynamo" in sys.modules else nullcontext(),
                        torch.autocast(self.device.type, dtype=dtype) if enabled else nullcontext(),
                    ):
                        _evaluate(held.modules, before)
                        arguments, keywords = batches.bind(self.function or self.model, inputs)
                        for number, known in enumerate(parameters):
                            if number:
                                _restore(before)
                            values: dict[int, Tensor] = {}  # by identity: tied tensors have one, if none for their use
                            for name, buffer in held.buffers.items():  # copies: some modules write to them even so
                                values[id(buffer)] = known[name] if name in known else buffer.clone()
                            for name, parameter in held.parameters.items():
                                own = known.get(name)
                                if own is None:  # an attribute takes long under modes
                                    plain = parameter.requires_grad or type(parameter) is nn.Parameter
                                    own = parameter.detach() if plain else parameter
                                values[id(parameter)] = own
                            for name, (place, key, tensor) in held.places.items():
                                place[key] = known[name] if name in known else values[id(tensor)]
                            found.append((self.function or self.model)(*arguments, **keywords))
                except (torch.OutOfMemoryError, ConfigurationError, DataError):  # from a rule of a layer, or of bind
                    raise
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    what, expected = f"The network failed on a batch: {error}.", "inputs that model(inputs) takes"
                    fix = "Look at the error above this one, and call the model on such a batch yourself."
                    raise InputError(what, expected=expected, got=batches.describe(inputs), fix=fix) from error
                finally:
                    _restore(before, held.places)
            except BaseException:  # Ctrl-C in the middle of restoring
                _restore(before, held.places)
                raise
        return found

    def several(self, inputs: Any, vectors: Tensor) -> list[Tensor]:
        """Outputs ``[B, *, C]`` with the selected entries taken from each of ``vectors [S, P]``, no derivatives."""
        stacked = self.substitute(vectors)
        fits = 0 < len(vectors) * self.bytes_forward <= 8 * CACHE_BYTES and not self.sharded
        if fits and batches.batch_size(inputs) == 1:  # of more examples, convolutions would be slower
            with suppress(InputError), torch.no_grad(), warnings.catch_warnings():  # where it can be batched
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return [*torch.vmap(lambda own: self(inputs, own))(stacked)]
        sets = [dict(zip(stacked, one, strict=True)) for one in zip(*map(Tensor.unbind, stacked.values()), strict=True)]
        # Other kernels, with other rounding, where no mode is active and no derivatives are asked for.
        fused = any(isinstance(m, (nn.TransformerEncoderLayer, nn.MultiheadAttention)) for m in self.held.modules)
        with torch.no_grad(), BaseTorchFunctionMode() if fused else nullcontext():
            found = [self.raw_each(piece, sets) for piece in self.cut(inputs, self.bytes_forward)]
        parts = [[self.arrange(batches.output_tensor(raw)) for raw in own] for own in found]
        return parts[0] if len(parts) == 1 else [torch.cat(own) for own in zip(*parts, strict=True)]

    def __call__(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Outputs ``[B, *, C]`` at the network's own parameters, or with some substituted."""
        # Transformer modules leave their fused inference kernels, which have no derivatives, while any mode is active.
        with BaseTorchFunctionMode():
            return self.arrange(batches.output_tensor(self.raw(inputs, parameters)))

    def forward(self, inputs: Any) -> Tensor:
        """Outputs ``[B, *, C]`` without derivatives."""
        with torch.no_grad():
            pieces = self.cut(inputs, self.bytes_forward) if self.can_cut else [inputs]
            parts = [self.arrange(batches.output_tensor(self.raw(piece))) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def cut(self, inputs: Any, bytes_each: int, allowed: int | None = None) -> list[Any]:
        """Inputs in parts of ``allowed`` bytes (half the memory budget), if examples are known to run apart."""
        size = batches.batch_size(inputs) if bytes_each and self.can_cut else 0
        allowed = budget(self.device) // 2 if allowed is None else allowed
        if bytes_each * size <= allowed or size == 1 or not batches.can_be_cut(inputs, size):
            return [inputs]
        return [batches.cut(inputs, part) for part in slices(size, bytes_each, allowed)]

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
        self.kept.clear()

    # -- guards --------------------------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Raise :class:`NonFiniteError` if any parameter, selected or not, is NaN or infinite."""
        for name, parameter in self.parameters.items():
            values = parameter.float() if parameter.itemsize == 1 else parameter  # eight-bit floats cannot be compared
            if bool(torch.isfinite(values.sum())):  # which NaNs and infinities reach
                continue
            finite = torch.isfinite(values)
            if not bool(finite.all()):
                what = f"Parameter {name!r} is not finite."
                got = f"{int((~finite).sum())} NaN or Inf among {parameter.numel()} entries"
                fix = "The training diverged; train again, e.g. with a smaller learning rate."
                raise NonFiniteError(what, expected="a trained network with finite weights", got=got, fix=fix)

    def mark(self) -> list[Any]:
        """What differs after a change of modules, options, adapters or tensors: identities, addresses, writes, entries.

        Options are what a class declares as ``__constants__``, as torch's do; others may be counters. Of large
        tensors, unless they are sparse or of other classes, some entries stand for all.
        """
        if "mark" in self.kept:
            return self.kept["mark"]
        held, stays = self.held, True
        found: list[Any] = [[*map(id, held.modules)]]
        for module in held.modules:
            found.append([*map(vars(module).get, getattr(type(module), "__constants__", ()))])
            if MERGED in vars(module):
                found.append(adapter_state(module))
        for named in (held.parameters, held.buffers):
            for name, tensor in named.items():
                try:
                    found.append((name, id(tensor), tensor.data_ptr(), tensor._version))
                    stays = stays and type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous()
                except RuntimeError:  # of inference mode, sparse ones, and tensors without storage
                    found.append((name, id(tensor)))
                    stays = False
        place, entries = self._entries
        if place != found or not stays:
            entries = entries_of((*held.parameters.values(), *held.buffers.values()))
            self._entries = found.copy(), entries
        for own in entries:
            found.append(torch.cat(own).view(torch.uint8).cpu().numpy().tobytes())
        if self.kept:
            self.kept["mark"] = found
        return found


def refuse_unsuitable(model: nn.Module) -> None:
    """Raise for scripted, lazy and meta modules, and such as normalise by the statistics of the batch."""
    if isinstance(model, torch.jit.ScriptModule):
        what, fix = "A TorchScript module hides its operations.", "Pass the module that was scripted."
        raise UnsupportedError(what, expected="a plain nn.Module", got="a torch.jit.ScriptModule", fix=fix)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            what, fix = f"{name!r} is on the meta device.", "Load weights: model.load_state_dict(..., assign=True)."
            raise ConfigurationError(what, expected="a trained network", got="a network without weights", fix=fix)
    for name, module in model.named_modules():
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters(recurse=False)):
            what, fix = f"Lazy module {name!r} is not initialised.", "Run the model once on a batch before wrapping it."
            raise ConfigurationError(what, fix=fix)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            what = f"Module {name!r} normalises by the statistics of the batch, so examples depend on each other."
            expected, got = "batch normalisation with running statistics", "track_running_stats=False"
            fix = "Train with track_running_stats=True, or replace it by group or layer normalisation."
            raise UnsupportedError(what, expected=expected, got=got, fix=fix)


def _evaluate(modules: Sequence[nn.Module], before: list[Any]) -> None:
    """Put modules into evaluation mode, each after what :func:`_restore` takes has been noted in ``before``.

    ``training`` is set directly, because a custom ``train()`` may do more, e.g. merge adapter weights. A forward pass
    may store tensors that exist in this call only: recurrent layers keep a list of their weights, weight normalisation
    sets the weight, and some networks remember activations. Attributes that hold tensors are therefore restored; other
    attributes, such as counters, stay as the network left them.
    """
    for module in modules:
        own, training = vars(module), module.training
        attributes, lists = own.copy(), {}
        if list in map(type, own.values()):
            lists = {name: [*value] for name, value in own.items() if type(value) is list and _holds_tensors(value)}
        before.append((module, training, own, attributes, lists))
        if training:  # past the module's own __setattr__, which is slow, but for scripted ones and properties
            (object.__setattr__ if "training" in own else setattr)(module, "training", False)


def _restore(before: Any, places: Mapping[str, Any] | None = None) -> None:
    """Restore the attributes that hold tensors; with ``places``, modes and the tensors there, too."""
    if places is not None:
        for own, key, tensor in places.values():
            own[key] = tensor
        for module, training, own, *_ in before:
            if module.training != training:
                (object.__setattr__ if "training" in own else setattr)(module, "training", training)
    for _, _, now, attributes, lists in before:
        if now.keys() != attributes.keys() or not all(map(is_, now.values(), attributes.values())):
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
