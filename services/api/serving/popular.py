"""What is popular and what is new, remembered for a moment; never what may be shown, which is asked anew."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from models.index import top_k
from services.catalogue import Catalogue

RowNumbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

HALF_LIFE_S: Final = 7 * 86_400.0
KEEP_MS: Final = 250
SHORTLIST: Final = 2_000
FRESH_MS: Final = 86_400_000
LOADING_MS: Final = 60_000
"""Items first seen within this time of nine tenths of the others came with them."""


class Popular:
    """The most liked and the newest items of a catalogue, kept for KEEP_MS."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._made_ms = -KEEP_MS
        self._scores = np.zeros(0)
        self._liked: RowNumbers = np.zeros(0, np.int64)
        self._newest: RowNumbers = np.zeros(0, np.int64)

    def _renew(self, now_ms: int) -> None:
        if len(self._catalogue) == len(self._scores) and 0 <= now_ms - self._made_ms < KEEP_MS:
            return
        self._made_ms = now_ms
        self._scores = self._catalogue.popularity(HALF_LIFE_S, now_ms)
        self._liked = top_k(self._scores.astype(np.float32), SHORTLIST).rows
        self._newest = self._fresh(now_ms)

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

    def scores(self, now_ms: int) -> npt.NDArray[np.float64]:
        """Decayed likes of every item ``[N]``."""
        self._renew(now_ms)
        return self._scores

    def liked(self, most: int, allowed: Mask, now_ms: int) -> RowNumbers:
        """The ``most`` most liked among ``allowed`` ``[N]``, best first."""
        self._renew(now_ms)
        rows = self._liked[allowed[self._liked]][:most]
        if len(rows) < most and len(self._liked) < len(self._scores):
            # The shortlist ran out: a narrow filter. Look at all of them.
            rows = top_k(self._scores.astype(np.float32), most, allowed).rows
        return rows

    def newest(self, most: int, allowed: Mask, now_ms: int) -> RowNumbers:
        """Up to ``most`` of the newest among ``allowed`` ``[N]``, newest first."""
        self._renew(now_ms)
        return self._newest[allowed[self._newest]][:most]
