"""Gradients of stochastic log-determinants, beside backpropagation through the loop.

Wanted: memory independent of K times the size of a product's graph.

Two operators whose products have a large autograd graph, in float32:

* "kernel": the matrix of a squared-exponential kernel on n points in eight dimensions, evaluated in chunks of rows at
  every product and never kept; its parameters are eight lengthscales, a scale and the noise. The graph of a product
  is several n × n tensors, for any number of vectors.
* "GGN": the generalised Gauss–Newton matrix of a network with two hidden layers, plus noise, its products written out
  forwards and backwards; differentiated in the weights. The graph of a product grows with the number of vectors.

All use the same probes and the same depth, with full re-orthogonalisation, and give the log-determinant with its
gradient. "loop" is Lanczos' process in plain torch, differentiated by autograd; "loop, checkpointed" keeps no graph of
a product but computes it again. "graphs" is the memory beyond that of the K vectors of every probe, in units of what
one product of the probes and its vector-Jacobian product take. "distance" is the relative distance of the gradient from
that of the loop in float64: "krylov", of ``slq_logdet``, approaches it as the Krylov space becomes exhaustive;
"adjoint", through ``lanczos``, is exact for every K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from measuring import Call, Row, least_seconds, memory_in_new_process
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from laplace_plus.linalg import draw_probes, lanczos, slq_logdet

PROBES = 4
PRODUCT = "one product and its VJP"


class KernelProblem:
    """The kernel matrix of n points, plus noise."""

    def __init__(self, n: int, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(n, 8, generator=generator).to(dtype)
        self.probes = _probes(n, dtype)
        lengthscales = torch.linspace(1.5, 3.0, 8, dtype=dtype)
        parameters = (lengthscales, torch.tensor(1.0, dtype=dtype), torch.tensor(0.1, dtype=dtype))
        self.parameters = [x.requires_grad_() for x in parameters]
        self.n = n

    def __call__(self, v: Tensor) -> Tensor:
        """The product with ``[..., n]``."""
        lengthscales, scale, noise = self.parameters
        points = self.points / lengthscales
        squares = points.square().sum(1)
        parts = []
        for rows, own in zip(points.split(256), squares.split(256), strict=True):
            distances = own[:, None] + squares - 2 * rows @ points.T
            parts.append(v @ (scale * torch.exp(-0.5 * distances)).T)
        return torch.cat(parts, dim=-1) + noise * v


class NetworkProblem:
    """The GGN of a network 16-width-width-4 on 256 inputs, plus noise."""

    def __init__(self, n: int, dtype: torch.dtype):
        width = max(4, round((n + 100) ** 0.5) - 10)
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(256, 16, generator=generator).to(dtype)
        shapes = [(width, 16), (width, width), (4, width)]
        weights = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
        vector = torch.cat([x.flatten() for x in weights]).to(dtype)
        self.shapes, self.n = shapes, len(vector)
        self.probes = _probes(self.n, dtype)
        self.parameters = [vector.requires_grad_(), torch.tensor(0.1, dtype=dtype, requires_grad=True)]

    def __call__(self, v: Tensor) -> Tensor:
        """The product with ``[..., n]``."""
        vector, noise = self.parameters
        stack = v.reshape(-1, self.n)
        weights, directions = self._layers(vector), self._layers(stack)
        inputs, slopes = [self.inputs], []
        tangent = inputs[0] @ directions[0].mT
        for weight, following, direction in zip(weights, weights[1:], directions[1:], strict=False):
            inputs.append(torch.tanh(inputs[-1] @ weight.T))
            slopes.append(1 - inputs[-1].square())
            tangent = slopes[-1] * tangent
            tangent = tangent @ following.T + inputs[-1] @ direction.mT
        parts = [tangent.mT @ inputs[-1]]
        for weight, x, slope in zip(weights[:0:-1], inputs[-2::-1], slopes[::-1], strict=True):
            tangent = slope * (tangent @ weight)
            parts.insert(0, tangent.mT @ x)
        return torch.cat([part.flatten(1) for part in parts], dim=1).reshape(v.shape) + noise * v

    def _layers(self, vectors: Tensor) -> list[Tensor]:
        parts = vectors.split([rows * columns for rows, columns in self.shapes], dim=-1)
        return [part.unflatten(-1, shape) for part, shape in zip(parts, self.shapes, strict=True)]


PROBLEMS: dict[str, Callable[[int, torch.dtype], KernelProblem | NetworkProblem]] = {
    "kernel": KernelProblem,
    "GGN": NetworkProblem,
}


def _probes(n: int, dtype: torch.dtype) -> Tensor:
    """Those that ``slq_logdet`` draws."""
    return draw_probes("signs", PROBES, n, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loop(problem: KernelProblem | NetworkProblem, depth: int, checkpointed: bool) -> Tensor:
    """The log-determinant by a loop that autograd records."""
    vector = problem.probes / problem.n**0.5
    vectors, diagonal, off_diagonal = [vector], [], []
    for k in range(depth):
        rest = checkpoint(problem, vector, use_reentrant=False) if checkpointed else problem(vector)
        basis = torch.stack(vectors, dim=1)
        for number in range(2):
            coefficients = torch.einsum("pkn,pn->pk", basis, rest)
            rest = rest - torch.einsum("pk,pkn->pn", coefficients, basis)
            if not number:
                diagonal.append(coefficients[:, k])
        if k + 1 < depth:
            size = rest.norm(dim=1)
            off_diagonal.append(size)
            vector = rest / size[:, None]
            vectors.append(vector)
    side = torch.diag_embed(torch.stack(off_diagonal, dim=1), 1)
    matrix = torch.diag_embed(torch.stack(diagonal, dim=1)) + side + side.mT
    values, rotation = torch.linalg.eigh(matrix.double())
    return problem.n * (rotation[:, 0].square() * values.log()).sum(1).mean()


def calls(problem: KernelProblem | NetworkProblem, depth: int) -> dict[str, Call]:
    """What is compared; each gives the value and the gradients."""

    def with_gradients(value: Call) -> Call:
        def call() -> tuple[Tensor, tuple[Tensor, ...]]:
            result = value()
            return result.detach(), torch.autograd.grad(result, problem.parameters)

        return call

    def krylov() -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return slq_logdet(problem, problem.n, probes=PROBES, depth=depth, generator=generator).value

    def adjoint() -> Tensor:
        values, rotation = torch.linalg.eigh(lanczos(problem, problem.probes, depth).tridiagonal().double())
        return problem.n * (rotation[:, 0].square() * values.log()).sum(1).mean()

    return {
        "laplace_plus, krylov": with_gradients(krylov),
        "laplace_plus, adjoint": with_gradients(adjoint),
        "loop": with_gradients(lambda: loop(problem, depth, checkpointed=False)),
        "loop, checkpointed": with_gradients(lambda: loop(problem, depth, checkpointed=True)),
    }


def one_product(problem: KernelProblem | NetworkProblem) -> Call:
    """A product with the probes, and its vector-Jacobian product."""
    return lambda: torch.autograd.grad(problem(problem.probes).sum(), problem.parameters)


def call(operator: str, n: int, depth: int, method: str, small: bool = False) -> Call:
    """That of which memory is measured."""
    problem = PROBLEMS[operator](200 if small else n, torch.float32)
    return one_product(problem) if method == PRODUCT else calls(problem, 3 if small else depth)[method]


def run(quick: bool) -> Iterator[Row]:
    """All rows."""
    sizes = {"kernel": 500, "GGN": 2000} if quick else {"kernel": 1500, "GGN": 10_000}
    depths, rounds = ((5,), 1) if quick else ((5, 10, 20, 40), 3)
    for operator, n in sizes.items():
        problem = PROBLEMS[operator](n, torch.float32)
        asked: Row = {"operator": operator, "n": n, "depth": 1, "method": PRODUCT}
        base: Row = asked | {"n": problem.n, "probes": PROBES}
        graph = memory_in_new_process("gradients", **asked)
        seconds = least_seconds({PRODUCT: one_product(problem)}, rounds)[PRODUCT]
        yield base | {"seconds": seconds, "megabytes": graph}
        for depth in depths:
            compared = calls(problem, depth)
            times = least_seconds(compared, rounds)
            _, exact = calls(PROBLEMS[operator](n, torch.float64), depth)["loop"]()
            for method, seconds in times.items():
                chosen: Row = {"depth": depth, "method": method}
                _, gradients = compared[method]()
                gap = torch.cat([x.double().flatten() - y.flatten() for x, y in zip(gradients, exact, strict=True)])
                memory = memory_in_new_process("gradients", **asked | chosen)
                yield (
                    base
                    | chosen
                    | {
                        "seconds": seconds,
                        "x_faster_than_loop": times["loop"] / seconds,
                        "megabytes": memory,
                        "graphs": (memory - 4e-6 * problem.n * PROBES * depth) / graph,
                        "distance": (gap.norm() / torch.cat([x.flatten() for x in exact]).norm()).item(),
                    }
                )
