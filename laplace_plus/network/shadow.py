"""Module objects of its own over chosen tensors, made for one call: the user's model is never touched.

A shadow is a tree of new module objects of the same classes in evaluation mode. They have copies of the containers and
buffers of the user's modules, and share everything else. What a forward pass stores on ``self`` is gone with it, so
that no call sees another one, whichever thread makes it, and nothing has to be restored or locked.

Plain attributes may refer to modules and parameters, too: lists of them, bound methods (such as the ``forward`` that
accelerate puts into a module), partial functions, closures. All are mapped to the shadow. A reference that hides in an
object of another kind is only found by :func:`copied`, which copies the whole model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_SHARED = frozenset({type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size})
"""Types of attributes that hold no reference to a module or tensor and cannot be written to."""

_CALLABLES = frozenset({FunctionType, MethodType, partial})

_CONTAINERS = frozenset({list, set, dict, OrderedDict, defaultdict, deque, tuple})

_OWN = frozenset({"_modules", "_parameters", "_buffers", "training"})

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes of every module; but for a shadow's own, those that are containers are empty without hooks."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers, which hide or scatter its operations."""
    wrapper = "module" if isinstance(model, _PARALLEL) else "_orig_mod"
    return unwrap(model._modules[wrapper]) if wrapper in model._modules else model  # type: ignore[arg-type]


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is spread over ranks: a DTensor, as of ``fully_shard``."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """A tensor with the parts of all ranks, which make this call together where it is sharded."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local(tensor: Any) -> Tensor:
    """What this rank holds of a sharded tensor."""
    with torch.no_grad():
        return tensor.to_local()


def reshard(modules: Iterable[Any]) -> None:
    """Free what a forward pass of a sharded network leaves whole, as the outermost module's parameters."""
    for module in modules:
        if hasattr(type(module), "reshard"):
            module.reshard()


class SeenNow(dict[str, Any]):
    """A module's own parameters as they are at the time of reading: sharded ones are whole only while its layer runs.

    ``see(name, tensor)`` gives what the module gets for a parameter that is whole now, by its name in the model.
    """

    def __init__(self, own: dict[str, Any], names: Mapping[tuple[int, str], str], see: Callable[[str, Tensor], Tensor]):
        super().__init__(own)
        self._own, self._names, self._see = own, names, see

    def __getitem__(self, key: str) -> Any:
        tensor = self._own[key]
        return tensor if tensor is None or is_sharded(tensor) else self._see(self._names[id(self._own), key], tensor)


class Shadow:
    """Makes shadows of modules, and of functions that refer to them, over the same tensors.

    Args:
        tensors: By the id of a tensor of the user's modules, what stands in its place. Other parameters are detached,
            and buffers cloned, since some modules write to them even in evaluation mode.
        apart: By the id of a module's ``_parameters`` and a name, the tensor of one use of a tied parameter.
        modules: The modules of the user's model.

    Attributes:
        sharded: Makes of a module's ``_parameters`` with sharded tensors those of its shadow; else None.
    """

    def __init__(
        self, tensors: Mapping[int, Tensor], apart: Mapping[tuple[int, str], Tensor], modules: Iterable[nn.Module]
    ):
        self.tensors, self.apart, self.known = dict(tensors), apart, frozenset(map(id, modules))
        self.sharded: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self.made: dict[int, Any] = {}  # by the id of the user's object

    def __call__(self, target: Any) -> Any:
        """The shadow of a module, or of a function or callable object that uses modules."""
        if isinstance(target, nn.Module) or type(target) in _CALLABLES:
            return self.mapped(target)
        shadow = copy.copy(target)
        if hasattr(target, "__dict__"):
            vars(shadow).update({name: self.mapped(value) for name, value in vars(target).items()})
        return shadow

    def module(self, module: nn.Module) -> nn.Module:
        """The shadow of a module, without wrappers."""
        if "_orig_mod" in module._modules or isinstance(module, _PARALLEL):
            module = unwrap(module)
        if id(module) in self.made:
            return self.made[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            return self._scripted(module)
        shadow = self.made[id(module)] = object.__new__(type(module))
        theirs = vars(module)
        own = theirs.copy()
        object.__setattr__(shadow, "__dict__", own)
        for key, value in theirs.items():
            if (value and key not in _OWN) if key in _STANDARD else type(value) not in _SHARED:
                own[key] = self.mapped(value)
        own["training"], own["_compiled_call_impl"] = False, None
        # Of an embedding: sparse gradients have few operations, scaled ones are no derivatives.
        for key in ("sparse", "scale_grad_by_freq"):
            if theirs.get(key) is True:
                own[key] = False
        own["_parameters"] = parameters = theirs["_parameters"].copy()
        if self.sharded is not None and any(map(is_sharded, parameters.values())):
            own["_parameters"], parameters = self.sharded(theirs["_parameters"]), {}
        for key, parameter in parameters.items():
            if parameter is not None:
                use = self.apart.get((id(theirs["_parameters"]), key)) if self.apart else None
                use = self.parameter(parameter) if use is None else use
                # An embedding with a largest norm writes to its weights.
                parameters[key] = use.clone() if theirs.get("max_norm") is not None else use
        writes = not type(module).__module__.startswith("torch.nn.modules.")
        own["_buffers"] = buffers = theirs["_buffers"].copy()
        for key, buffer in buffers.items():
            buffers[key] = None if buffer is None else self.buffer(buffer, writes)
        own["_modules"] = children = theirs["_modules"].copy()
        for key, child in children.items():
            children[key] = None if child is None else self.module(child)
        return shadow

    def parameter(self, parameter: Tensor) -> Tensor:
        """What stands for a parameter; frozen ones of a class of their own (quantised ones) stay as they are."""
        if id(parameter) not in self.tensors:
            is_plain = parameter.requires_grad or type(parameter) is nn.Parameter
            self.tensors[id(parameter)] = parameter.detach() if is_plain else parameter
        return self.tensors[id(parameter)]

    def buffer(self, buffer: Tensor, writes: bool) -> Tensor:
        """What stands for a buffer."""
        if id(buffer) not in self.tensors:
            self.tensors[id(buffer)] = buffer.clone() if writes else buffer
        return self.tensors[id(buffer)]

    def mapped(self, value: Any) -> Any:
        """A value of an attribute with every reference to the user's modules and parameters mapped."""
        kind = type(value)
        if kind in _SHARED:
            return value
        if isinstance(value, Tensor):
            return self.parameter(value) if isinstance(value, nn.Parameter) else self.tensors.get(id(value), value)
        if isinstance(value, nn.Module):
            return self.module(value) if self._is_connected(value) else value
        if kind in _CONTAINERS or (kind is not tuple and isinstance(value, tuple) and hasattr(value, "_make")):
            return self._container(value)
        if kind is MethodType:
            return MethodType(self.mapped(value.__func__), self.mapped(value.__self__))
        if kind is partial:
            arguments, options = self._container(value.args), self._container(value.keywords)
            return partial(self.mapped(value.func), *arguments, **options)
        if kind is FunctionType:
            return self._function(value)
        return value

    def _is_connected(self, module: nn.Module) -> bool:
        """Whether a module is one of the model's, or has any of its modules or tensors within."""
        if id(module) in self.known or not self.known.isdisjoint(map(id, module.modules())):
            return True
        return not self.tensors.keys().isdisjoint(map(id, module.parameters()))

    def _container(self, value: Any) -> Any:
        kind: Any = type(value)
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, tuple):
            entries = [self.mapped(entry) for entry in value]
            changed = any(new is not old for new, old in zip(entries, value, strict=True))
            return (tuple(entries) if kind is tuple else kind._make(entries)) if changed else value
        result = self.made[id(value)] = copy.copy(value)
        if isinstance(value, dict):
            result.update({key: self.mapped(entry) for key, entry in value.items()})
        elif value:
            entries = [self.mapped(entry) for entry in value]
            result.clear()
            (result.update if isinstance(value, set) else result.extend)(entries)
        return result

    def _function(self, function: FunctionType) -> FunctionType:
        """A function whose closure, defaults or globals lead to the shadow; itself where none of them does."""
        if id(function) in self.made or (function.__module__ or "").startswith("torch."):
            return self.made.get(id(function), function)
        self.made[id(function)] = function  # of a function that refers to itself
        variables = {}
        for name in _names(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            if type(value) not in _CONTAINERS and (own := self._variable(value)) is not value:
                variables[name] = own
        cells = []
        for cell in function.__closure__ or ():
            content = None
            with suppress(ValueError):  # of an empty cell
                content = cell.cell_contents
            own = self._variable(content)
            cells.append(cell if own is content else CellType(own))
        defaults = self._variable(function.__defaults__)
        if not variables and defaults is function.__defaults__ and tuple(cells) == (function.__closure__ or ()):
            return function
        variables = {**function.__globals__, **variables} if variables else function.__globals__
        result = FunctionType(function.__code__, variables, function.__name__, defaults, tuple(cells))
        result.__kwdefaults__ = function.__kwdefaults__
        self.made[id(function)] = result
        return result

    def _variable(self, value: Any) -> Any:
        """A function's variable, mapped; the caller's own containers only where they lead to the shadow."""
        if not (isinstance(value, nn.Module) or type(value) in _CONTAINERS or type(value) in _CALLABLES):
            return value
        own = self.mapped(value)
        entries = zip(_entries(own), _entries(value), strict=True) if type(value) in _CONTAINERS else [(own, value)]
        return own if any(new is not old for new, old in entries) else value

    def _scripted(self, module: nn.Module) -> nn.Module:
        """A copy of a TorchScript module, whose tensors are not in Python's hands, with others set."""
        result = copy.deepcopy(module)
        for theirs, own in zip(module.modules(), result.modules(), strict=True):
            self.made[id(theirs)] = own
            own.training = False
            parameters: dict[str, Any] = own._parameters
            for key, parameter in theirs._parameters.items():
                if parameter is not None:
                    parameters[key] = self.apart.get((id(theirs._parameters), key), self.parameter(parameter))
        return result


def copied(model: nn.Module, tensors: Mapping[int, Tensor], apart: Mapping[tuple[int, str], Tensor]) -> nn.Module:
    """A copy of the whole model with other tensors, for models whose references a :class:`Shadow` cannot follow."""
    made, memo = Shadow(tensors, apart, ()), dict[int, Any]()
    for parameter in model.parameters():
        memo[id(parameter)] = made.parameter(parameter)
    for buffer in model.buffers():
        memo[id(buffer)] = made.buffer(buffer, True)
    result = copy.deepcopy(model, memo)
    for theirs, own in zip(model.modules(), result.modules(), strict=True):
        vars(own)["training"] = False
        mine = id(theirs._parameters)
        vars(own)["_parameters"].update({key: apart[mine, key] for key in theirs._parameters if (mine, key) in apart})
    return result


def _names(code: CodeType) -> set[str]:
    """Names that a function, or one that is defined within, may look up in its module."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _entries(container: Any) -> list[Any]:
    return [*(container.values() if isinstance(container, dict) else container)]
