"""Which trainers step together: one record in coordination, followed by all, rewritten by any of them.

The record says the generation of the group and who is in it, in the order of their names, each with the
incarnation of its process, so that a restarted trainer makes a new generation. Whoever sees that the members
differ from the record takes a short lease, and writes the next generation by compare-and-swap.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from types import TracebackType
from typing import Final

import msgspec

from services.coordination.contract import Conflict, Coordination, CoordinationError
from services.coordination.membership import Member, members
from services.parameter_server.client.steps import Seat
from services.workers import now_ms

KEY: Final = "trainers/group"
LEADER: Final = "trainers/leader"
LEAD_S: Final = 1.0
"""The lease of whoever writes the record: one write long."""
LOOK_S: Final = 0.2

log = logging.getLogger(__name__)


class GroupRecord(msgspec.Struct, frozen=True):
    """``names`` in order, which gives the ranks, with the ``incarnations`` of their processes."""

    generation: int
    names: tuple[str, ...]
    incarnations: tuple[int, ...]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(GroupRecord)


def next_record(now: GroupRecord | None, present: Sequence[Member], clock_ms: int) -> GroupRecord | None:
    """The record that should follow ``now``, None where it is right as it is.

    Generations grow with the clock, so that they also grow where coordination is begun anew while parameter
    servers, which remember the last one, go on.
    """
    ready = sorted((member for member in present if member.ready), key=lambda member: member.name)
    names, incarnations = tuple(m.name for m in ready), tuple(m.incarnation for m in ready)
    if now is not None and (now.names, now.incarnations) == (names, incarnations):
        return None
    return GroupRecord(max(0 if now is None else now.generation + 1, clock_ms, 1), names, incarnations)


def seat_in(record: GroupRecord | None, member: Member, ratio: Decimal) -> Seat | None:
    """The place of ``member``, None while the group does not have it."""
    if record is None:
        return None
    for rank, (name, incarnation) in enumerate(zip(record.names, record.incarnations, strict=True)):
        if (name, incarnation) == (member.name, member.incarnation):
            return Seat(record.generation, len(record.names), rank, ratio)
    return None


class GroupFollower:
    """Keeps up with the group in a background thread, and with what it has to become."""

    def __init__(
        self,
        store: Coordination,
        member: Callable[[], Member],
        ratio: Decimal = Decimal(1),
        *,
        clock_ms: Callable[[], int] = now_ms,
        look_s: float = LOOK_S,
    ) -> None:
        """``member`` gives this trainer's own entry; it must be registered, and ready."""
        self._store, self._member, self._ratio = store, member, ratio
        self._clock_ms, self._look_s = clock_ms, look_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._record: GroupRecord | None = None
        self._look()
        self._thread = threading.Thread(target=self._follow, name="group", daemon=True)
        self._thread.start()

    def seat(self) -> Seat | None:
        """This trainer's place in the newest group that is known."""
        return seat_in(self._record, self._member(), self._ratio)

    def renew(self, seat: Seat) -> None:
        """Begin a new generation of the same members, unless ``seat``'s is over already: all then load what
        they hold of the parameters anew."""
        with self._lock:
            self._attempt(lambda record: None if record is None else self._after(record, seat))

    def _after(self, record: GroupRecord, seat: Seat) -> GroupRecord | None:
        if record.generation != seat.generation:
            return None
        generation = max(record.generation + 1, self._clock_ms())
        return msgspec.structs.replace(record, generation=generation)

    def _look(self) -> None:
        with self._lock:
            present = members(self._store, self._member().service)
            self._attempt(lambda record: next_record(record, present, self._clock_ms()))

    def _attempt(self, wanted: Callable[[GroupRecord | None], GroupRecord | None]) -> None:
        """Read the record, and write the one that should follow it, if any."""
        entry = self._store.get(KEY)
        record = None if entry is None else _decoder.decode(entry.value)
        following = wanted(record)
        if following is not None:
            lease = self._store.lease(LEAD_S)
            try:
                if self._store.acquire(LEADER, self._member().name, lease) is not None:
                    revision = 0 if entry is None else entry.revision
                    self._store.put(KEY, _encoder.encode(following), expect_revision=revision)
                    record = following
                    log.info("group %d of trainers: %s", record.generation, ", ".join(record.names))
            except Conflict:
                log.debug("another trainer wrote the group first")
            finally:
                lease.revoke()
        self._record = record

    def _follow(self) -> None:
        while not self._closing.wait(self._look_s):
            try:
                self._look()
            except (CoordinationError, msgspec.DecodeError) as error:
                log.warning("the group of trainers cannot be followed now: %s", error)

    def close(self) -> None:
        """Stop following."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> GroupFollower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
