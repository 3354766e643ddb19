"""Bounded log files: what a child prints is written by the supervisor, which rotates."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

_CHUNK: int = 65_536


class RotatingLog:
    """A file of at most ``max_bytes``; a full one becomes ``.1``, and the older ``.1`` becomes ``.2``, up to
    ``kept`` old ones. One thread writes it."""

    def __init__(self, path: Path, max_bytes: int = 8 * 2**20, kept: int = 2) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._kept = kept
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Append ``data``. It goes to one file whole, unless it is larger than a file may be."""
        for start in range(0, len(data), self._max_bytes):
            part = data[start : start + self._max_bytes]
            if self._size and self._size + len(part) > self._max_bytes:
                self._rotate()
            self._file.write(part)
            self._size += len(part)

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._kept, 0, -1):
            newer = self.path if number == 1 else self._old(number - 1)
            if newer.exists():
                os.replace(newer, self._old(number))
        self._file = self.path.open("wb", buffering=0)
        self._size = 0

    def _old(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def close(self) -> None:
        self._file.close()


def pump(source: IO[bytes], target: RotatingLog) -> threading.Thread:
    """Start a thread that writes all of ``source`` to ``target`` and closes both at its end.

    A full disk must not block the child, so what cannot be written is read on and dropped.
    """

    def run() -> None:
        with source:
            while chunk := os.read(source.fileno(), _CHUNK):
                try:
                    target.write(chunk)
                except OSError:
                    continue
        target.close()

    thread = threading.Thread(target=run, name=f"log-{target.path.stem}", daemon=True)
    thread.start()
    return thread


def tail(path: Path, lines: int, max_bytes: int = 65_536) -> list[str]:
    """The last ``lines`` lines of a log, of at most ``max_bytes``; [] where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            return file.read().decode("utf-8", "replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
