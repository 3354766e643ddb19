"""Snapshots as files: one series per shard, each file complete or absent, the newest good one counts.

``<folder>/<model>/<shard>-of-<shards>/<number>.snapshot``. A file is written beside its place, synced, renamed,
and its folder synced; so a crash leaves at most a temporary file. A damaged file keeps its bytes under
``<number>.damaged`` for whoever wants to look; the newest two of those are kept.

Exceptions::

    SnapshotError
    ├── SnapshotsLost        there are snapshots of the shard, and not one can be read
    ├── LayoutChanged        the snapshots were made with another number of shards
    └── FolderHeld           another process of the same name has the folder
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from sync.errors import SnapshotDamaged
from sync.shard import ShardState
from sync.snapshot import decode

SUFFIX: Final = ".snapshot"
DAMAGED: Final = ".damaged"
TEMPORARY: Final = ".tmp"
DAMAGED_KEPT: Final = 2
_log = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview


class SnapshotError(Exception):
    """What is on disk cannot be started from."""


class SnapshotsLost(SnapshotError):
    """Every snapshot of a shard is damaged."""


class LayoutChanged(SnapshotError):
    """The number of shards is not the one of the snapshots."""


class FolderHeld(SnapshotError):
    """Another process still writes here."""


class SnapshotSeries:
    """The snapshots of one shard, of which the newest ``kept`` stay."""

    def __init__(self, folder: Path, model: str, shard: int, shards: int, kept: int) -> None:
        """Raises LayoutChanged if the model was saved with another number of shards."""
        self._kept = kept
        self._folder = folder / model / f"{shard}-of-{shards}"
        for other in sorted((folder / model).glob("*-of-*")):
            if other.name.rpartition("-of-")[2] != str(shards):
                raise LayoutChanged(
                    f"{other} was saved with another number of shards than {shards}; set parameters.shards back, "
                    f"or move {folder / model} away to start anew"
                )

    def newest(self) -> ShardState | None:
        """The newest snapshot that is whole, or None where there never was one. Raises SnapshotsLost."""
        self._sweep()
        files = self._files(SUFFIX)
        for path in reversed(files):
            try:
                return decode(path.read_bytes())
            except SnapshotDamaged as error:
                _log.error("snapshot %s is damaged (%s); the one before it is used", path, error)
                path.rename(path.with_suffix(DAMAGED))
        if files:
            raise SnapshotsLost(f"no snapshot in {self._folder} can be read; see its {DAMAGED} files")
        if damaged := self._files(DAMAGED):
            raise SnapshotsLost(
                f"all snapshots in {self._folder} were found damaged (newest: {damaged[-1].name}); "
                "move the folder away to start this shard anew from the log"
            )
        return None

    def write(self, buffers: Sequence[Buffer]) -> Path:
        """Make a snapshot durable and drop those beyond the number kept. Raises OSError; then nothing changed."""
        self._make_folder()
        numbers = [int(path.stem) for path in (*self._files(SUFFIX), *self._files(DAMAGED))]
        path = self._folder / f"{max(numbers, default=0) + 1:012d}{SUFFIX}"
        temporary = path.with_suffix(TEMPORARY)
        try:
            with temporary.open("wb", buffering=0) as file:
                for buffer in buffers:
                    _write_all(file.fileno(), memoryview(buffer))
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self._folder)
        for old in self._files(SUFFIX)[: -self._kept]:
            old.unlink()
        for old in self._files(DAMAGED)[:-DAMAGED_KEPT]:
            old.unlink()
        return path

    def _files(self, suffix: str) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"*{suffix}") if path.stem.isdecimal())

    def _make_folder(self) -> None:
        missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.is_dir()]
        self._folder.mkdir(parents=True, exist_ok=True)
        # A file is only as durable as the names that lead to it.
        for folder in missing:
            _sync_folder(folder.parent)

    def _sweep(self) -> None:
        for path in self._folder.glob(f"*{TEMPORARY}"):
            _log.warning("removing %s: its write did not finish", path)
            path.unlink()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
