"""Views of a posterior: another output of the same weights, such as a language model's answer at the last token."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature.accumulation import MASK_KEY
from laplace_plus.errors import ConfigurationError, DataError, SelectionError
from laplace_plus.likelihoods import Categorical, Likelihood, resolve_likelihood
from laplace_plus.network import batches
from laplace_plus.network.network import Network, full_precision
from laplace_plus.posteriors import Posterior
from laplace_plus.predictive import Prediction
from laplace_plus.predictive.linearized import FunctionalPosterior, output_indices


def through(posterior: Posterior, function: Callable[..., Any], likelihood: Any = None) -> Through:
    """The posterior of another output of the same weights: a decoder's image, the logits at some position, a field.

    Args:
        posterior: A fitted posterior.
        function: What is called with a batch's inputs in place of the model: a function that calls the model, or a
            module within it. Its output is ``[B, *, C]``, laid out as the likelihood's.
        likelihood: That of the new outputs, for ``predictive``; without one there is ``functional_posterior``.

    Returns:
        A view with ``functional_posterior``, ``predictive`` and ``sample``.

    Raises:
        NotFittedError: Before :meth:`fit`.

    Example:
        >>> import laplace_plus as lp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        >>> posterior = lp.KFAC(model, "classification").fit([(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))])
        >>> margin = lp.through(posterior, lambda x: model(x)[:, :1] - model(x)[:, 1:2])
        >>> margin.functional_posterior(torch.ones(6, 2)).covariance.shape
        torch.Size([6, 1, 1])
    """
    return Through(posterior, function, likelihood)


def at_last_token(posterior: Posterior, classes: Sequence[int] | Tensor | None = None) -> Through:
    """The posterior of a language model's answer after each text, for one backward pass for each class.

    The last token is the last that ``"attention_mask" [B, T]`` does not hide, with padding on either side; without
    a mask it is the last position. Keep the view for all batches: its first call asks which parameters matter.

    Args:
        posterior: A fitted posterior over a language model.
        classes: Token ids ``[K]`` among which the answer is; probabilities sum to one over these. None for all.

    Returns:
        A view as of :func:`through`, with outputs ``[B, K]``; :class:`DataError` for another mask or other models.
    """
    own: Any = "classification" if isinstance(posterior.likelihood, Categorical) else posterior.likelihood
    return Through(posterior, LastToken(posterior.network, classes), own)


class Through:
    """A view of a posterior by another function of its weights; see :func:`laplace_plus.through`.

    It reads the posterior as it is at each call, with the hyperparameters of then.
    """

    def __init__(self, posterior: Posterior, function: Callable[..., Any], likelihood: Any = None):
        posterior.require_fit()
        self.posterior, self.function = posterior, function
        self.likelihood: Likelihood | None = None if likelihood is None else resolve_likelihood(likelihood)
        self._network: Any = None
        self._n_outputs = 0

    def functional_posterior(self, x: Any, **options: Any) -> FunctionalPosterior:
        """Mean and covariance of the function's linearised outputs; arguments as of the posterior's own method.

        Raises:
            SelectionError: They do not depend on the posterior's weights.
        """
        return self._view(x).functional_posterior(x, **options)

    def predictive(self, x: Any = None, **options: Any) -> Prediction:
        """Predictions; options, or in place of ``x`` the entries of a batch, as of ``Posterior.predictive``.

        Raises:
            ConfigurationError: There is no likelihood of these outputs.
            SelectionError: They do not depend on the posterior's weights.
        """
        if self.likelihood is None:
            fix = "Write lp.through(posterior, function, likelihood), or ask for functional_posterior(x)."
            raise ConfigurationError("A prediction needs a likelihood of these outputs.", got="none", fix=fix)
        if x is None:
            known = batches.signature_of(Posterior.predictive).parameters
            x = batches.inputs_of({name: options.pop(name) for name in [*options] if name not in known})
        return self._view(x).predictive(x, **options)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """The posterior's own samples of the weights, ``[n, P]``."""
        return self.posterior.sample(n, generator=generator)

    def _view(self, x: Any) -> Posterior:
        """A copy of the posterior whose network is the function."""
        own = self.posterior
        own.require_fit()
        view = copy.copy(own)
        if self._network is None:
            view.network = own.network.of(self.function, (self.likelihood or own.likelihood).arrange)
            self._network, self._n_outputs = view.network, _dependent_outputs(view, x)
        view._other_likelihood = self.likelihood
        if self.likelihood is not None and view.link not in self.likelihood.links:
            view.link = None  # which the tuning chose for other outputs
        if self.likelihood is not None and not self.likelihood.is_classifier:
            view.output_temperature = 1.0  # that of logits
        for one in (view, *(value for value in vars(view).values() if isinstance(value, Posterior))):
            one.network, state = self._network, one.state
            one._found = None if state is None else replace(state, n_outputs=self._n_outputs)
        return view


class LastToken:
    """A model's outputs at each sequence's last token, ``[B, K]``; see :func:`laplace_plus.at_last_token`."""

    def __init__(self, network: Network, classes: Sequence[int] | Tensor | None):
        self.model, self.arrange, self.classes = network.model, network.arrange, classes
        inner = getattr(self.model, "get_base_model", lambda: self.model)()  # within peft's
        # Models of transformers then compute no logits of other positions, a third of GPT-2's forward pass.
        self._keeps = "logits_to_keep" in batches.signature_of(type(inner).forward).parameters

    def __call__(self, *inputs: Any, **batch: Any) -> Tensor:
        """The chosen outputs; DataError for a mask that does not say which token is the last."""
        x: Any = batches.inputs_of(batch) if batch else inputs if len(inputs) > 1 else inputs[0]
        mask = x.get(MASK_KEY) if isinstance(x, Mapping) else None
        mask = torch.ones(batches.batch_size(x), 1) if mask is None else mask
        tokens = mask != 0
        if mask.ndim != 2 or not torch.equal(tokens.to(mask.dtype), mask) or not bool(tokens.any(1).all()):  # noqa: PLR2004
            what = f"{MASK_KEY!r} does not say which token is the last."
            raise DataError(
                what, expected="[B, T] of zeros and ones, one at least in each row", got=checks.describe(mask)
            )
        places = -1 - tokens.flip(1).int().argmax(1)
        if self._keeps and isinstance(x, Mapping):
            kept, places = places.unique(return_inverse=True)
            x = {**x, "logits_to_keep": kept}
        found = self.arrange(batches.output_tensor(batches.call(self.model, x)))
        checks.shape("The model's output", found, [None, None, None])
        found = found[torch.arange(len(found), device=found.device), places.to(found.device)]
        return found if self.classes is None else found[:, output_indices(self.classes, found.shape).to(found.device)]


@full_precision
def _dependent_outputs(view: Any, x: Any) -> int:
    """The number of outputs; :class:`SelectionError` where no gradient leads from them to the selected weights."""
    network, inputs = view.network, view.network.receive(x)
    with torch.enable_grad():
        vector = network.vector().requires_grad_()
        outputs = network(inputs, network.substitute(vector))
        found = torch.autograd.grad(outputs.sum(), vector, allow_unused=True) if outputs.requires_grad else (None,)
    if found[0] is None:
        expected, fix = "a function that calls the posterior's own model", "Call the wrapped model, not a copy."
        raise SelectionError("These outputs do not depend on the posterior's weights.", expected=expected, fix=fix)
    return outputs.shape[-1]
