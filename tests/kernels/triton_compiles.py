"""Compiles every Triton kernel for devices that need not be there; started by ``test_triton.py``.

The launchers run with their kernels replaced by recorders; each recorded launch is then compiled ahead of time, with
the types, constants and divisibilities that Triton would see on the device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laplace_plus.kernels._triton import gram_schmidt, symmetric_update

TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Recorder:
    """In place of a kernel: compiles instead of launching."""

    def __init__(self, kernel: Any, capability: int):
        self.kernel, self.capability, self.binaries = kernel, capability, []

    def __getitem__(self, grid: Any) -> Recorder:
        assert all(0 < extent < 2**16 for extent in grid[1:])
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        parameters = self.kernel.params
        given = dict(zip([p.name for p in parameters], args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(parameters):
            value = given[parameter.name]
            specialised = type(value) is int and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or specialised:
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
            elif isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                attributes[(place,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        binary = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        assert binary.metadata.shared <= (227 if self.capability == 90 else 163) * 1024
        self.binaries.append(binary)


@pytest.fixture(params=[80, 90], ids=["A100", "H100"])
def record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    def replace(module: Any, *names: str) -> list[Recorder]:
        found = [Recorder(getattr(module, name), request.param) for name in names]
        for name, recorder in zip(names, found, strict=True):
            monkeypatch.setattr(module, name, recorder)
        return found

    return replace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [20, 64, 256])
def test_symmetric_update(record: Any, dtype: torch.dtype, size: int) -> None:
    recorders = record(symmetric_update, "symmetric_product", "add_partial")
    for tiling in symmetric_update.tilings(dtype, size):
        for shape in ((1, 512 * tiling.step, size), (2, 15, size)):
            rows = torch.empty(*shape, dtype=dtype)
            symmetric_update.update(torch.empty(shape[0], size, size), rows, precision="tf32", tiling=tiling)
    assert all(recorder.binaries for recorder in recorders)
    if dtype == torch.float32:
        tiling = symmetric_update.tilings(dtype, size)[-1]
        symmetric_update.update(
            torch.empty(1, size, size), torch.empty(1, 192, size), precision="tf32x3", tiling=tiling
        )


def test_gram_schmidt(record: Any) -> None:
    recorders = record(gram_schmidt, "inner_products", "subtract_and_multiply", "subtract")
    for dtype in (torch.float32, torch.float64):
        for probes, rows in ((1, 1), (2, 50), (1, 200)):
            basis, vector = torch.empty(probes, rows, 10000, dtype=dtype), torch.empty(probes, 10000, dtype=dtype)
            gram_schmidt.orthogonalize(basis, vector)
    assert all(recorder.binaries for recorder in recorders)
