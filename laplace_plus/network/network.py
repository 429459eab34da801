"""The trained module as a pure function ``f(θ, x)`` of its parameters and inputs, run by a shadow of the model."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dis import opname
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from laplace_plus import checks
from laplace_plus.errors import (
    NETWORK_ERRORS,
    ConfigurationError,
    DataError,
    InputError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.network import batches
from laplace_plus.network.differentiability import eager
from laplace_plus.network.example_gradients import per_example_gradients
from laplace_plus.network.selection import MERGED, Selected, Selection, adapter_state, select, uses
from laplace_plus.network.shadow import SeenNow, Shadow, copied, is_sharded, local, reshard, unwrap, whole

_SMALL = 100_000
"""Up to this many parameters, a batch of one example runs with several parameter vectors at once."""

_TOGETHER = 16
"""So many: more are no faster, and take their activations' memory."""

M = TypeVar("M", bound=Callable[..., Any])

AMBIENT: ContextVar[tuple[bool, torch.dtype] | None] = ContextVar("ambient_autocast", default=None)
"""Whether autocast is on for the caller of the public method that runs, and its type; None outside."""


@contextmanager
def exact_arithmetic(network: Network) -> Iterator[None]:
    """Run a public method without the caller's autocast and inference mode, in which there are no derivatives.

    Only the network's own forward pass runs under the caller's autocast. Nested calls do nothing.
    """
    if AMBIENT.get() is not None:
        yield
        return
    kind = network.device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    low = dtype if enabled else network.tensor(network.parameter_names[0]).dtype
    token, products = AMBIENT.set((enabled, dtype)), checks.PRODUCTS.get()
    checks.PRODUCTS.set(torch.finfo(low).eps if low.itemsize == 2 else 0.0)  # noqa: PLR2004
    no_autocast = torch.autocast(kind, enabled=False) if enabled else nullcontext()
    plain = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    try:
        with plain, no_autocast:
            yield
    finally:
        checks.PRODUCTS.set(products)
        AMBIENT.reset(token)


def full_precision(method: M) -> M:
    """Run a public method outside of the caller's autocast and inference mode, which only the network's pass sees."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **keywords: Any) -> Any:
        if keywords.get("generator") is not None:
            checks.generator(keywords["generator"])
        with exact_arithmetic(self.network):
            return method(self, *args, **keywords)

    return cast(M, wrapped)


class Held(NamedTuple):
    """A model's modules, each once; parameters by their (first) names; the places of all tensors by every name.

    ``sharded`` has the (first) names of the parameters of a sharded network by the id of what holds them, and the key.
    """

    modules: list[nn.Module]
    parameters: dict[str, Tensor]
    places: dict[str, tuple[dict[str, Any], str]]
    sharded: dict[tuple[int, str], str]


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
        self.model: nn.Module = unwrap(model)
        self.selection, self.arrange = parameters, arrange
        # What is called in place of the model, for another output of the same weights.
        self.function: Callable[..., Any] | None = None
        self._is_followed = self._is_copied = False  # whether a pass has shown that the shadow follows all references
        # Of a sharded network, lets all ranks make their passes at the same time; see laplace_plus.distributed.
        self.turns: Any = None
        refuse_unsuitable(self.model)
        self.mark()
        self.select_last_layer(None)
        self.forget()

    def forget(self) -> None:
        """Drop what has been learnt about how the network runs; a fit begins with this."""
        self.examined: dict[Any, Any] = {}  # of each kind of batch, see laplace_plus.network.invariant
        self.pushes: Any = None  # the way to products with the Jacobian that was found right
        self.missed: set[str] = set()  # parameters for which some batch missed the invariant
        self.warned: set[str] = set()  # parameters of which a warning has said what they cost
        self.reached: dict[str, bool] = {}  # whether a gradient of the outputs reaches a parameter, as far as asked
        self.weights: dict[str, str] = {}  # what files say of a sharded network's, which takes all ranks to find
        self.lists: bool | None = None  # whether a list is one argument of the model, once a batch was one

    def selecting(self, parameters: Selection) -> Network:
        """The same network with other parameters selected."""
        return Network(self.model, parameters, self.arrange)

    def of(self, function: Callable[..., Any], arrange: Callable[[Any], Tensor]) -> Network:
        """The same weights with another function of the inputs, in which a caller uses the model."""
        result = copy.copy(self)
        result.function, result.arrange, result.selection = function, arrange, self.parameter_names
        result._is_followed = result._is_copied = False
        result.forget()
        return result

    def select_last_layer(self, layer: str | None) -> None:
        """Select the parameters; a batch may have shown which layer is last (None: the last one defined)."""
        self.selected: tuple[Selected, ...] = select(self.model, self.selection, last_layer=layer)
        for item in self.selected if not isinstance(self.selection, str) or layer or self.selection == "all" else ():
            if self.tensor(item.name).is_complex():
                what = f"{item.name!r} holds complex weights."
                fix = "Pass parameters=lambda name, p: not p.is_complex()."
                raise UnsupportedError(what, expected="real weights", got=f"{self.tensor(item.name).dtype}", fix=fix)
        self.parameter_names = tuple([item.name for item in self.selected])
        self.layers: tuple[str, ...] = tuple(dict.fromkeys([item.layer for item in self.selected]))
        # Further names of tied parameters that are not selected as a whole: each use is told apart.
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        every = uses(self.model)
        if not first.keys() >= set(map(id, every.values())):
            what = "The network makes its parameters anew when it is asked for them, as peft's LoRA of attention does."
            fix = "Put adapters on linear layers only, or merge them: model.merge_and_unload()."
            raise UnsupportedError(what, expected="the same parameters each time", got="others", fix=fix)
        self._apart = [n for n, p in every.items() if first[id(p)] not in (n, *self.parameter_names)]
        self.offsets: dict[str, int] = {}
        self.n_parameters = 0
        for item in self.selected:
            self.offsets[item.name] = self.n_parameters
            self.n_parameters += item.size
        self._layer_index: Tensor | None = None
        self.examined = {}

    # -- the parameter vector ------------------------------------------------------------------------------------------

    def layer_index(self) -> Tensor:
        """The layer number of each entry of the parameter vector: ``[P]`` integers."""
        if self._layer_index is None:
            number = {layer: i for i, layer in enumerate(self.layers)}
            self._layer_index = torch.cat([torch.full((item.size,), number[item.layer]) for item in self.selected])
        return self._layer_index

    def tensor(self, name: str) -> Tensor:
        """The model's own parameter or buffer of that name."""
        own, key = self.held.places[name]
        return own[key]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Detached views of all parameters, selected or not; of tied ones that are not selected, one for each use."""
        result = {}
        for name in (*self.held.parameters, *self._apart):
            parameter = self.tensor(name)
            # Frozen ones of a class of their own stay as they are: quantised weights keep their scales as attributes.
            is_plain = parameter.requires_grad or type(parameter) is nn.Parameter
            result[name] = parameter.detach() if is_plain else parameter
        return result

    def vector(self) -> Tensor:
        """The network's current selected entries, ``[P]``, at least float32."""
        dtype, parts = self.dtype, []
        for item in self.selected:
            own = self.tensor(item.name).detach()
            if self.held.sharded and is_sharded(own):
                with self.turn("whole", item.name):
                    own = whole(own)
            flat = own.flatten()
            flat = flat if item.mask is None else flat[item.mask.to(flat.device)]
            parts.append(flat.to(dtype))
        return torch.cat(parts)

    def substitute(self, vectors: Tensor) -> dict[str, Tensor]:
        """Parameter tensors with the selected entries taken from ``vectors [..., P]``; differentiable."""
        result, lead = {}, vectors.shape[:-1]
        for item, entries in zip(self.selected, vectors.split([item.size for item in self.selected], -1), strict=True):
            original = self.tensor(item.name).detach()
            entries = entries.to(original.dtype, copy=not lead)  # complex views of them begin at even places
            if item.mask is not None:
                index = item.mask.to(original.device).nonzero().squeeze(-1)
                entries = original.flatten().expand(*lead, -1).index_copy(-1, index, entries)
            result[item.name] = entries.view((*lead, *item.shape))
        return result

    @property
    def dtype(self) -> torch.dtype:
        """The type that factorisations use: that of the selected parameters, at least float32."""
        dtype = torch.float32
        for item in self.selected:
            dtype = torch.promote_types(dtype, self.tensor(item.name).dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the first selected parameter; batches are moved there."""
        return self.tensor(self.parameter_names[0]).device

    def receive(self, inputs: Any) -> Any:
        """Inputs moved to the network's device; a list of examples, where the batches of the fit were such, as one."""
        whole = self.lists and type(inputs) in (tuple, list)
        return batches.to_device(batches.Examples(inputs) if whole else inputs, self.device)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def raw(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None, mode: Any = None) -> Any:
        """What the model returns, with some parameters substituted, watched by a function mode.

        InputError: An operation fails on these inputs. What the network's own code raises comes out as it is.
        """
        tensors, apart = dict[int, Tensor](), dict[tuple[int, str], Tensor]()
        for name, value in (parameters or {}).items():
            own, key = self.held.places[name]
            if self.held.sharded and is_sharded(own[key]) and not is_sharded(value):
                what = "The weights of a sharded network cannot be replaced."
                fix = "Use KFAC or Diagonal, linearised, or lp.distributed.gathered(model, whole_model)."
                raise UnsupportedError(what, expected="the network's own weights", got=f"another {name!r}", fix=fix)
            if name in self._apart:
                apart[id(own), key] = value
            else:
                tensors[id(own[key])] = value
        enabled, dtype = AMBIENT.get() or (False, torch.bfloat16)
        watch = nullcontext() if self._is_followed or self.held.sharded else _OwnTensors(self.held)
        try:
            # Nothing is compiled before torch._dynamo is imported, which takes a second.
            with (
                eager if "torch._dynamo" in sys.modules else nullcontext(),
                torch.autocast(self.device.type, dtype=dtype) if enabled else nullcontext(),
            ):
                if self._is_copied:
                    target: Any = copied(self.model, tensors, apart)
                else:
                    shadow = Shadow(tensors, apart, self.held.modules)
                    if self.held.sharded:
                        shadow.sharded = self._seen_now(mode)
                    target = shadow.module(self.model) if self.function is None else shadow(self.function)
                arguments, keywords = batches.bind(target, inputs, whole=self.lists)
                if isinstance(inputs, (tuple, list)):
                    before, self.lists = self.lists, bool(arguments) and arguments[0] is inputs
                    if before not in (None, self.lists):
                        self.lists = before
                        raise _two_ways(inputs)
                names = self.parameter_names if hasattr(mode, "see") else None
                turn = self.turn("forward", names, inputs=inputs) if self.held.sharded else nullcontext()
                with turn, nullcontext() if mode is None else mode, watch:
                    found = target(*arguments, **keywords)
        except (torch.OutOfMemoryError, ConfigurationError, DataError):  # from a rule of a layer, or of bind
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if _is_raised(error):
                error.add_note(f"Raised by the network on a batch {checks.describe(inputs)}.")
                raise
            raise _failed(error, inputs) from error
        finally:
            if self.held.sharded:
                reshard(self.held.modules)
        seen = getattr(watch, "seen", ())
        if not seen:
            self._is_followed = True
            return found
        if not self._is_copied and self.function is None:  # references that a shadow does not follow
            self._is_copied = True
            return self.raw(inputs, parameters, mode)
        what = "The network reaches weights through references that cannot be followed."
        expected = "references in modules, containers, bound methods or closures"
        fix = "Register the module that holds them as an attribute of the one that calls it."
        raise UnsupportedError(what, expected=expected, got=", ".join(sorted(seen)[:4]), fix=fix)

    def _seen_now(self, mode: Any) -> Any:
        """Makes a module's ``_parameters`` such as a pass of a sharded network sees; ``mode.see`` hears of each use."""
        names = dict(self.held.sharded)
        for name in self._apart:
            own, key = self.held.places[name]
            names[id(own), key] = name
        return partial(SeenNow, names=names, see=getattr(mode, "see", lambda name, tensor: tensor.detach()))

    def turn(self, *what: Any, inputs: Any = None) -> AbstractContextManager[None]:
        """Waits until all ranks do the same as this one, as a sharded network only can."""
        if self.turns is None or not self.turns.is_open:
            of, expected = "A sharded network runs on all ranks at the same time.", "a call that all ranks share"
            fix = "Use lp.distributed.fit, and `with lp.distributed.together(posterior):` around all that follows."
            raise UnsupportedError(of, expected=expected, got="a call of this rank alone", fix=fix)
        return self.turns.taken(what, inputs)

    def several(self, inputs: Any, vectors: Tensor) -> list[Tensor]:
        """Outputs ``[B, *, C]`` with the selected entries taken from each of ``vectors [S, P]``, no derivatives."""
        stacked = self.substitute(vectors)
        # Of more examples, convolutions would be slower.
        if len(vectors) > 1 and self.n_parameters <= _SMALL and batches.batch_size(inputs) == 1:
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    mapped = torch.vmap(lambda own: self(inputs, own), chunk_size=_TOGETHER)
                    return [*mapped(stacked)]
            except NETWORK_ERRORS:  # some operation that cannot be batched
                pass
        with torch.enable_grad():  # as in forward
            sets = ({name: own[n].detach().clone() for name, own in stacked.items()} for n in range(len(vectors)))
            return [self(inputs, one).detach() for one in sets]

    def __call__(self, inputs: Any, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """Outputs ``[B, *, C]`` at the network's own parameters, or with some substituted."""
        # While any mode is active, transformer modules leave their fused inference kernels, which have no derivatives,
        # overlook adapters of their layers, and give zeros for padding.
        return self.arrange(batches.output_tensor(self.raw(inputs, parameters, BaseTorchFunctionMode())))

    def forward(self, inputs: Any) -> Tensor:
        """Outputs ``[B, *, C]`` without derivatives."""
        with torch.enable_grad():  # for networks that differentiate themselves; no parameter requires gradients
            return self(inputs).detach()

    def per_example_gradients(self, inputs: Any, names: tuple[str, ...], cotangents: Tensor) -> dict[str, Tensor]:
        """Vector-Jacobian products of each example on its own: ``[V, B, *shape]`` for each named parameter.

        For posteriors of one's own. ``cotangents`` is ``[V, B, *, C]``.
        """
        return per_example_gradients(self, inputs, {name: self.parameters[name] for name in names}, cotangents, False)

    # -- guards --------------------------------------------------------------------------------------------------------

    def check_finite(self) -> None:
        """Raise :class:`NonFiniteError` if any parameter, selected or not, is NaN or infinite."""
        for name, parameter in self.parameters.items():
            parameter = local(parameter) if self.held.sharded and is_sharded(parameter) else parameter
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
        """What differs after a change of modules, tensors or adapters: identities, addresses, numbers of writes."""
        held, seen = Held([], {}, {}, {}), dict[int, str]()
        tensors, adapters = list[Any](), list[Any]()
        for prefix, module in self.model.named_modules():
            held.modules.append(module)
            if hasattr(type(module), "reshard"):
                reshard([module])
            for own in (module._parameters, module._buffers):
                for key, tensor in own.items():
                    if tensor is None:
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    held.places[name] = own, key
                    if is_spread := hasattr(tensor, "full_tensor"):
                        held.sharded[id(own), key] = seen.get(id(tensor), name)
                    if id(tensor) in seen:
                        continue
                    seen[id(tensor)] = name
                    if own is module._parameters:
                        held.parameters[name] = tensor
                    try:
                        part = local(tensor) if is_spread else tensor
                        tensors.append((name, id(tensor), part.data_ptr(), tensor._version))
                    except RuntimeError:  # of inference mode, sparse ones, and tensors without storage
                        tensors.append((name, id(tensor)))
            if MERGED in vars(module):
                adapters.append((adapter_state(module),))
        self.held = held  # whole, for other threads
        return [[*map(id, held.modules)], *tensors, *adapters]


def _two_ways(inputs: Any) -> DataError:
    what = "A list is one argument of the network in one batch, and several arguments in another."
    expected = "a list with an entry for each example in every batch, or in none"
    fix = "Yield {name: list, 'labels': y} for one argument, by its name in forward, or (x1, x2, y) for two."
    return DataError(what, expected=expected, got=checks.describe(inputs), fix=fix)


def _failed(error: Exception, inputs: Any) -> InputError:
    what, expected = f"The network failed on a batch: {error}.", "inputs that model(inputs) takes"
    fix = "Look at the error above this one, and call the model on such a batch yourself."
    if "does not require grad" in str(error):
        fix = "Weights are constants here: before forward differentiates by h, let it do h.requires_grad_()."
    if isinstance(inputs, tuple):  # (x, y, w) or (x, y, index): all but the last entry were taken for inputs
        fix += " The last of a batch's entries is its target. Weights w of examples come with theirs, as (x, (y, w)), "
        fix += "and with weighted=True in the likelihood, such as lp.Categorical(weighted=True). Leave an index out: "
        fix += "[(x, y) for x, y, index in loader]."
    return InputError(what, expected=expected, got=checks.describe(inputs), fix=fix)


def _is_raised(error: BaseException) -> bool:
    """Whether an error comes from a ``raise`` of code other than torch's: the user's own word on the inputs."""
    trace: Any = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame, operation = trace.tb_frame, opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]
    return operation == "RAISE_VARARGS" and not frame.f_globals.get("__name__", "").startswith("torch.")


class _OwnTensors(TorchFunctionMode):
    """Notes which of a model's own parameters are used, which never should be: detached ones take their places."""

    def __init__(self, held: Held):
        super().__init__()
        self._names: dict[int, str] = {}
        for name, parameter in held.parameters.items():
            if parameter.requires_grad or type(parameter) is nn.Parameter:
                self._names[id(parameter)] = name
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in batches.tensors_in((args, kwargs)):
            if id(tensor) in self._names and func is not Tensor.detach:
                self.seen.add(self._names[id(tensor)])
        return func(*args, **(kwargs or {}))


def refuse_unsuitable(model: nn.Module) -> None:
    """Raise for scripted, lazy and meta modules, and such as normalise by the statistics of the batch."""
    if isinstance(model, torch.jit.ScriptModule):
        what, fix = "A TorchScript module hides its operations.", "Pass the module that was scripted."
        raise UnsupportedError(what, expected="a plain nn.Module", got="a torch.jit.ScriptModule", fix=fix)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_flat = type(tensor).__name__ == "FlatParameter"
        # As fully_shard makes them, layers gather their own weights.
        if is_flat or (is_sharded(tensor) and not any(hasattr(type(own), "reshard") for own in model.modules())):
            what, fix = f"{name!r} is sharded over ranks.", "Pass lp.distributed.gathered(model, whole_model)."
            raise UnsupportedError(what, expected="whole parameters on each rank", got=type(tensor).__name__, fix=fix)
        if isinstance(tensor, nn.UninitializedParameter) or tensor.is_meta:
            what = f"{name!r} is on the meta device, or of a lazy module that is not initialised."
            fix = "Load weights by model.load_state_dict(..., assign=True), or run the model once on a batch."
            raise ConfigurationError(what, expected="a trained network", got="a network without weights", fix=fix)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            what = f"Module {name!r} normalises by the statistics of the batch, so examples depend on each other."
            expected, got = "batch normalisation with running statistics", "track_running_stats=False"
            fix = "Train with track_running_stats=True, or replace it by group or layer normalisation."
            raise UnsupportedError(what, expected=expected, got=got, fix=fix)
