"""Operators whose products run over a data loader: the parts that all of them share.

A product takes one pass over the data for any number of vectors. Between passes neither the network nor the data may
change. Both are checked: products would otherwise come from different matrices, and no algorithm would notice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from laplace_plus import batches
from laplace_plus.batches import Batch
from laplace_plus.curvature.capture import capture_batch
from laplace_plus.curvature.linearization import ADModes, Linearization
from laplace_plus.errors import ConfigurationError, DataError, ModelChangedError, NonFiniteError
from laplace_plus.linalg.linear_maps import attach
from laplace_plus.linalg.operators import Operator
from laplace_plus.network import Network, exact_arithmetic

_ENTRIES_AT_A_TIME = 2**22
"""Entries of the data that are converted to float64 together, for their sums: 32 MiB."""


class Stream:
    """A network and a data loader, run over again and again.

    Args:
        network: The network, or a module of which all parameters that require gradients are taken.
        arrange: Puts the outputs of such a module into the shape ``[B, *, C]``.
        data: An iterable of batches that can be started again.
        chunk_size: Number of vectors that are pushed through the network at a time.
        progress: Whether to show a progress bar for each pass.

    Attributes:
        n_data: Number of examples.
        n_outputs: Number of outputs of all examples, positions included.

    Raises:
        DataError: Data that can be run over only once, or of no known form.
        ConfigurationError: A chunk size that is no positive integer.
        NonFiniteError: NaN or infinity among the parameters.
    """

    def __init__(
        self, network: Network | nn.Module, arrange: Any, data: Iterable[Any], chunk_size: int, progress: bool
    ):
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ConfigurationError(
                "chunk_size must be a positive integer.", expected="chunk_size >= 1", got=repr(chunk_size)
            )
        if isinstance(data, Iterator):
            raise DataError(
                "The data can be run over only once.",
                expected="a loader or a list of batches, since every product takes a pass over it",
                got=f"a {type(data).__name__}",
                fix="Pass the DataLoader itself, or list(...) of the batches.",
            )
        self.network = network if isinstance(network, Network) else Network(network, "all", arrange)
        self.data, self.chunk_size, self.progress = data, chunk_size, progress
        self.ad_modes = ADModes()
        self.network.check_finite()
        # The network remembers one state, which may belong to another check; a twin has its own.
        self._watch, self._names = self.network.twin(), self.network.parameter_names
        self._watch.remember()
        self.n_data = self.n_outputs = 0
        self._sums: tuple[float, float] | None = None

    def survey(self, description: str) -> Iterator[tuple[Batch, Tensor]]:
        """The first pass: every batch with the network's outputs ``[B, *, C]`` on it, which are finite.

        All passes must run inside :func:`~laplace_plus.network.exact_arithmetic`.
        """
        sums = DataSums(self.network.device)
        for number, batch in enumerate(self._iterate(description)):
            if number == 0:
                capture_batch(self.network, batch)  # tells which layer is the last one, and refuses what is cut off
                self._names = self.network.parameter_names
            outputs = self.network.forward(batch.inputs)
            if not bool(torch.isfinite(outputs).all()):
                raise _not_finite(batch, outputs, number)
            sums.add(batch, len(outputs))
            self.n_outputs += outputs.numel()
            yield batch, outputs.to(self.network.dtype)
        self.n_data, self._sums = sums.count, sums.values()

    @property
    def checksum(self) -> float:
        """A sum over the data of the first pass that tells them from others, however they are batched and ordered."""
        assert self._sums is not None
        return self._sums[0]

    def batches(self, description: str, *, ordered: bool) -> Iterator[Batch]:
        """One more pass; the same batches as in the first one.

        Args:
            description: The words before the progress bar.
            ordered: Whether the order of the examples matters.

        Raises:
            ModelChangedError: The network is not what it was in the first pass.
            DataError: The data are not what they were.
        """
        if self._watch.has_changed() or self._names != self.network.parameter_names:
            raise ModelChangedError(
                "The network has changed since the operator was made.",
                expected="the same weights, buffers and selection in every pass over the data",
                got="others",
                fix="Make a new operator after training, or give this one a copy of the model.",
            )
        sums = DataSums(self.network.device)
        for batch in self._iterate(description):
            sums.add(batch, batches.batch_size(batch.target))
            if sums.count > self.n_data:
                raise self.changed(f"more than {self.n_data} examples")
            yield batch
        if sums.count != self.n_data:
            raise self.changed(f"{sums.count} examples")
        assert self._sums is not None
        for kind, before, now in zip(("examples", "order"), self._sums, sums.values(), strict=True):
            if (kind == "examples" or ordered) and not same_sum(before, now):
                raise self.changed(f"other {kind}" if kind == "examples" else "the same in another order")

    def linearizations(self, description: str, *, ordered: bool) -> Iterator[tuple[Batch, Linearization]]:
        """One more pass, with the network linearised on each batch; errors as for :meth:`batches`."""
        vector = self.network.vector()
        for batch in self.batches(description, ordered=ordered):
            yield batch, Linearization(self.network, vector, batch.inputs, self.ad_modes)

    def _iterate(self, description: str) -> Iterator[Batch]:
        return batches.iterate(self.data, device=self.network.device, progress=self.progress, description=description)

    def changed(self, got: str) -> DataError:
        """The error for data that differ from those of the first pass."""
        return DataError(
            "The data are not the same in every pass.",
            expected=f"the same {self.n_data} examples as in the first pass",
            got=got,
            fix="Use shuffle=False and no random augmentation, or a list of batches; padding must not change, either.",
        )


class NetworkOperator(Operator):
    """An operator whose products run over a :class:`Stream`.

    Products are differentiable in the vectors, at the cost of another pass, but not in the network's parameters:
    :meth:`tensors` is empty.

    Attributes:
        matvecs: Number of vectors multiplied so far, in either direction.
    """

    def __init__(self, stream: Stream):
        self._stream = stream
        self.dtype, self.device = stream.network.dtype, stream.network.device
        self.matvecs = 0

    @property
    def n_data(self) -> int:
        """Number of examples that the loader yielded."""
        return self._stream.n_data

    @property
    def network(self) -> Network:
        """The network."""
        return self._stream.network

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    @abstractmethod
    def _multiply(self, vectors: Tensor) -> Tensor:
        """``A v`` for vectors ``[m, n]``, in one pass over the data."""

    def _run(self, multiply: Callable[[Tensor], Tensor], transpose: Operator, size: int, vectors: Tensor) -> Tensor:
        """A product with ``[..., n]`` by a function ``[m, n] -> [m, size]``; differentiable."""

        def products(stack: Tensor) -> Tensor:
            self.matvecs += len(stack)
            # Contexts are entered here rather than in the generators, which may be left half-way.
            with exact_arithmetic(self.network), torch.no_grad():
                stack = stack.clone() if stack.is_inference() else stack
                return multiply(stack) if len(stack) else stack.new_zeros(0, size)

        # Not inside of an autograd function's forward, where torch switches forward derivatives off.
        stack = products(vectors.detach().reshape(vectors.shape[:-1].numel(), vectors.shape[-1]))
        return attach(
            (stack.view(*vectors.shape[:-1], size),),
            (vectors,),
            lambda _, cotangents: [None if cotangents[0] is None else transpose(cotangents[0])],
        )[0]

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self._run(self._multiply, self.T, self.shape[0], vectors)

    @override
    def _details(self) -> str:
        return f"{self.n_data} data"


class DataSums:
    """A summary of the data that tells two passes apart: the number of examples, and two sums over their entries.

    An example contributes ``Σ_k r_k + Σ_{j<k} r_j r_k``, where ``r_k`` is a weighted sum over the entries of its k-th
    tensor, the target among them: inputs with other examples' targets have other products. The second sum weights
    examples by their number, so that it also tells the order. Both are computed for each example by itself: how the
    data are cut into batches does not matter, nor does padding of an example's first dimension by zeros.

    Args:
        device: Where the sums are kept.

    Attributes:
        count: Number of examples.
    """

    def __init__(self, device: torch.device | str):
        self.count = 0
        self._plain = torch.zeros((), dtype=torch.float64, device=device)
        self._weighted = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, batch: Batch, size: int) -> None:
        """Add a batch with ``size`` examples."""
        device = self._plain.device
        total, pairs = (torch.zeros(size, dtype=torch.float64, device=device) for _ in range(2))
        for number, leaf in enumerate([*batches.flatten(batch.inputs)[0], batch.target], start=1):
            values = leaf.data if isinstance(leaf, PackedSequence) else leaf
            if not isinstance(values, Tensor) or values.is_complex() or not values.numel():
                continue
            values = values.detach().to(device)
            if values.ndim == 0 or values.shape[0] != size:
                self._plain += values.sum(dtype=torch.float64) / number
                continue
            rows = _row_sums(values.reshape(size, -1)) / number
            pairs += total * rows
            total += rows
        total += pairs
        self._plain += total.sum()
        self._weighted += total @ _irregular(self.count, self.count + size, device)
        self.count += size

    def values(self) -> tuple[float, float]:
        """The sum that no order changes, and the other one."""
        return float(self._plain), float(self._weighted)


def same_sum(before: float, now: float) -> bool:
    """Whether two sums of :class:`DataSums` come from the same data, up to rounding."""
    return not abs(before - now) > 1e-6 * (1 + abs(before))


def _row_sums(values: Tensor) -> Tensor:
    """``Σ_j w_j v_ij`` in float64, ``[B]``: with weights, as the plain sums of probabilities are all the same."""
    weights = _irregular(0, values.shape[1], values.device)
    parts = values.split(max(1, _ENTRIES_AT_A_TIME // values.shape[1]))
    return torch.cat([part.double() @ weights for part in parts])


def _irregular(start: int, stop: int, device: torch.device) -> Tensor:
    """Weights between 1/2 and 3/2 without regularity (multiples of the golden ratio), one for each number."""
    numbers = torch.arange(start, stop, dtype=torch.float64, device=device)
    return 0.5 + (numbers * 0.6180339887498949) % 1.0


def _not_finite(batch: Batch, outputs: Tensor, number: int) -> NonFiniteError:
    leaves = [leaf for leaf in batches.flatten(batch.inputs)[0] if isinstance(leaf, Tensor)]
    bad = [leaf for leaf in leaves if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())]
    wrong, where = (bad[0], "inputs") if bad else (outputs, "network's outputs")
    return NonFiniteError(
        f"In batch {number} of the data, the {where} hold NaN or infinity.",
        expected="finite numbers",
        got=f"{int((~torch.isfinite(wrong)).sum())} of {wrong.numel()} entries that are not",
        fix="Drop or impute them." if bad else "Check the trained weights; half precision may have overflowed.",
    )
