"""Marked updates: numbered pushes to a tiny model of their own, ``probes``, which measure parameters alone.

The number of a push is the writer's clock in microseconds, or one more than the last where that is larger. So
no number comes twice, not even after servers lost everything, and a region that has heard of a lost one cannot
take a new one for it. Two writers that happen to draw the same slot are told ``gap`` or ``duplicate``, and
number again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from models.samples import Watermark
from services.freshness.stamps import Marked, Stamp
from services.parameter_server.types import ParameterError, PushReply
from sync.pushes import Source
from sync.spec import Initialiser, Optimiser, Segment, TableSpec

if TYPE_CHECKING:
    from services.parameter_server.client import ParameterClient

MODEL: Final = "probes"
TABLE: Final = "marks"
LOG: Final = "probes"
SLOTS: Final = 64
"""Sources that writers share: servers remember each source for ever, so there must not be more and more."""
NO_SCHEMA: Final = "none"
"""The keys are numbers, which no schema encodes."""
DIM: Final = 4
ROWS: Final = 64
"""Enough for each shard to have some."""
TRIES: Final = 8

SPECS: Final = (
    TableSpec(TABLE, DIM, Initialiser((Segment(0, 0.0),)), Optimiser("sgd", rate=1.0), guard=0.0),
)


@dataclass(frozen=True, slots=True)
class Update:
    """A marked update that every shard's leader has: its position in ``LOG``, when it was sent, when the last
    leader had acknowledged it (Unix ms, the writer's clock)."""

    slot: int
    number: int
    sent_at_ms: float
    applied_at_ms: float


class UpdateWriter:
    """Pushes marked updates, one at a time. One thread."""

    def __init__(self, client: ParameterClient, slot: int, now_ns: Callable[[], int] = time.time_ns) -> None:
        """``slot`` in [0, SLOTS): drawn at random, it is seldom another's."""
        self._client, self._now_ns = client, now_ns
        self._source = Source(LOG, slot)
        self._before: dict[int, int] = {}
        self._last = 0
        self._sign = np.float32(1.0)
        self._keys = np.arange(ROWS, dtype=np.uint64)

    def open(self) -> None:
        """Make the model known, and look how far the slot is. Raises ParameterError."""
        self._client.declare(MODEL, SPECS, NO_SCHEMA)
        self._look()

    def push(self) -> Update:
        """Push one update to all shards. Raises ParameterError where they are away, or refuse it."""
        sent_ns = self._now_ns()
        for _ in range(TRIES):
            self._last = max(self._now_ns() // 1_000, self._last + 1)
            replies = self._try(sent_ns)
            if all(reply.status == "applied" for reply in replies.values()):
                self._before = dict.fromkeys(replies, self._last)
                return Update(self._source.partition, self._last, sent_ns / 1e6, self._now_ns() / 1e6)
            if refused := [reply for reply in replies.values() if reply.status == "refused"]:
                raise ParameterError(f"a marked update was refused: {refused[0].reason}")
            self._look()
        raise ParameterError(f"slot {self._source.partition} of the marked updates is another writer's")

    def _try(self, sent_ns: int) -> dict[int, PushReply]:
        # Up and down again, so that the rows change each time and stay small for ever.
        self._sign = -self._sign
        gradient = np.full((ROWS, DIM), self._sign, np.float32)
        at_ms = sent_ns // 1_000_000
        mark = Watermark(LOG, self._source.partition, self._last, at_ms)
        parts = {TABLE: (self._keys, gradient)}
        return self._client.push(MODEL, self._source, self._last, self._before, at_ms, mark, parts)

    def _look(self) -> None:
        applied = self._client.applied(MODEL, self._source)
        self._before = {shard: of.applied for shard, of in applied.items()}
        self._last = max(self._last, *self._before.values())


def update_id(update: Update) -> str:
    """The id of a marked update: its position."""
    return f"update-{update.slot}-{update.number}"


def update_stamp(update: Update) -> Stamp:
    """What the writer of ``update`` says of it, also to the other regions."""
    marked = Marked(update_id(update), update.number, update.sent_at_ms)
    return Stamp("applied", "update", LOG, update.slot, update.number, update.applied_at_ms, [marked])
