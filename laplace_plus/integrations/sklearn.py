"""Classifiers and regressors of scikit-learn from networks with posteriors; see ``docs/how-to/scikit-learn.md``.

``fit`` trains the network, fits a posterior to the same data and tunes it by the library's default, so that an
estimator needs no data but what scikit-learn hands it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self, TypeAlias, overload

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.errors import UnsupportedError
from laplace_plus.integrations.training import as_trained, fitted, train
from laplace_plus.likelihoods import Categorical, Gaussian
from laplace_plus.posteriors import Posterior
from laplace_plus.predictive import Prediction, from_functional, from_samples

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]

HIDDEN = 50
"""Units of the default network's one hidden layer."""

Array = NDArray[Any]
Module: TypeAlias = nn.Module | Callable[[int, int], nn.Module] | BaseEstimator | None


@dataclass(eq=False, repr=False)
class LaplaceEstimator(BaseEstimator):
    """What both estimators share.

    Args:
        module: The network, with inputs ``[N, n_features]`` and outputs ``[N, n_outputs]`` (logits of classes): an
            ``nn.Module``, of which copies are trained from its weights on; a function ``(n_features, n_outputs) ->
            nn.Module``; a skorch net, which trains with its own settings, its loss's class weights and smoothing among
            them; or None for one hidden layer of 50 tanh units in double precision.
        posterior: The class, or its name.
        posterior_options: Its arguments, such as ``{"parameters": "last_layer"}``.
        epochs: Passes over the data by Adam, with steps that shrink to zero along a cosine.
        lr: The first step.
        weight_decay: Adam's, with the mean loss over a minibatch.
        batch_size: Examples in a minibatch.
        prefit: Whether the module, or the skorch net, is trained already. ``fit`` then takes it as it is.
        device: Where a new network is trained and predicts; None for where it is.
        random_state: Of initial weights, minibatches and dropout, as scikit-learn has it.

    Attributes:
        module_: The trained network.
        posterior_: Its posterior, with all methods of the library; ``posterior_.tuning.why`` says how it was tuned.
        n_features_in_: Number of features.
    """

    module: Module = None
    _: KW_ONLY
    posterior: str | type[Posterior] = "KFAC"
    posterior_options: Mapping[str, Any] | None = None
    epochs: int = 200
    lr: float = 1e-2
    weight_decay: float = 1e-3
    batch_size: int = 64
    prefit: bool = False
    device: str | torch.device | None = None
    random_state: Any = None

    def predictive(self, X: Any) -> Prediction:
        """The library's prediction, of the encoded classes ``0 … C − 1`` or of targets ``[N, C]``, for ``X [N, D]``."""
        check_is_fitted(self)
        return self.posterior_.predictive(self._tensor(validate_data(self, X, reset=False)))

    def _tensor(self, values: Array) -> Tensor:
        dtype = next((p.dtype for p in self.module_.parameters() if p.is_floating_point()), torch.float32)
        return torch.tensor(values, dtype=dtype)  # a copy: arrays may be read-only

    def _fit(self, X: Array, y: Array, weight: Array | None, n_outputs: int) -> Self:
        """Train a network on ``y``, integers ``[N]`` or numbers ``[N, C]``, and fit and tune its posterior."""
        weighted = weight is not None
        likelihood: Any = (Categorical if y.ndim == 1 else Gaussian)(weighted=weighted)
        loss = (nn.CrossEntropyLoss if y.ndim == 1 else nn.MSELoss)(reduction="none" if weighted else "mean")
        seed = check_random_state(self.random_state).randint(2**31)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if isinstance(self.module, BaseEstimator):
                net: Any = self.module
                if not self.prefit and (weighted or y.ndim == 1 and net.criterion is nn.BCEWithLogitsLoss):
                    what = "A skorch net is trained without weights, and has an output for each class."
                    fix = "Take nn.CrossEntropyLoss. For weights train it yourself, and pass prefit=True."
                    raise UnsupportedError(what, got=f"{net.criterion}{', sample_weight' * weighted}", fix=fix)
                if not self.prefit:
                    net = clone(net).fit(X.astype(np.float32), y if y.ndim == 1 else y.astype(np.float32))
                self.module_, likelihood = net.module_, as_trained(likelihood, [net.criterion_], adopts=True)
            else:
                self.module_ = self._module(X.shape[1], n_outputs)
        inputs, targets = self._tensor(X), torch.as_tensor(y) if y.ndim == 1 else self._tensor(y)
        share = None if weight is None else self._tensor(weight)
        if not (self.prefit or isinstance(self.module, BaseEstimator)):
            training: dict[str, Any] = {"epochs": self.epochs, "lr": self.lr, "batch_size": self.batch_size}
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                train(self.module_, inputs, targets, loss, weight_decay=self.weight_decay, weight=share, **training)
        parts: Any = targets.split(self.batch_size)
        if share is not None:
            parts = zip(parts, share.split(self.batch_size), strict=True)
        batches = list(zip(inputs.split(self.batch_size), parts, strict=True))
        options: Any = {"generator": torch.Generator().manual_seed(seed), "seen": not self.prefit}
        options |= self.posterior_options or {}
        self.posterior_ = fitted(self.posterior, self.module_, likelihood, batches, **options)
        return self

    def _module(self, n_features: int, n_outputs: int) -> nn.Module:
        module: Any = self.module
        if self.prefit:
            return module
        if module is None:
            layers = nn.Linear(n_features, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, n_outputs)
            module = nn.Sequential(*layers).double()
        else:
            module = copy.deepcopy(module) if isinstance(module, nn.Module) else module(n_features, n_outputs)
        return module if self.device is None else module.to(self.device)


class LaplaceClassifier(ClassifierMixin, LaplaceEstimator):
    """A classifier whose probabilities account for not knowing the weights.

    Arguments and attributes are those of :class:`LaplaceEstimator`, and ``classes_``: the labels, in ascending order.

    Raises:
        ConfigurationError: Fewer than two classes.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> y = np.where(X[:, 0] + np.random.default_rng(1).normal(size=200) > 0, "yes", "no")
        >>> LaplaceClassifier(epochs=40, random_state=0).fit(X, y).predict_proba(X).shape
        (200, 2)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train and fit to ``X [N, D]`` and labels ``y [N]`` of any kind, each as often as its weight says."""
        X, y = validate_data(self, X, y)
        X, y, weight = _counted(X, y, sample_weight)
        check_classification_targets(y)
        self.classes_, encoded = np.unique(y, return_inverse=True)
        checks.count("The number of classes", len(self.classes_), 2, "Pass labels of more than one class.")
        return self._fit(X, encoded.astype(np.int64), weight, len(self.classes_))

    def predict_proba(self, X: Any) -> Array:
        """Probabilities ``[N, C]`` in the order of ``classes_``."""
        return self.predictive(X).mean.cpu().double().numpy()

    def predict(self, X: Any) -> Array:
        """The most probable labels, ``[N]``."""
        most_probable = self.predict_proba(X).argmax(1)  # before the fit an error that scikit-learn knows
        return self.classes_[most_probable]


class LaplaceRegressor(RegressorMixin, LaplaceEstimator):
    """A regressor with error bars.

    Arguments and attributes are those of :class:`LaplaceEstimator`. Targets are scaled to mean 0 and variance 1 for the
    network, and predictions back, unless it was trained already.

    Example:
        >>> X = np.linspace(-1, 1, 50)[:, None]
        >>> mean, std = LaplaceRegressor(epochs=20, random_state=0).fit(X, X[:, 0] ** 2).predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((50,), (50,))
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train and fit to ``X [N, D]`` and targets ``y [N]`` or ``[N, C]``, each as often as its weight says."""
        X, y = validate_data(self, X, y, y_numeric=True, multi_output=True)
        X, y, weight = _counted(X, y, sample_weight)
        self._one, columns = y.ndim == 1, y.reshape(len(y), -1).astype(np.float64)
        center = np.average(columns, 0, weight)
        scale = np.average((columns - center) ** 2, 0, weight) ** 0.5
        self._scale = np.ones(1) if self.prefit else np.where(scale > 0, scale, 1.0)
        self._center = np.zeros(1) if self.prefit else center
        return self._fit(X, (columns - self._center) / self._scale, weight, columns.shape[1])

    def predictive(self, X: Any) -> Prediction:
        """The library's prediction of targets ``[N, C]``, in their own units: on the CPU, in double precision."""
        found, scale, center = super().predictive(X), torch.as_tensor(self._scale), torch.as_tensor(self._center)
        likelihood = Gaussian(self.posterior_.noise_std.cpu() * scale)
        mean, covariance = found.functional_mean.cpu() * scale + center, found.functional_covariance
        if covariance is None:
            return from_samples(likelihood, found.functional_samples.cpu() * scale + center)
        squares = scale.square() if covariance.ndim == mean.ndim else scale[:, None] * scale  # of variances only
        return from_functional(likelihood, mean, covariance.cpu() * squares)

    @overload
    def predict(self, X: Any, return_std: Literal[False] = False) -> Array: ...

    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[Array, Array]: ...

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means, shaped as ``y``; with ``return_std`` also the standard deviations of new targets, noise included."""
        prediction = self.predictive(X)
        moments = (prediction.mean, prediction.std) if return_std else (prediction.mean,)
        arrays = [(part[:, 0] if self._one else part).cpu().numpy() for part in moments]
        return tuple(arrays) if return_std else arrays[0]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _counted(X: Array, y: Array, sample_weight: Any) -> tuple[Array, Array, Array | None]:
    """The rows whose weights are above 0, and these, float64; None for none."""
    if sample_weight is None:
        return X, y, None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    kept = weight > 0
    checks.count("The number of rows with a weight", int(kept.sum()), 1)
    return X[kept], y[kept], weight[kept]
