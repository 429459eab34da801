"""Products with the curvature of networks in units of a pass through them.

"× pass" is relative to one forward and backward pass over the same batch. Products are with one vector, and with ten in
one call: of the Jacobian, and of the generalised Gauss–Newton matrix, the Hessian and the empirical Fisher matrix of a
classifier. curvlinops multiplies the same vectors; "distance" is the relative distance of its result from ours.

The networks are an MLP 784-1024-1024-10 with 1.9 million weights on 256 data, and torchvision's ResNet-18 with 11
million on 16 images of 32 × 32 pixels, in evaluation mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from measuring import Call, Row, least_seconds, memory_in_new_process
from torch import Tensor, nn

from laplace_plus.curvature.operators import FisherOperator, GGNOperator, HessianOperator, JacobianOperator

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import curvlinops
except ImportError:  # the comparison is optional
    curvlinops = None
try:
    from torchvision.models import resnet18
except ImportError:
    resnet18 = None

MATRICES = ("Jacobian", "GGN", "Hessian", "Fisher")
COUNTS = (1, 10)
PASS = "forward and backward"
Data = list[tuple[Tensor, Tensor]]


def build(network: str, small: bool) -> tuple[nn.Module, Data]:
    """A network and a batch."""
    torch.manual_seed(0)
    if network == "mlp":
        layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        model, x = nn.Sequential(*layers), torch.randn(2 if small else 256, 784)
    else:
        model, x = resnet18(num_classes=10), torch.randn(1 if small else 16, 3, 32, 32)
    return model.eval(), [(x, torch.randint(10, (len(x),)))]


def ours(matrix: str, model: nn.Module, data: Data) -> Any:
    """Our operator, on row-stacked vectors."""
    if matrix == "Jacobian":
        return JacobianOperator(model, data)
    if matrix == "Fisher":
        return FisherOperator(model, "classification", data, kind="empirical")
    return (GGNOperator if matrix == "GGN" else HessianOperator)(model, "classification", data)


def theirs(matrix: str, model: nn.Module, data: Data) -> Any:
    """That of curvlinops, on vectors as columns."""
    parameters = list(model.parameters())
    if matrix == "Jacobian":
        return curvlinops.JacobianLinearOperator(model, parameters, data, check_deterministic=False)
    loss = nn.CrossEntropyLoss(reduction="sum")
    kind = getattr(curvlinops, ("EF" if matrix == "Fisher" else matrix) + "LinearOperator")
    return kind(model, loss, parameters, data, check_deterministic=False)


def calls(network: str, matrix: str, small: bool = False) -> dict[str, Call]:
    """What is compared for one matrix of one network."""
    model, data = build(network, small)
    ((x, y),) = data
    operator = ours(matrix, model, data)
    vectors = torch.randn(max(COUNTS), operator.shape[1])

    def one_pass() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    compared: dict[str, Call] = {PASS: one_pass}
    for count in COUNTS:
        rows = vectors[0] if count == 1 else vectors[:count]
        compared[f"laplace_plus, {count}"] = lambda rows=rows: operator(rows)
    if curvlinops is not None:
        peer = theirs(matrix, model, data)
        for count in COUNTS:
            columns = vectors[:count].T.contiguous()
            compared[f"curvlinops, {count}"] = lambda columns=columns: (peer @ columns).T
    return compared


def call(network: str, matrix: str, name: str, small: bool = False) -> Call:
    """That of which memory is measured."""
    return calls(network, matrix, small)[name]


def run(quick: bool) -> Iterator[Row]:
    """All rows."""
    networks = ["mlp"] if quick or resnet18 is None else ["mlp", "resnet18"]
    for network in networks:
        for matrix in MATRICES:
            compared = calls(network, matrix)
            seconds = least_seconds(compared, 1 if quick else 3)
            for name, time in seconds.items():
                library, _, count = name.partition(", ")
                if name == PASS and matrix != MATRICES[0]:
                    continue
                row: Row = {"network": network, "matrix": "" if name == PASS else matrix, "library": library}
                row |= {"vectors": int(count) if count else None, "seconds": time, "x_pass": time / seconds[PASS]}
                if not quick and count != "1":
                    row["megabytes"] = memory_in_new_process("networks", network=network, matrix=matrix, name=name)
                if library == "curvlinops":
                    mine = f"laplace_plus, {count}"
                    row["laplace_plus_x_faster"] = time / seconds[mine]
                    expected = compared[mine]()
                    row["distance"] = ((compared[name]() - expected).norm() / expected.norm()).item()
                yield row
