"""One shard's files while they are written: its log, and a snapshot under way. Used by the writing thread alone."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from services.parameter_server.storage.files import GrowingFile
from services.parameter_server.storage.snapshots import TEMPORARY, ShardFolder
from sync.records import Delta, End, Graves, Head, Rows
from sync.snapshot import encode_record

SYNC_BYTES: Final = 16 * 2**20
"""A snapshot is synced whenever so much was written of it: one sync of all of it would keep the log waiting."""
_log = logging.getLogger(__name__)


class ShardLog:
    """Appends steps to the newest log, and writes snapshots beside it.

    ``head``: of the shard, without rows, as of the position that the log continues from.

    Once steps are missing (``abandon``), nothing is taken until the next snapshot begins; until that one is complete,
    the log after it is of no use.
    """

    __slots__ = (
        "_folder",
        "_head",
        "_log_file",
        "_renewed",
        "_snapshot",
        "_taking",
        "begun",
        "behind",
        "position",
    )

    def __init__(self, folder: ShardFolder, head: Head) -> None:
        self._folder = folder
        self._head = head
        self._log_file: GrowingFile | None = None
        self._snapshot: tuple[int, GrowingFile] | None = None
        self._taking = True
        self._renewed = False
        self.behind = False
        """Whether the newest snapshot and the log after it do not reach each other."""
        self.position = head.position
        """The newest step that was written."""
        self.begun = 0
        """The number of the newest snapshot that was begun."""

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def snapshotting(self) -> bool:
        """Whether a snapshot is under way."""
        return self._snapshot is not None

    def append(self, delta: Delta) -> int:
        """Write a step; how many bytes it takes (0: it is of no use now). Raises OSError; then nothing was written."""
        if not self._taking:
            return 0
        history = self._head.history
        if not history or history[-1][0] != delta.epoch:
            history = (*history, (delta.epoch, delta.position))
        if self._log_file is None:
            self._log_file = self._begin_log(delta.position)
        buffers = encode_record(delta)
        self._log_file.append(buffers)
        self._head = replace(self._head, epoch=delta.epoch, position=delta.position, history=history)
        self.position = delta.position
        return sum(len(buffer) for buffer in buffers)

    def _begin_log(self, position: int) -> GrowingFile:
        file = self._folder.create(
            self._folder.pending(position) if self.behind else self._folder.log(position)
        )
        try:
            file.append(encode_record(self._head))
        except OSError:
            file.close()
            with suppress(OSError):
                self._folder.disk.remove(file.path)
            raise
        return file

    def sync(self) -> bool:
        """Every step appended is on disk afterwards; whether there was anything to do. Raises OSError; then the log has
        to be abandoned."""
        if self._log_file is None or self._log_file.synced == self._log_file.size:
            return False
        self._log_file.sync()
        return True

    def abandon(self, *, renew: bool = False) -> None:
        """Take no more steps until a snapshot begins. With ``renew`` what is there belongs to another line of steps,
        and goes once that snapshot is complete. Raises OSError; the log is abandoned all the same."""
        file, self._log_file = self._log_file, None
        self._taking, self.behind = False, True
        self._renewed |= renew
        if file is not None:
            try:
                file.cut()
            finally:
                file.close()

    def begin(self, head: Head, number: int) -> int:
        """Start snapshot ``number`` of the shard at ``head``; steps after it go to a log of their own. How many bytes
        were written. Raises OSError."""
        if self._log_file is not None:
            self.sync()
            self._log_file.close()
            self._log_file = None
        self._head = replace(head, knowledge={}, epochs={}, pushes={}, generations=(), norms={}, sketches={})
        self._taking, self.position, self.begun = True, head.position, number
        file = self._folder.create(self._folder.snapshot(head.position).with_suffix(TEMPORARY))
        self._snapshot = head.position, file
        return self._write(file, head)

    def add(self, page: Rows | Graves) -> int:
        """Write a page of the snapshot; how many bytes it takes. Raises OSError."""
        if self._snapshot is None:
            return 0
        _, file = self._snapshot
        size = self._write(file, page)
        if file.size - file.synced >= SYNC_BYTES:
            file.sync()
        return size

    def end(self, position: int) -> int:
        """Complete the snapshot; the log has to be on disk up to ``position``. Its bytes in all. Raises OSError."""
        assert self._snapshot is not None, "no snapshot is under way"
        first, file = self._snapshot
        self._write(file, End(position))
        file.sync()
        path = self._folder.snapshot(first)
        self._folder.disk.rename(file.path, path)
        if self.behind and self._log_file is not None:
            following = self._folder.log(first + 1)
            self._folder.disk.rename(self._log_file.path, following)
            self._log_file.path = following
        self._folder.disk.sync_path(self._folder.path)
        self._snapshot = None
        file.close()
        self.behind = False
        try:
            if self._renewed:
                self._folder.keep_only({path} if self._log_file is None else {path, self._log_file.path})
                self._renewed = False
            self._folder.prune()
        except OSError as error:
            _log.warning("old snapshots in %s were not removed: %s", self._folder.path, error)
        return file.size

    def drop(self) -> None:
        """Give the snapshot under way up, and remove it. Raises OSError where that fails; a start removes it."""
        if self._snapshot is None:
            return
        _, file = self._snapshot
        self._snapshot = None
        file.close()
        self._folder.disk.remove(file.path)

    def close(self) -> None:
        """Close what is open. Raises OSError."""
        self.drop()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    def _write(self, file: GrowingFile, record: Head | Rows | Graves | End) -> int:
        before = file.size
        file.append(encode_record(record))
        return file.size - before
