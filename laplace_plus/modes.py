"""How a user's model runs without a trace: in evaluation mode, and in one thread at a time.

While the package runs a model, other weights, hooks and modes replace the model's own. Code that reads or runs a model
therefore holds the model's lock, so that calls from several threads come one after the other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

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


class Shared:
    """A setting of the whole process that holds while any thread is inside; the last one to leave restores it.

    Threads that run different models do not wait for each other. If each restored what it had found, the last one
    might find another thread's setting and leave it behind.

    Args:
        make: Returns the context that makes the setting.
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


eager = Shared(partial(torch.compiler.set_stance, "force_eager"))
"""Runs compiled parts of a module eagerly: they hide their operations, and do not compile under the active modes."""

written_out_attention = Shared(partial(sdpa_kernel, SDPBackend.MATH))
"""Runs attention unfused: the fused kernels cannot be differentiated twice."""

without_cudnn = Shared(partial(torch.backends.cudnn.flags, enabled=False))
"""Runs recurrent layers without cuDNN, whose kernels cannot be differentiated twice."""


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
            before.append((module, attributes, lists))
            module.training = False
        try:
            yield
        finally:
            for module, attributes, lists in before:
                module.training = attributes["training"]
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
