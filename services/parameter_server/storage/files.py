"""Files of records that grow at their end, and the system calls beneath: one seam, so that tests can put a disk that
is full, slow or broken in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

Buffer = bytes | bytearray | memoryview
_AT_ONCE: Final = 512
"""Buffers in one system call; POSIX promises 16, Linux takes 1,024."""


class Disk:
    """What durability asks of the operating system. Everything raises OSError."""

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file, whose writes go to its end."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        """How many bytes were written, maybe fewer than given."""
        return os.writev(descriptor, buffers)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        path.rename(to)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_path(self, path: Path) -> None:
        """Make a file's content, or the names in a folder, durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def make_folder(self, folder: Path) -> None:
        missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
        folder.mkdir(parents=True, exist_ok=True)
        # A file is only as durable as the names that lead to it.
        for one in missing:
            self.sync_path(one.parent)


class GrowingFile:
    """A file that is appended to. ``size``: bytes that were written whole; ``synced``: those on disk."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """Raises OSError."""
        self.path, self._disk = path, disk
        self._descriptor = disk.create(path)
        self.size = self.synced = 0
        self._ragged = False

    def append(self, buffers: Iterable[Buffer]) -> None:
        """Write all of ``buffers``. Raises OSError; of what was written, nothing stays."""
        try:
            if self._ragged:
                self._trim(self.size)
            self.size += self._write_all([memoryview(buffer).cast("B") for buffer in buffers])
        except OSError:
            self._ragged = True
            # If even this fails it is done before the next write; readers cut off an unfinished end themselves.
            with suppress(OSError):
                self._trim(self.size)
            raise

    def sync(self) -> None:
        """Everything appended is on disk afterwards. Raises OSError; then nobody knows how much is, and another try
        would prove nothing: the system may have dropped what it could not write."""
        self._disk.sync(self._descriptor)
        self.synced = self.size

    def cut(self) -> None:
        """Drop what is not known to be on disk. Raises OSError."""
        self._trim(self.synced)
        self.size = self.synced

    def close(self) -> None:
        self._disk.close(self._descriptor)

    def _trim(self, size: int) -> None:
        self._disk.truncate(self._descriptor, size)
        self._ragged = False

    def _write_all(self, buffers: list[memoryview]) -> int:
        total = sum(len(buffer) for buffer in buffers)
        first = 0
        while first < len(buffers):
            written = self._disk.write(self._descriptor, buffers[first : first + _AT_ONCE])
            while first < len(buffers) and written >= len(buffers[first]):
                written -= len(buffers[first])
                first += 1
            if written:
                buffers[first] = buffers[first][written:]
        return total
