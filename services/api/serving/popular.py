"""What is popular and what is new, remembered for a moment; never what may be shown, which is asked anew."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from models.index import top_k
from services.catalogue import Catalogue

RowNumbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

HALF_LIFE_S: Final = 7 * 86_400.0
KEEP_MS: Final = 250
"""For how long an order stands while likes come in."""
DECAY_MS: Final = 10_000
"""For how long a score stands that nobody touched: next to nothing decays in this time."""
SHORTLIST: Final = 2_000
FRESH_MS: Final = 86_400_000
LOADING_MS: Final = 60_000
"""Items first seen within this time of nine tenths of the others came with them."""


class Popular:
    """The most liked and the newest items of a catalogue. ``touch`` it with the rows that change."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        half_lives = catalogue.half_lives
        # Without counters that decay there is the total, which comes last.
        self._column = min(
            range(len(half_lives)), key=lambda n: abs(half_lives[n] - HALF_LIFE_S), default=len(half_lives)
        )
        self._scores: Floats = np.zeros(0, np.float32)
        self._touched: list[RowNumbers] = []
        self._ordered_ms = self._decayed_ms = -DECAY_MS
        self._liked: RowNumbers = np.zeros(0, np.int64)
        self._newest: RowNumbers = np.zeros(0, np.int64)

    def touch(self, rows: RowNumbers) -> None:
        """These rows changed, or are new."""
        self._touched.append(rows)

    def scores(self, now_ms: int) -> Floats:
        """Decayed likes of every item ``[N]``."""
        self._renew(now_ms)
        return self._scores

    def liked(self, most: int, allowed: Mask, now_ms: int) -> RowNumbers:
        """The ``most`` most liked among ``allowed`` ``[N]``, best first."""
        self._renew(now_ms)
        rows = self._liked[allowed[self._liked]][:most]
        if len(rows) < most and len(self._liked) < len(self._scores):
            # The shortlist ran out: a narrow filter. Look at all of them.
            rows = top_k(self._scores, most, allowed).rows
        return rows

    def newest(self, most: int, allowed: Mask, now_ms: int) -> RowNumbers:
        """Up to ``most`` of the newest among ``allowed`` ``[N]``, newest first."""
        self._renew(now_ms)
        return self._newest[allowed[self._newest]][:most]

    def _renew(self, now_ms: int) -> None:
        grown = len(self._catalogue) != len(self._scores)
        decayed = not 0 <= now_ms - self._decayed_ms < DECAY_MS
        if not (grown or decayed or (self._touched and not 0 <= now_ms - self._ordered_ms < KEEP_MS)):
            return
        if decayed:
            self._scores = self._count(now_ms, None)
            self._decayed_ms = now_ms
        else:
            self._scores = np.concatenate(
                [self._scores, np.zeros(len(self._catalogue) - len(self._scores), np.float32)]
            )
            rows = np.unique(np.concatenate(self._touched)) if self._touched else np.zeros(0, np.int64)
            self._scores[rows] = self._count(now_ms, rows)
        self._touched.clear()
        self._ordered_ms = now_ms
        self._liked = top_k(self._scores, SHORTLIST).rows
        if grown or decayed:
            self._newest = self._fresh(now_ms)

    def _count(self, now_ms: int, rows: RowNumbers | None) -> Floats:
        return self._catalogue.counts(now_ms, rows)[:, self._column].astype(np.float32)

    def _fresh(self, now_ms: int) -> RowNumbers:
        """Items known for less than a day, newest first; none of a catalogue that was loaded as a whole,
        where everything is new and nothing stands out."""
        first_seen = self._catalogue.first_seen_ms
        if not len(first_seen):
            return np.zeros(0, np.int64)
        settled = np.partition(first_seen, int(0.9 * (len(first_seen) - 1)))[int(0.9 * (len(first_seen) - 1))]
        rows = np.flatnonzero(first_seen > max(now_ms - FRESH_MS, int(settled) + LOADING_MS))
        newest: RowNumbers = rows[np.argsort(-first_seen[rows], kind="stable")][:SHORTLIST]
        return newest
