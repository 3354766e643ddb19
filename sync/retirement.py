"""Writers that are gone, before they are taken out of all vectors: what of theirs is kept, and what is undone. Pure.

The owner of a shard *closes* the fencing epochs below its own once every replica covers what it knows of them
(``Shard.retire``), and tells so (``Horizon``). From then on their writers wrote what the owner has of theirs, and
nothing else: it takes over what came to it out of turn (``out_of_turn``, ``as_own``), and a replica that has more of
them drops that (``unsettled``), or has it put right by a full replacement (``Settled``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sync.clock import MAX_TIME
from sync.contents import Contents
from sync.knowledge import Known
from sync.records import Generation, Graves, Learned, Rows, Update

Keys = npt.NDArray[np.uint64]
Epochs = Mapping[int, int]
Times = npt.NDArray[np.uint64]
Writers = npt.NDArray[np.uint32]
Wins = npt.NDArray[np.bool_]
Part = TypeVar("Part", Rows, Graves)


def older(here: Contents, epoch: int) -> dict[int, int]:
    """What is known here of the writers of fencing epochs below ``epoch``."""
    return {w: time for w, time in here.knowledge.items() if here.epochs.get(w, 0) < epoch}


def out_of_turn(here: Contents, epoch: int) -> tuple[list[Rows], list[Graves], list[Generation]]:
    """What is here of writers of fencing epochs below ``epoch`` beyond what is known of them. Of those that were
    retired before that is nothing: they are named in no vector any more, and what is here of theirs is all."""
    known, retired = older(here, epoch), here.horizon.retired
    limits = {w: known.get(w, 0) if retired <= e < epoch else MAX_TIME for w, e in here.epochs.items()}
    parts = list(_beyond(here, Known.of(limits)))
    published = [one for one in here.generations() if one.time > limits.get(one.writer, MAX_TIME)]
    rows = [part for part in parts if isinstance(part, Rows)]
    return rows, [part for part in parts if isinstance(part, Graves)], published


def _beyond(here: Contents, known: Known) -> Iterator[Rows | Graves]:
    for spec in here.specs:
        if spec.placement == "hashed":
            table = here.table(spec.name)
            yield from (part for part in table.told(table.located(table.scan(known))) if len(part.keys))


def as_own(part: Part, time: int, writer: int) -> Part:
    """``part`` [N] as ``writer`` writes it again at ``time``."""
    count = len(part.keys)
    return replace(part, time=np.full(count, time, np.uint64), writer=np.full(count, writer, np.uint32))


@dataclass(frozen=True, slots=True)
class Settled:
    """What a full replacement settles: retired writers wrote what the sender holds of theirs, and nothing else."""

    closed: Known
    complete: bool
    """Whether the sender knows all deletions that were forgotten here, so that what is not here is just missing."""

    @staticmethod
    def of(here: Contents, final: Learned | None, epochs: Epochs) -> Settled | None:
        if final is None or final.horizon.retired <= here.horizon.retired:
            return None
        closed = Known.of({}, final.horizon.retired, epochs)
        theirs = Known.of(final.knowledge, final.horizon.retired, epochs)
        return Settled(closed, theirs.covers(here.horizon.graves))

    def undone(self, part: Rows | Graves, latest: tuple[Times, Writers]) -> Wins:
        """Which states of ``part`` [N] replace ``latest`` [N] though they are no news."""
        time, writer = latest
        other = (time != part.time) | (writer != part.writer)
        wins: Wins = ~self.closed.above(time, writer) & other
        if self.complete:
            wins |= (time == 0) & ~self.closed.above(part.time, part.writer)
        return wins

    def is_undone(self, here: Generation, other: Generation) -> bool:
        """The same of a generation."""
        closed = here.time == 0 or not self.closed.is_below(here.time, here.writer)
        return bool(closed) and (here.time, here.writer) != (other.time, other.writer)


def unsettled(
    here: Contents, update: Update, dropped: Collection[tuple[str, Keys]]
) -> tuple[int, tuple[str, ...]]:
    """What would stay of retired writers beyond their last versions once ``update`` told of their retirement: how many
    rows and graves, and the dense tables of generations that only these writers published."""
    assert update.learned is not None
    horizon = update.learned.horizon
    epochs = here.epochs | dict(update.epochs)
    limits = {
        writer: horizon.last.get(writer, 0) if horizon.retired_before <= epoch < horizon.retired else MAX_TIME
        for writer, epoch in epochs.items()
    }
    beyond = Known.of(limits)
    rows, published = 0, []
    told = {one.table for one in update.generations}
    for spec in here.specs:
        if spec.placement == "single":
            one = here.dense(spec.name)
            # A full replacement tells of all generations that there are.
            closed = update.final is not None and epochs.get(one.writer, 0) < horizon.retired
            beyond_last = closed or one.time > limits.get(one.writer, MAX_TIME)
            if one.number and beyond_last and spec.name not in told:
                published.append(spec.name)
            continue
        gone = [keys for name, keys in dropped if name == spec.name]
        gone += [part.keys for part in update.versioned if part.table == spec.name]
        keys = here.table(spec.name).scan(beyond)
        rows += len(np.setdiff1d(keys, np.concatenate(gone))) if gone else len(keys)
    return rows, tuple(published)
