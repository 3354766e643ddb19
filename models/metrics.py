"""Quality metrics, exactly as published tables define them. NumPy alone.

Ranked lists are item numbers, best first; relevant items are distinct. K: length of a list, N: samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Items = npt.NDArray[np.integer]
Numbers = npt.NDArray[np.floating]


def _hits(ranked: Items, relevant: Items, k: int) -> npt.NDArray[np.bool_]:
    if k < 1:
        raise ValueError(f"k is at least 1, not {k}")
    if len(relevant) == 0:
        raise ValueError("a user without a relevant item has no recall: leave such users out of the mean")
    return np.isin(ranked[:k], relevant)


def recall_at_k(ranked: Items, relevant: Items, k: int) -> float:
    """TP / (TP + FN): the share of the relevant items among the first k. Raises ValueError without any.

    It cannot reach 1 for a user with more than k relevant items; published tables use it all the same.
    """
    return float(_hits(ranked, relevant, k).sum()) / len(relevant)


def capped_recall_at_k(ranked: Items, relevant: Items, k: int) -> float:
    """TP / min(TP + FN, k): as recall, but 1 can always be reached. Raises ValueError without any."""
    return float(_hits(ranked, relevant, k).sum()) / min(len(relevant), k)


def ndcg_at_k(ranked: Items, relevant: Items, k: int) -> float:
    """Discounted gain of the first k, 1/log2(place + 1) per hit, over the best possible gain.

    Raises ValueError where nothing is relevant."""
    hits = _hits(ranked, relevant, k)
    gains = 1.0 / np.log2(np.arange(2, k + 2))
    return float(gains[: len(hits)][hits].sum() / gains[: min(len(relevant), k)].sum())


def auc(labels: Numbers, scores: Numbers) -> float:
    """Probability that a positive scores above a negative, ties counting half.

    Shapes: labels (0 or 1) and scores ``[N]``. Raises ValueError where only one of the classes occurs.
    """
    positive = np.asarray(labels) > 0
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if positives == 0 or negatives == 0:
        raise ValueError("AUC needs a positive and a negative")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # The mean rank of each group of ties: ranks end at the cumulated count.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def f1(labels: Numbers, scores: Numbers, threshold: float) -> float:
    """2·TP / (2·TP + FP + FN), what scores at least ``threshold`` being predicted positive; 0 without any
    true, predicted or missed positive."""
    positive, predicted = np.asarray(labels) > 0, np.asarray(scores) >= threshold
    true = int((positive & predicted).sum())
    wrong = int((positive ^ predicted).sum())
    return 2 * true / (2 * true + wrong) if true + wrong else 0.0


def best_f1_threshold(labels: Numbers, scores: Numbers) -> float:
    """The threshold with the highest F1 on validation data, the highest such one; to be used on other data.

    Shapes: labels (0 or 1) and scores ``[N]``. Raises ValueError on empty data.
    """
    if len(scores) == 0:
        raise ValueError("a threshold needs validation data")
    order = np.argsort(-np.asarray(scores), kind="stable")
    ranked = np.asarray(scores)[order]
    positive = np.asarray(labels)[order] > 0
    predicted = np.arange(1, len(ranked) + 1)
    values = 2 * np.cumsum(positive) / (predicted + positive.sum())
    last_of_ties = np.append(ranked[1:] != ranked[:-1], True)
    return float(ranked[np.argmax(np.where(last_of_ties, values, -1.0))])
