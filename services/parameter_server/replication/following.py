"""What this server asks of one other whose shards it follows: steps by long polls, whole shards page by page.

Requests out, answers in; no socket. At most one page of a copy is on its way. A new poll may be sent while one
waits: it carries how far those behind this server are, and the other answers the older one at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from services.parameter_server import messages as wire
from services.parameter_server.replication.replica import Replica, Shards
from services.parameter_server.replication.streams import common, contains
from services.parameter_server.types import ParameterError
from services.rpc.calls import Outgoing
from services.rpc.codec import Array, Reply
from sync.errors import OutOfOrder, RecordDamaged, SyncError
from sync.records import Delta, Graves, Head, Rows
from sync.replica import PageCursor
from sync.shard import Shard
from sync.snapshot import records
from sync.wire import from_parts

POLL_MS: Final = 500
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Copy:
    """A shard that is being copied: into what, and where to go on (no ``into``: the head comes first)."""

    shard: int
    model: str
    stream: int = 0
    into: Shard | None = None
    cursor: PageCursor | None = None


@dataclass(slots=True)
class FollowingCounts:
    """Totals since the start, over all servers that were followed."""

    copied_rows_total: int = 0
    discarded_steps_total: int = 0


@dataclass(slots=True)
class Following:
    """The steps and copies that ``name``, as the process of ``incarnation``, gets from ``server``."""

    name: str
    incarnation: int
    server: str
    shards: Shards
    new_stream_id: Iterator[int]
    counts: FollowingCounts
    _copy: _Copy | None = None
    _turn: int = 0
    """Which copy comes next where one was refused."""
    _asked: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)

    def poll(self, replicas: Sequence[Replica], epoch: int, *, waiting: bool) -> Outgoing | None:
        """The next poll for steps of ``replicas``, all of which follow the server under the map of ``epoch``; None
        while one waits there and has nothing new to tell."""
        ready = [replica for replica in replicas if not replica.to_copy]
        state = {r.shard: (r.session, r.origin, r.holds(), epoch) for r in ready}
        if not ready or (waiting and state == self._asked):
            return None
        self._asked = state
        asked = [
            wire.TailShard(
                replica.shard,
                replica.session,
                replica.origin,
                replica.holds() if replica.consistent else -1,
                {} if replica.session else self._positions(replica.shard),
                list(replica.unsettled),
                replica.copied_from,
            )
            for replica in ready
        ]
        return Outgoing(
            "tail", wire.pack(wire.TailRequest(self.name, asked, POLL_MS, self.incarnation, epoch))
        )

    def page(self, replicas: Sequence[Replica]) -> Outgoing | None:
        """The next piece of a copy to ask for, if one is needed and none is on its way."""
        if self._copy is None:
            wanted = [(replica.shard, model) for replica in replicas for model in replica.to_copy]
            if wanted:
                self._copy = _Copy(*wanted[self._turn % len(wanted)])
        copy = self._copy
        if copy is None:
            return None
        return Outgoing("copy", wire.pack(wire.CopyRequest(copy.model, copy.shard, copy.cursor)))

    def expired(self) -> None:
        """The server did not answer: the same is asked again. A copy goes on where it was."""
        self._asked = {}

    def refused(self, replicas: Mapping[int, Replica]) -> None:
        """The server did not send what was to be copied: it begins anew, if it is needed still."""
        if self._copy is not None and (replica := replicas.get(self._copy.shard)) is not None:
            replica.rejoin()
        self._copy, self._asked = None, {}
        self._turn += 1

    def tailed(self, reply: Reply, replicas: Mapping[int, Replica]) -> None:
        """Take over the steps of a poll's answer. Raises what makes no sense (msgspec's errors, SyncError)."""
        found = wire.unpack(reply.body, wire.TailReply)
        arrays = iter(reply.arrays)
        for tailed in found.shards:
            steps = _steps(tailed, arrays)
            replica = replicas.get(tailed.shard)
            if replica is not None and replica.upstream == self.server:
                self._take(replica, tailed, steps)

    def _take(self, replica: Replica, tailed: wire.TailedShard, steps: list[tuple[str, Delta]]) -> None:
        if not tailed.stream:
            replica.rejoin()
            return
        if tailed.unknown:
            self._discard(replica, tailed)
            return
        if tailed.copy:
            _log.info("shard %d: copying %s from %s", replica.shard, ", ".join(tailed.copy), self.server)
            replica.session, replica.to_copy = 0, list(tailed.copy)
            return
        if tailed.stream != replica.session:
            replica.join(tailed.stream, tailed.number, tailed.newest)
        for number, (model, delta) in enumerate(steps, tailed.number + 1):
            if number <= replica.origin:
                continue
            if number > replica.origin + 1 or not self._apply(replica, model, delta, number):
                replica.session = 0
                return

    def _discard(self, replica: Replica, tailed: wire.TailedShard) -> None:
        """Begin models anew that the server has no step of."""
        for model, before in self.shards.of(replica.shard).items():
            if model in tailed.unknown and before.position:
                copy = _Copy(replica.shard, model, tailed.stream)
                self._adopt(replica, copy, self.shards.blank(before.head()), 0)

    def _apply(self, replica: Replica, model: str, delta: Delta, number: int) -> bool:
        """Let a shard take a step. False: it is of no use here, and the shard has to be joined anew."""
        shard = self.shards.of(replica.shard).get(model)
        if shard is None:
            replica.to_copy = [model]
            return False
        if delta.position <= shard.position:
            if not contains(shard.history, shard.position, delta.epoch, delta.position):
                replica.to_copy = [model]
                return False
            replica.reached(number)
            return True
        try:
            shard.apply(delta)
        except SyncError as error:
            _log.warning("shard %d of %s cannot follow %s: %s", replica.shard, model, self.server, error)
            # But for a step out of order, nobody knows what of it was written.
            replica.mixed = replica.mixed or not isinstance(error, OutOfOrder)
            replica.to_copy = [model]
            return False
        self.shards.took(shard, delta)
        replica.took(model, delta, number)
        if model in replica.unsettled and shard.position >= replica.unsettled[model]:
            del replica.unsettled[model]
            self.shards.settled(shard)
        replica.reached(number)
        return True

    def paged(self, reply: Reply, replicas: Mapping[int, Replica]) -> None:
        """Take over a piece of a copy. Raises what makes no sense (msgspec's errors, SyncError)."""
        copy = self._copy
        replica = None if copy is None else replicas.get(copy.shard)
        stands = replica is not None and replica.upstream == self.server
        if copy is None or replica is None or not stands or copy.model not in replica.to_copy:
            self._copy = None
            return
        found = wire.unpack(reply.body, wire.CopyReply)
        if copy.into is None:
            copy.stream = found.stream
        elif found.stream != copy.stream:
            raise RecordDamaged(f"{self.server} replaced the shard in the middle of a copy")
        record = from_parts(found.header, reply.arrays)
        match record:
            case Head() if copy.into is None:
                copy.into = self.shards.blank(record)
                copy.into.begin(record)
            case Rows() if copy.into is not None:
                copy.into.put(record)
                self.counts.copied_rows_total += len(record.keys)
            case Graves() if copy.into is not None:
                copy.into.bury(record)
            case _:
                raise RecordDamaged(f"{self.server} sent a {type(record).__name__} in the middle of a copy")
        copy.cursor = found.cursor
        if found.cursor is None:
            self._copy = None
            self._adopt(replica, copy, copy.into, found.position)

    def _adopt(self, replica: Replica, source: _Copy, copy: Shard, position: int) -> None:
        model = source.model
        before = self.shards.of(replica.shard).get(model)
        # What was copied and did not become whole is no line of steps of its own.
        if before is not None and model not in replica.unsettled:
            self._report_discarded(before, copy)
        self.shards.adopt(copy)
        alone = len(self.shards.of(replica.shard)) == 1
        replica.adopted(model, source.stream, next(self.new_stream_id), alone=alone)
        if copy.position >= position:
            self.shards.settled(copy)
        else:
            replica.unsettled[model] = position

    def _report_discarded(self, before: Shard, copy: Shard) -> None:
        """Steps that were taken here and never reached the present leader: its version is the one that counts."""
        agreed = common((before.history, before.position), (copy.history, copy.position))
        discarded = before.position - agreed
        if discarded <= 0:
            return
        self.counts.discarded_steps_total += discarded
        behind = [
            f"{source.log}/{source.partition} from {progress.applied} to {copy.applied(source)}"
            for source, progress in before.pushes.progress().items()
            if progress.applied > copy.applied(source)
        ]
        _log.error(
            "shard %d of %s: %d steps from %d on, taken here under epoch %d, were never replicated and are "
            "discarded; their pushes are lost unless their trainers send them again (back: %s)",
            before.shard_id, before.model, discarded, agreed + 1, _epoch(before), "; ".join(behind) or "none any more",
        )  # fmt: skip

    def _positions(self, shard: int) -> dict[str, tuple[int, int]]:
        return {model: (_epoch(one), one.position) for model, one in self.shards.of(shard).items()}


def _epoch(shard: Shard) -> int:
    """Under which epoch the newest step was taken."""
    return shard.history[-1][0] if shard.history else 0


def _steps(tailed: wire.TailedShard, arrays: Iterator[Array]) -> list[tuple[str, Delta]]:
    """The steps of one shard, each with its model. Raises RecordDamaged."""
    if not tailed.models:
        return []
    block = next(arrays, None)
    if block is None or block.dtype != np.uint8 or block.ndim != 1:
        raise RecordDamaged("steps were announced and did not come")
    found = [record for record, _ in records(block.view(np.uint8).data)]
    deltas = [record for record in found if isinstance(record, Delta)]
    if len(deltas) != len(found) or len(deltas) != len(tailed.models):
        raise RecordDamaged(f"{len(tailed.models)} steps were announced, {len(deltas)} of {len(found)} came")
    return list(zip(tailed.models, deltas, strict=True))


Foreign = (ParameterError, SyncError)
"""What an answer that makes no sense raises, beside msgspec's own errors."""
