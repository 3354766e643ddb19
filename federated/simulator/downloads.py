"""What clients start from, version by version, and how many bytes it takes to send it to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.compression.download import Grid, Held, difference, snap
from federated.device import LocalTraining
from federated.weights import Array

KEPT = 8
"""Versions that a client may hold and be sent a difference; whoever holds an older one gets the whole model."""

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Published:
    """What a client that starts at ``version`` gets: ``weights`` [D], perhaps ``control`` [D], its training, and the
    ``threshold`` that it answers by a bit."""

    version: int
    weights: Array
    training: LocalTraining
    control: Array | None = None
    threshold: float | None = None


@dataclass(slots=True)
class Downloads:
    """The versions that clients in training may have started from, and those that they may hold.

    With a ``grid`` the weights are rounded to it and travel as coded differences (``compression.download``); without,
    as float32.
    """

    size: int
    grid: Grid | None = None
    published: dict[int, Published] = field(default_factory=dict)
    _held: dict[int, Held] = field(default_factory=dict)
    _bytes: dict[tuple[int, int], int] = field(default_factory=dict)

    def publish(
        self,
        version: int,
        weights: Array,
        training: LocalTraining,
        control: Array | None,
        oldest_wanted: int,
        threshold: float | None = None,
    ) -> None:
        """Make ``weights`` [D] the newest version; forget versions below ``oldest_wanted`` that nobody trains on."""
        if self.grid is not None:
            held = snap(self.grid, weights, version, self._held.get(version - 1))
            weights = held.vector(self.grid)
            self._held[version] = held
            for old in [old for old in self._held if old < version - KEPT]:
                del self._held[old]
        self._bytes.clear()
        self.published[version] = Published(version, weights, training, control, threshold)
        for old in [old for old in self.published if old < oldest_wanted]:
            del self.published[old]

    def bytes_for(self, held: int, version: int) -> int:
        """Of the body that takes a client from version ``held`` (−1: none) to ``version``."""
        known = self._bytes.get((held, version))
        if known is None:
            known = self._bytes[held, version] = self._measure(held, version)
        return known

    def _measure(self, held: int, version: int) -> int:
        control = 0 if self.published[version].control is None else 4 * self.size
        # On the wire a held version of 0 means none: who holds the first gets the whole model, too.
        if self.grid is None:
            return control + (0 if held == version > 0 else 4 * self.size)
        new, base = self._held[version], self._held.get(held) if held > 0 else None
        whole = len(difference(self.grid, new, None))
        return control + (whole if base is None else min(whole, len(difference(self.grid, new, base))))

    def save(self) -> tuple[dict[str, Any], Columns]:
        """Numbers and columns from which ``restore`` goes on."""
        columns: Columns = {}
        trainings: dict[str, Any] = {}
        for version, one in self.published.items():
            trainings[str(version)] = asdict(one.training)
            columns[f"published.{version}.weights"] = one.weights
            if one.control is not None:
                columns[f"published.{version}.control"] = one.control
        for version, held in self._held.items():
            columns[f"held.{version}.exponents"] = held.exponents
            columns[f"held.{version}.codes"] = held.codes
        thresholds = {str(version): one.threshold for version, one in self.published.items()}
        return {"trainings": trainings, "thresholds": thresholds, "held": sorted(self._held)}, columns

    def restore(self, values: dict[str, Any], columns: Columns) -> None:
        """Go on where ``save`` was."""
        self.published = {
            int(version): Published(
                int(version),
                np.asarray(columns[f"published.{version}.weights"], np.float32),
                LocalTraining(**training),
                columns.get(f"published.{version}.control"),
                values.get("thresholds", {}).get(version),
            )
            for version, training in values["trainings"].items()
        }
        self._held = {
            version: Held(version, columns[f"held.{version}.exponents"], columns[f"held.{version}.codes"])
            for version in values["held"]
        }
        self._bytes.clear()
