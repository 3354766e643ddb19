"""The puller's end: one address of another region, asked for all shards; it sends those that it leads.

Whatever comes is taken over a batch at a time, between the calls that this server answers. Used by its loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from services.parameter_server.declarations import Declaration, decode_declaration
from services.parameter_server.messages import pack
from services.parameter_server.storage.snapshots import SnapshotError
from services.parameter_server.syncing.messages import (
    LARGEST_BYTES,
    REST,
    Received,
    RestRequest,
    SyncRequest,
    lengths_of,
    received,
    request_of,
)
from services.parameter_server.syncing.source import Clock
from services.parameter_server.types import ModelMismatch, ParameterError
from services.rpc.calls import Outgoing
from services.rpc.codec import Failure, Reply
from services.rpc.errors import RpcError
from sync.errors import RecordDamaged, SyncError
from sync.exchange import Batch, Pull, Puller, ShardName
from sync.exchange.puller import GRACE_S, LONGEST_PATIENCE_S, LONGEST_SENDING_S
from sync.replica import Replica

_log = logging.getLogger(__name__)

FIRST_PART_BYTES: Final = 64 * 2**10
PART_BYTES: Final = 256 * 2**10
"""Of a batch that is too large to come at once, asked for at a time: at most."""
PARTS_OPEN: Final = 8
PARTS_S: Final = 0.4
"""All that are open take about so long, since answers to pulls wait behind them."""

OnAnswer = Callable[[Reply | Failure | None], None]
"""None: there was no answer in time."""


class Connection(Protocol):
    """What asks without waiting (``services.rpc.link.Link`` provides it)."""

    def ask(self, outgoing: Outgoing, timeout_s: float) -> int: ...

    def receive(self) -> list[tuple[int, Reply | Failure]]: ...

    def expired(self) -> list[int]: ...


class Links(Protocol):
    """Makes and ends connections (``main._Links`` does)."""

    def connect(self, address: str) -> Connection: ...

    def disconnect(self, connection: Connection) -> None: ...


class Models(Protocol):
    """What a puller has to know of this server's models."""

    def digests(self) -> dict[str, str]:
        """By model, the digest of its declaration."""
        ...

    def learn(self, declaration: Declaration) -> None:
        """Another region declares it so. Raises ModelMismatch, ParametersRefused."""
        ...


@dataclass(slots=True)
class UpstreamCounts:
    """``damaged_total``: batches that were not well formed; ``expired_total``: pulls without an answer in time;
    ``connections_total``: connections begun."""

    damaged_total: int = 0
    expired_total: int = 0
    connections_total: int = 0
    last_fault: str = ""


@dataclass(slots=True)
class _Parts:
    """A batch that comes part by part, since ``began_s``. ``asked``, ``got``: bytes so far."""

    number: int
    reply: Reply
    lengths: list[int]
    data: npt.NDArray[np.uint8]
    began_s: float
    asked: int = 0
    got: int = 0
    open: int = 0

    def part_bytes(self, now_s: float) -> int:
        """How much to ask for next, as fast as it came so far."""
        if not self.got:
            return FIRST_PART_BYTES
        rate = self.got / max(now_s - self.began_s, 0.001)
        return min(max(int(rate * PARTS_S / PARTS_OPEN), FIRST_PART_BYTES // 4), PART_BYTES)

    def whole(self) -> Reply:
        """The answer as if it had come at once."""
        ends = np.cumsum(np.asarray(self.lengths, np.int64))
        return Reply(self.reply.id, self.reply.body, tuple(np.split(self.data, ends[:-1])))


class Upstream:
    """``template``: what all its pulls have in common."""

    def __init__(
        self,
        address: str,
        links: Links,
        make_puller: Callable[[Callable[[], Mapping[ShardName, Replica]]], Puller],
        shards: Callable[[], Mapping[ShardName, Replica]],
        template: SyncRequest,
        models: Models,
        clock: Clock,
    ) -> None:
        self.address = address
        self.region = ""
        """The source's, once it answered."""
        self.written: frozenset[int] = frozenset()
        """The shards that the source's region writes, as it says in this stream."""
        self.counts = UpstreamCounts()
        self.unlike: set[str] = set()
        """Models that the other region declares otherwise; they are not followed."""
        self.puller = make_puller(self._shards)
        self._all_shards, self._links, self._template = shards, links, template
        self._models, self._clock = models, clock
        self._link = links.connect(address)
        self._calls: dict[int, OnAnswer] = {}
        self._backlog: deque[Received] = deque()
        self._fetching = 0
        """Bytes of batches that come part by part."""
        self._stream = 0

    def _shards(self) -> Mapping[ShardName, Replica]:
        found = self._all_shards()
        if not self.unlike:
            return found
        return {name: replica for name, replica in found.items() if name[0] not in self.unlike}

    @property
    def waiting(self) -> int:
        """Batches that came and were not taken over yet."""
        return len(self._backlog)

    def serves(self, name: ShardName) -> bool:
        """Whether the source leads the shard there, as far as is known."""
        standing = self.puller.standings.get(name)
        return standing is not None and standing.served

    def ask(self, outgoing: Outgoing, timeout_s: float, on_answer: OnAnswer) -> None:
        """Ask the source something else over the same connection. Raises RpcError; then nothing was sent."""
        self._calls[self._link.ask(outgoing, timeout_s)] = on_answer

    def receive(self) -> None:
        """Take in what arrived, and see what did not."""
        for call, answer in self._link.receive():
            on_answer = self._calls.pop(call, None)
            if on_answer is not None:
                on_answer(answer)
        for call in self._link.expired():
            on_answer = self._calls.pop(call, None)
            if on_answer is not None:
                on_answer(None)

    def merge_next(self) -> bool:
        """Take over the next batch. Whether there was one."""
        if not self._backlog:
            return False
        found = self._backlog.popleft()
        now = self._clock.monotonic()
        batch = self._learn(found)
        try:
            taken = self.puller.take(batch, found.nbytes, now, self._clock.physical_us())
        except SyncError as error:
            # The puller lets single shards rest that cannot be taken; this is a source that makes no sense at all.
            self.counts.damaged_total += 1
            self._fail(f"a batch cannot be taken: {error}")
            return True
        if taken.fault:
            self._begin_anew(taken.fault)
        return True

    def _learn(self, found: Received) -> Batch:
        """Take over the models that came along; the batch without those that this region declares otherwise."""
        self.region = found.region
        if found.written is not None:
            self.written = found.written
        for data in found.declarations:
            try:
                declaration = decode_declaration(data)
            except ParameterError as error:
                self._note(f"a model of region {found.region} cannot be declared here: {error}")
                continue
            try:
                self._models.learn(declaration)
                self.unlike.discard(declaration.model)
            except (ParameterError, SnapshotError, OSError) as error:
                self.unlike.add(declaration.model)
                what = "declares it otherwise" if isinstance(error, ModelMismatch) else "has it, this cannot"
                self._note(
                    f"model {declaration.model} is not followed: region {found.region} {what}: {error}"
                )
        if not self.unlike:
            return found.batch
        pieces = tuple(piece for piece in found.batch.pieces if piece.shard[0] not in self.unlike)
        return replace(found.batch, pieces=pieces)

    def pull(self) -> None:
        """Send the pulls that are due."""
        now = self._clock.monotonic()
        while (pull := self.puller.ask(now)) is not None:
            template = self._template
            if pull.number == 1:
                self._stream = pull.stream
                template = msgspec.structs.replace(template, models=self._models.digests())
            try:
                self.ask(
                    request_of(pull, template, self._clock.physical_us()),
                    self.puller.patience_s(pull),
                    partial(self._answered, pull),
                )
            except RpcError as error:
                self._fail(str(error), reconnect=True)

    def _answered(self, pull: Pull, answer: Reply | Failure | None) -> None:
        if pull.stream != self._stream:
            return
        if answer is None:
            # A connection that lost something is slow to notice that all is well again; a new one is not.
            self.counts.expired_total += 1
            fault = self.puller.overdue(self._clock.monotonic()).fault
            self._begin_anew(fault, reconnect=True)
        elif isinstance(answer, Failure):
            self._fail(f"{answer.code}: {answer.message}")
        else:
            self._well_formed(lambda: self._take_in(pull.number, answer))

    def _well_formed(self, take: Callable[[], None]) -> None:
        try:
            take()
        except (RecordDamaged, msgspec.DecodeError) as error:
            self.counts.damaged_total += 1
            self._fail(f"a batch is not well formed: {error}")

    def _take_in(self, number: int, answer: Reply) -> None:
        lengths = lengths_of(answer)
        if not lengths:
            self._backlog.append(received(answer))
            return
        self._fetching += sum(lengths)
        if self._fetching > LARGEST_BYTES:
            raise RecordDamaged(f"batches of {self._fetching} bytes come at once")
        data = np.empty(sum(lengths), np.uint8)
        self._fetch(_Parts(number, answer, lengths, data, self._clock.monotonic()))

    def _fetch(self, parts: _Parts) -> None:
        """Ask for the next parts of a large batch; several are on their way."""
        while parts.open < PARTS_OPEN and parts.asked < len(parts.data):
            size = parts.part_bytes(self._clock.monotonic())
            start, size = parts.asked, min(size, len(parts.data) - parts.asked)
            request = RestRequest(self._template.puller, self._stream, parts.number, start, size)
            parts.asked += size
            parts.open += 1
            rate = self.puller.pace.rate
            sending_s = 2.0 * PARTS_OPEN * PART_BYTES / rate if rate else 0.0
            timeout_s = GRACE_S + LONGEST_PATIENCE_S + min(sending_s, LONGEST_SENDING_S)
            came = partial(self._part_answered, parts, self._stream, start, size)
            try:
                self.ask(Outgoing(REST, pack(request)), timeout_s, came)
            except RpcError as error:
                self._fail(str(error), reconnect=True)
                return

    def _part_answered(
        self, parts: _Parts, stream: int, start: int, size: int, answer: Reply | Failure | None
    ) -> None:
        if stream == self._stream:
            self._well_formed(lambda: self._part_came(parts, start, size, answer))

    def _part_came(self, parts: _Parts, start: int, size: int, answer: Reply | Failure | None) -> None:
        if not isinstance(answer, Reply):
            why = "it does not answer" if answer is None else answer.message
            self._fail(f"a large batch broke off: {why}", reconnect=answer is None)
            return
        (found,) = answer.arrays if len(answer.arrays) == 1 else (np.zeros(0, np.uint8),)
        if found.dtype != np.uint8 or found.shape != (size,):
            raise RecordDamaged(f"{found.dtype} {list(found.shape)} for {size} bytes of a batch")
        parts.data[start : start + size] = found
        parts.got += size
        parts.open -= 1
        if parts.got == len(parts.data):
            self._fetching -= len(parts.data)
            self._backlog.append(received(parts.whole()))
        else:
            self._fetch(parts)

    def _fail(self, why: str, *, reconnect: bool = False) -> None:
        self.puller.failed(self._clock.monotonic(), why)
        self._begin_anew(why, reconnect=reconnect)

    def _begin_anew(self, why: str, *, reconnect: bool = False) -> None:
        """The stream is over: what is on its way belongs to it."""
        self._note(f"pulling from {self.address} begins anew: {why}")
        self._stream, self._fetching = 0, 0
        # Nobody knows what it writes once it is back.
        self.written = frozenset()
        self._backlog.clear()
        if reconnect:
            calls, self._calls = self._calls, {}
            self._links.disconnect(self._link)
            self._link = self._links.connect(self.address)
            self.counts.connections_total += 1
            for on_answer in calls.values():
                on_answer(None)

    def _note(self, what: str) -> None:
        if what != self.counts.last_fault:
            _log.warning("%s", what)
        self.counts.last_fault = what

    def next_s(self, at_most_s: float) -> float:
        """Seconds until there is something to do although nothing comes in."""
        if self._backlog:
            return 0.0
        due_s = self.puller.due_s() - self._clock.monotonic()
        # What is due and waits for an answer that is on its way needs no look before that.
        return at_most_s if due_s <= 0.0 else min(due_s, at_most_s)

    def close(self) -> None:
        """Close the connection."""
        self._links.disconnect(self._link)
