"""A shard from its files: the newest whole snapshot, then the log, step by step.

- A log whose last record is unfinished: the process died while it wrote it, and nobody was told that it was durable.
  It is cut off.
- A damaged snapshot: the one before it and the log since then give the same shard; nothing is lost.
- A damaged record of the log: what follows it cannot be applied. How much that is, as far as can be told, goes to the
  log of the process, and the shard goes on from the step before; trainers see that and push again.
- Nothing whole where there was something: SnapshotsLost. A shard is never begun anew in silence.

What is damaged, or cannot be reached any more, is set aside under ``.damaged``.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.parameter_server.storage.snapshots import Numbered, OtherVersion, ShardFolder, SnapshotsLost
from sync.errors import OtherFormat, OutOfOrder, PeerFault, RecordDamaged, SnapshotDamaged
from sync.records import Delta, End, Graves, Head, Record, Rows
from sync.shard import Shard
from sync.snapshot import HEADER_BYTES, MAGIC, Truncated, decode_record, record_size

FIRST_FORMAT: Final = b"HWSHARD\x00"
"""What snapshots of the first format began with."""
Check = Callable[[Head], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """``snapshot``: the position of the snapshot that was used, 0 if the log alone was enough; ``log_bytes``: length of
    the logs after it."""

    shard: Shard
    snapshot: int
    log_bytes: int


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where a log cannot be followed any further: log ``number`` of all, whose first ``good`` bytes were applied."""

    number: int
    path: Path
    good: int
    reason: str
    kind: str
    """``torn``: its last record is unfinished; ``missing``: it begins too late; ``damaged``."""


def recover(folder: ShardFolder, make: Callable[[], Shard], check: Check) -> Recovered:
    """The shard that is in ``folder``, or a new one where nothing is. ``make`` gives an empty one; ``check`` looks at
    every head and raises what it finds wrong.

    Raises SnapshotsLost, OtherVersion, and OSError where a file cannot be read or set aside.
    """
    folder.sweep()
    logs = folder.logs()
    shard, snapshot, stop = _newest(folder, logs, make, check)
    if not shard.position and (folder.damaged() or (stop is not None and stop.kind != "torn")):
        raise SnapshotsLost(
            f"nothing in {folder.path} can be started from; look at its .damaged files, or move the folder away to "
            "start this shard anew from the samples that are kept"
        )
    if stop is not None:
        _end_at(folder, shard, logs, stop)
    _finish(folder, shard)
    if shard.position:
        what = f"{shard.position - snapshot} of them from its log"
        _log.info("shard %d of %s: restored %d steps, %s", shard.shard_id, shard.model, shard.position, what)
    return Recovered(
        shard, snapshot, sum(path.stat().st_size for first, path in folder.logs() if first > snapshot)
    )


def _newest(
    folder: ShardFolder, logs: Numbered, make: Callable[[], Shard], check: Check
) -> tuple[Shard, int, _Stop | None]:
    """The shard as it can be had, the position of the snapshot that it began with, and where its log had to stop. The
    snapshots that cannot be used are set aside."""
    for position, path in reversed(folder.snapshots()):
        shard = make()
        try:
            end = _load(path, shard, check)
            stop = _replay(shard, logs, check)
            if shard.position < end:
                raise SnapshotDamaged(f"it needs the steps up to {end}; the log ends at {shard.position}")
            return shard, position, stop
        except (RecordDamaged, SnapshotDamaged) as error:
            _log.error("snapshot %s cannot be used (%s); what is before it is", path, error)
            folder.set_aside(path)
    shard = make()
    return shard, 0, _replay(shard, logs, check)


def read_records(path: Path) -> Iterator[tuple[Record, int]]:
    """Every record of a file with the offset of its end, one in memory at a time.

    Raises as ``decode_record`` at the first that is not whole (also where the disk cannot read it), OtherVersion,
    OSError.
    """
    with path.open("rb") as file:
        size, start = os.fstat(file.fileno()).st_size, 0
        while start < size:
            try:
                header = file.read(HEADER_BYTES)
                if header.startswith(FIRST_FORMAT):
                    raise OtherVersion(_other_version(path, "format 1"))
                data = bytearray(record_size(header, size - start))
                data[: len(header)] = header
                file.readinto(memoryview(data)[len(header) :])
                record, length = decode_record(memoryview(data))
            except OtherFormat as error:
                raise OtherVersion(_other_version(path, str(error))) from error
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise RecordDamaged(f"the disk cannot read it: {error}") from error
            start += length
            yield record, start


def _load(path: Path, shard: Shard, check: Check) -> int:
    """Fill ``shard`` from a snapshot; the position up to which it needs the log. Raises RecordDamaged,
    SnapshotDamaged."""
    found = read_records(path)
    head, _ = next(found, (None, 0))
    if not isinstance(head, Head):
        raise SnapshotDamaged("it does not begin with a head")
    if (head.model, head.shard_id) != (shard.model, shard.shard_id):
        raise SnapshotDamaged(f"it is of shard {head.shard_id} of model {head.model}")
    check(head)
    shard.begin(head)
    for record, _ in found:
        match record:
            case Rows():
                shard.put(record)
            case Graves():
                shard.bury(record)
            case End():
                if next(found, None) is not None:
                    raise SnapshotDamaged("something follows its end")
                return record.position
            case _:
                raise SnapshotDamaged("it holds something other than rows and graves")
    raise SnapshotDamaged("it has no end")


def _replay(shard: Shard, logs: Numbered, check: Check) -> _Stop | None:
    """Apply every step after the shard's position; where it had to stop, if before the end."""
    start = max((number for number, (first, _) in enumerate(logs) if first <= shard.position + 1), default=0)
    for number, (first, path) in enumerate(logs[start:], start):
        if first > shard.position + 1:
            reason = f"steps {shard.position + 1} to {first - 1} are in no log"
            return _Stop(number, path, 0, reason, "missing")
        good = 0
        try:
            for record, end in read_records(path):
                _take(shard, record, check)
                good = end
        except (RecordDamaged, PeerFault) as error:
            last = number + 1 == len(logs)
            torn = last and isinstance(error, RecordDamaged) and _is_torn(path, good, error)
            return _Stop(number, path, good, str(error), "torn" if torn else "damaged")
    return None


def _take(shard: Shard, record: Record, check: Check) -> None:
    """Raises RecordDamaged, PeerFault."""
    match record:
        case Head():
            check(record)
            if _line(record.history, record.position) != _line(shard.history, record.position):
                raise OutOfOrder("the log belongs to another line of owners")
        case Delta():
            if record.position > shard.position:
                shard.apply(record)
        case _:
            raise RecordDamaged("a log holds something other than steps")


def _line(history: tuple[tuple[int, int], ...], position: int) -> list[tuple[int, int]]:
    return [(epoch, first) for epoch, first in history if first <= position]


def _is_torn(path: Path, good: int, error: RecordDamaged) -> bool:
    """Whether the rest of a log is what a write leaves that did not end: too short, or space that was never filled, and
    no whole record after it."""
    rest = path.read_bytes()[good:]
    unfilled = not any(rest)
    return unfilled or (isinstance(error, Truncated) and not any(_steps_in(rest)))


def _steps_in(data: bytes) -> Iterator[int]:
    """The positions of all whole steps in ``data``, wherever they stand."""
    at = data.find(MAGIC)
    while at >= 0:
        try:
            record, length = decode_record(memoryview(data)[at:])
        except RecordDamaged:
            length = 1
        else:
            if isinstance(record, Delta):
                yield record.position
        at = data.find(MAGIC, at + length)


def _end_at(folder: ShardFolder, shard: Shard, logs: Numbered, stop: _Stop) -> None:
    """Make the logs end where they could be followed to, and tell what is lost."""
    if stop.kind == "torn":
        _log.info("%s: cut off after %d bytes, where a write did not end", stop.path, stop.good)
        folder.cut(stop.path, stop.good, keep=False)
        return
    later = [path for _, path in logs[stop.number :]]
    newest = max((step for path in later for step in _steps_in(path.read_bytes())), default=0)
    _log.error(
        "log %s cannot be used from byte %d on: %s. Shard %d of model %s goes on from step %d; lost are %s, and "
        "trainers will push them again as far as samples are kept",
        stop.path,
        stop.good,
        stop.reason,
        shard.shard_id,
        shard.model,
        shard.position,
        f"steps up to {newest} ({newest - shard.position})"
        if newest > shard.position
        else "steps of unknown number",
    )
    if stop.good:
        folder.cut(stop.path, stop.good, keep=True)
        later = later[1:]
    for path in later:
        folder.set_aside(path)


def _finish(folder: ShardFolder, shard: Shard) -> None:
    """Leave no log behind that holds no step, since one will begin with the next; and what was read is on disk."""
    for first, path in folder.logs():
        if first > shard.position:
            folder.disk.remove(path)
        else:
            folder.disk.sync_path(path)
    if folder.path.is_dir():
        folder.disk.sync_path(folder.path)


def _other_version(path: Path, what: str) -> str:
    return (
        f"{path} was written by another version of Headwater ({what}); run that version, or move {path.parent} away to "
        "start this shard anew from the samples that are kept"
    )
