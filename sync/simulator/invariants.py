"""What must hold at every replica at any time, and of all of them in the end. Pure looks; a breach raises Broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sync.changes import Cursor
from sync.exchange import ShardName
from sync.records import Rows
from sync.replica import Replica
from sync.shard import Shard
from sync.simulator.ledger import NEVER, Ledger, Order, Place, View, Write, covered_up_to, view


class Broken(AssertionError):
    """An invariant does not hold. The message says where, and what of."""


class Watcher:
    """Follows one replica, from one start to the next crash."""

    def __init__(self, who: str, name: ShardName, ledger: Ledger) -> None:
        self.who, self.name = who, name
        self._ledger = ledger
        self._seen: dict[Place, Order] = {}
        self._generations: dict[str, Order] = {}

    def look(self, replica: Replica) -> View:
        """Check ``replica`` as it is now; returns what it holds."""
        ledger, name = self._ledger, self.name
        claimed = covered_up_to(replica)
        here = view(replica, ledger.epochs[name])
        for place, write in here.items():
            known = _find(ledger.writes[name].get(place, ()), write.order)
            if known is None or known.content != write.content:
                raise Broken(f"{self._at(place)}: {write.order} was never written so")
        for place, writes in ledger.writes[name].items():
            newest = self._newest(writes, claimed, replica.horizon.retired)
            held = here[place].order if place in here else NEVER
            self._check_claim(place, newest, held, claimed)
            self._check_order(place, newest, held, replica.horizon.retired)
        self._look_at_generations(replica, claimed)
        self._look_at_progress(replica, claimed)
        return here

    def _at(self, place: object) -> str:
        return f"{self.who}, shard {self.name[1]}, {place}"

    def _newest(self, writes: Sequence[Write], claimed: Mapping[int, int], retired: int) -> Write | None:
        for write in reversed(writes):
            _, time, writer = write.order
            if claimed.get(writer, 0) < time:
                continue
            if self._ledger.is_void(self.name, write.order, retired):
                continue
            return write
        return None

    def _check_claim(
        self, place: Place, newest: Write | None, held: Order, claimed: Mapping[int, int]
    ) -> None:
        if newest is None or held >= newest.order:
            return
        if held == NEVER and newest.content is None:
            return
        raise Broken(f"{self._at(place)}: claims {newest.order}, holds {held}; knows {dict(claimed)}")

    def _check_order(self, place: Place, newest: Write | None, held: Order, retired: int) -> None:
        seen = self._seen.get(place, NEVER)
        if held < seen and not self._ledger.is_void(self.name, seen, retired):
            gone = held == NEVER and newest is not None and newest.content is None and newest.order >= seen
            if not gone:
                raise Broken(f"{self._at(place)}: was {seen}, is {held}")
        if held == NEVER and newest is not None:
            # The grave was forgotten. What is older than it must not come back.
            held = newest.order
        if held != NEVER:
            self._seen[place] = held

    def _look_at_generations(self, replica: Replica, claimed: Mapping[int, int]) -> None:
        ledger, name = self._ledger, self.name
        for one in replica.generations():
            epoch = ledger.epochs[name].get(one.writer, 0)
            order = (epoch, one.time, one.writer)
            content = one.number.to_bytes(8) + one.values.tobytes()
            if Write(order, content) not in ledger.generations[name][one.table]:
                raise Broken(f"{self._at(one.table)}: generation {order} was never published so")
            seen = self._generations.get(one.table, NEVER)
            if order < seen and not ledger.is_void(name, seen, replica.horizon.retired):
                raise Broken(f"{self._at(one.table)}: generation was {seen}, is {order}")
            self._generations[one.table] = order
        for table, published in ledger.generations[name].items():
            newest = self._newest(sorted(published, key=lambda g: g.order), claimed, replica.horizon.retired)
            held = self._generations.get(table, NEVER)
            if newest is not None and held < newest.order:
                raise Broken(f"{self._at(table)}: claims generation {newest.order}, holds {held}")

    def _look_at_progress(self, replica: Replica, claimed: Mapping[int, int]) -> None:
        for source, progress in replica.pushes.progress().items():
            steps = self._ledger.pushes[self.name][source, progress.applied]
            if not any(step == NEVER or claimed.get(step[2], 0) >= step[1] for step in steps):
                raise Broken(f"{self._at(source)}: says it has {progress.applied}, {steps}, and has not")


class Reader:
    """Follows a shard's change stream with a cursor that it keeps, whatever happens to the shard."""

    def __init__(self, page_rows: int) -> None:
        self._cursor = Cursor()
        self._page_rows = page_rows
        self.rows: dict[Place, bytes] = {}
        self.resets_total = 0

    def read(self, replica: Replica, *, all_of_it: bool = False) -> None:
        """Read one page, or all there is."""
        tables = [spec.name for spec in replica.specs if spec.placement == "hashed"]
        while True:
            changes = replica.changes(self._cursor, tables, self._page_rows)
            if changes.reset:
                self.rows.clear()
                self.resets_total += 1
            self._cursor = changes.cursor
            for table, (keys, values) in changes.parts.items():
                for key, row in zip(keys.tolist(), values, strict=True):
                    self.rows[table, key] = row.tobytes()
            if changes.complete or not all_of_it:
                return

    def check(self, who: str, replica: Replica) -> None:
        """What was read is what is there; what is not there has its initial values."""
        self.read(replica, all_of_it=True)
        tables = {spec.name for spec in replica.specs if spec.placement == "hashed"}
        stored = {
            (page.table, key)
            for page in replica.pages()
            if page.table in tables and isinstance(page, Rows)
            for key in page.keys.tolist()
        }
        if lacking := stored - self.rows.keys():
            raise Broken(f"{who}: the reader has not heard of {sorted(lacking)[:5]}")
        for (table, key), row in self.rows.items():
            if replica.pull(table, np.array([key], np.uint64)).tobytes() != row:
                raise Broken(f"{who}: the reader has another row of {table}, {key}")


def difference(one: Shard, other: Shard, epochs: Mapping[int, int]) -> str:
    """What two replicas that heard everything do not agree on; an empty text if nothing."""
    if one.knowledge != other.knowledge or one.horizon.retired != other.horizon.retired:
        return f"knowledge {one.knowledge} below {one.horizon.retired}, {other.knowledge} below {other.horizon.retired}"
    mine, theirs = (_rows(view(shard, epochs)) for shard in (one, other))
    if mine != theirs:
        places = [place for place in mine.keys() | theirs.keys() if mine.get(place) != theirs.get(place)]
        place = min(places)
        pair = [found[place].order if place in found else None for found in (mine, theirs)]
        return f"{len(places)} rows, {place}: {pair[0]} and {pair[1]}"
    for here, there in zip(one.generations(), other.generations(), strict=False):
        if (here.number, here.time, here.values.tobytes()) != (
            there.number,
            there.time,
            there.values.tobytes(),
        ):
            return f"generation {here.number} of {here.time}, {there.number} of {there.time}"
    if len(one.generations()) != len(other.generations()):
        return "generations"
    if one.pushes.progress() != other.pushes.progress():
        return f"progress {one.pushes.progress()} and {other.pushes.progress()}"
    return ""


def _rows(found: View) -> View:
    return {place: write for place, write in found.items() if write.content is not None}


def _find(writes: Sequence[Write], order: Order) -> Write | None:
    return next((write for write in reversed(writes) if write.order == order), None)
