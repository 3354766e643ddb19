"""Taste: how well an item's categories fit those of what a user liked lately. Content alone, NumPy alone.

A few likes of one genre say something at once, before any weight moved. Each item is a unit vector over its
categories, rare categories weighing more (idf). A user's profile is the mean vector of the recent items less
the catalogue's mean; the affinity of an item is its product with the profile, damped while likes are few.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featurestore.encoded import Keys, Ragged

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Taste:
    """Category statistics of a catalogue. Shapes: keys ``[G]`` ascending, idf ``[G]``, mean ``[G]``: the
    mean over all items of their unit category vectors."""

    keys: Keys
    idf: Doubles
    mean: Doubles

    @staticmethod
    def of(categories: Ragged) -> Taste:
        """The statistics of a catalogue whose N items have these ``categories``."""
        items = len(categories.offsets) - 1
        keys, counts = np.unique(categories.values, return_counts=True)
        empty = Taste(keys, np.log((items + 1) / np.maximum(counts, 1)), np.zeros(len(keys)))
        at, _, values = empty._vectors(categories)
        mean = np.bincount(at, values, minlength=len(keys)) / max(items, 1)
        return Taste(keys, empty.idf, mean)

    def _vectors(self, items: Ragged) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64], Doubles]:
        """Unit vectors of ``items`` as (category, item, value) triples; unknown categories are left out."""
        owner = np.repeat(np.arange(len(items.offsets) - 1), np.diff(items.offsets))
        if len(self.keys) == 0:
            return np.empty(0, np.intp), owner[:0], np.empty(0)
        at = np.minimum(np.searchsorted(self.keys, items.values), len(self.keys) - 1)
        known = self.keys[at] == items.values
        at, owner = at[known], owner[known]
        values = self.idf[at]
        length = np.sqrt(np.bincount(owner, values**2, minlength=len(items.offsets) - 1))
        return at, owner, values / np.maximum(length[owner], 1e-12)

    def affinity(self, recent: Ragged, items: Ragged) -> Floats:
        """How well N ``items`` fit a user who liked the R ``recent`` ones, ``[N]`` within about ±1; 0 for
        everything where R is 0."""
        count, likes = len(items.offsets) - 1, len(recent.offsets) - 1
        if likes == 0:
            return np.zeros(count, np.float32)
        liked_at, _, liked_values = self._vectors(recent)
        profile = np.bincount(liked_at, liked_values, minlength=len(self.keys)) / likes - self.mean
        at, owner, values = self._vectors(items)
        fit = np.bincount(owner, values * profile[at], minlength=count)
        return (fit * likes / (likes + 1)).astype(np.float32)
