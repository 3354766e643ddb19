"""Other ways to bring what was written to all replicas, as small models in virtual time on the links of ``scale``.

None has a mind of its own: each sends the bytes that it would send, waits for whom it would wait for, and works as long
as the constants say. Where a thing could be had in two ways, the one that is faster for it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from benchmarks.charges import Constants
from benchmarks.outcomes import Outcome, Times, summed, traffic
from benchmarks.scale import (
    OWNER,
    Floats,
    Plan,
    Scale,
    distinct_rows,
    lay_links,
    names,
    path_s,
    updates_a_second,
)
from sync.simulator.queue import EventQueue

SMALL: Final = 64
"""Bytes of a request, an acknowledgement or a commit."""
CHUNK: Final = 64 * 2**20
VERSION: Final = 20
"""Bytes of a key and its version."""
NEAR_ROUNDS: Final = 20
TOUCHED_S: Final = 10.0
"""How often touched keys are pushed (the default of Monolith, Liu et al. 2022)."""


def place_of(name: str) -> str:
    """The region of a replica."""
    return name.split(".", 1)[0]


@dataclass(frozen=True, slots=True)
class Span:
    """Rows written from ``first_s`` up to ``last_s`` count; all ends at ``until_s``."""

    first_s: float
    last_s: float
    until_s: float


class Sending:
    """What the models share: links, the source's one thread, and when each replica had each row."""

    def __init__(self, scale: Scale, plan: Plan, constants: Constants, slowed: float = 1.0) -> None:
        self.scale, self.plan, self.constants = scale, plan, constants
        self.queue = EventQueue()
        self.network = lay_links(scale, self.queue, slowed)
        # Whoever has the slowest link is served first: so slow links and the source's own are busy at the same time.
        found = sorted((-int(name.split(".")[0][1:]), name) for region in names(scale) for name in region)
        self.replicas = [name for _, name in found if name != OWNER]
        self.held_s: dict[str, Floats] = {name: np.full(len(plan.keys), np.inf) for name in self.replicas}
        self._busy_s = 0.0

    def written(self) -> int:
        """How many rows of the plan are written by now."""
        return int(np.searchsorted(self.plan.written_s, self.queue.now_s, side="right"))

    def distinct(self, first: int, last: int) -> int:
        """Real rows behind the writes from number ``first`` up to ``last``, each once."""
        return self.scale.each * len(np.unique(self.plan.keys[first:last]))

    def work(self, seconds: float, action: Callable[[], None]) -> None:
        """``action`` once the source's thread has done this, after what it had to do before."""
        self._busy_s = max(self._busy_s, self.queue.now_s) + seconds
        self.queue.at(self._busy_s, action)

    def send(self, sender: str, receiver: str, nbytes: int, deliver: Callable[[], None]) -> None:
        """A message between two replicas."""
        self.network.send((place_of(sender), sender), (place_of(receiver), receiver), nbytes, deliver)

    def have(self, name: str, first: int, last: int) -> None:
        """The replica has these writes now."""
        self.held_s[name][first:last] = self.queue.now_s

    def outcome(self, title: str, span: Span) -> Outcome:
        """Run and sum up."""
        self.queue.run(span.first_s)
        before = traffic(self.network)
        self.queue.run(span.last_s)
        wide, messages = (now - then for now, then in zip(traffic(self.network), before, strict=True))
        self.queue.run(span.until_s)
        held = [[self.held_s[name] for name in region[-2:] if name != OWNER] for region in names(self.scale)]
        ends = (span.first_s, span.last_s, span.until_s)
        return summed(title, self.scale, self.plan, held, ends, wide, messages, self.queue.events_total)

    def merge_s(self, rows: int) -> float:
        """What a replica works to take ``rows`` rows."""
        c = self.constants
        return c.message + self.scale.told_shards(rows) * c.merged_shard + rows * c.merged_row


class TwoPhase(Sending):
    """The source pushes what was written since its last push, hot rows once, to all replicas of all regions; each
    prepares it and says so; when all have, the source commits. One push at a time: it batches by itself what came
    meanwhile, as Project Adam batches updates between replicas (Chilimbi et al., OSDI 2014). Readers see what is
    committed; the next push does not wait for the commit's acknowledgement."""

    def start(self) -> None:
        """Begin."""
        self._push(0)

    def _push(self, first: int) -> None:
        last = self.written()
        if last == first:
            later = self.plan.written_s[first:]
            if len(later):
                self.queue.at(float(later[0]), lambda: self._push(first))
            return
        rows = self.distinct(first, last)
        waiting = set(self.replicas)
        # The rows are found and copied once for all.
        self.work(rows * self.constants.told_row, lambda: None)
        for name in self.replicas:
            self.work(self.constants.message, self._prepare(name, rows, waiting, first, last))

    def _prepare(self, name: str, rows: int, waiting: set[str], first: int, last: int) -> Callable[[], None]:
        def acknowledged() -> None:
            waiting.discard(name)
            if not waiting:
                self._commit(first, last)

        def prepared() -> None:
            self.send(name, OWNER, SMALL, lambda: self.work(self.constants.message, acknowledged))

        def arrived() -> None:
            self.queue.after(self.merge_s(rows), prepared)

        return lambda: self.send(OWNER, name, SMALL + rows * self.scale.row_bytes, arrived)

    def _commit(self, first: int, last: int) -> None:
        for name in self.replicas:
            self.send(OWNER, name, SMALL, partial(self.have, name, first, last))
        self._push(last)


class Touched(Sending):
    """Every ten seconds the source pushes all rows touched since, to every replica; where that takes longer, when it is
    done."""

    def start(self) -> None:
        """Begin."""
        self.queue.at(TOUCHED_S, lambda: self._round(0))

    def _round(self, first: int) -> None:
        last, began_s = self.written(), self.queue.now_s
        rows, waiting = self.distinct(first, last), set(self.replicas)

        def arrived(name: str) -> None:
            self.have(name, first, last)
            waiting.discard(name)
            if not waiting:
                self.queue.at(began_s + TOUCHED_S, lambda: self._round(last))

        def push(name: str) -> None:
            merged = partial(self.queue.after, self.merge_s(rows), partial(arrived, name))
            self.send(OWNER, name, SMALL + rows * self.scale.row_bytes, merged)

        for name in self.replicas:
            self.work(self.constants.message, partial(push, name))


class Chain(Sending):
    """Regions in a chain, each the nearest to the one before. A region hands on what it has as soon as its last message
    has left, so all that came meanwhile goes together; its own replicas get it over the LAN. An update counts as held
    when it is there; in strict chain replication it may be read only once the last region has it."""

    def start(self) -> None:
        """Begin."""
        self._regions = names(self.scale)
        self.order = [0]
        while len(self.order) < len(self._regions):
            left = [one for one in range(len(self._regions)) if one not in self.order]
            self.order.append(min(left, key=lambda one: path_s(self.order[-1], one)))
        self._has, self._sent = [0] * len(self.order), [0] * len(self.order)
        self._free = [True] * len(self.order)
        rates = self.scale.rates()
        self._rates = [min(rates[one], rates[other]) for one, other in pairwise(self.order)]
        for at_s in self.plan.at_s.tolist():
            self.queue.at(at_s, lambda: self._reach(0, self.written()))

    def _reach(self, link: int, last: int) -> None:
        first, self._has[link] = self._has[link], last
        head, *members = self._regions[self.order[link]]
        rows = self.distinct(first, last)
        if head != OWNER:
            self.have(head, first, last)
        for name in members:
            self.send(head, name, SMALL + rows * self.scale.row_bytes, partial(self.have, name, first, last))
        self._hand_on(link)

    def _hand_on(self, link: int) -> None:
        if link + 1 == len(self.order) or not self._free[link] or self._has[link] == self._sent[link]:
            return
        first, last = self._sent[link], self._has[link]
        rows = self.distinct(first, last)
        nbytes = SMALL + rows * self.scale.row_bytes
        self._sent[link], self._free[link] = last, False
        head, following = (self._regions[self.order[link + more]][0] for more in range(2))

        def freed() -> None:
            self._free[link] = True
            self._hand_on(link)

        def arrived() -> None:
            self.queue.after(self.merge_s(rows), lambda: self._reach(link + 1, last))

        self.send(head, following, nbytes, arrived)
        self.queue.after(nbytes / self._rates[link], freed)


class _Again:
    """Replicas that get everything, again and again. A round of one: when it was read at the source, and when it was
    there."""

    def __init__(self, scale: Scale, constants: Constants) -> None:
        self.scale, self.constants = scale, constants
        self.queue = EventQueue()
        self.network = lay_links(scale, self.queue)
        self.rounds: dict[str, list[tuple[float, float]]] = {
            name: [] for region in names(scale) for name in region if name != OWNER
        }

    def carry(self, sender: str, receiver: str, nbytes: float, deliver: Callable[[], None]) -> None:
        """Send so many bytes in chunks, so that several share a link evenly."""
        some = min(nbytes, CHUNK)
        ends = (place_of(sender), sender), (place_of(receiver), receiver)
        rest = nbytes - some
        arrived = (lambda: self.carry(sender, receiver, rest, deliver)) if rest > 0 else deliver
        self.network.send(*ends, round(some), arrived)

    def outcome(self, title: str, rounds: int) -> Outcome:
        """Run until each replica had so many rounds, and sum up: what was written between two reads is there when the
        second is; writes are even over time."""
        while min(len(one) for one in self.rounds.values()) < rounds:
            self.queue.run(self.queue.now_s + 60.0)
        regions: list[list[Floats]] = [[] for _ in range(self.scale.regions)]
        for name, reads in self.rounds.items():
            for (before_s, _), (read_s, there_s) in pairwise(reads):
                waits = there_s - np.linspace(before_s, read_s, 101)[1:]
                regions[int(place_of(name)[1:])].append(waits)
        by_region = [np.concatenate(one) if one else np.zeros(0) for one in regions]
        between = Times.of(np.concatenate(by_region[1:]))
        wide, messages = (count / self.queue.now_s for count in traffic(self.network))
        rows = updates_a_second(self.scale) * self.scale.each
        return Outcome(
            title, between, Times.of(by_region[0]), between, between,
            tuple(float(one.mean()) if len(one) else 0.0 for one in by_region), wide, messages, wide / rows,
            self.queue.events_total,
        )  # fmt: skip


class FullCompare(_Again):
    """Each replica asks the source for the versions of all rows, compares them with its own, and asks for those that
    differ; then it asks again."""

    def start(self) -> None:
        """Begin."""
        self._busy_s = 0.0
        for name in self.rounds:
            self._ask(name)

    def _ask(self, name: str) -> None:
        self.carry(name, OWNER, SMALL, lambda: self._look(name))

    def _look(self, name: str) -> None:
        took_s = self.scale.real_rows * self.constants.scanned_row
        self._busy_s = max(self._busy_s, self.queue.now_s) + took_s
        read_s = self._busy_s
        before_s = self.rounds[name][-1][0] if self.rounds[name] else 0.0

        def compared() -> None:
            # All that changed since the look before, as of now.
            draws = updates_a_second(self.scale) * (self.queue.now_s - before_s)
            rows = distinct_rows(self.scale, draws) * self.scale.each
            back = partial(self.carry, OWNER, name, rows * self.scale.row_bytes, had)
            self.carry(name, OWNER, SMALL + 8 * rows, back)

        def had() -> None:
            self.rounds[name].append((read_s, self.queue.now_s))
            # Near the source it is soon done, and need not be simulated for as long as the others take.
            if place_of(name) != place_of(OWNER) or len(self.rounds[name]) < NEAR_ROUNDS:
                self._ask(name)

        versions = self.scale.real_rows * VERSION
        self.queue.at(
            read_s, lambda: self.carry(OWNER, name, versions, lambda: self.queue.after(took_s, compared))
        )


class Checkpoint(_Again):
    """A snapshot of everything goes to one replica of each region, all at once over the source's uplink, and from there
    to the others; when all have it, the next is taken. Writing and loading it takes no time here."""

    def start(self) -> None:
        """Begin."""
        self._nbytes = float(self.scale.real_rows * self.scale.row_bytes)
        self._round()

    def _round(self) -> None:
        began_s = self.queue.now_s
        waiting = set(self.rounds)

        def had(name: str) -> None:
            self.rounds[name].append((began_s, self.queue.now_s))
            waiting.discard(name)
            if not waiting:
                self._round()

        def spread(head: str, members: Sequence[str]) -> None:
            for name in members:
                self.carry(head, name, self._nbytes, partial(had, name))

        for head, *members in names(self.scale):
            if head == OWNER:
                spread(head, members)
                continue

            def arrived(head: str = head, members: Sequence[str] = members) -> None:
                had(head)
                spread(head, members)

            self.carry(OWNER, head, self._nbytes, arrived)
