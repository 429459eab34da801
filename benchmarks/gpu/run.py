"""The kernels on a GPU beside what torch offers, and the memory they take.

    python benchmarks/gpu/run.py --output benchmarks/results/gpu.json

Times are medians of CUDA events after warming up; "bandwidth" is that of a copy of 1 GiB on the same device. Each
choice that was measured on the way is written down, too. Without a CUDA device it says so, writes nothing and succeeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from laplace_plus import kernels
from laplace_plus.kernels import selection

# 3 × 3 layers of ResNet-50 at 224 × 224 pixels: channels, side of the input, stride
RESNET50 = [(64, 56, 1), (128, 56, 2), (128, 28, 1), (256, 28, 2), (256, 14, 1), (512, 14, 2), (512, 7, 1)]
Row = dict[str, Any]


def seconds(call: Callable[[], object], repetitions: int = 10) -> float:
    """Median seconds of a call on the GPU."""
    return selection.device_seconds(call, warm_up=3, repetitions=repetitions)


def extra_memory(call: Callable[[], object]) -> int:
    """Peak bytes allocated during a call, beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """In Frobenius norm, of lower triangles."""
    difference = actual.double().tril() - exact.double().tril()
    return float(difference.norm() / exact.double().tril().norm())


def compared(row: Row, reference: Callable[[], object], ours: Callable[[], object]) -> Row:
    """Times of a reference, of the automatic choice and of the best Triton kernel alone."""
    with kernels.use("reference"):
        row["torch_seconds"] = seconds(reference)
    before = set(selection.choices())
    row["ours_seconds"] = seconds(ours)
    row["speedup"] = row["torch_seconds"] / row["ours_seconds"]
    found = [choice for key, choice in selection.choices().items() if key not in before]
    if found:
        row["chosen"], row["measured"] = found[-1].chosen, dict(found[-1].seconds)
    return row


def symmetric_updates(quick: bool) -> list[Row]:
    """C += XᵀX against one cuBLAS product, TF32 and bfloat16."""
    rows = []
    sizes = [128, 256, 512, 768, 1024, 2048, 3072, 4096, 8192]
    for dtype, precision in ((torch.float32, "tf32"), (torch.bfloat16, "tf32"), (torch.float32, "float32")):
        for size in sizes[:4] if quick else sizes:
            for count in (4096, 32768):
                x = torch.randn(count, size, device="cuda").to(dtype)
                total = torch.zeros(size, size, device="cuda")
                product = torch.empty(size, size, device="cuda", dtype=dtype)

                def gemm(x: Tensor = x, product: Tensor = product) -> None:
                    torch.mm(x.T, x, out=product)

                def ours(x: Tensor = x, total: Tensor = total) -> None:
                    kernels.symmetric_update(total, x)

                torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
                name = f"{dtype}".removeprefix("torch.") + ("" if dtype == torch.bfloat16 else f" as {precision}")
                row: Row = {"kernel": "symmetric update", "type": name, "d": size, "rows": count}
                compared(row, gemm, ours)
                row["tera_operations_per_second"] = 2.0 * count * size**2 / row["ours_seconds"] / 1e12
                total.zero_()
                ours()
                row["error"] = relative_error(total, x.double().T @ x.double())
                rows.append(report(row))
    torch.set_float32_matmul_precision("highest")
    return rows


def convolution_factors(quick: bool) -> list[Row]:
    """Factors of 3 × 3 layers against unfolding all patches and one product."""
    rows = []
    examples = 4 if quick else 32
    torch.set_float32_matmul_precision("high")
    for dtype in (torch.float32, torch.bfloat16):
        for channels, side, stride in RESNET50:
            x = torch.randn(examples, channels, side, side, device="cuda").to(dtype)
            total = torch.zeros(1, 9 * channels, 9 * channels, device="cuda")

            def unfolded(x: Tensor = x, stride: int = stride) -> Tensor:
                columns = F.unfold(x, 3, padding=1, stride=stride).transpose(1, 2).flatten(0, 1)
                return columns.T @ columns

            def ours(x: Tensor = x, total: Tensor = total, stride: int = stride) -> None:
                kernels.convolution_factor(x, 3, padding=1, stride=stride, total=total)

            row: Row = {"kernel": "convolution factor", "type": str(dtype).removeprefix("torch.")}
            row |= {"channels": channels, "side": side, "stride": stride, "examples": examples}
            compared(row, unfolded, ours)
            row["torch_bytes"], row["ours_bytes"] = extra_memory(unfolded), extra_memory(ours)
            total.zero_()
            ours()
            exact = kernels.convolution_factor(x.double(), 3, padding=1, stride=stride, method="patches")
            row["error"] = relative_error(total, exact)
            rows.append(report(row))
            del exact
    torch.set_float32_matmul_precision("highest")
    return rows


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source))


def lanczos(quick: bool) -> list[Row]:
    """The vector work of K steps with full re-orthogonalisation, as a part of the bandwidth of a copy."""
    bandwidth = copy_bandwidth()
    rows = []
    for n, depth in ((1_000_000, 20),) if quick else ((1_000_000, 50), (11_000_000, 50)):
        basis = torch.randn(depth, n, device="cuda").mul_(n**-0.5)
        vector = torch.randn(n, device="cuda")

        def steps(basis: Tensor = basis, vector: Tensor = vector, depth: int = depth) -> None:
            for k in range(1, depth + 1):
                kernels.orthogonalize(basis[:k], vector)

        row: Row = {"kernel": "Gram-Schmidt twice", "n": n, "depth": depth, "copy_bytes_per_second": bandwidth}
        for choice in ("reference", "triton", "auto"):
            with kernels.use(choice):  # type: ignore[arg-type]
                steps()
                row[f"{choice}_seconds"] = seconds(steps, 5)
        # What must be read and written at the least: the basis three times, and the vector's copies.
        for passes, name in ((4, "four"), (3, "three")):
            moved = 4.0 * n * sum(passes * k + 5 for k in range(1, depth + 1))
            row[f"part_of_bandwidth_counting_{name}_passes"] = moved / row["auto_seconds"] / bandwidth
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        row["captured_seconds"] = seconds(graph.replay, 5)
        rows.append(report(row))
    return rows


def eigendecompositions(quick: bool) -> list[Row]:
    """Batches of small symmetric matrices, float64."""
    rows = []
    for n, batch in ((9, 512), (32, 500), (33, 500), (100, 500), (256, 8), (1024, 1)):
        root = torch.randn(min(batch, 16) if quick else batch, n, n, device="cuda", dtype=torch.float64)
        matrices = root @ root.mT

        def batched(matrices: Tensor = matrices) -> object:
            return torch.linalg.eigh(matrices)

        def ours(matrices: Tensor = matrices) -> object:
            return kernels.symmetric_eigen(matrices)

        row: Row = {"kernel": "symmetric eigendecomposition", "n": n, "batch": len(matrices)}
        compared(row, batched, ours)
        values, vectors = kernels.symmetric_eigen(matrices)
        residual = (matrices @ vectors - vectors * values.unsqueeze(-2)).abs().amax() / matrices.abs().amax()
        row["residual"] = float(residual)
        rows.append(report(row))
    return rows


def report(row: Row) -> Row:
    """Print a row as it comes."""
    print(json.dumps(row), flush=True)  # noqa: T201
    return row


PARTS = {
    "symmetric": symmetric_updates,
    "convolution": convolution_factors,
    "lanczos": lanczos,
    "eigen": eigendecompositions,
}


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: no CUDA device")  # noqa: T201
        return
    device = torch.cuda.get_device_name()
    print(device)  # noqa: T201
    rows = [row for part in arguments.parts for row in PARTS[part](arguments.quick)]
    slower = [row for row in rows if "measured" in row and row["measured"][row["chosen"]] > row["measured"]["torch"]]
    print(f"choices that are slower than torch's own: {len(slower)}")  # noqa: T201
    if arguments.output:
        document = {"device": device, "torch": torch.__version__, "cuda": torch.version.cuda, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
