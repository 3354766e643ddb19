"""A job's desk: requests in, one transaction on the store, replies out. Every driver stands on it.

A server hands over all requests that wait, and they share one transaction (group commit). Any number of desks, in any
processes, may work on one store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from federated.rounds import aggregation
from federated.rounds.aggregation import Task, Work
from federated.rounds.keys import Keys
from federated.rounds.machine import Decision, Rounds, valid_id
from federated.rounds.messages import Refused, Reply, Request, StartRequest, UploadRequest
from federated.rounds.phases import Phase
from federated.rounds.records import Closed, Entry, Header, RecordRefused, Slot
from federated.rounds.store import Store, StoreUnavailable, read

R = TypeVar("R")

MOST_REQUESTS = 1024  # of one transaction
_MOST_MOVES = 64
_SWEPT_AGAIN = 1  # iterations before the one that is due: whoever closed them may have died before it swept


class JobUnknown(LookupError):
    """The store holds no such job."""


@dataclass(frozen=True, slots=True)
class _Moved:
    iteration: int


@dataclass(slots=True)
class Batch:
    """One transaction's requests, folded over the records that were read. Pure: same records, same outcome.

    ``entries`` by (iteration, client); ``closed`` and ``slots`` collect what is to be written.
    """

    rounds: Rounds
    header: Header
    entries: dict[tuple[int, str], Entry | None]
    changed: dict[tuple[int, str], Entry] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)

    def serve(self, request: Request, now: float, draw: float) -> Reply:
        """One request's reply."""
        if isinstance(request, StartRequest):
            # A window may have run out since: then the entry read is not this iteration's, and start() sees that.
            iteration = self.header.iteration
            entry = self.entries.get((iteration, request.client))
            recent = sum(
                self.entries.get((iteration - back, request.client)) is not None
                for back in range(1, self.rounds.selection.window + 1)
            )
            decision = self.rounds.start(self.header, entry, request, now, draw, recent)
        elif isinstance(request, UploadRequest):
            entry = self.entries.get((request.iteration, request.client))
            decision = self.rounds.upload(self.header, entry, request, now, draw)
        else:
            entry = self.entries.get((request.iteration, request.client))
            decision = self.rounds.poll(self.header, entry, request, now, draw)
        self._take(decision, entry, request.client)
        assert decision.reply is not None
        return decision.reply

    def _take(self, decision: Decision, before: Entry | None, client: str) -> None:
        self.header = decision.header
        self.closed += decision.closed
        if decision.slot is not None:
            self.slots.append(decision.slot)
        if decision.entry is not None and decision.entry != before:
            place = (decision.entry.iteration, client)
            self.entries[place] = self.changed[place] = decision.entry


class Desk:
    """The rounds of one job on a store."""

    def __init__(self, store: Store, rounds: Rounds) -> None:
        self.store = store
        self.rounds = rounds
        self.keys = Keys(rounds.tickets.job)
        self._iteration = 1  # as last seen: which records to read

    def create(self) -> bool:
        """Begin the job; False when it is there already, which stays as it is."""

        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes | None], bool]:
            if values[self.keys.header] is not None:
                return {}, False
            return {self.keys.header: self.rounds.init().to_bytes()}, True

        return self.store.transact([self.keys.header], step)

    def header(self) -> Header:
        """The job's state as stored. Raises JobUnknown."""
        return self.store.transact([self.keys.header], lambda values: ({}, self._header(values)))

    def handle(self, requests: Sequence[Request], now: float, draws: Sequence[float]) -> list[Reply]:
        """Serve ``requests`` in order, in one transaction, and give one reply each.

        ``draws`` are as many numbers in [0, 1). Raises JobUnknown, StoreUnavailable, and ValueError for more than
        1,024 requests or another number of draws.
        """
        if len(requests) > MOST_REQUESTS or len(draws) != len(requests):
            raise ValueError(
                f"{len(requests)} requests and {len(draws)} draws: at most {MOST_REQUESTS}, as many draws"
            )
        for _ in range(_MOST_MOVES):
            hint = self._iteration
            places = sorted({place for request in requests for place in self._needed(request, hint)})

            def step(
                values: Mapping[str, bytes | None], hint: int = hint, places: list[tuple[int, str]] = places
            ) -> tuple[Mapping[str, bytes | None], _Moved | tuple[list[Reply], list[Closed]]]:
                header = self._header(values)
                if header.iteration != hint:
                    return {}, _Moved(header.iteration)
                entries = {place: _entry(values[self.keys.entry(*place)]) for place in places}
                batch = Batch(self.rounds, header, entries)
                replies = [
                    batch.serve(request, now, draw) for request, draw in zip(requests, draws, strict=True)
                ]
                return self._writes(header, batch), (replies, batch.closed)

            keys = [self.keys.header, *(self.keys.entry(*place) for place in places)]
            outcome = self.store.transact(keys, step)
            if isinstance(outcome, _Moved):
                self._iteration = outcome.iteration
                continue
            replies, closed = outcome
            self._sweep(closed)
            return replies
        raise StoreUnavailable("iterations end faster than a request can be served")

    def handle_together(
        self, requests: Sequence[UploadRequest], now: float, draw: float
    ) -> Mapping[str, Reply]:
        """Count an edge's sum: see ``Rounds.upload_together``. Gives whose part is wrong; nobody's: all are counted.
        Raises JobUnknown, StoreUnavailable and ValueError."""
        if not 1 <= len(requests) <= MOST_REQUESTS:
            raise ValueError(f"{len(requests)} uploads in one sum: 1 to {MOST_REQUESTS} are possible")
        unreadable = {request.client for request in requests if not valid_id(request.client)}
        if unreadable:
            return {client: Refused("bad_id", "not the id of a client") for client in unreadable}
        keys = [self.keys.entry(request.iteration, request.client) for request in requests]

        def step(
            values: Mapping[str, bytes | None],
        ) -> tuple[Mapping[str, bytes | None], tuple[Mapping[str, Reply], tuple[Closed, ...]]]:
            before = self._header(values)
            entries = [_entry(values[key]) for key in keys]
            found = self.rounds.upload_together(before, entries, requests, now, draw)
            writes = self._moved(before, found.header, found.closed)
            writes |= {key: entry.to_bytes() for key, entry in zip(keys, found.entries, strict=False)}
            writes |= {self.keys.slot(slot.iteration, slot.index): slot.to_bytes() for slot in found.slots}
            return writes, (found.wrong, found.closed)

        wrong, closed = self.store.transact([self.keys.header, *keys], step)
        self._sweep(closed)
        return wrong

    def tick(self, now: float) -> list[Closed]:
        """Apply the windows that have run out. Servers call it at least every second."""
        return self._change(lambda header: self.rounds.tick(header, now) or Decision(header))

    def stop(self, now: float) -> list[Closed]:
        """See ``Rounds.stop``."""
        return self._change(lambda header: self.rounds.stop(header, now))

    def resume(self, now: float) -> list[Closed]:
        """See ``Rounds.resume``."""
        return self._change(lambda header: self.rounds.resume(header, now))

    def void(self, iteration: int, now: float) -> list[Closed]:
        """See ``Rounds.void``."""
        return self._change(lambda header: self.rounds.void(header, iteration, now))

    def claim(self, server: str, now: float, *, merge: bool = True) -> Task | None:
        """A task for ``server``, if there is one: see ``aggregation.claim``."""
        settings = self.rounds.settings

        def step(header: Header, work: Work) -> tuple[Decision, Work, Task | None]:
            decision = self.rounds.tick(header, now) or Decision(header)
            after = decision.header
            if after.iteration != work.iteration or after.phase in (Phase.STOPPED, Phase.FINISHED):
                return decision, work, None
            closed = after.phase is Phase.AGGREGATING
            time = max(now, after.clock)
            work, task = aggregation.claim(
                work,
                after.uploads,
                settings.aggregation_group,
                closed,
                server,
                time,
                settings.aggregation_lease_s,
                merge=merge,
            )
            return decision, work, task

        return self._work(None, step)[0]

    def renew(self, task: Task, now: float) -> bool:
        """Hold ``task`` longer; False when going on is of no use."""

        def step(header: Header, work: Work) -> tuple[Decision, Work, bool]:
            if header.iteration != task.iteration:
                return Decision(header), work, False
            time = max(now, header.clock)
            work, held = aggregation.renew(work, task, time, self.rounds.settings.aggregation_lease_s)
            return Decision(header), work, held

        return self._work(task.iteration, step)[0]

    def deliver(self, task: Task, now: float) -> bool:
        """``task``'s result is stored durably. True when it counts; after the merge the next iteration has begun."""

        def step(header: Header, work: Work) -> tuple[Decision, Work, bool]:
            decision = self.rounds.tick(header, now) or Decision(header)
            if decision.header.iteration != task.iteration or decision.header.phase is Phase.FINISHED:
                return decision, work, False
            work, first = aggregation.deliver(work, task)
            if first and task.kind == "merge":
                merged = self.rounds.aggregated(decision.header, task.iteration, now, task.attempt)
                decision = replace(merged, closed=decision.closed + merged.closed)
            return decision, work, first

        return self._work(task.iteration, step)[0]

    def give_up(self, task: Task, now: float) -> int:
        """``task`` failed here; another may try. Gives how often it has failed; after ``aggregation_attempts`` the
        iteration is invalid."""

        def step(header: Header, work: Work) -> tuple[Decision, Work, int]:
            decision = self.rounds.tick(header, now) or Decision(header)
            if decision.header.iteration != task.iteration or decision.header.phase is Phase.FINISHED:
                return decision, work, 0
            work, failures = aggregation.give_up(work, task)
            if failures >= self.rounds.settings.aggregation_attempts:
                failed = self.rounds.aggregation_failed(decision.header, task.iteration, now)
                decision = replace(failed, closed=decision.closed + failed.closed)
            return decision, work, failures

        return self._work(task.iteration, step)[0]

    def slots(self, task: Task) -> list[Slot]:
        """The counted uploads of a group. Raises RecordRefused when one is missing.

        What came in while an earlier buffer was aggregated was expected to be a version older than it is if that
        aggregation failed: staleness and weight are those of the version that the sum is applied to.
        """
        return self._slots(task.iteration, task.first, task.last)

    def slots_of(self, iteration: int, count: int) -> list[Slot]:
        """The first ``count`` uploads that were counted for an iteration. Raises RecordRefused when one is missing."""
        found: list[Slot] = []
        for first in range(0, count, MOST_REQUESTS):
            found += self._slots(iteration, first, min(first + MOST_REQUESTS, count))
        return found

    def _slots(self, iteration: int, first: int, last: int) -> list[Slot]:
        keys = [self.keys.slot(iteration, index) for index in range(first, last)]
        header, found = self.store.transact(
            [self.keys.header, *keys],
            lambda values: ({}, (self._header(values), [values[key] for key in keys])),
        )
        slots = [Slot.from_bytes(body) for body in found if body is not None]
        if self.rounds.settings.mode == "buffered":
            slots = [self._aged(slot, header.version - slot.version) for slot in slots]
        if len(slots) != len(keys):
            raise RecordRefused(f"{len(keys) - len(slots)} slots of iteration {iteration} are missing")
        return slots

    def _aged(self, slot: Slot, staleness: int) -> Slot:
        weight = self.rounds.settings.weight(slot.examples, staleness)
        return replace(slot, staleness=staleness, weight=weight)

    def log(self, first: int = 1) -> Iterator[Closed]:
        """How each iteration from ``first`` on ended, oldest first."""
        last = self.header().iteration
        for start in range(first, last + 1, 256):
            keys = [self.keys.log(iteration) for iteration in range(start, min(start + 256, last + 1))]
            yield from (Closed.from_bytes(body) for body in read(self.store, keys) if body is not None)

    def drop(self) -> None:
        """Forget the job and all that belongs to it."""
        self.store.delete(self.keys.all)

    # How it is kept.

    def _header(self, values: Mapping[str, bytes | None]) -> Header:
        body = values[self.keys.header]
        if body is None:
            raise JobUnknown(f"no job {self.keys.job}")
        return Header.from_bytes(body)

    def _needed(self, request: Request, hint: int) -> list[tuple[int, str]]:
        if not valid_id(request.client):
            return []  # refused without a look at the store
        if isinstance(request, StartRequest):
            oldest = max(1, hint - self.rounds.selection.window)
            return [(iteration, request.client) for iteration in range(oldest, hint + 1)]
        # Another job's or a made-up number of an iteration has no record: do not read it.
        return [(request.iteration, request.client)] if 1 <= request.iteration <= hint else []

    def _writes(self, before: Header, batch: Batch) -> dict[str, bytes | None]:
        keys = self.keys
        writes: dict[str, bytes | None] = {
            keys.entry(*place): e.to_bytes() for place, e in batch.changed.items()
        }
        writes |= {keys.slot(slot.iteration, slot.index): slot.to_bytes() for slot in batch.slots}
        return writes | self._moved(before, batch.header, batch.closed)

    def _moved(self, before: Header, after: Header, closed: Sequence[Closed]) -> dict[str, bytes | None]:
        writes: dict[str, bytes | None] = {self.keys.log(c.iteration): c.to_bytes() for c in closed}
        # A clock that moved on alone is not worth a write: it only has to stand beside what it decided.
        if after._replace(clock=before.clock) != before:
            writes[self.keys.header] = after.to_bytes()
        return writes

    def _change(self, move: Callable[[Header], Decision]) -> list[Closed]:
        def step(values: Mapping[str, bytes | None]) -> tuple[Mapping[str, bytes | None], list[Closed]]:
            header = self._header(values)
            decision = move(header)
            return self._moved(header, decision.header, decision.closed), list(decision.closed)

        closed = self.store.transact([self.keys.header], step)
        self._sweep(closed)
        return closed

    def _work(
        self, iteration: int | None, move: Callable[[Header, Work], tuple[Decision, Work, R]]
    ) -> tuple[R, list[Closed]]:
        for _ in range(_MOST_MOVES):
            hint = self._iteration if iteration is None else iteration
            key = self.keys.work(hint)

            def step(
                values: Mapping[str, bytes | None], hint: int = hint, key: str = key
            ) -> tuple[Mapping[str, bytes | None], _Moved | tuple[R, list[Closed]]]:
                header = self._header(values)
                if iteration is None and header.iteration != hint:
                    return {}, _Moved(header.iteration)
                body = values[key]
                before = Work(hint) if body is None else Work.from_bytes(body)
                decision, work, result = move(header, before)
                writes = self._moved(header, decision.header, decision.closed)
                if work != before:
                    writes[key] = work.to_bytes()
                return writes, (result, list(decision.closed))

            outcome = self.store.transact([self.keys.header, key], step)
            if isinstance(outcome, _Moved):
                self._iteration = outcome.iteration
                continue
            self._sweep(outcome[1])
            return outcome
        raise StoreUnavailable("iterations end faster than a task can be claimed")

    def _sweep(self, closed: Sequence[Closed]) -> None:
        """Drop what no request can ask for any more. A server that dies before it did leaves that to the next."""
        for ended in closed:
            due = ended.iteration - self.rounds.kept_iterations - 2
            for iteration in range(max(1, due - _SWEPT_AGAIN), due + 1):
                self.store.delete(self.keys.iteration(iteration))
            if ended.valid:
                for version in range(max(0, ended.version - 2 - _SWEPT_AGAIN), ended.version - 1):
                    self.store.delete(self.keys.states(version))


def _entry(body: bytes | None) -> Entry | None:
    return None if body is None else Entry.from_bytes(body)
