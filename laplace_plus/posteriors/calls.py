"""What people type: short calls of every posterior, made of :meth:`predictive` and of what is stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import CheckpointError, ConfigurationError, DataError, EmptyDataError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import batch_size, describe, inputs_of
from laplace_plus.posteriors.configuration import full_precision
from laplace_plus.posteriors.loading import rebuilt
from laplace_plus.posteriors.predicting import Predicting
from laplace_plus.predictive import Prediction
from laplace_plus.predictive.from_outputs import stacked


class Called(Predicting):
    """Short calls of what every posterior has."""

    def __call__(self, x: Any = None, **options: Any) -> Prediction:
        """:meth:`predictive`."""
        return self.predictive(x, **options)

    def predict_proba(self, x: Any, **options: Any) -> Tensor:
        """Class probabilities of one batch, ``[N, K]``, a row for each observation; UnsupportedError without classes.

        Arguments as of :meth:`predictive`; of binary outputs the columns are no and yes.
        """
        return self.likelihood.class_probabilities(self.predictive(x, **options).mean)

    def predict(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None, **options: Any
    ) -> Prediction:
        """One prediction for all batches of a loader, in its order.

        Args:
            data: Batches as :meth:`fit` takes them, or their inputs alone. Of a tuple of several the last entry is the
                target, and not looked at.
            progress: Whether to show a progress bar.
            generator: Source of randomness. Sampled networks are the same for all batches.
            **options: As for :meth:`predictive`, without ``joint``.

        Raises:
            EmptyDataError: No batch came.
            DataError: One batch in place of a loader, or batches whose outputs differ in shape.
        """
        checks.generator(generator)
        if isinstance(data, (Tensor, Mapping)) or not isinstance(data, Iterable) or options.get("joint"):
            what, got = "predict takes a loader, batch by batch.", describe(data)
            raise DataError(what, got=got, fix="Call posterior(x), for joint predictions with joint=True.")
        device = self.network.device if generator is None else generator.device
        seed, found = draw_seed(generator), []
        for item in progress_bar(data, enabled=progress, description=f"{type(self).__name__}: predict"):
            if batch_size(inputs := inputs_of(item)):
                source = torch.Generator(device).manual_seed(seed)
                found.append(self.predictive(inputs, generator=source, **options))
        if not found:
            raise EmptyDataError("The loader yielded no data.", expected="at least one example", got="none")
        return stacked(found)

    @full_precision
    def state_dict(self) -> dict[str, Any]:
        """What :meth:`save` writes, as copied tensors and plain values, for ``torch.save``; errors as of ``save``."""
        if self.group is not None and self.group.is_alive() and self.owned_sums():
            raise UnsupportedError("The ranks hold parts of this posterior.", fix="Write posterior.save(folder).")
        header, tensors = self.description()
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return {"header": json.loads(json.dumps(header)), "tensors": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Take up a :meth:`state_dict` in place of the present fit and hyperparameters; returns the posterior itself.

        Raises:
            CheckpointError: It is of another network, or of a posterior with other arguments; nothing is changed.
        """
        if not isinstance(state, Mapping) or not state.keys() >= {"header", "tensors"}:
            raise CheckpointError("This is no state of a posterior.", expected="what state_dict() gave")
        custom = self.likelihood if self.likelihood.config().get("name") == "custom" else None
        tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}
        found = rebuilt(dict(state["header"]), tensors, self.model, custom)
        theirs, changing = found.settings(), self.hyperparameter_digests().keys()
        for name, own in self.settings().items():
            if name not in changing and own != theirs[name]:
                what = f"The state is of a posterior with another {name}."
                raise CheckpointError(what, expected=str(own), got=str(theirs[name]), fix="Use lp.load for saved ones.")
        found.memory_budget = self.memory_budget
        self.__dict__ = dict(vars(found))  # at once
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Follow the model to a device: after ``model.to(device)``, which the posterior does not do itself.

        Raises:
            ConfigurationError: The model is on another device, or its weights are of another type. A posterior of
                another type is another posterior: fit it to ``model.to(dtype)``.
        """
        device, dtype = (None, device) if isinstance(device, torch.dtype) else (device, dtype)
        own = self.network.device
        try:
            there = own if device is None else torch.empty(0, device=device).device
        except RuntimeError as error:
            raise ConfigurationError("There is no such device.", expected='such as "cuda"', got=repr(device)) from error
        if dtype not in (None, self.network.dtype):
            fix, expected = f"Call model.to({dtype}), and fit again.", str(self.network.dtype)
            raise ConfigurationError("A posterior is of its model's type.", expected=expected, got=str(dtype), fix=fix)
        if there != own:
            fix = f'Call model.to("{there}") first.'
            raise ConfigurationError("A posterior is where its model is.", expected=str(own), got=str(there), fix=fix)
        if self.is_fitted and self.mean.device != own:
            kept = {name: getattr(self, name) for name in ("training_data", "tuning")}
            vars(self.load_state_dict(self.state_dict())).update(kept)
        return self
