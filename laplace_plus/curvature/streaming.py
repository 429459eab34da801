"""Repeated passes over a data loader, checked to see the same network and the same data each time.

Products of operators over a data loader would otherwise come from different matrices, and no algorithm would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from laplace_plus import checks
from laplace_plus.errors import DataError, ModelChangedError
from laplace_plus.network import batches
from laplace_plus.network.batches import Batch
from laplace_plus.network.data_sums import DataSums, same_sum
from laplace_plus.network.gradients import batch_gradients
from laplace_plus.network.linearization import Linearization
from laplace_plus.network.network import Network
from laplace_plus.structured.gradients import slices

CHUNK_SIZE = 16
"""Default number of vectors that are pushed through the network together: activations take this times the memory."""


def in_order(data: Iterable[Any]) -> Iterable[Any]:
    """A loader with ``shuffle=True`` in the order of its dataset, as rows keep their places; other data as they are."""
    sampler: Any = data.sampler if type(data) is DataLoader else None
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return data
    own: Any = data
    kept = {name: getattr(own, name) for name in ("num_workers", "collate_fn", "pin_memory", "worker_init_fn")}
    return DataLoader(own.dataset, own.batch_size, drop_last=own.drop_last, **kept)


class Stream:
    """A network and a data loader, passed over again and again within ``exact_arithmetic``.

    Of a module, all parameters that require gradients are taken, and ``arrange`` puts its outputs into the shape
    ``[B, *, C]``. After the first pass, ``n_data`` and ``n_outputs`` are the numbers of examples and of all their
    outputs. ``checksum`` is a sum over the data that does not depend on batches and order. Raises DataError for
    data that can be iterated over only once or have no known form, ConfigurationError for a chunk size that is no
    positive integer, NonFiniteError for parameters that are not.
    """

    def __init__(
        self, network: Network | nn.Module, arrange: Any, data: Iterable[Any], chunk_size: int, progress: bool
    ):
        checks.count("chunk_size", chunk_size, 1)
        if isinstance(data, Iterator):
            expected = "a loader or a list of batches, since every product takes a pass over it"
            got, fix = f"a {type(data).__name__}", "Pass the DataLoader itself, or list(...) of the batches."
            raise DataError("The data can be run over only once.", expected=expected, got=got, fix=fix)
        self.network = network if isinstance(network, Network) else Network(network, "all", arrange)
        self.data, self.chunk_size, self.progress = in_order(data), chunk_size, progress
        self.network.check_finite()
        self._mark, self._names = self.network.mark(), self.network.parameter_names
        self.n_data = self.n_outputs = 0
        self.checksum = self._order_sum = 0.0

    def survey(self, description: str) -> Iterator[tuple[Batch, Tensor]]:
        """The first pass: every batch with the network's outputs ``[B, *, C]`` on it, which are finite."""
        sums = DataSums(self.network.device)
        for number, batch in enumerate(self._iterate(description)):
            if number == 0:  # tells which layer is the last one, and refuses detached outputs
                batch_gradients(self.network, batch)
                self._names = self.network.parameter_names
            outputs = self.network.forward(batch.inputs)
            checks.finite(f"The network's output in batch {number}", outputs)
            sums.add(batch, len(outputs))
            self.n_outputs += outputs.numel()
            yield batch, outputs.to(self.network.dtype)
        self.n_data = sums.count
        self.checksum, self._order_sum = sums.values()

    def batches(self, description: str, *, ordered: bool) -> Iterator[Batch]:
        """One more pass over the same batches; ``ordered`` if the order of the examples matters.

        ModelChangedError or DataError if the network or the data are not what they were in the first pass.
        """
        if self.network.mark() != self._mark or self._names != self.network.parameter_names:
            what = "The network has changed since the operator was made."
            expected = "the same weights, buffers and selection in every pass over the data"
            fix = "Make a new operator after training, or give this one a copy of the model."
            raise ModelChangedError(what, expected=expected, got="others", fix=fix)
        sums = DataSums(self.network.device)
        for batch in self._iterate(description):
            sums.add(batch, batches.batch_size(batch.target))
            if sums.count > self.n_data:
                break
            yield batch
        total, order = sums.values()
        is_same = sums.count == self.n_data and same_sum(self.checksum, total)
        if not is_same or (ordered and not same_sum(self._order_sum, order)):
            raise self.changed("the same in another order" if is_same else "others")

    def linearizations(self, name: str, *, ordered: bool) -> Iterator[tuple[Batch, Linearization]]:
        """One more pass, with the network linearised on each batch; arguments and errors as for :meth:`batches`."""
        vector = self.network.vector()
        for batch in self.batches(name, ordered=ordered):
            yield batch, Linearization(self.network, vector, batch.inputs)

    def chunks(self, total: int) -> Iterator[slice]:
        """Slices of so many vectors, of ``chunk_size``."""
        return slices(total, 1, self.chunk_size)

    def _iterate(self, description: str) -> Iterator[Batch]:
        return batches.iterate(self.data, device=self.network.device, progress=self.progress, description=description)

    def changed(self, got: str) -> DataError:
        """The error for data that differ from those of the first pass."""
        return DataError(
            "The data are not the same in every pass.",
            expected=f"the same {self.n_data} examples as in the first pass",
            got=got,
            fix="Use no random augmentation or sampling, or a list of batches; padding must not change, either.",
        )
