"""What was really written, by everybody: what replicas are measured against.

A write is ordered by (fencing epoch, time, writer). Writes of retired writers that nobody had heard of when they were
retired are void: they lose, whenever they come back.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sync.clock import MAX_TIME
from sync.exchange import ShardName
from sync.knowledge import Horizon
from sync.pushes import Source
from sync.records import Delta, Graves, Rows
from sync.replica import Replica

Order = tuple[int, int, int]
"""(epoch, time, writer) of a version."""
Place = tuple[str, int]
"""(table, key)."""
NEVER: Final[Order] = (-1, 0, 0)


@dataclass(frozen=True, slots=True)
class Write:
    """``content``: the bytes of a row's values and state, or None for a grave."""

    order: Order
    content: bytes | None

    @property
    def version(self) -> tuple[int, int]:
        return self.order[1], self.order[2]


View = dict[Place, Write]


class Ledger:
    """All writes of all shards."""

    def __init__(self, tables: Collection[str]) -> None:
        """``tables``: whose rows replicate one by one."""
        self._tables = frozenset(tables)
        self.writes: dict[ShardName, dict[Place, list[Write]]] = defaultdict(lambda: defaultdict(list))
        self.generations: dict[ShardName, dict[str, list[Write]]] = defaultdict(lambda: defaultdict(list))
        self.pushes: dict[ShardName, dict[tuple[Source, int], list[Order]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.epochs: dict[ShardName, dict[int, int]] = defaultdict(dict)
        self.writes_total = 0
        self._retired: dict[ShardName, dict[int, Horizon]] = defaultdict(dict)

    def record(self, name: ShardName, delta: Delta) -> None:
        """Note a step that was taken by its writer itself."""
        if delta.learned is not None:
            if delta.learned.horizon.retired and not delta.learned.knowledge:
                self._retired[name][delta.learned.horizon.retired] = delta.learned.horizon
            return
        self.epochs[name][delta.writer] = delta.epoch
        own = (delta.epoch, delta.clock, delta.writer)
        parts: tuple[Rows | Graves, ...] = (*delta.rows, *delta.graves)
        for rows in parts:
            if rows.table not in self._tables:
                continue
            for place, write in _writes(rows, self.epochs[name]):
                bisect.insort(self.writes[name][place], write, key=lambda one: one.order)
                self.writes_total += 1
        for one in delta.generations:
            order = (delta.epoch, one.time, one.writer)
            self.generations[name][one.table].append(
                Write(order, one.number.to_bytes(8) + one.values.tobytes())
            )
        for source, progress in delta.progress:
            self.pushes[name][source, progress.applied].append(own if delta.rows else NEVER)

    def is_void(self, name: ShardName, order: Order, retired: int) -> bool:
        """Whether the write was not known where its writer was retired, as who has heard of the retirements up to
        ``retired`` sees it."""
        epoch, time, writer = order
        while (one := self._retired[name].get(retired)) is not None and epoch < one.retired:
            if epoch >= one.retired_before:
                return time > one.last.get(writer, 0)
            retired = one.retired_before
        return False


def view(replica: Replica, epochs: Mapping[int, int]) -> View:
    """Every row and grave of ``replica``; ``epochs``: of all writers there ever were."""
    pages: Iterator[Rows | Graves] = replica.pages()
    return dict(
        write
        for page in pages
        if replica.table(page.table).spec.placement == "hashed"
        for write in _writes(page, epochs)
    )


def _writes(page: Rows | Graves, epochs: Mapping[int, int]) -> Iterator[tuple[Place, Write]]:
    for i, (key, time, writer) in enumerate(
        zip(page.keys.tolist(), page.time.tolist(), page.writer.tolist(), strict=True)
    ):
        order = (epochs.get(writer, 0), time, writer)
        content = page.values[i].tobytes() + page.state[i].tobytes() if isinstance(page, Rows) else None
        yield (page.table, key), Write(order, content)


def covered_up_to(replica: Replica) -> dict[int, int]:
    """What ``replica`` claims, writers that it took out of its vector included."""
    retired = replica.horizon.retired
    gone = {writer: MAX_TIME for writer, epoch in replica.epochs.items() if epoch < retired}
    return dict(replica.knowledge) | gone
