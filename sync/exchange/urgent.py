"""Rows that overtake: which urgent changes of a shard are still to be sent, and which were sent out of turn. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from sync.replica import Replica
from sync.table import Table

Sequences = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
_NONE: Final = np.zeros(0, np.int64)
_NOWHERE: Final = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Sent:
    """Of one table: up to which change ``looked`` at, and the numbers of ``changes``, ascending, that were sent though
    no exchange that was completed contains them, with their ``slots``."""

    looked: int = 0
    changes: Sequences = field(default_factory=lambda: _NONE)
    slots: Slots = field(default_factory=lambda: _NOWHERE)

    def has(self, sequences: Sequences) -> npt.NDArray[np.bool_]:
        """Which of ``sequences`` [N] were sent."""
        if not len(self.changes):
            return np.zeros(len(sequences), np.bool_)
        places = np.minimum(np.searchsorted(self.changes, sequences), len(self.changes) - 1)
        found: npt.NDArray[np.bool_] = self.changes[places] == sequences
        return found

    def reach(self, slots: Slots) -> Sequences:
        """The newest change that was sent of each of ``slots`` [N], 0 where none was."""
        if not len(self.slots):
            return np.zeros(len(slots), np.int64)
        # The first of those that are the newest first.
        known, places = np.unique(self.slots[::-1], return_index=True)
        newest = self.changes[::-1][places]
        at = np.minimum(np.searchsorted(known, slots), len(known) - 1)
        return np.where(known[at] == slots, newest[at], 0)

    def add(self, sequences: Sequences, slots: Slots) -> None:
        sequences, places = np.unique(np.concatenate([self.changes, sequences]), return_index=True)
        self.changes, self.slots = sequences, np.concatenate([self.slots, slots])[places]

    def forget(self, before: int) -> None:
        first = np.searchsorted(self.changes, before, side="right")
        self.changes, self.slots = self.changes[first:], self.slots[first:]


class Overtaking:
    """What has overtaken in one shard of one stream. ``share``: of recent updates, how many are urgent."""

    __slots__ = ("_sent", "_share")

    def __init__(self, share: float) -> None:
        self._share = share
        self._sent: dict[str, _Sent] = {}

    def waiting(self, shard: Replica, since: int) -> Iterator[tuple[Table, Sequences, Slots]]:
        """By table, where the urgent changes after number ``since`` are that were not sent yet, each place once, as
        ``Table.changed_after`` tells it, and the number of the first of each, ascending. A change is urgent until it
        was sent, also where one that is not has followed it."""
        for spec in shard.specs:
            if spec.placement != "hashed":
                continue
            table, sent = shard.table(spec.name), self._sent.setdefault(spec.name, _Sent())
            sent.looked = max(sent.looked, since)
            if sent.looked >= shard.token.counter:
                continue
            sequences, slots = table.urgent(sent.looked, table.ring.quantile(self._share))
            fresh = sequences > sent.reach(slots)
            if fresh.any():
                sequences, slots = sequences[fresh], slots[fresh]
                firsts = np.sort(np.unique(slots, return_index=True)[1])
                yield table, sequences[firsts], slots[firsts]
            else:
                sent.looked = shard.token.counter

    def overtook(self, table: Table, slots: Slots, up_to: int) -> None:
        """What is in ``slots`` [N] is sent out of turn; up to number ``up_to`` those are all urgent changes."""
        sent = self._sent[table.spec.name]
        sent.add(table.written_at(slots), slots)
        sent.looked = max(sent.looked, up_to)
        # What fell out of the ring is not urgent any more; it may be sent twice.
        sent.forget(max(table.ring.floor, table.graves.ring.floor))

    def unsent(self, table: Table, slots: Slots, begun: int, *, last: bool) -> Slots:
        """Those of ``slots`` [N] that did not overtake; they are sent now, in turn, in an exchange that begun at change
        ``begun``. ``last``: with nothing behind."""
        sent = self._sent.setdefault(table.spec.name, _Sent())
        sequences = table.written_at(slots)
        left = ~sent.has(sequences)
        # What is not urgent any more, and what the next exchange would send again as it is now.
        floor = begun if last else min(begun, sent.looked)
        kept = left & (sequences > floor)
        sent.add(sequences[kept], slots[kept])
        return slots[left]

    def forget(self, up_to: int) -> None:
        """Changes up to number ``up_to`` are known to the puller now."""
        for sent in self._sent.values():
            sent.forget(up_to)
