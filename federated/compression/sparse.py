"""Sending a few coordinates only: the largest (top-k), or a random mask that a seed names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from federated.compression.errors import UnsoundScheme
from federated.compression.packing import most_gap_bytes, pack_gaps, unpack_gaps
from federated.compression.sections import Section, SectionRule
from federated.compression.step import Dice, Kind
from federated.compression.streams import Floats, Indices, support


def chosen_of(share: float, count: int) -> int:
    """How many of ``count`` coordinates a share is: rounded, at least one."""
    return max(1, min(count, round(share * count)))


def require_share(name: str, share: float) -> None:
    """Raise UnsoundScheme unless 0 < share ≤ 1."""
    if not 0.0 < share <= 1.0:
        raise UnsoundScheme(f"{name}: the share of coordinates lies above 0 and at most at 1, not at {share}")


def largest(values: Floats, chosen: int) -> Indices:
    """Places of the ``chosen`` largest magnitudes in each row of ``[B, N]``, ascending ``[B, chosen]``; of equal
    ones the first."""
    rows, count = values.shape
    # Magnitudes of float32 are ordered as their bits are, and integers partition faster.
    magnitudes = np.abs(values).view(np.uint32)
    limits = np.partition(magnitudes, count - chosen, axis=1)[:, count - chosen, None]
    taken = magnitudes >= limits
    for row in np.flatnonzero(np.count_nonzero(taken, axis=1) > chosen):
        equal = np.flatnonzero(magnitudes[row] == limits[row])
        spare = int(np.count_nonzero(taken[row])) - chosen
        taken[row, equal[len(equal) - spare :]] = False
    places = np.flatnonzero(taken).reshape(rows, chosen)
    within: Indices = places - np.arange(rows)[:, None] * count
    return within


@dataclass(frozen=True, slots=True)
class _SomeCoordinates:
    """What both have in common: a ``share`` of the coordinates goes on."""

    share: float
    name: str = ""
    takes: frozenset[Kind] = frozenset({"dense"})
    gives: Kind = "sparse"

    def __post_init__(self) -> None:
        require_share(self.name, self.share)

    def grows(self) -> str | None:
        return None

    def width(self, count: int) -> int:
        return chosen_of(self.share, count)


@dataclass(frozen=True, slots=True)
class TopK(_SomeCoordinates):
    """The largest ``share`` of the coordinates by magnitude, their places as gaps. What is left out must be
    remembered (error feedback), or small coordinates would never travel (Stich 2018, Karimireddy 2019)."""

    name: str = "top_k"
    skews: bool = True

    def rules(self, count: int) -> tuple[SectionRule, ...]:
        return (SectionRule(most_gap_bytes(self.width(count), count), fixed=False),)

    def encode(self, values: Floats, dice: Dice, feedback: bool) -> tuple[Floats, tuple[Section, ...]]:
        places = largest(values, self.width(values.shape[1]))
        return np.take_along_axis(values, places, axis=1), (Section(*pack_gaps(places)),)

    def decode(
        self, values: Floats, sections: Sequence[Section], count: int, dice: Dice, feedback: bool
    ) -> Floats:
        rows, chosen = values.shape
        places = unpack_gaps(sections[0].body, rows, chosen, count)
        out = np.zeros((rows, count), np.float32)
        np.put_along_axis(out, places, values, axis=1)
        return out


@dataclass(frozen=True, slots=True)
class RandomMask(_SomeCoordinates):
    """A random ``share`` of the coordinates (Konečný et al. 2016). The body carries the mask's seed, or, when
    ``shared``, the round's seed names one mask for all clients (as secure aggregation needs).

    Values are divided by the share, so that the mean is right, unless ``scaled`` is off: then what is not sent
    counts as no change. Under error feedback nothing is scaled, since what was left out travels later.
    """

    shared: bool = False
    scaled: bool = True
    name: str = "random_mask"
    skews: bool = False

    def rules(self, count: int) -> tuple[SectionRule, ...]:
        return () if self.shared else (SectionRule(4, noise=True),)

    def factor(self, count: int, feedback: bool) -> np.float32:
        """What a sent value is multiplied by at the server."""
        return np.float32(count / self.width(count) if self.scaled and not feedback else 1.0)

    def encode(self, values: Floats, dice: Dice, feedback: bool) -> tuple[Floats, tuple[Section, ...]]:
        count = values.shape[1]
        if self.shared:
            return values[:, support(dice.shared, count, self.width(count))], ()
        section = Section.of_rows(dice.seeds())
        return np.take_along_axis(values, self._places(section, count, dice), axis=1), (section,)

    def decode(
        self, values: Floats, sections: Sequence[Section], count: int, dice: Dice, feedback: bool
    ) -> Floats:
        out = np.zeros((len(values), count), np.float32)
        scaled = values * self.factor(count, feedback)
        if self.shared:
            out[:, support(dice.shared, count, self.width(count))] = scaled
        else:
            np.put_along_axis(out, self._places(sections[0], count, dice), scaled, axis=1)
        return out

    def _places(self, section: Section, count: int, dice: Dice) -> Indices:
        def derive(seeds: list[int]) -> Indices:
            return np.stack([support(seed, count, self.width(count)) for seed in seeds])

        return dice.once(self.name, section, count, derive)
