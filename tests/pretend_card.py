"""A device that every machine has: its numbers are on the CPU, yet tensors there and on the CPU do not mix.

``pytest --device card`` runs on it what ``--device cuda`` runs on a graphics card. What only a card
would show is found: operations that mix devices, and numbers that NumPy reads without a copy to the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten


class OnCard(Tensor):
    """A tensor whose numbers, ``raw``, are on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, device="card:0", **layout)
        made.raw = raw
        return made

    def __repr__(self):
        return f"card({self.raw})"

    def __format__(self, how):
        return format(self.item(), how)

    def tolist(self):
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, *args, **(kwargs or {}))


def run(operation, *args, **kwargs):
    """An operation, on the CPU, after a look at the devices of what it is given; as a card does, it takes numbers, and
    of the CPU's tensors those without axes and those that index."""
    given = [own for own in tree_leaves((args, kwargs)) if isinstance(own, Tensor)]
    ours = [own for own in given if isinstance(own, OnCard)]
    moves = operation in (aten._to_copy.default, aten.copy_.default)
    if "index" in operation.name() or moves:
        mixed = not moves and ours and not isinstance(args[0], OnCard)
    else:
        mixed = ours and any(own.ndim for own in given if not isinstance(own, OnCard))
    if mixed:
        raise RuntimeError(f"{operation} mixes devices: {[(str(own.device), tuple(own.shape)) for own in given]}")
    target = kwargs.get("device")
    here = bool(ours) if target is None else torch.device(target).type == "card"
    here = isinstance(args[0], OnCard) if operation is aten.copy_.default else here
    if target is not None and here:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(lambda own: own.raw if isinstance(own, OnCard) else own, (args, kwargs))
    known = {id(own.raw): own for own in ours}  # what works in place gives back what it was given

    def back(own):
        if not here or not isinstance(own, Tensor):
            return own
        return known[id(own)] if id(own) in known else OnCard(own)

    return tree_map(back, operation(*args, **kwargs))


_setup_privateuseone_for_python_backend("card")
EVERY, MAKING = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
EVERY.fallback(run, "PrivateUse1")
for name in ("arange", "eye", "linspace", "logspace", "randperm"):  # torch would make them of an empty one that grows
    for overload in getattr(aten, name).overloads():
        if "out" not in overload:
            one = getattr(getattr(aten, name), overload)
            MAKING.impl(one.name(), lambda *args, one=one, **kwargs: run(one, *args, **kwargs), "PrivateUse1")
torch.__future__.set_swap_module_params_on_conversion(True)  # else Module.to would untie weights


class Kind(type(torch._C.Generator)):
    def __call__(cls, device="cpu"):
        made = torch._C.Generator()
        if torch.device(device).type == "card":
            made = super().__call__()
        return made

    def __instancecheck__(cls, other):
        return type(other) is torch._C.Generator or type.__instancecheck__(cls, other)


class Generator(torch._C.Generator, metaclass=Kind):
    """One of the CPU that says that it is on the card."""

    device = torch.device("card:0")


torch.Generator = Generator
