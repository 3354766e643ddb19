"""Choosing a list once all that had to be waited for is here. Pure computation over the items' state.

Every way to a list, the fallbacks included, goes through the same mask of what may be shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from models.parameters import RANKING
from models.recommend import (
    FRESH,
    POPULAR,
    SIMILAR,
    TWO_TOWER,
    Channel,
    Choice,
    Liked,
    Pool,
    Reason,
    Recommended,
    Signals,
    Weights,
    blend,
    merge,
    recommend,
)
from models.taste import Taste
from services.api.serving.items import Generation, ItemState
from services.api.serving.people import Person
from services.api.serving.queries import Pick, Query
from services.parameter_server.types import Pulled
from services.settings.model import RecommendationSettings

RowNumbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

FALLBACK: Final = "popular_fallback"
RANKED: Final = "ranking"
UNKNOWN: Final = "unknown"
SIMILAR_RECENT: Final = 10
"""Of the items liked last, how many the item-to-item channel looks around."""
EXPLORE_FROM: Final = 5
"""Lists of at least this length give their last place to a fresh item that its score would leave out."""
TASTE_KEPT_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class Given:
    """What was waited for. ``pulled`` is None where there are no parameters; ``late``: something is missing;
    ``hurry``: the deadline is past, so that ranking has to be left out."""

    person: Person
    pulled: Pulled | None
    late: bool
    hurry: bool
    now_ms: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """A list, whether it falls short of a proper one, and whether more could follow."""

    picks: tuple[Pick, ...]
    degraded: bool
    more: bool = False
    explanation: Mapping[str, object] = field(default_factory=dict)


class Chooser:
    """Makes lists from ``items``. Belongs to the event loop that changes them."""

    def __init__(self, items: ItemState, settings: RecommendationSettings) -> None:
        self._items = items
        self._settings = settings
        self._popular = items.popular
        self._weights = Weights(
            settings.retrieval_weight,
            settings.ranking_weight,
            settings.popularity_weight,
            settings.taste_weight,
        )
        self._taste: Taste | None = None
        self._taste_made_ms = 0
        self._taste_items = 0

    def recommend(self, query: Query, given: Given) -> Chosen:
        """A list of up to ``query.n``."""
        allowed = self._allowed(query, given.person, given.now_ms)
        generation, pulled = self._items.current, given.pulled
        if generation is None or pulled is None:
            picks = self._fallback(query.n, allowed, given.now_ms)
            return Chosen(picks, True, _more(allowed, picks))
        user = self._items.model.encode_users(given.person.encoded, pulled.rows, generation.dense.values)[0]
        recent = self._recent(given.person)
        channels = self._recall(generation, user, recent, allowed, given.now_ms)
        pool = merge(channels, allowed, self._settings.candidates)
        signals = self._signals(generation, user, recent, pool.items, given)
        liked = _liked(generation, recent)
        listed = recommend(
            pool, signals, self._weights, self._choice(query), _directions(generation, pool.items), liked
        )
        picks = tuple(self._pick(one, query.explain) for one in listed)
        if len(picks) < query.n and query.min_score is None:
            picks = self._pad(picks, listed, query.n, allowed, given.now_ms)
        explanation = self._explanation(query, given, channels, pool, allowed) if query.explain else {}
        return Chosen(picks, given.hurry, _more(allowed, picks), explanation)

    def rank(self, query: Query, given: Given, item_ids: Sequence[str]) -> Chosen:
        """``item_ids`` in order of the same score that lists are made by."""
        rows = self._items.catalogue.rows(item_ids)
        available = self._items.catalogue.available(given.now_ms)
        known = rows[rows >= 0]
        known = known[available[known]]
        unknown = tuple(
            Pick(item_id, None, UNKNOWN)
            for item_id, row in zip(item_ids, rows.tolist(), strict=True)
            if row < 0
        )
        generation, pulled = self._items.current, given.pulled
        if generation is None or pulled is None:
            scores = self._popular.scores(given.now_ms)[known]
            order = np.argsort(-scores, kind="stable")
            ids = self._items.catalogue.ids
            ranked = tuple(Pick(ids[known[n]], float(scores[n]), FALLBACK, ("popular",)) for n in order)
            return Chosen(ranked + unknown, True)
        user = self._items.model.encode_users(given.person.encoded, pulled.rows, generation.dense.values)[0]
        recent = self._recent(given.person)
        signals = self._signals(generation, user, recent, known, given)
        pool = Pool(known, np.zeros(len(known), np.int8), (RANKED,))
        listed = recommend(
            pool,
            signals,
            self._weights,
            Choice(len(known)),
            _directions(generation, known),
            _liked(generation, recent),
        )
        return Chosen(tuple(self._pick(one, query.explain) for one in listed) + unknown, given.hurry)

    def similar(self, query: Query, row: int, now_ms: int) -> Chosen:
        """Items near the one in ``row``."""
        allowed = self._items.catalogue.available(now_ms)
        if query.categories:
            allowed &= self._items.catalogue.in_categories(query.categories)
        allowed[row] = False
        generation = self._items.current
        if generation is None or row >= len(generation.index) or not generation.encoded[row]:
            picks = self._fallback(query.n, allowed, now_ms)
            return Chosen(picks, True, _more(allowed, picks))
        mask = allowed[: len(generation.index)] & generation.encoded
        hits = generation.index.similar(np.array([row]), query.n, mask)
        ids = self._items.catalogue.ids
        reason = (f"similar_to:{ids[row]}",)
        picks = tuple(
            Pick(ids[found], float(score), SIMILAR, reason)
            for found, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
        )
        return Chosen(picks, False, _more(allowed, picks))

    def _allowed(self, query: Query, who: Person, now_ms: int) -> Mask:
        """Which items ``[N]`` may be shown to this person, by this query, now."""
        catalogue = self._items.catalogue
        allowed = catalogue.available(now_ms)
        if query.excluded:
            excluded = catalogue.rows(list(query.excluded))
            allowed[excluded[excluded >= 0]] = False
        if query.exclude_seen and len(who.seen):
            allowed[self._items.own_rows(who.seen)] = False
        if query.categories:
            allowed &= catalogue.in_categories(query.categories)
        return allowed

    def _recall(
        self, generation: Generation, user: Floats, recent: RowNumbers, allowed: Mask, now_ms: int
    ) -> dict[str, Channel]:
        """Candidates by channel, best first."""
        index, settings = generation.index, self._settings
        mask = allowed[: len(index)] & generation.encoded
        near = index.search(user[None], settings.candidates, mask)[0]
        channels = {TWO_TOWER: Channel(near.rows, near.scores)}
        around = recent[recent < len(index)][-SIMILAR_RECENT:]
        if len(around):
            alike = index.similar(around, settings.candidates // 2, mask)
            channels[SIMILAR] = Channel(alike.rows, alike.scores)
        for name, rows in (
            (POPULAR, self._popular.liked(settings.popular_candidates, allowed, now_ms)),
            (FRESH, self._popular.newest(settings.fresh_candidates, allowed, now_ms)),
        ):
            channels[name] = Channel(rows, self._popular.scores(now_ms)[rows])
        return channels

    def _signals(
        self, generation: Generation, user: Floats, recent: RowNumbers, rows: RowNumbers, given: Given
    ) -> Signals:
        """What is known of the candidates ``rows`` ``[P]``."""
        retrieval = np.zeros(len(rows), np.float32)
        inside = rows < len(generation.index)
        vectors = generation.index.vectors[rows[inside]]
        retrieval[inside] = (vectors @ user) / self._items.model.config.temperature
        catalogue = self._items.catalogue
        taste = self._tastes(given.now_ms).affinity(catalogue.categories(recent), catalogue.categories(rows))
        popularity = self._popular.scores(given.now_ms)[rows]
        ranking = None if given.hurry or not len(rows) else self._logits(generation, rows, given)
        return Signals(retrieval, ranking, popularity, taste)

    def _logits(self, generation: Generation, rows: RowNumbers, given: Given) -> Floats:
        """The ranking model's logits ``[P]``: item rows from memory, the person's as just pulled."""
        assert given.pulled is not None
        model, who = self._items.model, given.person.encoded
        items = self._items.catalogue.encoded(rows, given.now_ms)
        keys = model.pair_keys(who, items)[RANKING]
        values, _ = self._items.rows.gather(RANKING, keys)
        values[np.searchsorted(keys, model.user_keys(who)[RANKING])] = given.pulled.rows[RANKING]
        return model.rank(who, items, {RANKING: values}, generation.dense.values)

    def _tastes(self, now_ms: int) -> Taste:
        """Category statistics of the catalogue, made anew when it grew by a hundredth or they are old."""
        items = len(self._items.catalogue)
        old = not 0 <= now_ms - self._taste_made_ms < TASTE_KEPT_MS
        if self._taste is None or old or items - self._taste_items > self._taste_items // 100:
            rows = np.arange(items, dtype=np.int64)
            self._taste = Taste.of(self._items.catalogue.categories(rows))
            self._taste_made_ms, self._taste_items = now_ms, items
        return self._taste

    def _recent(self, who: Person) -> RowNumbers:
        rows = self._items.catalogue.rows(who.recent)
        return rows[rows >= 0]

    def _pick(self, one: Recommended, explain: bool) -> Pick:
        ids = self._items.catalogue.ids
        told = [reason for reason in one.reasons if reason.item != one.item]  # an item is like itself
        reasons = tuple(_reason(reason, ids) for reason in told or [Reason("for_you")])
        return Pick(ids[one.item], one.score, one.source, reasons, one.stages if explain else None)

    def _fallback(self, most: int, allowed: Mask, now_ms: int) -> tuple[Pick, ...]:
        rows = self._popular.liked(most, allowed, now_ms)
        scores = self._popular.scores(now_ms)[rows]
        nothing = np.zeros(len(rows), np.float32)
        scores = blend(Signals(nothing, None, scores, nothing), self._weights)
        ids = self._items.catalogue.ids
        return tuple(
            Pick(ids[row], score, FALLBACK, ("popular",))
            for row, score in zip(rows.tolist(), scores.tolist(), strict=True)
        )

    def _pad(
        self, picks: tuple[Pick, ...], listed: Sequence[Recommended], n: int, allowed: Mask, now_ms: int
    ) -> tuple[Pick, ...]:
        """``picks`` filled up with what is popular; padding never outscores what it follows."""
        rest = allowed.copy()
        rest[[one.item for one in listed]] = False
        least = min((one.score for one in listed), default=np.inf)
        padding = self._fallback(n - len(picks), rest, now_ms)
        return picks + tuple(
            Pick(one.item_id, min(one.score or 0.0, least), one.source, one.reasons) for one in padding
        )

    def _explanation(
        self, query: Query, given: Given, channels: Mapping[str, Channel], pool: Pool, allowed: Mask
    ) -> dict[str, object]:
        return {
            "audience": given.person.audience,
            "recent_items": list(given.person.recent),
            "catalogue": len(allowed),
            "allowed": int(allowed.sum()),
            "candidates": {name: len(channel.items) for name, channel in channels.items()},
            "ranked": 0 if given.hurry else len(pool),
            "diversity": query.diversity,
            "weights": {
                name: getattr(self._weights, name) for name in ("retrieval", "ranking", "popularity", "taste")
            },
        }

    def _choice(self, query: Query) -> Choice:
        explores = query.n >= EXPLORE_FROM and query.min_score is None
        least = -np.inf if query.min_score is None else query.min_score
        return Choice(query.n, query.diversity, least, self._settings.explore if explores else 0)


def _directions(generation: Generation, rows: RowNumbers) -> Floats | None:
    """Unit vectors of candidates; items that have no vector yet point nowhere."""
    index = generation.index
    if not len(index):
        return None
    directions = index.directions(np.minimum(rows, len(index) - 1))
    directions[rows >= len(index)] = 0
    return directions


def _liked(generation: Generation, recent: RowNumbers) -> Liked | None:
    recent = recent[recent < len(generation.index)]
    return Liked(recent, generation.index.directions(recent)) if len(recent) else None


def _more(allowed: Mask, picks: Sequence[Pick]) -> bool:
    """Whether anything is left for a further page."""
    return bool(picks) and int(allowed.sum()) > len(picks)


def _reason(reason: Reason, ids: Sequence[str]) -> str:
    return reason.kind if reason.item is None else f"{reason.kind}:{ids[reason.item]}"
