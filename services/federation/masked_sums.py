"""Sums of masked vectors: words modulo 2**bits, which mean nothing until the masks of the whole sum come off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from federated.rounds import Desk, RecordRefused, Slot, Store, Task
from federated.secagg.quantise import ValuesRefused
from federated.secagg.ring import Words
from federated.sums import Sum
from services.federation.hosted import HostedJob
from services.federation.secure import MasksStay, SecureRounds

_COUNT_BYTES: Final = 8  # before a partial sum: the bytes of the bodies in it
_RENEWED: Final = 64  # vectors between two looks at the lease


class MaskedSums:
    """Of one job, for the worker that sums."""

    def __init__(self, store: Store, job: HostedJob, desk: Desk, secure: SecureRounds) -> None:
        self._store, self._job, self._desk, self._secure = store, job, desk, secure
        self._plan = secure.masked.plan

    def group(self, task: Task, hold: Callable[[], None]) -> bytes:
        """The partial sum of a group's masked vectors. ``hold`` is called now and then, and raises when going on is of
        no use. Raises RecordRefused and RingRefused."""
        ring, received = self._plan.ring, 0
        total = ring.zeros(self._plan.length)
        for place, slot in enumerate(self._desk.slots(task)):
            body = self._body(slot)
            ring.add_into(total, ring.unpack(body, self._plan.length))
            received += len(body)
            if place % _RENEWED == _RENEWED - 1:
                hold()
        return received.to_bytes(_COUNT_BYTES, "little") + ring.pack(total)

    def total(self, task: Task, hold: Callable[[], None]) -> tuple[Sum, int]:
        """The sum of an iteration without its masks, and the bytes of the bodies in it; ``hold`` as for a group. Raises
        MasksStay, RecordRefused and RingRefused."""
        ring, received = self._plan.ring, 0
        words: Words = ring.zeros(self._plan.length)
        for number, attempt in task.partials:
            body = self._store.get_blob(self._job.keys.partial(task.iteration, number, attempt))
            if body is None:
                raise RecordRefused(f"partial sum {number} of iteration {task.iteration} is missing")
            received += int.from_bytes(body[:_COUNT_BYTES], "little")
            ring.add_into(words, ring.unpack(body[_COUNT_BYTES:], self._plan.length))
        clients = self._desk.header().uploads
        self._secure.reveal(task.iteration, words, hold)
        try:
            return self._secure.masked.to_sum(ring.signed(words), clients, task.iteration), received
        except ValuesRefused as error:
            raise MasksStay(f"spoilt sum: {error}") from error

    def _body(self, slot: Slot) -> bytes:
        body = self._store.get_blob(self._job.keys.body(slot.started, slot.client, slot.digest))
        if body is None:
            raise RecordRefused(f"the body of slot {slot.index} in iteration {slot.iteration} is missing")
        return body
