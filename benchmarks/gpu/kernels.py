"""Each kernel beside torch's own, at the shapes of the networks and at sizes between them.

A kernel earns its place where it takes at most two thirds of torch's time. Triton's are run where they can be; on the
CPU only torch's are, to see that nothing here has rotted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.gpu.measuring import Memory, Row, Settings, Step, seconds
from laplace_plus import kernels
from laplace_plus.kernels.convolution import convolution_factor
from laplace_plus.kernels.gram_schmidt import reference_orthogonalize
from laplace_plus.kernels.selection import triton_kernels

GAIN = 1.5
"""How many times less than torch a kernel must take."""

PRECISIONS = {
    "float32": (torch.float32, "highest"),
    "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "high"),
}

FACTORS = {
    "LeNet": [(151, 50_000), (401, 500)],
    "ResNet-18, 32²": [(576, 262_144), (1152, 65_536), (4608, 4096)],
    "ResNet-50, 224²": [(64, 200_704), (1152, 50_176), (2304, 12_544), (4608, 3136)],
    "ViT-B/16": [(769, 12_608), (2304, 12_608), (3073, 12_608)],
    "GPT-2, adapters": [(8, 2048), (768, 2048)],
    "between": [(d, n) for d in (128, 256, 512, 1024, 2048, 4096, 8192) for n in (4096, 32_768)],
}
"""Columns and rows of the symmetric updates that a batch of each network makes."""

CONVOLUTIONS = [(64, 56, 1), (128, 56, 2), (128, 28, 1), (256, 28, 2), (256, 14, 1), (512, 14, 2), (512, 7, 1)]
"""3 × 3 layers of ResNet-50 at 224 × 224 pixels: channels, side of the input, stride."""

PROBLEMS = [(9, 512), (32, 500), (33, 500), (64, 64), (100, 500), (256, 8), (1024, 1), (4609, 1)]
"""Rows and number of the matrices to decompose."""


def verdict(torch_s: float, ours: dict[str, float]) -> Row:
    """The best of ours, its gain, and whether it is enough."""
    if not ours:
        return {"torch_ms": torch_s * 1e3, "gain": None, "stays": None}
    best = min(ours, key=lambda name: ours[name])
    row = {"torch_ms": torch_s * 1e3, "best": best, "best_ms": ours[best] * 1e3, "gain": torch_s / ours[best]}
    return row | {"stays": torch_s / ours[best] >= GAIN}


def timed(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Seconds of those that run; one that fails is left out, and said."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = seconds(call, device, 10, 3)
        except Exception as error:  # noqa: BLE001
            print(f"{name}: {error}"[:200], flush=True)  # noqa: T201
    return found


def symmetric_update(settings: Settings, name: str, width: int, rows: int) -> Row:
    """``C += XᵀX`` of one triangle against one product of cuBLAS."""
    dtype, precision = PRECISIONS[name]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        x = torch.randn(1, rows, width, device=settings.device).to(dtype)
        total, product = (
            torch.zeros(1, width, width, device=settings.device),
            torch.empty(width, width, device=x.device, dtype=dtype),
        )
        plain = seconds(lambda: torch.mm(x[0].mT, x[0], out=product), settings.device, 10, 3)
        with kernels.use("triton"):
            found = triton_kernels("symmetric_update", total.device)
        calls: dict[str, Callable[[], object]] = {}
        for tiling in found.tilings(dtype, width) if found else ():
            how = "tf32x3" if precision == "highest" else "tf32"
            calls[str(tiling)] = partial(found.update, total, x, precision=how, tiling=tiling)
        row = {"d": width, "rows": rows, "type": name} | verdict(plain, timed(calls, settings.device))
        total.zero_()
        kernels.symmetric_update(total, x)
        exact = (x.double().mT @ x.double()).tril()
        error = (total.double().tril() - exact).norm() / exact.norm()
        return row | {"relative_error": float(error), "tflops": 2e-12 * rows * width**2 / plain}
    finally:
        torch.set_float32_matmul_precision(before)


def convolution(settings: Settings, dtype: torch.dtype, channels: int, side: int, stride: int) -> Row:
    """The factor of a 3 × 3 layer by unfolding all patches, by patches in chunks, and by lags."""
    x = torch.randn(settings.sized(2, 64), channels, side, side, device=settings.device).to(dtype)

    def unfolded() -> Tensor:
        columns = F.unfold(x, 3, padding=1, stride=stride).transpose(1, 2).flatten(0, 1)
        return columns.mT @ columns

    total, methods = torch.zeros(1, 9 * channels, 9 * channels, device=x.device), ["patches"] + ["lags"] * (stride == 1)
    options: dict[str, Any] = {"stride": stride, "padding": 1, "total": total}
    calls = {name: partial(convolution_factor, x, 3, method=name, **options) for name in methods}
    with Memory(settings.device) as plain:
        took = seconds(unfolded, settings.device, 10, 3)
    with Memory(settings.device) as ours:
        found = timed(calls, settings.device)
    row = {"channels": channels, "side": side, "stride": stride, "type": str(dtype).removeprefix("torch.")}
    row |= {f"{name}_ms": value * 1e3 for name, value in found.items()} | verdict(took, found)
    return row | {f"torch_{key}": value for key, value in plain.row.items()} | ours.row


def gram_schmidt(settings: Settings, size: int, depth: int) -> Row:
    """Steps of a Lanczos recurrence, and the share of a copy's bandwidth that they reach."""
    basis = torch.randn(depth, size, device=settings.device).mul_(size**-0.5)
    vector, target = torch.randn(size, device=settings.device), torch.empty_like(basis)
    bandwidth = 2 * basis.numel() * basis.element_size() / seconds(lambda: target.copy_(basis), settings.device, 10, 3)

    def steps(one: Callable[[Tensor, Tensor], object]) -> None:
        for k in range(1, depth + 1):
            one(basis[None, :k], vector[None])

    with kernels.use("triton"):
        found = triton_kernels("gram_schmidt", basis.device)
    plain = seconds(partial(steps, reference_orthogonalize), settings.device)
    ours = timed({"triton": partial(steps, found.orthogonalize)} if found else {}, settings.device)
    moved = 4.0 * size * sum(4 * k + 5 for k in range(1, depth + 1))  # torch reads the basis four times
    row = {
        "n": size,
        "depth": depth,
        "copy_gb_per_s": bandwidth / 1e9,
        "torch_share_of_copy": moved / plain / bandwidth,
    }
    fewer = 4.0 * size * sum(3 * k + 5 for k in range(1, depth + 1))
    share = {"best_share_of_copy": fewer / ours["triton"] / bandwidth} if ours else {}
    return row | verdict(plain, ours) | share


def eigen(settings: Settings, size: int, count: int) -> Row:
    """Matrices in float64: torch's batched call, one call for each, and LAPACK on the CPU; what the rule takes."""
    root = torch.randn(count, size, size, device=settings.device, dtype=torch.float64)
    matrices = root @ root.mT
    calls: dict[str, Callable[[], object]] = {
        "one by one": lambda: [torch.linalg.eigh(one) for one in matrices],
        "LAPACK on the CPU": lambda: [part.to(matrices.device) for part in torch.linalg.eigh(matrices.cpu())],
        "the rule": lambda: kernels.symmetric_eigen(matrices),
    }
    plain = seconds(lambda: torch.linalg.eigh(matrices), settings.device)
    found = {name: seconds(call, settings.device) for name, call in calls.items()}
    row = {"n": size, "matrices": count} | {f"{name}_ms": value * 1e3 for name, value in found.items()}
    return row | verdict(plain, {"the rule": found["the rule"]})


def steps(settings: Settings) -> Iterator[Step]:
    """Updates at the networks' shapes first, then the others."""
    factors = settings.sized({"tiny": [(20, 30)]}, FACTORS)
    for network, shapes in factors.items():
        for width, rows in shapes:
            for name in PRECISIONS:
                call = partial(symmetric_update, settings, name, width, rows)
                yield Step(f"symmetric update {width} × {rows}, {name} ({network})", 5.0, call)
    for size, depth in settings.sized([(200, 3)], [(1_000_000, 50), (11_000_000, 50)]):
        yield Step(f"Gram-Schmidt {size} × {depth}", 5.0, partial(gram_schmidt, settings, size, depth))
    for size, count in settings.sized([(5, 3)], PROBLEMS):
        yield Step(f"eigenproblems {count} of {size}", 10.0, partial(eigen, settings, size, count))
    for channels, side, stride in settings.sized([(4, 5, 1)], CONVOLUTIONS):
        for dtype in (torch.float32, torch.bfloat16):
            call = partial(convolution, settings, dtype, channels, side, stride)
            yield Step(f"convolution {channels}, {side}², stride {stride}, {dtype}", 5.0, call)
