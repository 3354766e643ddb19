"""A folder of bytes on disk, for sets beyond memory; see ``federated.psi.members.Folder``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"[a-z0-9-]{1,64}")


class FolderDamaged(ValueError):
    """The folder's files are shorter than at the checkpoint: it cannot be gone on from."""


class DiskFolder:
    """Files below ``path``, which is made, readable by this user alone, and used by one run only.

    ``mark`` writes all through to the disk, so that what a checkpoint stands on outlives the machine's power, too.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._changed: set[str] = set()

    def append(self, name: str, data: bytes) -> None:
        """See ``Folder``."""
        with self._file(name).open("ab") as file:
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
                raise FolderDamaged(f"{path} is missing or shorter than {size} bytes: begin anew")
            os.truncate(path, size)
        for path in list(self._path.iterdir()):
            if path.name not in sizes:
                path.unlink()

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
