"""A folder of bytes on disk, for sets beyond memory; see ``federated.psi.members.Folder``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.vertical.store import StateDamaged, StateNotKept

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")


class FolderDamaged(StateDamaged, ValueError):
    """The folder's files are shorter than at the checkpoint: it cannot be gone on from."""


class DiskFolder:
    """Files below ``path``, which is made, readable by this user alone, and used by one run only.

    ``mark`` writes all through to the disk, so that what a checkpoint stands on outlives the machine's power, too.
    """

    def __init__(self, path: Path) -> None:
        """Raises StateNotKept, as ``append`` and ``mark`` do: no room, no rights."""
        self._path = path
        with self._writing():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._changed: set[str] = set()

    def expect(self, length: int) -> None:
        """See ``Folder``: a mark has sizes alone."""

    def append(self, name: str, data: bytes) -> None:
        """See ``Folder``."""
        with self._writing(), self._file(name).open("ab") as file:
            file.write(data)
        self._changed.add(name)

    def read(self, name: str) -> bytes:
        """See ``Folder``."""
        path = self._file(name)
        return path.read_bytes() if path.exists() else b""

    def remove(self, name: str) -> None:
        """See ``Folder``."""
        self._file(name).unlink(missing_ok=True)
        self._changed.discard(name)

    def mark(self) -> bytes:
        """See ``Folder``: the files' sizes."""
        with self._writing():
            for name in self._changed:
                _write_through(self._file(name))
            _write_through(self._path)
        self._changed.clear()
        sizes = {path.name: path.stat().st_size for path in sorted(self._path.iterdir())}
        return json.dumps(sizes).encode()

    def back_to(self, mark: bytes) -> None:
        """See ``Folder``. Raises FolderDamaged."""
        sizes: dict[str, int] = json.loads(mark)
        for name, size in sizes.items():
            path = self._file(name)
            if not path.exists() or path.stat().st_size < size:
                raise FolderDamaged(f"{path} is missing or shorter than {size} bytes; --fresh begins anew")
            os.truncate(path, size)
        for path in list(self._path.iterdir()):
            if path.name not in sizes:
                path.unlink()

    def empty(self) -> None:
        """As if it had just been made."""
        self.back_to(b"{}")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StateNotKept(
                f"{self._path} takes nothing more: {error.strerror}; make room there, and start again"
            ) from error

    def _file(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a file here")
        return self._path / name


def _write_through(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
