"""Products with the curvature of networks in units of a pass through them, and the posterior that is made of them.

"x pass" is relative to one forward and backward pass over the same batch. Products are with the generalised
Gauss–Newton matrix of a classifier, for one vector and for ten in one call; curvlinops multiplies the same vectors.
"distance" is the relative distance of its result from ours.

The second table is the fit of up to 20 eigenpairs for an MLP of 1.9 million weights on 256 data. laplace-torch's are
those of the Hessian, by power iteration with deflation, for which it needs a package of its own (``pip install
--no-deps asdfghjkl==0.1a2``). "largest" and "smallest" are the eigenvalues found, "residual" is the largest
``‖H u − λ u‖ / λ_max`` of the pairs, each with its own matrix. "with remainder" is the stochastic part of the evidence,
which costs another eight vectors times ten products.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import Call, Row, extra_memory, memory_in_new_process, report, timed, timings
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.curvature.operators import GGNOperator, HessianOperator

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import curvlinops
        import laplace
except ImportError:  # the comparison is optional
    curvlinops = laplace = None

TABLES = "table"
Data = list[tuple[Tensor, Tensor]]


def mlp(batch: int) -> tuple[nn.Module, Data]:
    """784-1024-1024-10, 1.9 million weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers).eval(), [(torch.randn(batch, 784), torch.randint(10, (batch,)))]


def resnet18(batch: int) -> tuple[nn.Module, Data]:
    """Torchvision's ResNet-18 on 32 x 32 images, 11 million weights."""
    from torchvision.models import resnet18 as build  # noqa: PLC0415  -- an extra

    torch.manual_seed(0)
    return build(num_classes=10).eval(), [(torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))]


MODELS = {"mlp": (mlp, 256), "resnet18": (resnet18, 16)}


def products(name: str) -> dict[str, Call]:
    """What is compared for one network."""
    build, batch = MODELS[name]
    model, data = build(batch)
    ((x, y),) = data
    operator = GGNOperator(model, "classification", data)
    vectors = torch.randn(10, operator.shape[1])

    def one_pass() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    compared: dict[str, Call] = {
        "forward and backward": one_pass,
        "laplace_plus, 1 vector": lambda: operator(vectors[0]),
        "laplace_plus, 10 vectors": lambda: operator(vectors),
    }
    if curvlinops is not None:
        parameters = list(model.parameters())
        loss = nn.CrossEntropyLoss(reduction="sum")
        theirs = curvlinops.GGNLinearOperator(model, loss, parameters, data, check_deterministic=False)
        columns = vectors.T.contiguous()
        compared["curvlinops, 1 vector"] = lambda: theirs @ columns[:, 0]
        compared["curvlinops, 10 vectors"] = lambda: (theirs @ columns).T
    return compared


def fits(rank: int, batch: int) -> dict[str, Call]:
    """Fits of a low-rank posterior; each gives eigenvalues, vectors as rows, and the operator that they belong to."""
    model, data = mlp(batch)

    def ours(kind: str, probes: int) -> Call:
        def fit() -> tuple[Tensor, Tensor, str]:
            posterior = lp.LowRank(
                model, "classification", rank=rank, remainder_probes=probes, backend=lp.Native(kind=kind)
            )
            posterior.fit(data, generator=torch.Generator().manual_seed(0))
            ((_, block),) = posterior.laplace_model().curvature
            return block.values, block.vectors, kind

        return fit

    compared: dict[str, Call] = {
        "laplace_plus, GGN": ours("ggn", 0),
        "laplace_plus, GGN with remainder": ours("ggn", 8),
        "laplace_plus, Hessian": ours("hessian", 0),
    }
    if laplace is not None:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data[0]), batch)

        def theirs() -> tuple[Tensor, Tensor, str]:
            posterior = laplace.Laplace(
                model,
                "classification",
                subset_of_weights="all",
                hessian_structure="lowrank",
                backend_kwargs={"low_rank": rank},
            )
            posterior.fit(loader)
            return posterior.H[1], posterior.H[0].T, "hessian"

        compared["laplace-torch, Hessian"] = theirs
    return compared


def residual(values: Tensor, vectors: Tensor, kind: str, batch: int) -> float:
    """The largest residual of eigenpairs, relative to the largest eigenvalue."""
    model, data = mlp(batch)
    operator = (HessianOperator if kind == "hessian" else GGNOperator)(model, "classification", data)
    vectors = nn.functional.normalize(vectors.float(), dim=1)
    gaps = operator(vectors) - values.float()[:, None] * vectors
    return (gaps.norm(dim=1).max() / values.max()).item()


def memory(table: str, name: str, rank: int, batch: int, network: str) -> Row:
    """Peak memory of one call, in this process."""
    if table == "products":
        call = products(network)[name]
        products("mlp")["laplace_plus, 1 vector"]()
    else:
        call = fits(rank, batch)[name]
        fits(1, 8)["laplace_plus, GGN"]()
    return {"peak_megabytes": extra_memory(call)}


def run(quick: bool, script: Path, **_: Any) -> list[Row]:
    """All rows."""
    rounds, rank, batch = (1, 2, 16) if quick else (5, 20, 256)
    rows = []
    for network in ("mlp",) if quick else MODELS:
        calls = products(network)
        measured = timings(calls, rounds)
        for name, timing in measured.items():
            row: Row = {"case": "networks", "table": "products", "network": network, "call": name, **timing.row()}
            row["x_pass"] = timing.ratio(measured["forward and backward"]) ** -1
            row |= memory_in_new_process(
                script, case="networks", table="products", name=name, rank=0, batch=0, network=network
            )
            mine = name.replace("curvlinops", "laplace_plus")
            if mine != name:
                row["x_slower_than_ours"] = measured[mine].ratio(timing)
                row["distance"] = ((calls[name]() - calls[mine]()).norm() / calls[mine]().norm()).item()
            rows.append(report(row))
    for name, call in fits(rank, batch).items():
        row = {"case": "networks", "table": "fit", "network": "mlp", "call": name, "data": batch}
        try:
            timing, (values, vectors, kind) = timed(call)
        except (ImportError, RuntimeError, ValueError) as error:
            rows.append(report(row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}))
            continue
        row |= timing.row()
        row |= {"pairs": len(values), "largest": values.max().item(), "smallest": values.min().item()}
        row["residual"] = residual(values, vectors, kind, batch)
        row |= memory_in_new_process(
            script, case="networks", table="fit", name=name, rank=rank, batch=batch, network="mlp"
        )
        rows.append(report(row))
    return rows
