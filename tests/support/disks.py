"""Disks that fail on request, and parameter shards that are kept on them.

As a program, ``disks.py FOLDER`` keeps a shard there and pushes to it without end. Each line that it prints is: the
offset pushed, the durable offset, 1 while the disk fails, how many snapshots are whole, 1 while the log is given up.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from services.parameter_server.client import operations
from services.parameter_server.holdings import Held
from services.parameter_server.storage.durability import Durability, DurabilityConfig
from services.parameter_server.storage.files import Buffer, Disk
from services.parameter_server.storage.recovery import recover
from services.parameter_server.storage.snapshots import ShardFolder
from services.parameter_server.storage.writer import Pace
from services.parameter_server.types import PushReply
from sync.clock import HybridClock
from sync.records import Rows
from sync.shard import Shard

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.parameters import DECLARATION, SOURCE, Fleet, gradients, recorded

QUICK = Pace(fsync_s=0.001, retry_s=0.02)
PATIENCE_S = 20.0


class FaultyDisk(Disk):
    """``room``: bytes that can still be written (None: any number); ``error``: what a write beyond says;
    ``syncs_fail``: a sync raises EIO; ``before_write`` is called first, and may wait."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.error = errno.ENOSPC
        self.syncs_fail = False
        self.truncates_fail = False
        self.before_write: Callable[[], None] = lambda: None
        self.done: list[str] = []

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        self.before_write()
        if self.room is None:
            return super().write(descriptor, buffers)
        if self.room <= 0:
            raise OSError(self.error, "the test's disk is full")
        some = memoryview(b"".join(buffers))[: self.room]
        self.room -= len(some)
        return super().write(descriptor, [some])

    def sync(self, descriptor: int) -> None:
        if self.syncs_fail:
            raise OSError(errno.EIO, "the test's disk is broken")
        self.done.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().suffix)
        super().sync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        if self.truncates_fail:
            raise OSError(errno.EIO, "the test's disk is broken")
        super().truncate(descriptor, size)

    def rename(self, path: Path, to: Path) -> None:
        self.done.append(f"rename {to.suffix}")
        super().rename(path, to)


class Kept:
    """One shard of one server, kept below ``folder``; start it again by making another."""

    def __init__(
        self, folder: Path, start: int = 1, disk: Disk | None = None, *, kept: int = 2, **config: object
    ) -> None:
        self.folder = folder / "main" / "0-of-1"
        settings = DurabilityConfig(**{"snapshot_s": 3_600.0, "pace": QUICK, **config})  # type: ignore[arg-type]
        self.durability = Durability(
            lambda model, shard: ShardFolder(folder, model, shard, 1, kept, disk), settings
        )
        try:
            self.fleet = Fleet(("a",), 1, keeper=self.durability, incarnation=start)
        except BaseException:
            self.durability.close()
            raise
        self.held: Held = self.fleet.hosts["a"].models["main"].held[0]

    @property
    def shard(self) -> Shard:
        return self.held.shard

    @property
    def applied(self) -> int:
        return self.shard.applied(SOURCE)

    @property
    def durable(self) -> int:
        return self.held.durable.of(SOURCE)

    def push(self, count: int = 1) -> PushReply:
        """The recorded pushes that follow what is applied."""
        for offset in range(self.applied + 1, self.applied + 1 + count):
            reply = self.fleet.ask(operations.push(self.fleet.route, gradients(offset, recorded(offset), 1)))[
                0
            ]
            assert reply.status == "applied"
        return reply

    def until(self, holds: Callable[[], bool]) -> None:
        """Turn the loop until ``holds()``."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it did not happen"
            self.durability.step()
            time.sleep(0.0005)

    def flush(self) -> None:
        """Until everything is on disk."""
        assert self.durability.finish(PATIENCE_S)

    def snapshot(self) -> Path:
        """Take one now, whole."""
        before = self.durability.writer.counts.snapshots_total
        position = self.shard.position
        self.durability.snapshot_now()
        self.until(lambda: self.durability.writer.counts.snapshots_total > before)
        self.until(lambda: not self.durability.busy)
        return self.folder / f"{position:012d}.snapshot"

    def close(self) -> None:
        self.durability.close()

    def crash(self) -> None:
        """End without writing what waits: as a kill, for the files."""
        self.durability.writer.give_up()
        self.durability.close()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def contents(shard: Shard) -> dict[str, bytes]:
    """Every bit of a shard's rows, by table and column, and how far its sources are."""
    found = {"progress": repr(sorted(shard.pushes.progress().items())).encode()}
    pages = [page for page in shard.state().rows if isinstance(page, Rows)]
    for table in {page.table for page in pages}:
        some = [page for page in pages if page.table == table]
        order = np.argsort(np.concatenate([page.keys for page in some]))
        for name in ("keys", "values", "state", "time"):
            column = np.concatenate([getattr(page, name) for page in some])
            found[f"{table}.{name}"] = column[order].tobytes()
    return found


def but_times(found: dict[str, bytes]) -> dict[str, bytes]:
    """``contents`` without version times: each restart publishes once more, and that takes one."""
    return {name: value for name, value in found.items() if not name.endswith(".time")}


def recovered(folder: Path, start: int = 99) -> Shard:
    """The shard below ``folder`` as a start would have it. Sets aside what a start would."""

    def make() -> Shard:
        clock = HybridClock(lambda: 1_000_000)
        return Shard(0, DECLARATION.tables, start, clock, model="main", fingerprint="fp-1")

    return recover(ShardFolder(folder, "main", 0, 1, 2), make, lambda _head: None).shard


def main() -> None:
    start = int(time.time() * 10) % 2**24
    kept = Kept(Path(sys.argv[1]), start, backlog_bytes=40_000, snapshot_s=0.2)
    while True:
        reply = kept.push()
        kept.durability.step()
        while kept.durability.full:
            kept.durability.step()
        time.sleep(0.001)
        failing, whole = kept.durability.writer.failing, kept.durability.writer.counts.snapshots_total
        print(reply.applied, kept.durable, int(failing), whole, kept.durability.given_up, flush=True)


if __name__ == "__main__":
    main()
