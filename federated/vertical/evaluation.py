"""How good a joint model is: measures of scores, and the models of one party, or of all rows in one place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from models.metrics import auc

Floats = npt.NDArray[np.float64]
Task = Literal["binary", "classes", "number"]
MOST_CLASSES: Final = 20


def task_of(labels: Floats) -> Task:
    """What labels [N] are: two values, a few whole numbers, or numbers."""
    values = np.unique(labels)
    if len(values) <= 2:
        return "binary"
    whole = bool((values == np.round(values)).all())
    return "classes" if whole and len(values) <= MOST_CLASSES else "number"


def measures(labels: Floats, scores: Floats) -> dict[str, float]:
    """Of scores [N] or [N, C] for labels [N]: ``auc`` and ``ks`` for two classes, ``accuracy`` for more (labels are the
    columns' places in rising order), ``rmse`` for numbers. Empty where nothing can be measured.

    ks: the largest difference between the shares of positives and of negatives above a threshold.
    """
    task = task_of(labels)
    if len(labels) == 0 or len(scores) != len(labels):
        return {}
    if task == "number":
        return {"rmse": float(np.sqrt(np.mean((scores.reshape(len(labels), -1)[:, 0] - labels) ** 2)))}
    values = np.unique(labels)
    if task == "classes":
        if scores.ndim != 2 or scores.shape[1] < len(values):
            return {}
        return {"accuracy": float(np.mean(scores.argmax(axis=1) == np.searchsorted(values, labels)))}
    if len(values) < 2:
        return {}
    single = scores if scores.ndim == 1 else scores[:, -1]
    positive = labels == values[-1]
    return {"auc": auc(positive.astype(np.float64), single), "ks": ks(positive, single)}


def ks(positive: npt.NDArray[np.bool_], scores: Floats) -> float:
    """Kolmogorov and Smirnov's statistic between the scores of positives and negatives."""
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(positive[order]) / positive.sum()
    false = np.cumsum(~positive[order]) / (~positive).sum()
    ends = np.append(np.diff(scores[order]) != 0, True)
    return float(np.abs(hits - false)[ends].max())


def baselines(
    train: tuple[Floats, Floats], test: tuple[Floats, Floats], seed: int = 0
) -> Mapping[str, dict[str, float]]:
    """What plain models that see all of these columns reach: measures by model's name.

    ``train``, ``test``: features [N, F] (NaN: missing) and labels [N]. Logistic (or ridge) regression on standardised
    features, and histogram boosting, by scikit-learn. Raises ImportError where that is not installed.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    (features, labels), (held, truth) = train, test
    task = task_of(labels)
    mean = np.nan_to_num(np.nanmean(features, axis=0))
    deviation = np.nanstd(features, axis=0)
    scale = np.where(deviation > 0, deviation, 1.0)
    flat, held_flat = (np.nan_to_num((one - mean) / scale) for one in (features, held))
    models: dict[str, tuple[Any, Floats, Floats]]
    if task == "number":
        models = {
            "ridge": (Ridge(), flat, held_flat),
            "boosting": (HistGradientBoostingRegressor(random_state=seed), features, held),
        }
    else:
        models = {
            "logistic": (LogisticRegression(max_iter=1_000), flat, held_flat),
            "boosting": (HistGradientBoostingClassifier(random_state=seed), features, held),
        }
    found: dict[str, dict[str, float]] = {}
    for name, (model, seen, asked) in models.items():
        with warnings.catch_warnings():
            # Not converged within its iterations: the baseline is what it is.
            warnings.simplefilter("ignore")
            model.fit(seen, labels)
        scores = model.predict(asked) if task == "number" else model.predict_proba(asked)
        found[name] = measures(truth, np.asarray(scores, np.float64))
    return found
