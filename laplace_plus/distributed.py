"""Fits whose data several ranks of ``torch.distributed`` share: each rank has a loader of its own.

:func:`fit` runs ``posterior.fit_batches`` on every rank, with a function that sums values over all ranks: each rank's
value goes to all others, and all add them in the same order, so that all have the same bits. An error on one rank
becomes a :class:`~laplace_plus.errors.DistributedError` on the others rather than a wait. What follows a fit, such as
tuning by the evidence and predictions, needs no other rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from laplace_plus.errors import ConfigurationError, DistributedError, EmptyDataError
from laplace_plus.likelihoods.sampling import draw_seed, stage_generator
from laplace_plus.network.batches import batch_size, can_be_cut, cut, to_device
from laplace_plus.network.capture import Capture
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.network.shadow import whole
from laplace_plus.persistence import decode, digest, encode, fingerprint
from laplace_plus.posteriors import Posterior
from laplace_plus.posteriors.state import TrainingData

__all__ = ["fit", "gathered", "together", "update"]

P = TypeVar("P", bound=Posterior)


def fit(posterior: P, shard: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None) -> P:
    """Fit a posterior to the data of all ranks, of which ``shard`` is this rank's part; every rank makes the call.

    Shards may differ in size, and be empty on some ranks. All ranks then have the posterior that one process would have
    fitted to all data, up to rounding. Training data are not known afterwards: pass ``data=`` where they are needed.

    Args:
        posterior: The posterior, with the same network, options and hyperparameters on all ranks.
        shard: This rank's batches, such as a loader with a ``DistributedSampler``, as for ``posterior.fit``.
        progress: Whether rank 0 shows a progress bar.
        generator: Source of randomness; that of rank 0 counts, from which each rank gets its own.

    Raises:
        ConfigurationError: ``torch.distributed`` is not initialised.
        UnsupportedError: A class that sums nothing over ranks.
        DistributedError: Another rank failed, or has another posterior.
        EmptyDataError: No rank has data.
    """
    return _fitted(posterior, shard, None, progress=progress, generator=generator)


def update(
    posterior: P, shard: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
) -> P:
    """Add the data of all ranks to a fit that all ranks have; arguments and errors as for :func:`fit`."""
    posterior.require_fit()
    return _fitted(posterior, shard, posterior.state, progress=progress, generator=generator)


def gathered(model: nn.Module, into: nn.Module) -> nn.Module:
    """Copy the weights of a model that FSDP2 or tensor parallelism has sharded into a whole one; on all ranks.

    Args:
        model: The sharded model.
        into: A model of the same architecture with whole parameters, which a posterior can be fitted to.

    Returns:
        ``into``.
    """
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415  -- it takes seconds to import
        StateDictOptions,
        get_model_state_dict,
    )

    into.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return into


class Ranks:
    """All ranks, which meet to exchange values; tensors travel on the network's device; see :func:`fit`."""

    def __init__(self, device: torch.device):
        if not (dist.is_available() and dist.is_initialized()):
            fix = "Launch with torchrun and call torch.distributed.init_process_group() first."
            raise ConfigurationError("torch.distributed is not initialised.", got="a process on its own", fix=fix)
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()

    def meet(self, payload: Any = None, error: str | None = None) -> list[Any]:
        """Wait for all ranks and give every rank's payload to all; ``error`` is this rank's, which it raises itself."""
        reports: list[Any] = [None] * self.size
        dist.all_gather_object(reports, (payload, error))
        failed = [(rank, text) for rank, (_, text) in enumerate(reports) if text is not None]
        if failed and error is None:
            raise DistributedError(f"Rank {failed[0][0]} failed. {failed[0][1]}")
        return [own for own, _ in reports]

    def __call__(self, own: Any, add: Callable[[Any, Any], Any]) -> Any:
        """The sum of all ranks' values, those of ranks 0, 1, … in turn; None stands for no value."""
        tensors: dict[str, torch.Tensor] = {}
        tree = None if own is None else encode(own, tensors, "value")
        forms = {name: {"size": tensor.shape, "dtype": tensor.dtype} for name, tensor in tensors.items()}
        total = None
        for rank, (other, theirs) in enumerate(self.meet((tree, forms))):
            if other is None:
                continue
            parts = {name: torch.empty(**form, device=self.device) for name, form in theirs.items()}
            for name, part in parts.items():
                if rank == self.rank:
                    part.copy_(tensors[name])
                if part.numel():
                    dist.broadcast(part, rank)
            value = decode(other, parts)
            total = value if total is None else add(total, value)
        if total is None:
            raise EmptyDataError("No rank's loader yielded any data.", expected="at least one batch", got="none")
        return total


class Turns:
    """Passes of a sharded network, which all ranks make at the same time, as each holds a part of the weights.

    A rank says what it is about to do, and does it when it is its turn. Ranks that want something else, or nothing any
    more, take part meanwhile: with one example, and without gradients. So ranks may have batches of other numbers and
    shapes.

    Attributes:
        captures: The last recorded pass of each selection of parameters.
        is_open: Whether all ranks are within a call that takes turns.
    """

    def __init__(self, ranks: Ranks, network: Network):
        self.ranks, self.network, self.is_open = ranks, network, False
        self.captures: dict[tuple[str, ...], Capture] = {}
        self._example: Any = None
        self._joins = False

    @contextmanager
    def taken(self, wanted: Any, inputs: Any = None) -> Iterator[None]:
        """Begin when it is this rank's turn; DistributedError for a failure of another rank while it lasts."""
        self.wait(wanted, inputs)
        try:
            yield
        except Exception as error:
            self.part(error)
            raise

    def wait(self, wanted: Any, inputs: Any = None) -> None:
        """Return when it is this rank's turn to do what is ``wanted``, or, for None, when no rank wants anything."""
        while not self._joins:
            own = None
            if self._example is None and inputs is not None:
                own = cut(inputs, slice(0, 1)) if can_be_cut(inputs, batch_size(inputs)) else inputs
            wants = self.ranks.meet((wanted, own if own is None else to_device(own, "cpu")))
            if self._example is None:
                self._example = next((example for _, example in wants if example is not None), None)
            chosen: Any = next((want for want, _ in wants if want is not None), None)
            if chosen is not None and chosen[0] == "forward":
                self.captures.pop(chosen[1], None)  # and its memory
            if chosen == wanted:
                return
            self._joins = True
            try:
                self._join(*chosen)
            except Exception as error:
                self.part(error)
                raise
            finally:
                self._joins = False

    def _join(self, what: str, *details: Any) -> None:
        """Do what the ranks do whose turn it is."""
        network = self.network
        if what == "whole":
            whole(network.tensor(details[0]))
        elif what == "backward":
            names, numbers, leaves, size = details
            capture = self.captures[names]
            places = [capture.calls[number].edge for number in numbers] + [capture.leaves[name] for name in leaves]
            outputs = capture.graph_outputs
            capture.pull(outputs.new_zeros(size, *outputs.shape), places)
        else:
            inputs, names = to_device(self._example, network.device), details[0]
            if names is None:
                network.forward(inputs)
            elif names == network.parameter_names:
                _Joined(network, inputs)
            else:
                other = network.selecting(names)
                other.turns = self
                _Joined(other, inputs)

    def part(self, error: Exception) -> None:
        """Leave the group, on which the others wait within a pass, and tell them why; or learn it from them."""
        if dist.group.WORLD is None:
            return
        store, key = dist.group.WORLD.get_group_store(), "laplace_plus/failed"
        known = store.get(key).decode() if store.check([key]) else None
        if known is None:
            store.set(key, f"Rank {self.ranks.rank} failed. {type(error).__name__}: {error}")
        dist.destroy_process_group()
        if known is not None:
            raise DistributedError(known) from error


class _Joined(Capture):
    """A pass for the sake of the other ranks, which looks at nothing that would take another pass."""

    def _look_whether_pointwise(self) -> None:
        pass


@contextmanager
def together(posterior: P) -> Iterator[P]:
    """All ranks call methods of a posterior over a sharded network, each on data of its own.

    A rank that has left the block takes part in the others' passes until all have left it. For other networks nothing
    happens.

    Raises:
        DistributedError: Another rank failed.
    """
    network = posterior.network
    if not network.held.sharded:
        yield posterior
        return
    with _open(Turns(Ranks(network.device), network)) as network.turns:
        yield posterior
        network.turns.wait(None)


@contextmanager
def _open(turns: Turns) -> Iterator[Turns]:
    turns.is_open = True
    try:
        yield turns
    except Exception as error:
        # Errors that all ranks have need no word, and without a group there is nobody to tell.
        if not isinstance(error, (DistributedError, EmptyDataError)) and dist.is_initialized():
            try:
                turns.ranks.meet(error=f"{type(error).__name__}: {error}")
            except RuntimeError:  # another rank left within a pass
                turns.part(error)
        raise
    finally:
        turns.is_open, turns.captures = False, {}


def _fitted(posterior: P, shard: Iterable[Any], before: Any, *, progress: bool, generator: Any) -> P:
    ranks, made = Ranks(posterior.network.device), copy.copy(posterior)
    made.network = copy.copy(posterior.network)
    made.network.turns = turns = Turns(ranks, made.network)

    def reduce(own: Any, add: Callable[[Any, Any], Any]) -> Any:
        if made.network.held.sharded:
            turns.wait(None)
        return ranks(own, add)

    with _open(turns), exact_arithmetic(posterior.network):
        posterior.network.check_finite()
        weights = fingerprint(posterior.model)
        seed = _agreed(ranks, posterior, weights, before, generator)
        # The examples of different ranks draw independent labels; all else that is drawn is the same on all ranks.
        source = stage_generator(seed, ranks.rank if posterior.backend.kind == "ggn_mc" else 0)
        show = progress and ranks.rank == 0
        made._fitted(shard, before, reduce=reduce, progress=show, generator=source)
        made.training_data, made.network.weights = TrainingData(), weights if made.network.held.sharded else {}
    ranks.meet()
    posterior.__dict__ = vars(made)
    return posterior


def _agreed(
    ranks: Ranks, posterior: Posterior, weights: dict[str, str], before: Any, generator: torch.Generator | None
) -> int:
    """Rank 0's seed, after all ranks have found that they have the same posterior."""
    hyperparameters = {name: getattr(posterior, name) for name in ("prior_precision", "prior_mean", "temperature")}
    own = {
        "the call": "fit()" if before is None else f"update() after {before.n_data} examples",
        "class": type(posterior).__name__,
        "options": repr(posterior.options),
        "likelihood": str(posterior.likelihood.config()),
        "backend": str(posterior.backend.config()),
        "selected parameters": str([(s.name, s.mask is None or digest(s.mask)) for s in posterior.network.selected]),
        **{name: f"{value.flatten()[:3].tolist()} {digest(value)}" for name, value in hyperparameters.items()},
        **{f"the tensor {name!r}": text for name, text in weights.items()},
    }
    reports = ranks.meet((own, draw_seed(torch.default_generator if generator is None else generator)))
    first, seed = reports[0]
    for rank, (theirs, _) in enumerate(reports):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                what, got = f"Rank {rank} disagrees with rank 0 on {name}.", str(theirs.get(name))
                raise DistributedError(what, expected=str(first.get(name)), got=got)
    return seed
