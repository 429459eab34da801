"""Log-loss of ``LaplaceClassifier`` beside that of the network in it, by scikit-learn's own cross-validation.

    python benchmarks/integrations/tables.py

Five tables of scikit-learn, five folds, three seeds; two trainings: with the estimator's weight decay, and without any
for 500 epochs. Both losses of a fold are of the same trained network.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from laplace_plus.errors import NoGainWarning
from laplace_plus.integrations.sklearn import LaplaceClassifier

TRAININGS = {"weight decay 1e-3": {}, "none, 500 epochs": {"weight_decay": 0.0, "epochs": 500}}
SEEDS = 3


def network_loss(pipeline: Any, features: Any, labels: Any) -> float:
    """The log-loss of the network alone, at the same weights."""
    prediction = pipeline[-1].predictive(pipeline[:-1].transform(features))
    return -log_loss(labels, prediction.functional_mean.softmax(-1).double().numpy(), labels=pipeline.classes_)


SCORING = {"network": network_loss, "laplace": "neg_log_loss"}


def tables() -> dict[str, tuple[Any, Any]]:
    """Features and labels by name."""
    loaders = ("breast_cancer", "wine", "digits", "iris", "diabetes")
    found = {name: getattr(datasets, f"load_{name}")(return_X_y=True) for name in loaders}
    features, progression = found["diabetes"]
    found["diabetes"] = features, np.digitize(progression, np.quantile(progression, [1 / 3, 2 / 3]))
    return found


def main() -> None:
    """Print a table of means, and the paired difference with its standard error over seeds and folds."""
    warnings.simplefilter("ignore", NoGainWarning)
    say = sys.stdout.write
    say("| table | training | the network | `LaplaceClassifier` | difference |\n|---|---|---|---|---|\n")
    for table, (features, labels) in tables().items():
        for training, options in TRAININGS.items():
            scores = []
            for seed in range(SEEDS):
                folds = StratifiedKFold(5, shuffle=True, random_state=seed)
                estimator = make_pipeline(StandardScaler(), LaplaceClassifier(random_state=seed, **options))
                scores.append(cross_validate(estimator, features, labels, cv=folds, scoring=SCORING))
            plain, laplace = (-np.concatenate([s[f"test_{name}"] for s in scores]) for name in SCORING)
            difference = laplace - plain
            error = difference.std(ddof=1) / len(difference) ** 0.5
            means = f"{plain.mean():.3f} | {laplace.mean():.3f} | {difference.mean():+.3f} ± {error:.3f}"
            say(f"| {table} | {training} | {means} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
