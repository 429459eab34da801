"""What people type: short calls of every posterior, made of :meth:`predictive` and of what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import CheckpointError, ConfigurationError, DataError, EmptyDataError, UnsupportedError
from laplace_plus.likelihoods import Categorical
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg.arguments import require_generator
from laplace_plus.network.batches import batch_size, describe, inputs_of
from laplace_plus.posteriors.configuration import full_precision
from laplace_plus.posteriors.loading import rebuilt
from laplace_plus.posteriors.predicting import Predicting
from laplace_plus.posteriors.registry import ADDED
from laplace_plus.posteriors.through import LastToken, Through
from laplace_plus.predictive import Prediction
from laplace_plus.predictive.linearized import stacked


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
        require_generator(generator)
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
    def freeze(self, x: Any = None, *, link: str | None = None) -> Any:
        """A module for serving, which ``torch.compile``, ``torch.export``, ONNX export and ``torch.jit.trace`` take.

        It holds copies, is called as the network is, and returns mean, variance, functional mean and its variance at
        ``link``, by default that of :meth:`predictive`. It is compared with that on ``x`` or else training data:
        ``docs/serving.md``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: Anything but a Gaussian posterior over a last layer, or ``lp.KFAC`` or ``lp.Diagonal`` of
                layers that rules describe; the link ``"mc"``.
            ConfigurationError: Without ``x``, if the training data are not at hand; an unknown link.
        """
        return ADDED["freeze"](self, x, link)

    def through(self, function: Callable[..., Any], likelihood: Any = None) -> Through:
        """The posterior of another output of the same weights: a decoder's image, the logits at some position, a field.

        Args:
            function: What is called with a batch's inputs in place of the model: a function that calls the model, or a
                module within it. Its output is ``[B, *, C]``, laid out as the likelihood's.
            likelihood: That of the new outputs, for ``predictive``; without one there is ``functional_posterior``.

        Returns:
            A view with ``functional_posterior``, ``predictive`` and ``sample``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            SelectionError: A module that shares no weights with the model.

        Example:
            >>> import laplace_plus as lp
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
            >>> posterior = lp.KFAC(model, "classification").fit([(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))])
            >>> margin = posterior.through(lambda x: model(x)[:, :1] - model(x)[:, 1:2])
            >>> margin.functional_posterior(torch.ones(6, 2)).covariance.shape
            torch.Size([6, 1, 1])
        """
        return Through(self, function, likelihood)

    def at_last_token(self, classes: Sequence[int] | Tensor | None = None) -> Through:
        """The posterior of a language model's answer after each text, for one backward pass for each class.

        The last token is the last that ``"attention_mask" [B, T]`` does not hide, with padding on either side; without
        a mask it is the last position. Keep the view for all batches: its first call asks which parameters matter.

        Args:
            classes: Token ids ``[K]`` among which the answer is; probabilities sum to one over these. None for all.

        Returns:
            A view as of :meth:`through`, with outputs ``[B, K]``; :class:`DataError` for another mask or other models.
        """
        own: Any = "classification" if isinstance(self.likelihood, Categorical) else self.likelihood
        return Through(self, LastToken(self.network, classes), own)

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
