"""Ours and the peers measured in turn, several times, and the row that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.report import Row

Block = Callable[[], float]
"""Does a piece of work and returns its figure, such as rows a second."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one contender, one a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


def in_turn(blocks: Sequence[Block], rounds: int, *, warm: bool = True) -> list[Figures]:
    """Figures of each block, run in turn ``rounds`` times, every second time backwards; if ``warm`` once before,
    which does not count."""
    if warm:
        for block in blocks:
            block()
    found: list[list[float]] = [[] for _ in blocks]
    for number in range(rounds):
        order = range(len(blocks)) if number % 2 == 0 else range(len(blocks) - 1, -1, -1)
        for place in order:
            found[place].append(blocks[place]())
    return [Figures(tuple(values)) for values in found]


def faced(
    work: str,
    unit: str,
    ours: Figures,
    peer: Figures | None,
    peer_name: str,
    *,
    aim: float | None = None,
    less_is_better: bool = False,
    note: str = "",
) -> Row:
    """A row with a peer; ``aim`` is the least ratio wanted, where larger is better for us. Without the peer (None)
    nothing is said of the aim."""
    row = Row(work, unit, ours.median, aim, None, ours.spread, None, peer_name, note=note)
    if peer is None:
        return row
    ratio = peer.median / ours.median if less_is_better else ours.median / peer.median
    low, high = peer.spread
    said = f"peer {low:,.4g}–{high:,.4g}" + ("" if aim is None else "; the aim is a ratio")
    return replace(
        row,
        peer=peer.median,
        ratio=ratio,
        met=None if aim is None else ratio >= aim,
        note=f"{note}; {said}" if note else said,
    )
