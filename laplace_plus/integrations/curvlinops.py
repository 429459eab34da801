"""Curvature by curvlinops (Dangel et al., 2025, arXiv:2501.19183).

Full matrices are curvlinops' linear operators applied to the identity; they see the network as a function of the
parameter vector, so every architecture and selection that ``torch.func`` can differentiate is as good as another. The
Kronecker factors come from hooks on the modules of a private copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from laplace_plus import batches
from laplace_plus._memory import CHUNK_BYTES
from laplace_plus.batches import Batch
from laplace_plus.curvature.base import KINDS
from laplace_plus.curvature.calls import EmbeddingCall
from laplace_plus.curvature.capture import Capture, capture_batch
from laplace_plus.curvature.structures import Curvature, KroneckerStructure, Structure, whole_layout
from laplace_plus.integrations.foreign import ForeignBackend, loss_targets
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import widen
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network import Network
from laplace_plus.structured import DenseBlock, KroneckerBlock

with warnings.catch_warnings():
    # curvlinops imports a package that compiles functions by torch.jit.script, which torch has deprecated.
    warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")
    from curvlinops import (
        EFLinearOperator,
        FisherMCLinearOperator,
        FisherType,
        GGNLinearOperator,
        HessianLinearOperator,
        KFACLinearOperator,
    )

_FULL: dict[str, Callable[..., Any]] = {
    "ggn": GGNLinearOperator,
    "ggn_mc": FisherMCLinearOperator,
    "empirical_fisher": EFLinearOperator,
    "hessian": HessianLinearOperator,
}
_FACTORS = {"ggn": FisherType.TYPE2, "ggn_mc": FisherType.MC, "empirical_fisher": FisherType.EMPIRICAL}


class Curvlinops(ForeignBackend):
    """Full and Kronecker-factored curvature by curvlinops; see :class:`Backend`.

    Full matrices take P matrix-vector products and any selection; Kronecker factors exist for ``nn.Linear`` and
    ``nn.Conv2d`` without groups. Likelihoods are Categorical, Bernoulli and Gaussian. There is no exact diagonal.

    Example:
        >>> import laplace_plus as lp
        >>> net, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
        >>> data = [(x, torch.tensor([0, 1, 2, 0]))]
        >>> mine = lp.Full(net, "classification", backend="curvlinops").fit(data).precision_matrix()
        >>> torch.allclose(mine, lp.Full(net, "classification").fit(data).precision_matrix())
        True
    """

    name: ClassVar[str] = "curvlinops"
    supported: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {(kind, "full") for kind in KINDS} | {(kind, "KFAC") for kind in _FACTORS}
    )

    @override
    def curvature(
        self,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        structure: Structure,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Curvature, Tensor]:
        self.check(structure, likelihood)
        loss, scale = self.loss(likelihood)
        if self.kind == "empirical_fisher":  # which is quadratic in the loss
            scale *= scale
        capture = capture_batch(network, batch)
        outputs = capture.outputs.view(capture.output_shape)
        likelihood.validate(outputs, batch.target)
        targets, ignored = loss_targets(likelihood, widen(outputs), batch)
        factored = isinstance(structure, KroneckerStructure)
        if outputs.ndim > 2 and (factored or self.kind == "empirical_fisher"):
            # curvlinops treats positions as examples, or adds up the gradients of one direction over all of them.
            raise self.refusal(
                f"does not keep the positions of one example together in a {structure.name} {self.kind} curvature",
                expected="outputs [B, C]",
                got=f"outputs {tuple(outputs.shape)}",
            )
        if ignored and (self.kind == "ggn_mc" or factored):
            raise self.refusal(
                f"counts ignored targets in a {structure.name} {self.kind} curvature",
                expected="no target equal to ignore_index",
                got="ignored targets",
            )
        task = _Task(network, likelihood, loss, scale, batch.inputs, targets, capture, generator)
        if isinstance(structure, KroneckerStructure):
            return self._factored(task, structure.weight_sharing), outputs
        return self._full(task), outputs

    # -- full matrices -------------------------------------------------------------------------------------------------

    def _full(self, task: _Task) -> Curvature:
        network, capture = task.network, task.capture
        self._require_forward_mode(network, capture)
        options: dict[str, Any] = {"mc_samples": self.n_samples} if self.kind == "ggn_mc" else {}
        parts = []
        for component in task.components:
            model = _FunctionOfVector(network, task.loss, component)
            if self.kind == "ggn_mc":
                options["seed"] = task.seed()
            operator = _FULL[self.kind](
                model, task.loss, [model.vector], task.data(component), **task.common, **options
            )
            # Attention's fused kernels have no derivatives forwards.
            with self.translated(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
                # Forward mode compiles its rules by torch.jit.script, too; operations that vmap loops over are no news.
                warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")
                warnings.filterwarnings("ignore", message="There is a performance drop")
                parts.append(_dense(operator, network, capture.activation_elements))
        matrix = torch.stack(parts)[:, None] * task.scale  # [K, 1, P, P]
        tolerance = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().max()
        if bool(((matrix - matrix.mT).abs() > tolerance).any()):
            raise self.refusal(
                f"got an asymmetric {self.kind} matrix, because torch.func differentiates some operation wrongly when "
                "nested (layer normalisation is known for it)",
                expected="a symmetric matrix",
                got=f"a difference of {float((matrix - matrix.mT).abs().max()):.3g} from its transpose",
            )
        layout = whole_layout(network)
        return Curvature([(layout, DenseBlock((matrix + matrix.mT) / 2, layout.shape))])

    def _require_forward_mode(self, network: Network, capture: Capture) -> None:
        """Refuse what has another derivative forwards than backwards: only the latter leaves out the padding row."""
        embeddings = [call for call in capture.calls if isinstance(call, EmbeddingCall) and call.padding is not None]
        names = {rows.name for call in embeddings for rows in call.rows}
        for name, module in network.model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
                names.add(f"{name}.weight" if name else "weight")
        padded = sorted(names & set(network.parameter_names))
        if padded:
            raise self.refusal(
                f"differentiates the padding row of {padded[0]!r}, which training leaves alone",
                expected="an embedding without padding_idx",
                got="padding_idx",
            )

    # -- Kronecker factors ---------------------------------------------------------------------------------------------

    def _factored(self, task: _Task, weight_sharing: str) -> Curvature:
        network, n_data = task.network, task.n_data
        private = self.private_copy(network)
        layers = self.kronecker_layers(network, task.capture, private)
        positions = {layer.name: _watch_positions(layer.module) for layer in layers}
        parameters = dict(private.named_parameters())
        scale = task.scale
        lefts: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
        rights: dict[str, Tensor] = {}
        for component in task.components:
            with self.translated(), torch.enable_grad():
                operator = KFACLinearOperator(
                    _WithOutputs(private, network, component),
                    task.loss,
                    [parameters[name] for name in network.parameter_names],
                    task.data(component),
                    seed=task.seed() if self.kind == "ggn_mc" else 0,
                    fisher_type=_FACTORS[self.kind],
                    mc_samples=self.n_samples if self.kind == "ggn_mc" else 1,
                    kfac_approx=weight_sharing,
                    num_per_example_loss_terms=1,
                    separate_weight_and_bias=False,
                    **task.common,
                )
                operator.compute_kronecker_factors()
                factors = operator.state_dict()
            for layer in layers:
                key = f"private.{layer.name}" if layer.name else "private"
                left = factors["gradient_covariances"].get(key)
                right = factors["input_covariances"].get(key)
                if left is None or (right is None and layer.call.weight is not None):
                    raise self.refusal(
                        f"did not see {layer.name!r} at work",
                        expected="layers that are called as modules and that the outputs depend on",
                        got="a layer whose weight is used by a function",
                    )
                lefts[layer.name].append(left * scale)
                rights[layer.name] = left.new_ones(1, 1) if right is None else right
        blocks: list[tuple[Any, Any]] = []
        for layer in layers:
            n_rows, per_example = positions[layer.name][-1]
            if weight_sharing == "reduce":
                if n_rows != n_data * per_example or layer.axis is None or layer.axis != (0, False):
                    raise self.refusal(
                        f"averages over all but the first axis, which for {layer.name!r} is not that of the examples",
                        expected='examples along the first axis, or weight_sharing="expand"',
                        got=f"{n_rows} rows for {n_data} examples",
                    )
                n_rows, per_example = n_data, 1
            # curvlinops has divided the sum of a aᵀ by the number of examples and of positions of each.
            right = rights[layer.name] * (n_data * per_example if layer.call.weight is not None else n_rows)
            count = torch.tensor(float(n_rows), dtype=torch.float64)
            left = torch.stack(lefts[layer.name])[:, None].to(network.dtype)
            blocks.append((layer.layout, KroneckerBlock(left, right[None].to(network.dtype), count)))
        return Curvature(blocks)


@dataclass(frozen=True)
class _Task:
    """One batch, in curvlinops' terms."""

    network: Network
    likelihood: Likelihood
    loss: nn.Module
    scale: float
    inputs: Any
    targets: Tensor
    capture: Capture
    generator: torch.Generator | None

    @property
    def n_data(self) -> int:
        return self.capture.output_shape[0]

    @property
    def components(self) -> list[int | None]:
        """The outputs that get a curvature of their own: None for all at once."""
        n_noise = self.likelihood.n_noise
        return [None] if n_noise == 1 else list(range(n_noise))

    @property
    def common(self) -> dict[str, Any]:
        """What every operator is told. The data are one batch, known to be deterministic."""
        return {"check_deterministic": False, "num_data": self.n_data, "batch_size_fn": lambda _: self.n_data}

    def data(self, component: int | None) -> list[tuple[dict[str, Any], Tensor]]:
        """The batch, whose inputs curvlinops passes on untouched because they are in a mapping."""
        return [({"inputs": self.inputs}, _component_of(self.targets, component))]

    def seed(self) -> int:
        return draw_seed(torch.default_generator if self.generator is None else self.generator)


class _FunctionOfVector(nn.Module):
    """The outputs as a function of the parameter vector, the only parameter, in the axes that torch's losses take."""

    def __init__(self, network: Network, loss: nn.Module, component: int | None):
        super().__init__()
        self.vector = nn.Parameter(network.vector())
        self.classes_first = isinstance(loss, nn.CrossEntropyLoss)
        self.component = component
        # In a tuple: the user's model must not become a part of this module.
        self.network = (network,)

    def forward(self, data: dict[str, Any]) -> Tensor:
        network = self.network[0]
        outputs = widen(network(data["inputs"], network.substitute(self.vector)))
        outputs = _component_of(outputs, self.component)
        return outputs.movedim(-1, 1) if self.classes_first else outputs


class _WithOutputs(nn.Module):
    """A private copy that takes a batch's inputs however the model takes them and returns ``[B, C]``."""

    def __init__(self, private: nn.Module, network: Network, component: int | None):
        super().__init__()
        self.private = private
        self.arrange = network.arrange
        self.component = component

    def forward(self, data: dict[str, Any]) -> Tensor:
        outputs = self.arrange(batches.output_tensor(batches.call(self.private, data["inputs"])))
        return _component_of(outputs, self.component)


def _component_of(values: Tensor, component: int | None) -> Tensor:
    return values if component is None else values[..., component : component + 1]


def _dense(operator: Any, network: Network, n_activations: int) -> Tensor:
    """An operator written out, ``[P, P]``, a bounded number of columns at a time."""
    vector = network.vector()
    total = len(vector)
    step = max(1, CHUNK_BYTES // (4 * vector.element_size() * (n_activations + total)))
    columns = []
    for start in range(0, total, step):
        width = min(step, total - start)
        identity = vector.new_zeros(total, width)
        identity[start : start + width] = torch.eye(width, dtype=vector.dtype, device=vector.device)
        columns.append(operator @ identity)
    return torch.cat(columns, 1).detach()


def _watch_positions(module: nn.Module) -> list[tuple[int, int]]:
    """A list that every call of the module adds to: rows of its input factor, and positions for each first index."""
    seen: list[tuple[int, int]] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        per_example = (output.shape[2:] if isinstance(module, nn.Conv2d) else output.shape[1:-1]).numel()
        seen.append((output.shape[0] * per_example, per_example))

    module.register_forward_hook(note)
    return seen
