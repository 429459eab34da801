"""What a posterior does beside its own method where several ranks share the data: agree, draw apart, save once."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace_plus import io
from laplace_plus.distributed import Group, broadcast_
from laplace_plus.errors import DistributedError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed

if TYPE_CHECKING:
    from laplace_plus.posteriors.base import Posterior

_GOLDEN = 0x9E3779B97F4A7C15
"""The step between the seeds of neighbouring ranks: 2⁶⁴ divided by the golden ratio."""


def session(group: Group | None) -> AbstractContextManager[None]:
    """Work together with a group's other ranks, if there is a group."""
    return nullcontext() if group is None else group.together()


def agree(
    posterior: Posterior, group: Group, generator: torch.Generator | None, *, update: bool
) -> torch.Generator | None:
    """Compare this rank's posterior with the others', and give it a generator of its own where numbers are drawn.

    Args:
        posterior: This rank's.
        group: The ranks.
        generator: Source of randomness; only that of rank 0 counts.
        update: Whether data are added rather than fitted anew.

    Raises:
        DistributedError: The ranks disagree.
        UnsupportedError: The posterior's class cannot be fitted over several ranks.
    """
    if not posterior.over_ranks:
        raise UnsupportedError(
            f"{type(posterior).__name__} cannot be fitted over several ranks.",
            expected="one process",
            got=f"{group.size} ranks of torch.distributed",
            fix="Pass distributed=False, and all the data, to fit on this rank alone.",
        )
    seen = f"update() after {posterior.n_data} examples" if update else "fit()"
    group.check_agreement({"the call": seen, **_settings(posterior), **_weights(posterior)})
    if posterior.backend.kind != "ggn_mc":
        return generator
    seeds = group.exchange("the seed", draw_seed(torch.default_generator if generator is None else generator))
    device = posterior.network.device if generator is None else generator.device
    # The examples of different ranks draw independent labels.
    return torch.Generator(device).manual_seed((seeds[0] + _GOLDEN * group.rank) % 2**63)


def save_once(posterior: Posterior, group: Group, path: str | Path) -> None:
    """Let rank 0 write the posterior while the others wait until it is there.

    Sums that lie on one rank each are sent to rank 0 before, and let go after.

    Raises:
        DistributedError: Rank 0 failed to write it, or wrote another posterior than this rank's.
    """
    if group.rank > 0:  # rank 0 asks when it writes, so that its error is told
        posterior._require_fit()
    own = _hyperparameters(posterior) | {"number of data": str(posterior.n_data)}

    def write() -> dict[str, str]:
        posterior.write(path)
        return own

    owned = posterior.owned_sums()
    with group.together() if owned else nullcontext():
        for part in owned:
            copy = part.matrix() if part.is_here else part.empty()
            broadcast_(group, [copy], part.owner)
            if group.rank == 0:
                part.hold(copy)
    try:
        written = group.lead(f"save to {path}", write)
    finally:
        for part in owned:
            part.release()
    name = next((name for name in own if own[name] != written.get(name)), None)
    if name is not None:
        raise DistributedError(
            f"Rank {group.rank} disagrees with rank 0, whose posterior was saved, on {name}.",
            expected=f"{written.get(name)} (rank 0)",
            got=f"{own[name]} (rank {group.rank})",
            fix="Tune and update in the same way, and on the same held-out data, on every rank.",
        )


def _settings(posterior: Posterior) -> dict[str, str]:
    likelihood = {key: value for key, value in posterior.likelihood.config().items() if key != "noise_std"}
    masks = {f"the mask of {s.name!r}": digest(s.mask) for s in posterior.network.selected if s.mask is not None}
    return {
        "the class": type(posterior).__name__,
        "the options": repr(posterior.options()),
        "the likelihood": repr(likelihood),
        "the backend": repr(posterior.backend.config()),
        "the selected parameters": ", ".join(posterior.parameter_names),
        **masks,
        **_hyperparameters(posterior),
    }


def _hyperparameters(posterior: Posterior) -> dict[str, str]:
    noise = posterior.noise_std
    return {
        "prior_precision": digest(posterior.prior_precision),
        "prior_mean": digest(posterior._prior_mean),
        "temperature": digest(posterior.temperature),
        "noise_std": "none" if noise is None else digest(noise),
    }


def _weights(posterior: Posterior) -> dict[str, str]:
    """The network's tensors, each with a hash of its values."""
    return {
        f"the {entry['kind']} {entry['name']!r}": f"{entry['dtype']} {entry['shape']} of SHA-256 {entry['sha256'][:16]}"
        for entry in io.fingerprint(posterior.network.model)["tensors"]
    }


def digest(tensor: Tensor) -> str:
    """A number as it is; more of them by their shape and a hash of their bytes."""
    values = tensor.detach().cpu().contiguous()
    if values.numel() == 1 and values.is_floating_point():
        return repr(float(values))
    return f"{list(values.shape)} of SHA-256 {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}"
