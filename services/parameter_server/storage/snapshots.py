"""Where a shard's snapshots and logs lie, and what is wrong when they cannot be started from.

``<folder>/<model>/<shard>-of-<shards>/`` holds ``<position>.snapshot``, the shard as of that step, and
``<position>.log``, the steps from that one on, up to where the next log begins. Both are files of records (see
``sync/snapshot.py``). A snapshot is written beside its place, synced, renamed, and its folder synced; so a crash
leaves at most a temporary file. A log that nothing reaches before a snapshot under way is whole is ``.pending`` until
then: nobody was told that it is durable. What is damaged keeps its bytes under its name and ``.damaged``, for whoever
wants to look; the newest eight of those are kept.

Exceptions::

    SnapshotError
    ├── SnapshotsLost        there was something of the shard, and nothing of it can be read
    ├── OtherVersion         written by a version whose files this one does not read
    ├── LayoutChanged        the snapshots were made with another number of shards
    └── FolderHeld           another process of the same name has the folder
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Final

from services.parameter_server.storage.files import Disk, GrowingFile

SNAPSHOT: Final = ".snapshot"
LOG: Final = ".log"
DAMAGED: Final = ".damaged"
PENDING: Final = ".pending"
TEMPORARY: Final = ".tmp"
DAMAGED_KEPT: Final = 8
_COPY_BYTES: Final = 2**20
_log = logging.getLogger(__name__)


class SnapshotError(Exception):
    """What is on disk cannot be started from."""


class SnapshotsLost(SnapshotError):
    """Every snapshot of a shard is damaged, and its log does not reach back to its birth."""


class OtherVersion(SnapshotError):
    """The file is whole for all that is known, but of a format that this version does not read."""


class LayoutChanged(SnapshotError):
    """The number of shards is not the one of the snapshots."""


class FolderHeld(SnapshotError):
    """Another process still writes here."""


Numbered = list[tuple[int, Path]]
"""Files with the position in their names, ascending."""


class ShardFolder:
    """The files of one shard. ``kept``: how many snapshots stay."""

    def __init__(
        self, folder: Path, model: str, shard: int, shards: int, kept: int, disk: Disk | None = None
    ) -> None:
        """Raises LayoutChanged if the model was saved with another number of shards."""
        self.kept, self.disk = kept, disk or Disk()
        self.path = folder / model / f"{shard}-of-{shards}"
        for other in sorted((folder / model).glob("*-of-*")):
            if other.name.rpartition("-of-")[2] != str(shards):
                raise LayoutChanged(
                    f"{other} was saved with another number of shards than {shards}; set parameters.shards back, "
                    f"or move {folder / model} away to start anew"
                )

    def snapshots(self) -> Numbered:
        """Every snapshot, by the position at which it was begun."""
        return self._files(SNAPSHOT)

    def logs(self) -> Numbered:
        """Every log, by its first position."""
        return self._files(LOG)

    def damaged(self) -> list[Path]:
        """What was set aside, the newest last."""
        found = self.path.glob(f"*{DAMAGED}")
        return sorted(found, key=lambda path: (path.stat().st_ctime_ns, path.name))

    def snapshot(self, position: int) -> Path:
        return self.path / f"{position:012d}{SNAPSHOT}"

    def log(self, position: int) -> Path:
        return self.path / f"{position:012d}{LOG}"

    def pending(self, position: int) -> Path:
        return self.path / f"{position:012d}{PENDING}"

    def create(self, path: Path) -> GrowingFile:
        """A new file here, its name durable. Raises OSError."""
        self.disk.make_folder(self.path)
        file = GrowingFile(path, self.disk)
        try:
            self.disk.sync_path(self.path)
        except OSError:
            file.close()
            raise
        return file

    def sweep(self) -> None:
        """Remove what a crash left half written under a temporary name, and logs whose snapshot is not there."""
        newest = max((position for position, _ in self.snapshots()), default=None)
        for first, path in self._files(PENDING):
            if first - 1 == newest:
                self.disk.rename(path, self.log(first))
            else:
                _log.info("removing %s: the snapshot that it follows was not completed", path)
                self.disk.remove(path)
        for path in self.path.glob(f"*{TEMPORARY}"):
            _log.info("removing %s: its write did not finish", path)
            self.disk.remove(path)

    def set_aside(self, path: Path) -> None:
        """Keep a file under its name and ``.damaged``. Raises OSError."""
        self.disk.rename(path, path.with_name(path.name + DAMAGED))
        self._tidy()

    def cut(self, path: Path, size: int, *, keep: bool) -> None:
        """Shorten a file, having copied what goes to a ``.damaged`` one if ``keep``. Raises OSError."""
        with path.open("r+b") as file:
            if keep:
                file.seek(size)
                with path.with_name(f"{path.name}.from-{size}{DAMAGED}").open("wb") as copy:
                    while part := file.read(_COPY_BYTES):
                        copy.write(part)
            file.truncate(size)
        self.disk.sync_path(path)
        self._tidy()

    def prune(self) -> None:
        """Remove the snapshots beyond those kept, and the logs that none of the kept ones needs. The log reaches back
        to the shard's birth until there are as many snapshots as are kept. Raises OSError."""
        found = self.snapshots()
        if len(found) < self.kept:
            return
        oldest = found[-self.kept][0]
        logs = self.logs()
        for (_, path), (following, _) in pairwise(logs):
            if following <= oldest + 1:
                self.disk.remove(path)
        for _, path in found[: -self.kept]:
            self.disk.remove(path)

    def keep_only(self, files: Collection[Path]) -> None:
        """Remove every snapshot and log but ``files``: they belong to another line of steps. Raises OSError."""
        for _, path in (*self.snapshots(), *self.logs()):
            if path not in files:
                self.disk.remove(path)

    def _files(self, suffix: str) -> Numbered:
        return sorted(
            (int(path.stem), path) for path in self.path.glob(f"*{suffix}") if path.stem.isdecimal()
        )

    def _tidy(self) -> None:
        for old in self.damaged()[:-DAMAGED_KEPT]:
            self.disk.remove(old)
        self.disk.sync_path(self.path)
