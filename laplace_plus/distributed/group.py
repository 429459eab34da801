"""Groups of ranks that work together, and how an error on one rank reaches the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laplace_plus.errors import ConfigurationError, DistributedError


@dataclass(frozen=True)
class Ranks:
    """Which ranks share the data, and what each of them keeps.

    Attributes:
        process_group: A ``torch.distributed.ProcessGroup``; None for all ranks.
        shard_factors: Whether each Kronecker factor is kept by one rank alone, the one that decomposes it; all ranks
            have the eigendecompositions in any case. It halves the memory of a posterior on many ranks. Then all ranks
            have to :meth:`save` together.
    """

    process_group: Any = None
    shard_factors: bool = False


Distributed = bool | Ranks | Any | None
"""What a user may pass as ``distributed=``: None, a bool, a ``torch.distributed.ProcessGroup``, or :class:`Ranks`."""


def resolve_group(distributed: Distributed) -> Group | None:
    """The ranks that take part in a call; None for this process alone.

    None stands for all ranks where ``torch.distributed`` is initialised with more than one, True for the same with an
    error where it is not. ConfigurationError for anything else, or a group that this rank is not in.
    """
    if isinstance(distributed, Ranks):
        group = resolve_group(distributed.process_group)
        if group is not None:
            group.shard_factors = distributed.shard_factors
        return group
    ready = dist.is_available() and dist.is_initialized()
    if distributed is False or (distributed is None and not ready):
        return None
    if distributed is True and not ready:
        what, expected = "torch.distributed is not initialised.", "torch.distributed to be initialised"
        fix = "Launch with torchrun and call torch.distributed.init_process_group() first."
        raise ConfigurationError(what, expected=expected, got="distributed=True in a process on its own", fix=fix)
    ranks = dist.group.WORLD if distributed is None or distributed is True else distributed
    if not ready or not isinstance(ranks, dist.ProcessGroup) or dist.get_rank(ranks) < 0:
        expected = "None, True, False, Ranks(…) or a process group that this rank belongs to"
        raise ConfigurationError("distributed= is not a group of ranks.", expected=expected, got=repr(distributed))
    return Group(ranks) if dist.get_world_size(ranks) > 1 else None


class Group:
    """Ranks that work together.

    Args:
        process_group: The process group of these ranks; this rank is one of them.

    Attributes:
        rank: This rank's number within the group.
        size: Number of ranks.
        shard_factors: See :class:`Ranks`.
    """

    def __init__(self, process_group: Any):
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)
        self.shard_factors = False
        self._over = False

    # Process groups are handles of this process: a copied object works with the same ranks, a pickled one with none.
    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()

    def is_alive(self) -> bool:
        """Whether ``torch.distributed`` still knows these ranks."""
        try:
            return dist.is_initialized() and dist.get_rank(self.process_group) == self.rank
        except ValueError:  # initialised anew
            return False

    # -- meetings ------------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """A session: an error that this rank raises is raised on all other ranks at their next meeting.

        It ends with a meeting of its own, so that no rank leaves before all are done.

        Raises:
            DistributedError: Another rank failed.
        """
        self._over = False
        try:
            yield
        except Exception as error:
            if not self._over:  # else the others know: the meeting itself ended it
                self.exchange("", error=f"{type(error).__name__}: {error}")
            raise
        self.exchange("the end")

    def exchange(self, stage: str, payload: Any = None, *, error: str | None = None) -> list[Any]:
        """A meeting: wait for all ranks, and give every rank's ``payload``, which can be pickled, to all, by rank.

        Ranks with another ``stage``, the purpose of the meeting, get an error; ``error`` is that of this rank, which
        raises it itself. DistributedError if another rank failed, does not answer within the process group's timeout,
        or is at another stage.
        """
        reports: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(reports, (stage, payload, error), group=self.process_group)
        except RuntimeError as failure:
            self._over = True
            raise DistributedError(
                "The other ranks do not answer.",
                expected="every rank to make the same call within the process group's timeout",
                got=" ".join(str(failure).split()),
                fix="Call it on every rank; raise init_process_group(timeout=…) where shards differ much in size; or "
                "pass distributed=False to work on this rank alone.",
            ) from failure
        stages, payloads, errors = zip(*reports, strict=True)
        failed = [rank for rank in range(self.size) if errors[rank] is not None]
        lost = [rank for rank in range(self.size) if stages[rank] != stages[0]]
        self._over = bool(failed or lost)
        if failed and error is None:
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise DistributedError(f"Rank {failed[0]}{others} failed. {errors[failed[0]]}")
        if lost and error is None:
            what = "The ranks do not make the same calls."
            expected = f"all ranks to be at the same point, as rank 0 is at {stages[0]}"
            fix = "Call the same methods in the same order on every rank, or pass distributed=False."
            raise DistributedError(what, expected=expected, got=f"rank {lost[0]} at {stages[lost[0]]}", fix=fix)
        return list(payloads)

    def check_agreement(self, description: Mapping[str, str]) -> None:
        """Raise :class:`DistributedError`, naming rank and entry, unless all ranks describe themselves alike."""
        descriptions = self.exchange("the comparison of settings", dict(description))
        for rank, other in enumerate(descriptions):
            _compare(descriptions[0], other, rank)

    def lead(self, name: str, work: Callable[[], object], description: Mapping[str, str]) -> None:
        """Rank 0 does ``work`` while the others wait, through the group's store: rank 0 waits for nobody.

        Each rank counts its calls of a ``name``, which says what is done: its n-th waits for the n-th of rank 0.
        DistributedError on the other ranks, where rank 0 failed, never came, or has another ``description``.
        """
        store = _store_of(self.process_group)
        number = store.add(f"laplace_plus/{name}/calls of rank {self.rank}", 1)
        key = f"laplace_plus/{name}/{number}"
        if self.rank == 0:
            try:
                work()
            except Exception as error:
                store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
                raise
            store.set(key, json.dumps({"description": dict(description)}))
            return
        try:
            store.wait([key], _WAIT)
        except RuntimeError as error:
            got, fix = " ".join(str(error).split()), "Make the call on every rank, or on rank 0 alone."
            expected = "rank 0 to make the same call as this one"
            raise DistributedError(f"Rank 0 did not {name}.", expected=expected, got=got, fix=fix) from error
        answer: dict[str, Any] = json.loads(store.get(key))
        if "error" in answer:
            raise DistributedError(f"Rank 0 failed. {answer['error']}")
        _compare(answer["description"], description, self.rank)

    # -- where tensors travel ------------------------------------------------------------------------------------------

    def transport(self, device: torch.device) -> torch.device:
        """The device on which tensors of that device can be communicated."""
        served = {part.partition(":")[0] for part in dist.get_backend_config(self.process_group).split(",")}
        if device.type in served or not served:
            return device
        return torch.device("cpu") if "cpu" in served else torch.device("cuda", torch.cuda.current_device())


_WAIT = timedelta(minutes=30)
"""Time that other ranks wait for rank 0: torch's default timeout of process groups on the CPU."""


def _store_of(process_group: dist.ProcessGroup) -> Any:
    """The key-value store that the ranks of a group share."""
    if hasattr(process_group, "get_group_store"):
        return process_group.get_group_store()
    return torch.distributed.distributed_c10d._world.pg_map[process_group][1]  # torch 2.6


def _compare(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> None:
    """Raise :class:`DistributedError` for the first entry in which a rank's description differs from rank 0's."""
    for name in {**first, **other}:
        mine, theirs = first.get(name, "none"), other.get(name, "none")
        if mine != theirs:
            what = f"Rank {rank} disagrees with rank 0 on {name}."
            fix = "Give every rank the same network, settings and calls; only the data of a fit differ."
            raise DistributedError(what, expected=f"{mine} (rank 0)", got=f"{theirs} (rank {rank})", fix=fix)
