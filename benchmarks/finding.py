"""Finding the rows that changed: by token, by the update cache and by a scan, against comparing everything.

The peer has no state of its own: the two replicas compare the version of every key. Both are in one process here, so
nothing of it waits for a network; what it would send is told in bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.draws import distinct, ranges
from benchmarks.report import Row, at_most
from benchmarks.turns import Block, Figures, faced, in_turn
from sync.clock import HybridClock
from sync.exchange.finding import missing
from sync.knowledge import Known
from sync.pushes import Push, Source
from sync.replica import Token
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

Keys = npt.NDArray[np.uint64]

SHARE: Final = 0.001
"""Of all rows, those that changed since the last time."""
FEW: Final = 1_000
PAGE: Final = 65_536
VERSIONED_BYTES: Final = 20
"""A key and its version."""
PEER: Final = "full compare (the version of every key, in pages of 65,536)"
AIM_TOKEN: Final = 50.0
AIM_SCAN: Final = 2.0
AIM_GROWTH: Final = 3.0
_TABLE: Final = TableSpec("rows", 1, Initialiser.uniform(0.1), Optimiser("sgd"))
_SOURCE: Final = Source("benchmark", 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ``rows`` are stored, ascending; how often each way is measured."""

    rows: Sequence[int]
    rounds: int


class Pair:
    """A source and the copy of a puller that knows everything but the rows that changed last."""

    def __init__(self) -> None:
        self.source = Shard(0, (_TABLE,), 1, HybridClock())
        self.copy = Shard(0, (_TABLE,), 2, HybridClock(), stateless=True)
        self.rows = 0
        self.token, self.known = self.source.token, Known.of({})

    def grow(self, rows: int) -> None:
        """Have ``rows`` rows on both sides."""
        for keys in ranges(self.rows, rows, PAGE):
            self._push(keys)
            slots = self.source.table("rows").located(keys)
            self.copy.put(self.source.table("rows").stored(slots))
        self.rows = rows

    def change(self, generator: np.random.Generator, count: int) -> Keys:
        """Push ``count`` rows that the copy is not told of; returns their keys."""
        self.token, self.known = self.source.token, Known.of(dict(self.source.knowledge))
        keys = distinct(generator, self.rows, count)
        self._push(keys)
        return keys

    def level(self, keys: Keys) -> None:
        """Tell the copy of ``keys``."""
        table = self.source.table("rows")
        self.copy.put(table.stored(table.located(keys)))

    def _push(self, keys: Keys) -> None:
        applied = self.source.applied(_SOURCE)
        part = ("rows", keys, np.ones((len(keys), 1), np.float32))
        self.source.push(Push(_SOURCE, applied + 1, applied, parts=(part,)))

    def by_token(self) -> Keys:
        return self._found("token", self.token.counter)

    def by_cache(self) -> Keys:
        return self._found("cache", None)

    def by_scan(self) -> Keys:
        return self.source.table("rows").scan(self.known)

    def by_comparing(self) -> Keys:
        """Page by page, which keys of the source have another version at the copy."""
        here, there, found = self.source.table("rows"), self.copy.table("rows"), list[Keys]()
        for first in range(0, self.rows, PAGE):
            # Nothing was deleted: the rows lie one after the other.
            slots = np.arange(first, min(first + PAGE, self.rows), dtype=np.int32)
            keys = here.keys_at(slots)
            (at, by), (other_at, other_by) = here.versions_at(slots), there.versions(keys)
            found.append(keys[(at != other_at) | (by != other_by)])
        return np.concatenate(found)

    def _found(self, how: str, since: int | None) -> Keys:
        (found,) = missing(self.source, self.known, since)
        if found.how != how:
            raise RuntimeError(f"found by {found.how}, not by {how}")
        return found.keys


def measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    """For each number of rows: the time that every way takes, and the bytes that an unchanged shard costs."""
    pair, generator, few = Pair(), np.random.default_rng(3), dict[int, Figures]()
    for rows in sizes.rows:
        console.print(f"finding: {rows:,} rows, {SHARE:.1%} of them changed")
        pair.grow(rows)
        changed = pair.change(generator, max(1, int(rows * SHARE)))
        ways = (pair.by_token, pair.by_cache, pair.by_scan, pair.by_comparing)
        for way in ways:
            if not np.array_equal(np.sort(way()), np.sort(changed)):
                raise RuntimeError(f"{way.__name__} does not find what changed")
        *ours, peer = in_turn([_timed(way) for way in ways], sizes.rounds)
        for how, figures, aim in (
            ("by token", ours[0], AIM_TOKEN),
            ("by the update cache", ours[1], None),
            ("by a scan of versions", ours[2], AIM_SCAN),
        ):
            row = faced(
                f"find {len(changed):,} changed of {rows:,} rows {how}", "ms", figures, peer, PEER,
                aim=aim if rows == sizes.rows[-1] else None, less_is_better=True,
            )  # fmt: skip
            rate = f"{len(changed) / figures.median * 1e3:,.0f} changed and {rows / figures.median * 1e3:,.0f} stored"
            yield replace(row, note=f"{rate} rows/s; {row.note}")
        pair.level(changed)
        some = pair.change(generator, min(FEW, rows))
        (few[rows],) = in_turn([_timed(pair.by_token)], sizes.rounds)
        pair.level(some)
        yield _unchanged(rows)
    yield _growth(few)


def _timed(way: Callable[[], object]) -> Block:
    def block() -> float:
        started_s = time.perf_counter()
        way()
        return (time.perf_counter() - started_s) * 1e3

    return block


def _growth(few: dict[int, Figures]) -> Row:
    """Whether what the token finds costs what changed, or what is stored."""
    (least, first), *_, (most, last) = few.items()
    ratio = last.median / first.median
    return Row(
        f"find {FEW:,} changed rows by token: time at {most:,} rows over that at {least:,}",
        "ratio", ratio, AIM_GROWTH, at_most(AIM_GROWTH, ratio),
        note=", ".join(f"{rows:,}: {one.median:.3f} ms" for rows, one in few.items()),
    )  # fmt: skip


def _unchanged(rows: int) -> Row:
    """What it takes to say that nothing changed."""
    largest = Token(2**32 - 1, 2**63 - 1)
    packed = msgspec.msgpack.encode((largest.incarnation, largest.counter))
    peer = float(rows * VERSIONED_BYTES)
    return Row(
        f"say that a shard of {rows:,} rows is unchanged", "bytes", float(len(packed)), 16.0,
        at_most(16.0, len(packed)), peer=peer, peer_name=PEER, ratio=peer / len(packed),
        note="incarnation and counter; the peer sends each key and version; nothing is sent while a pull waits",
    )  # fmt: skip
