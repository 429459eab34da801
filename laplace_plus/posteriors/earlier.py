"""What classes without a state need until they have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from laplace_plus import checks
from laplace_plus._memory import parse_bytes
from laplace_plus.persistence import digest
from laplace_plus.posteriors.state import State


class Earlier:
    """Setters, and names that go."""

    _found: Any
    network: Any

    @property
    def mean(self) -> Tensor:
        """The posterior mean ``[P]``; NotFittedError before a fit."""
        if self._found is None:
            self.require_fit()
        return self._found.mean

    @mean.setter
    def mean(self, vector: Tensor) -> None:
        self._with(mean=vector)

    @property
    def n_data(self) -> int:
        """The number of examples seen; 0 before a fit."""
        return 0 if self._found is None else self._found.n_data

    @n_data.setter
    def n_data(self, value: int) -> None:
        self._with(n_data=value)

    @property
    def n_outputs(self) -> int:
        """C, or 0 where the method does not say, and before a fit."""
        return 0 if self._found is None else self._found.n_outputs

    @n_outputs.setter
    def n_outputs(self, value: int) -> None:
        self._with(n_outputs=value)

    @property
    def memory_budget(self) -> int | None:
        """Bytes that intermediate results may take."""
        return self._memory_budget

    @memory_budget.setter
    def memory_budget(self, value: int | str | None) -> None:
        self._memory_budget = None if value is None else parse_bytes(value)

    data_attributes: tuple[str, ...] = ()

    @property
    def _vector(self) -> Any:
        return None if self._found is None else self._found.mean

    @_vector.setter
    def _vector(self, vector: Any) -> None:
        self.mean = vector

    def _with(self, **parts: Any) -> None:
        own = State(None, 0, 0) if self._found is None else self._found  # type: ignore[arg-type]
        self._found = replace(own, **parts)

    def _earlier_state(self) -> Any:
        if self._vector is None:
            self._with(mean=self.network.vector())
        return self._found

    def check_draws(self, **numbers: int) -> None:
        """Raise for numbers that are not positive."""
        for name, n in numbers.items():
            checks.count(name, n)

    def require_vectors(self, n: int, what: str) -> None:
        """Accepted, and gone as soon as no class asks."""
        _ = n, what

    def share_hyperparameters(self, other: Any) -> None:
        """Take over another posterior's prior, temperature and likelihood, and its network."""
        self.network, self.model, self.likelihood = other.network, other.model, other.likelihood
        self._prior_precision, self._prior_mean = other._prior_precision, other._prior_mean
        self._temperature, self._prior_groups = other._temperature, other._prior_groups

    def hyperparameter_digests(self) -> dict[str, str]:
        """Each hyperparameter as a short text."""
        noise = self.noise_std
        own = {"prior_precision": self.prior_precision, "prior_mean": self._prior_mean, "temperature": self.temperature}
        return {name: digest(value) for name, value in own.items()} | {
            "noise_std": "none" if noise is None else digest(noise)
        }

    def remember_weights(self) -> None:
        """Take the network's present weights for those of the fit."""
        self._mark = self.network.mark()
