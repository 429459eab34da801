"""The interface of the backends that compute curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature.structures import Curvature, Structure
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network

Kind = Literal["ggn", "ggn_mc", "empirical_fisher", "hessian"]
"""Exact generalised Gauss-Newton, its Monte-Carlo estimate, empirical Fisher, or the Hessian."""

KINDS: tuple[Kind, ...] = get_args(Kind)


class Backend(ABC):
    """Turns (network, likelihood, batch) into a structured matrix.

    Curvature is that of the negative log-likelihood summed over the batch, at unit observation noise; the noise enters
    later, through the weights of the matrix's components.

    Args:
        kind: Which curvature.
        n_samples: Number of sampled labels per example for ``"ggn_mc"``; at most 100 000.

    Attributes:
        name: How the backend is called in errors.
        supported: The pairs of kind and structure name that it can do.

    Raises:
        ConfigurationError: An unknown kind, fewer than one sample, or more than 100 000.
    """

    name: ClassVar[str]
    supported: ClassVar[frozenset[tuple[str, str]]]

    def __init__(self, kind: Kind = "ggn", *, n_samples: int = 1):
        checks.choice("curvature", kind, KINDS)
        checks.count("n_samples", n_samples, 1)
        self.kind, self.n_samples = kind, n_samples

    @abstractmethod
    def accumulate(
        self,
        total: Curvature | None,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        structure: Structure,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Curvature, Tensor]:
        """Add one batch's curvature to a sum in place; None begins one.

        To a sum with corrected eigenvalues (EKFAC) only those are added.

        Returns:
            The sum, and the batch's outputs ``[B, *, C]``.

        Raises:
            DataError: The network used its parameters differently than in earlier batches; the sum is then spoilt.
        """

    def operator(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        *,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Any:
        """A :class:`laplace_plus.linalg.Operator` of the curvature of all the data at unit noise, for ``lp.LowRank``.

        None, unless a backend overrides it, for the package's own operator of that kind; see
        :func:`~laplace_plus.curvature.curvature_operator`, which takes the same arguments.
        """
        return None

    def check(self, structure: Structure, likelihood: Likelihood) -> None:
        """Refuse by name what the backend cannot do."""
        if (self.kind, structure.name) not in self.supported:
            can = sorted(kind for kind, name in self.supported if name == structure.name)
            fix = f'The native backend can: backend=Native(kind="{self.kind}").'
            if self.name == "native":
                fix = f"Use one of these kinds, or a posterior of another structure than {structure.name}."
            if self.kind == "hessian" and structure.name == "KFAC":
                fix = 'Use lp.Full or lp.Diagonal with Native(kind="hessian"), or KFAC with kind="ggn".'
            raise UnsupportedError(
                f"The {self.name} backend cannot compute a {structure.name} {self.kind} curvature.",
                expected=f"for {structure.name}: {', '.join(can) or 'nothing'}",
                got=self.kind,
                fix=fix,
            )
        for name in ("factor_rank", "eigenvalue_corrected") if self.name != "native" else ():
            if value := getattr(structure, name, None):
                what, got = f"The {self.name} backend keeps Kronecker factors as they are.", f"{name}={value}"
                raise UnsupportedError(what, expected=f"no {name}", got=got, fix='Use backend="native".')
        if self.name != "native" or self.kind not in ("ggn", "hessian"):
            likelihood.require_own_rows(f"The {self.name} {self.kind} curvature adds up single rows.")
        if self.kind in ("empirical_fisher", "hessian") and likelihood.n_noise > 1:
            raise UnsupportedError(
                f"The {self.kind} curvature mixes outputs with different noise levels.",
                expected="one noise level",
                got=f"{likelihood.n_noise} noise levels",
                fix='Use the GGN, kind="ggn", or one noise level.',
            )

    def component_weights(self, likelihood: Likelihood, noise_std: Any = None) -> Tensor:
        """Weights ``[K]`` of the curvature's components at a noise level; differentiable.

        The GGN and the Hessian scale with 1/σ², the empirical Fisher – an outer product of gradients – with 1/σ⁴.
        """
        weights = likelihood.curvature_weights(noise_std)
        return weights.square() if self.kind == "empirical_fisher" else weights

    def config(self) -> dict[str, Any]:
        """What rebuilds the backend, in JSON's terms."""
        return {"name": self.name, "kind": self.kind, "n_samples": self.n_samples}


_backends: dict[str, type[Backend] | Callable[[], type[Backend]]] = {}


def register_backend(name: str, backend: type[Backend] | Callable[[], type[Backend]]) -> None:
    """Make a backend known by name, to ``backend="name"`` and to :func:`laplace_plus.load`.

    Args:
        name: The name; the class's own attribute ``name``.
        backend: The class, or a function without arguments that imports and returns it on first use. Loading calls the
            class with the entries of its :meth:`Backend.config`.

    Raises:
        ConfigurationError: The name belongs to another backend already.
    """
    if _backends.get(name, backend) is not backend:
        raise ConfigurationError(f"The backend name {name!r} is taken.", expected="a new name", got=repr(name))
    _backends[name] = backend


def backend_class(name: str) -> type[Backend]:
    """The registered backend of that name; :class:`ConfigurationError` if there is none."""
    if name not in _backends:
        what = "Unknown backend."
        fix = "Register it with laplace_plus.curvature.register_backend(name, cls)."
        raise ConfigurationError(what, expected=", ".join(_backends), got=repr(name), fix=fix)
    backend = _backends[name]
    return backend if isinstance(backend, type) else backend()


def resolve_backend(backend: str | Backend) -> Backend:
    """The backend of that name with its defaults, or the instance itself; errors as :func:`backend_class`."""
    return backend if isinstance(backend, Backend) else backend_class(backend)()


def backend_from_config(config: dict) -> Backend:
    """Rebuild a backend from :meth:`Backend.config`; errors as :func:`backend_class`."""
    return backend_class(config["name"])(**{key: value for key, value in config.items() if key != "name"})
