"""From candidates to the list: a pure pipeline. NumPy alone, no I/O, no clock.

Stages: `merge` joins the channels' candidates and drops what may not be shown; the caller ranks the pool by
the DLRM; `blend` makes one score of all signals; `rerank` applies the least score, diversity and exploration;
`explain` says why each item is there. `recommend` runs the stages after ranking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

TWO_TOWER: Final = "two_tower"
SIMILAR: Final = "similar"
POPULAR: Final = "popular"
FRESH: Final = "fresh"

_PRIOR_LIKES: Final = 0.3
"""Added to a decayed count before its logarithm: what an item without likes is taken for."""
_LIKE_MINDED: Final = 0.35
"""The least cosine at which an item counts as similar to one that the user liked."""
_TASTE: Final = 0.1
"""The least affinity at which an item counts as fitting the user's categories."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One channel's candidates, best first. Shapes: items (catalogue rows) and scores ``[C]``."""

    items: Rows
    scores: Floats


@dataclass(frozen=True, slots=True)
class Pool:
    """P distinct candidates. Shapes: items ``[P]`` catalogue rows, source ``[P]`` index into ``sources``:
    the first channel that proposed it."""

    items: Rows
    source: npt.NDArray[np.int8]
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known of P candidates. Shapes: all ``[P]``.

    ``retrieval``: two-tower score over the temperature; ``ranking``: DLRM logit (None where there was no time
    to rank); ``popularity``: decayed likes of about a week; ``taste``: category affinity.
    """

    retrieval: Floats
    ranking: Floats | None
    popularity: Floats
    taste: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each signal counts in the final score. All signals are on the scale of a log probability."""

    retrieval: float = 1.0
    ranking: float = 0.5
    popularity: float = 2.5
    taste: float = 8.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What the list should be like: ``n`` items, ``diversity`` in [0, 1] (0: by score alone), the least
    score, and how many of the n places at most go to fresh items that score alone would leave out."""

    n: int
    diversity: float = 0.0
    min_score: float = -np.inf
    explore: int = 0


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an item is in the list; ``item`` is the catalogue row that it is similar to, where it is one."""

    kind: Literal["similar_to", "fits_taste", "popular", "new", "for_you"]
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Recommended:
    """One place of the list: catalogue row, final score, channel, reasons, and each stage's scores."""

    item: int
    score: float
    source: str
    reasons: tuple[Reason, ...]
    stages: dict[str, float]


@dataclass(frozen=True, slots=True)
class Liked:
    """What a user liked lately: rows ``[R]`` and unit vectors ``[R, e]``, newest last."""

    items: Rows
    directions: Floats


def merge(channels: Mapping[str, Channel], allowed: Mask, limit: int) -> Pool:
    """Join channels into at most ``limit`` candidates, taking their bests in turn.

    ``allowed`` ``[N]`` says which catalogue rows may be shown (not seen, hidden, excluded or of another
    category); rows beyond it may not. An item proposed twice counts for the channel named first.
    """
    names = tuple(channels)
    kept = [channel.items[_inside(channel.items, allowed)] for channel in channels.values()]
    if sum(map(len, kept)) == 0:
        return Pool(np.empty(0, np.int64), np.empty(0, np.int8), names)
    items = np.concatenate(kept)
    source = np.repeat(np.arange(len(kept), dtype=np.int8), [len(part) for part in kept])
    place = np.concatenate([np.arange(len(part)) for part in kept])
    distinct, first = np.unique(items, return_index=True)
    best_place = np.full(len(distinct), len(items))
    np.minimum.at(best_place, np.searchsorted(distinct, items), place)
    chosen = np.lexsort((source[first], best_place))[:limit]
    return Pool(distinct[chosen], source[first][chosen], names)


def _inside(items: Rows, allowed: Mask) -> Mask:
    known = (items >= 0) & (items < len(allowed))
    mask: Mask = known & allowed[np.where(known, items, 0)] if len(allowed) else known
    return mask


def blend(signals: Signals, weights: Weights) -> Floats:
    """The final score ``[P]``: the weighted sum of the signals. It orders one user's items; only differences
    mean something. Ranking is centred, so that a list ranked in part or not at all keeps its scale."""
    score = weights.retrieval * signals.retrieval + weights.taste * signals.taste
    score = score + weights.popularity * np.log(np.maximum(signals.popularity, 0.0) + _PRIOR_LIKES)
    if signals.ranking is not None and len(signals.ranking):
        score = score + weights.ranking * (signals.ranking - signals.ranking.mean())
    return score.astype(np.float32)


def rerank(pool: Pool, scores: Floats, directions: Floats | None, choice: Choice) -> Rows:
    """The places of the list as indices into the pool ``[≤ n]``.

    directions ``[P, e]``: unit vectors for diversity (None: no diversity). Fresh items take up to
    ``choice.explore`` of the last places if score alone left them out; they need not reach ``min_score``.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= choice.min_score]
    if choice.diversity > 0 and directions is not None:
        listed = _diverse(order[: max(4 * choice.n, 50)], scores, directions, choice)
    else:
        listed = order[: choice.n]
    return _explore(pool, scores, listed, choice)


def _diverse(order: Rows, scores: Floats, directions: Floats, choice: Choice) -> Rows:
    """Maximal marginal relevance (Carbonell and Goldstein 1998): next is what maximises
    (1 − λ)·relevance − λ·largest cosine with what is listed; relevance is the score scaled to [0, 1]."""
    if len(order) == 0:
        return order
    span = max(float(np.ptp(scores[order])), 1e-9)
    relevance = (scores[order] - scores[order].min()) / span
    vectors = directions[order]
    closest = np.full(len(order), 0.0, np.float32)
    open_ = np.ones(len(order), bool)
    listed = []
    for _ in range(min(choice.n, len(order))):
        value = (1 - choice.diversity) * relevance - choice.diversity * closest
        best = int(np.argmax(np.where(open_, value, -np.inf)))
        listed.append(best)
        open_[best] = False
        closest = np.maximum(closest, vectors @ vectors[best])
    return order[np.array(listed, np.int64)]


def _explore(pool: Pool, scores: Floats, listed: Rows, choice: Choice) -> Rows:
    if choice.explore < 1 or FRESH not in pool.sources:
        return listed
    fresh = np.flatnonzero(pool.source == pool.sources.index(FRESH))
    wanted = min(choice.explore, choice.n) - int(np.isin(listed, fresh).sum())
    if wanted < 1:
        return listed
    left_out = fresh[~np.isin(fresh, listed)]
    added = left_out[np.argsort(-scores[left_out], kind="stable")][:wanted]
    return np.concatenate([listed[: choice.n - len(added)], added])


def explain(
    pool: Pool, places: Rows, signals: Signals, directions: Floats | None, liked: Liked | None
) -> list[tuple[Reason, ...]]:
    """Reasons for each of the ``places`` ``[n]`` (indices into the pool), the most telling first."""
    nearest, cosine = _nearest(places, directions, liked)
    popular = _popular(signals.popularity)
    reasons = []
    for number, place in enumerate(places.tolist()):
        found: list[Reason] = []
        if cosine[number] >= _LIKE_MINDED:
            found.append(Reason("similar_to", int(nearest[number])))
        if signals.taste[place] >= _TASTE:
            found.append(Reason("fits_taste"))
        if pool.sources[pool.source[place]] == FRESH:
            found.append(Reason("new"))
        if popular[place]:
            found.append(Reason("popular"))
        reasons.append(tuple(found) or (Reason("for_you"),))
    return reasons


def _nearest(places: Rows, directions: Floats | None, liked: Liked | None) -> tuple[Rows, Floats]:
    if directions is None or liked is None or len(liked.items) == 0:
        return np.zeros(len(places), np.int64), np.full(len(places), -1, np.float32)
    cosines = directions[places] @ liked.directions.T
    best = cosines.argmax(axis=1)
    return liked.items[best], cosines[np.arange(len(places)), best]


def _popular(popularity: Floats) -> Mask:
    """Which candidates are in the upper tenth of the pool by likes, having any."""
    if len(popularity) == 0:
        return np.zeros(0, bool)
    mask: Mask = (popularity >= np.quantile(popularity, 0.9)) & (popularity >= 1.0)
    return mask


def recommend(
    pool: Pool,
    signals: Signals,
    weights: Weights,
    choice: Choice,
    directions: Floats | None = None,
    liked: Liked | None = None,
) -> list[Recommended]:
    """All stages after ranking: blend, re-rank, explain. Fewer than ``choice.n`` where the pool has fewer."""
    scores = blend(signals, weights)
    places = rerank(pool, scores, directions, choice)
    reasons = explain(pool, places, signals, directions, liked)
    return [
        Recommended(
            item=int(pool.items[place]),
            score=float(scores[place]),
            source=pool.sources[pool.source[place]],
            reasons=why,
            stages=_stages(signals, place),
        )
        for place, why in zip(places.tolist(), reasons, strict=True)
    ]


def _stages(signals: Signals, place: int) -> dict[str, float]:
    columns: Sequence[tuple[str, Floats | None]] = (
        ("retrieval", signals.retrieval),
        ("ranking", signals.ranking),
        ("popularity", signals.popularity),
        ("taste", signals.taste),
    )
    return {name: float(values[place]) for name, values in columns if values is not None}
