"""Settings and replacements under which torch can differentiate a network twice, or in forward mode."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


class Shared:
    """A setting of the whole process that holds while any thread is inside; the last one to leave restores it.

    If each thread restored what it had found, the last one might find another thread's setting and leave it behind.
    ``make`` returns the context that makes the setting.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make, self._lock, self._n_inside, self._settings = make, threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._n_inside += 1
            if self._n_inside == 1:
                self._settings.enter_context(self._make())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._settings.close()


_LOST = 3 if torch.__version__ < "2.8" else 0
"""References to None that torch takes at each change of stance: Python 3.11 ended after 20 000 forward passes."""


def _stance() -> AbstractContextManager[Any]:
    for _ in range(_LOST):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
    return torch.compiler.set_stance("force_eager")


eager = Shared(_stance)
"""Runs compiled parts of a module eagerly: they hide their operations, and do not compile under the active modes."""

written_out_attention = Shared(partial(sdpa_kernel, SDPBackend.MATH))
"""Runs attention unfused: the fused kernels cannot be differentiated twice."""

without_cudnn = Shared(partial(torch.backends.cudnn.flags, enabled=False))
"""Runs recurrent layers without cuDNN, whose kernels cannot be differentiated twice."""


@contextmanager
def differentiable_kernels(model: nn.Module) -> Iterator[None]:
    """Use only kernels that can be differentiated twice: no fused attention, no recurrent layers of cuDNN."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with written_out_attention, without_cudnn if recurrent else nullcontext(), _WrittenOut():
        yield


class _WrittenOut(TorchFunctionMode):
    """Replaces operations whose second derivatives torch lacks or has wrong by the same functions written out.

    ``torch._weight_norm`` has a wrong one on the CPU, and the hard sigmoid has none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    # In torch._weight_norm, -1 means one norm over all entries, not the last axis.
    axes = None if dim == -1 else [axis for axis in range(v.ndim) if axis != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=axes, keepdim=dim != -1))


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    result = (input / 6 + 0.5).clamp(0.0, 1.0)
    return input.copy_(result) if inplace else result


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: _weight_norm,
    torch.nn.functional.hardsigmoid: _hardsigmoid,
}
