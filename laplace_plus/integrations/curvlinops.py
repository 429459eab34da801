"""Curvature by curvlinops (Dangel et al., 2025, arXiv:2501.19183).

Full matrices are curvlinops' linear operators applied to the identity. They see the network as a function of the
parameter vector, so they take every architecture and selection that ``torch.func`` can differentiate. The Kronecker
factors come from hooks on the modules of a private copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from laplace_plus.curvature.structures import Curvature, KroneckerStructure
from laplace_plus.integrations.foreign import ForeignBackend, Task
from laplace_plus.likelihoods.base import widen
from laplace_plus.network import batches
from laplace_plus.network.calls import FIRST
from laplace_plus.network.gradients import whole_layout
from laplace_plus.network.invariant import examined
from laplace_plus.structured import DenseBlock, KroneckerBlock

with warnings.catch_warnings():
    # curvlinops imports a package that compiles functions by torch.jit.script, which torch has deprecated.
    warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")
    from curvlinops import FisherType, GGNLinearOperator, KFACLinearOperator

_COLUMNS = 64
"""Columns of a matrix that are computed at a time."""


class Curvlinops(ForeignBackend):
    """The full or Kronecker-factored Gauss-Newton matrix by curvlinops; see :class:`Backend`.

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
    supported: ClassVar[frozenset[tuple[str, str]]] = frozenset({("ggn", "full"), ("ggn", "KFAC")})

    @override
    def compute(self, task: Task) -> Curvature:
        structure, n_noise = task.structure, task.likelihood.n_noise
        loss, scale, targets, ignored = self.loss(task)
        runs = []  # for each noise level, the outputs that have it and their targets
        for outputs_of in [slice(None)] if n_noise == 1 else [slice(k, k + 1) for k in range(n_noise)]:
            runs.append((outputs_of, targets[..., outputs_of] if targets.is_floating_point() else targets))
        if not isinstance(structure, KroneckerStructure):
            return self._full(task, runs, loss, scale)
        what, shape = "mixes positions, and counts ignored targets, in Kronecker factors", tuple(task.outputs.shape)
        plain = task.outputs.ndim == 2 and not ignored  # noqa: PLR2004
        expected = "outputs [B, C], and no target equal to ignore_index"
        self.require(plain, what, expected, f"outputs {shape}, {'some' if ignored else 'none'} ignored")
        return self._factored(task, structure.weight_sharing, runs, loss, scale)

    def _options(self, task: Task, targets: Tensor) -> dict[str, Any]:
        """What every operator is told. The data are one batch; curvlinops passes inputs in a mapping on untouched."""
        size = len(task.outputs)
        return {
            "data": [({"inputs": task.batch.inputs}, targets)],
            "num_data": size,
            "batch_size_fn": lambda _: size,
            "check_deterministic": False,
        }

    def _full(self, task: Task, runs: list[tuple[slice, Tensor]], loss: nn.Module, scale: float) -> Curvature:
        network = task.network
        for name, module in network.model.named_modules():  # only backward derivatives leave padding rows out
            weight = f"{name}.weight" if name else "weight"
            is_padded = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None
            what, expected = f"differentiates in the padding row of {weight!r}", "an embedding without padding_idx"
            self.require(not is_padded or weight not in network.parameter_names, what, expected, "padding_idx")
        parts = []
        for outputs_of, targets in runs:
            model = _Outputs(outputs_of, loss)
            vector = model.vector = nn.Parameter(network.vector())
            model.compute = partial(lambda own, inputs: widen(network(inputs, network.substitute(own.vector))), model)
            operator = GGNLinearOperator(model, loss, [vector], **self._options(task, targets))
            # Attention's fused kernels have no derivatives forwards.
            with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
                # Forward mode compiles its rules by torch.jit.script, too; vmap may loop over some operations.
                warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")
                warnings.filterwarnings("ignore", message="There is a performance drop")
                identity = torch.eye(len(vector), dtype=vector.dtype, device=vector.device)
                columns = [operator @ some for some in identity.split(_COLUMNS, 1)]
            parts.append(torch.cat(columns, 1).detach())
        matrix = torch.stack(parts)[:, None] * scale  # [K, 1, P, P]
        layout = whole_layout(network)
        return Curvature([(layout, DenseBlock((matrix + matrix.mT) / 2, layout.shape))])

    def _factored(
        self, task: Task, sharing: str, runs: list[tuple[slice, Tensor]], loss: nn.Module, scale: float
    ) -> Curvature:
        network, n_data = task.network, len(task.outputs)
        rows = examined(network, task.capture).rows
        in_order = all(row is FIRST or (sharing == "expand" and row is not None) for row in rows)
        what, expected = "takes rows of a layer for those of one example after another", "rows of examples in order"
        self.require(in_order, what, expected, "a network that moves or shares rows")
        private = self.private_copy(network)
        layers = self.kronecker_layers(task, private)
        parameters = dict(private.named_parameters())
        lefts: list[list[Tensor]] = [[] for _ in layers]
        rights: list[Tensor] = [torch.ones(1, 1, device=network.device)] * len(layers)  # of a bias alone
        for outputs_of, targets in runs:
            model = _Outputs(outputs_of, loss)
            model.private = private
            model.compute = lambda inputs: network.arrange(batches.output_tensor(batches.call(private, inputs)))
            with torch.enable_grad():
                operator = KFACLinearOperator(
                    model,
                    loss,
                    [parameters[name] for name in network.parameter_names],
                    fisher_type=FisherType.TYPE2,
                    kfac_approx=sharing,
                    num_per_example_loss_terms=1,
                    separate_weight_and_bias=False,
                    **self._options(task, targets),
                )
                operator.compute_kronecker_factors()
                factors = operator.state_dict()
            for number, layer in enumerate(layers):
                key = f"private.{layer.name}" if layer.name else "private"
                right = factors["input_covariances"].get(key)
                lefts[number].append(factors["gradient_covariances"][key] * scale)
                rights[number] = rights[number] if right is None else right
        blocks: list[tuple[Any, Any]] = []
        for layer, own, right in zip(layers, lefts, rights, strict=True):
            shape = layer.call.output_shape
            positions = (shape[2:] if isinstance(layer.module, nn.Conv2d) else shape[1:-1]).numel()
            n_rows = shape[0] * positions
            if sharing == "reduce":
                n_rows, positions = n_data, 1
            # curvlinops has divided the sum of a aᵀ by the number of examples and of positions of each.
            right = right * (n_data * positions if layer.call.weight is not None else n_rows)
            count = torch.tensor(float(n_rows), dtype=torch.float64)
            left = torch.stack(own)[:, None].to(network.dtype)
            blocks.append((layer.layout, KroneckerBlock(left, right[None].to(network.dtype), count)))
        return Curvature(blocks)


class _Outputs(nn.Module):
    """Some outputs of a network, as curvlinops takes them: a module whose own parameters are differentiated.

    ``compute`` maps a batch's inputs to outputs ``[B, *, C]``. The parameters are those of ``vector`` or ``private``.
    """

    vector: nn.Parameter
    private: nn.Module
    compute: Callable[[Any], Tensor]

    def __init__(self, chosen: slice, loss: nn.Module):
        super().__init__()
        self.chosen, self.classes_first = chosen, isinstance(loss, nn.CrossEntropyLoss)

    def forward(self, data: dict[str, Any]) -> Tensor:
        outputs = self.compute(data["inputs"])[..., self.chosen]
        return outputs.movedim(-1, 1) if self.classes_first else outputs
