"""How a user's model is run without leaving a trace: in evaluation mode, and by one thread at a time.

While the package runs a model, other weights, hooks and modes take the place of the model's own. Whatever looks at a
model or runs it therefore holds the model's lock, so that calls from several threads come one after the other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_registering = threading.Lock()


def turn(model: nn.Module) -> threading.RLock:
    """The re-entrant lock of a model, which it has in common with models that hold some of the same modules."""
    with _registering:
        lock = _locks.get(model)
        if lock is None:
            modules = list(model.modules())
            lock = next((_locks[module] for module in modules if module in _locks), None) or threading.RLock()
            for module in modules:
                _locks.setdefault(module, lock)
        return lock


class Shared:
    """A setting of the whole process, which holds while anybody is inside, and which the last to leave puts back.

    Threads that run different models do not wait for each other: were each to put back what it had found, the last
    might find the setting of another one, and leave it behind.

    Args:
        make: Gives the context that makes the setting.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._context = self._make()
                self._context.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._context is not None:
                self._context.__exit__(None, None, None)
                self._context = None


eager = Shared(lambda: torch.compiler.set_stance("force_eager"))
"""Compiled parts of a module hide their operations, and do not compile under the modes that are active here."""

written_out_attention = Shared(lambda: sdpa_kernel(SDPBackend.MATH))
"""Fused attention cannot be differentiated twice."""

without_cudnn = Shared(lambda: torch.backends.cudnn.flags(enabled=False))
"""Nor can cuDNN's recurrent layers."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every submodule in evaluation mode, and afterwards with the mode and the tensors that it had.

    ``training`` is set directly: a user's own ``train()`` may do more than that, e.g. merge adapter weights. Tensors
    among a module's attributes are put back because a forward pass may set some to what only this call substituted:
    recurrent layers keep a list of their weights, weight normalisation sets the weight, and some networks remember
    activations. What else a network counts or notes is its own business.
    """
    with turn(model):
        before = [(module, module.training, dict(vars(module)), _lists(module)) for module in model.modules()]
        try:
            for module, *_ in before:
                module.training = False
            yield
        finally:
            for module, training, attributes, lists in before:
                now = vars(module)
                for name in [name for name in now if name not in attributes and _holds_tensors(now[name])]:
                    del now[name]
                for name, value in attributes.items():
                    if now.get(name) is not value and (_holds_tensors(value) or _holds_tensors(now.get(name))):
                        now[name] = value
                for name, content in lists.items():
                    now[name][:] = content
                module.training = training


def _holds_tensors(value: Any) -> bool:
    kinds = (Tensor, weakref.ReferenceType)  # recurrent layers keep both
    return isinstance(value, Tensor) or (type(value) in (list, tuple) and any(isinstance(v, kinds) for v in value))


def _lists(module: nn.Module) -> dict[str, list[Any]]:
    """Copies of a module's lists of tensors."""
    return {name: list(value) for name, value in vars(module).items() if type(value) is list and _holds_tensors(value)}
