"""A callback for the ``Trainer`` of transformers that fits a posterior; see ``docs/how-to/hugging-face.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss
from transformers import TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from laplace_plus.applications.through import Through, through
from laplace_plus.errors import DataError
from laplace_plus.integrations.training import as_trained, fitted, require_one_process
from laplace_plus.likelihoods.base import widen
from laplace_plus.network.batches import call, output_tensor
from laplace_plus.posteriors import Posterior
from laplace_plus.predictive import Prediction

__all__ = ["LaplaceCallback", "ShiftedLabels", "predict_texts", "text_choices"]


class ShiftedLabels:
    """Batches whose label at each position is the next token, as causal models are trained; ``-100`` at the end.

    transformers shifts ``labels`` inside the loss of such a model. A posterior sees outputs and labels side by side.

    Args:
        data: Mappings with ``"labels" [B, T]``.

    Example:
        >>> next(iter(ShiftedLabels([{"labels": torch.tensor([[5, 6, 7]])}])))
        {'labels': tensor([[   6,    7, -100]])}
    """

    def __init__(self, data: Iterable[Any]):
        self.data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.data:
            labels = batch["labels"]
            yield {**batch, "labels": torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)}


class LaplaceCallback(TrainerCallback):
    """Fits and tunes a posterior when training ends, and saves it beside the model.

    The model and the global random state stay as they are. With ``load_best_model_at_end`` it is the posterior of the
    best model. Labels of causal models are shifted. The trainer's ``label_smoothing_factor`` is taken over by a
    likelihood that is given by its name; a loss of your own (``compute_loss_func``) is not seen.

    Args:
        likelihood: As for every posterior.
        posterior: The class, or its name.
        data: Batches to fit to; by default the trainer's own training loader.
        parameters: Those that are uncertain, ``"last_layer"`` by default.
        folder: Where in ``output_dir`` it is saved; None for nowhere.
        **options: Further arguments of the posterior, and ``generator``, the source of randomness.

    Attributes:
        posterior: The fitted posterior; None before.

    Raises:
        UnsupportedError: Training by several processes.
    """

    def __init__(
        self,
        likelihood: Any = "classification",
        posterior: str | type[Posterior] = "KFAC",
        *,
        data: Iterable[Any] | None = None,
        parameters: Any = "last_layer",
        folder: str | None = "posterior",
        **options: Any,
    ):
        self.posterior: Posterior | None = None
        self._arguments = posterior, likelihood, {"parameters": parameters, **options}
        self._data, self._folder = data, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse several processes before they train, and forget the posterior of earlier weights."""
        self.posterior = None
        require_one_process(args.world_size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit, tune and save."""
        model: Any = kwargs["model"]
        data = kwargs["train_dataloader"] if self._data is None else self._data
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # within peft's
        is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        data = ShiftedLabels(data) if is_causal and not isinstance(data, ShiftedLabels) else data
        cls, likelihood, options = self._arguments
        if args.label_smoothing_factor:
            likelihood = as_trained(likelihood, [CrossEntropyLoss(label_smoothing=float(args.label_smoothing_factor))])
        with torch.random.fork_rng():
            self.posterior = fitted(cls, model, likelihood, data, **options)
        if self._folder is not None:
            self.posterior.save(Path(args.output_dir) / self._folder)


def predict_texts(posterior: Posterior, tokenizer: Any, texts: Sequence[str], **options: Any) -> Prediction:
    """The prediction for some texts, as one batch.

    Args:
        posterior: A posterior over a model of texts.
        tokenizer: Its tokenizer.
        texts: B texts.
        **options: Of the tokenizer; by default ``padding=True`` and ``truncation=True``.
    """
    options = {"padding": True, "truncation": True, **options}
    return posterior.predictive(dict(tokenizer(list(texts), return_tensors="pt", **options)))


def text_choices(posterior: Posterior, *, average: bool = False) -> Through:
    """The posterior of which of K texts a causal model finds likely: answers of several tokens to a question, say.

    A text's score is ``Σ_t log p(y_t | y_<t)`` over its scored tokens; the softmax of the K scores is the prediction.
    It takes one forward pass over ``N K`` texts, and K backward passes.

    Args:
        posterior: A posterior over a causal model.
        average: Whether scores are averaged over the scored tokens, so that long answers are not less likely.

    Returns:
        A view as of ``lp.through``, with outputs ``[N, K]``. Its batches are mappings with ``"input_ids"`` and
        what else the model takes, ``[N, K, T]``, and ``"scored" [N, K, T]``: one at an answer's tokens, else zero. It
        raises :class:`DataError` for other shapes, and for texts without a scored token after the first.
    """
    model = posterior.network.model

    def scores(*, scored: Tensor, input_ids: Tensor, **batch: Any) -> Tensor:
        kept = scored.flatten(0, -2)[:, 1:] != 0  # the first token follows nothing
        if scored.ndim != 3 or input_ids.shape != scored.shape or not bool(kept.any(1).all()):  # noqa: PLR2004
            what, got = "The texts cannot be scored.", f"{list(input_ids.shape)} and {list(scored.shape)}"
            raise DataError(what, expected="input_ids and scored [N, K, T], tokens to score in each text", got=got)
        batch["input_ids"] = input_ids
        flat = {name: own.flatten(0, 1) if isinstance(own, Tensor) else own for name, own in batch.items()}
        logits = widen(output_tensor(call(model, flat))[:, :-1])
        found = logits.gather(-1, flat["input_ids"][:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        found = (found * kept).sum(1) / (kept.sum(1) if average else 1)
        return found.view(scored.shape[:2])

    return through(posterior, scores, "classification")
