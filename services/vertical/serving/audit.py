"""What was asked of this party, one JSON object a line: when, by whom, which ids, and what became of it.

Ids stand as marks: eight characters of a hash of each id, in the order of asking, keyed with this party's own key
(``audit.key`` beside the log). A log that gets out names nobody; this party finds the lines of an id again
(``marks_in``, `headwater fl vertical audit`). Lines are ASCII, so no text in them can look like the end of a line.

    audit.jsonl      lines, oldest first; at its bound it becomes
    audit.jsonl.1    in the place of the one before, unless that has lines younger than ``keep_s``: then nothing more
                     is written, and so nothing answered (AuditFull)
    audit.lock       held for each line: several processes of a party may write (one that serves, one that predicts)

A line is whole or not there: a write that fails is taken back, and what a cut left behind is closed by a line's end at
the next start. Refusals are many, cheap to cause, and would push answers out of the log: of each kind and asker only
``REFUSALS`` a minute stand one by one, the others as a number.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

_KEY_BYTES: Final = 32
LEAST_BYTES: Final = 4_096
MARK: Final = 8
"""Characters of a mark (6 bytes in base64): among a million ids two are alike with probability .002."""
REFUSALS: Final = 60
"""Lines a minute of one kind of refusal to one asker."""
MINUTE_S: Final = 60.0
_BLOCK: Final = 2**16


class AuditFull(OSError):
    """The log is at its bound and holds lines that are too young to be forgotten."""


class AuditLog:
    """Appends to ``path``. Thread-safe, and safe beside other processes. Raises OSError where it cannot be written:
    nothing is answered unaudited."""

    def __init__(
        self,
        path: Path,
        most_bytes: int,
        *,
        keep_s: float = 0.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._most, self._keep_s = path, max(LEAST_BYTES, most_bytes), keep_s
        self._now, self._monotonic = now, monotonic
        self._lock = threading.Lock()
        self._refusals: dict[tuple[str, str], tuple[float, int]] = {}
        self._held = os.open(path.with_name("audit.lock"), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            with self._alone():
                self._key = _make_key(path.with_name("audit.key"))
                self._file = self._open()
        except BaseException:
            os.close(self._held)
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process writes or turns the log over."""
        fcntl.flock(self._held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._held, fcntl.LOCK_UN)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
        return file

    @property
    def older(self) -> Path:
        """The file of older lines."""
        return older(self._path)

    def marks(self, ids: Iterable[bytes]) -> str:
        """The marks of ``ids``, in their order."""
        return marks_of(self._key, ids)

    def write(self, who: str, rows: int, ids: str, outcome: str, **more: str | int | float | bool) -> None:
        """One line (``ids``: marks), in the system's hands when this returns: it outlives this process."""
        with self._lock:
            self._append({"who": who, "rows": rows, "ids": ids, "outcome": outcome, **more})

    def refuse(self, who: str, rows: int, outcome: str, **more: str | int | float | bool) -> None:
        """A line of something that was not answered, or one more of those that are counted only."""
        with self._lock:
            now, key = self._monotonic(), (who, outcome)
            began, count = self._refusals.get(key, (now, 0))
            if now - began >= MINUTE_S:
                self._tell_more(key, count)
                began, count = now, 0
            self._refusals[key] = began, count + 1
            if count < REFUSALS:
                self._append({"who": who, "rows": rows, "ids": "", "outcome": outcome, **more})

    def _tell_more(self, key: tuple[str, str], count: int) -> None:
        if count > REFUSALS:
            who, outcome = key
            entry = {"who": who, "rows": 0, "ids": "", "outcome": outcome, "requests": count - REFUSALS}
            self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        at = self._now().isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, **entry}, allow_nan=False).encode() + b"\n"
        with self._alone():
            self._follow()
            self._put(line)

    def _follow(self) -> None:
        """To the file that is the log now, where another process turned it over, or a person moved it away."""
        own = os.fstat(self._file)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            os.close(self._file)
            self._file = self._open()

    def _put(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._most:
            self._rotate()
            size = 0
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            # A full disk takes a part of a line; the next one must not be glued to it.
            os.ftruncate(self._file, size)
            raise

    def _rotate(self) -> None:
        if self._keep_s and self.older.exists():
            age_s = self._now().timestamp() - self.older.stat().st_mtime
            if age_s < self._keep_s:
                raise AuditFull(
                    f"{self._path} is full and {self.older.name} is too young to be forgotten (serve.audit_keep); "
                    "raise serve.audit_bytes, or move the file away"
                )
        self._path.replace(self.older)
        os.close(self._file)
        self._file = self._open()

    def size(self) -> int:
        """Bytes of the log on the disk, older lines included."""
        return sum(path.stat().st_size for path in (self._path, self.older) if path.exists())

    def recent(self, seconds: float) -> Iterator[dict[str, Any]]:
        """The lines of the last ``seconds``, youngest first."""
        since = (self._now() - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
        for path in (self._path, self.older):
            for line in _backwards(path):
                entry = _entry(line)
                if entry is None:
                    continue
                if entry["at"] < since:
                    return
                yield entry

    def close(self) -> None:
        """Close the file, with what was counted only."""
        with self._lock:
            try:
                for key, (_, count) in self._refusals.items():
                    self._tell_more(key, count)
            finally:
                os.close(self._file)
                os.close(self._held)


def older(path: Path) -> Path:
    """Where the lines before those of ``path`` are."""
    return path.with_name(f"{path.name}.1")


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """All lines of the log at ``path``, oldest first; what a cut left of one is passed over. For any process."""
    for file in (older(path), path):
        if file.exists():
            with file.open("rb") as lines:
                yield from (entry for entry in map(_entry, lines) if entry is not None)


def read_key(path: Path) -> bytes:
    """The key of the log's marks. Raises OSError."""
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} is not a key of {_KEY_BYTES} bytes; remove it, and a new one is made")
    return key


def marks_of(key: bytes, ids: Iterable[bytes]) -> str:
    """The marks of ``ids`` under ``key``, in their order."""
    digests = (hmac.digest(key, one, hashlib.sha256)[: MARK * 6 // 8] for one in ids)
    return base64.urlsafe_b64encode(b"".join(digests)).decode()


def marks_in(entry: dict[str, Any]) -> frozenset[str]:
    """The marks of a line."""
    text = str(entry["ids"])
    return frozenset(text[at : at + MARK] for at in range(0, len(text), MARK))


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return (
        found if isinstance(found, dict) and {"at", "who", "rows", "ids", "outcome"} <= found.keys() else None
    )


def _backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file from its end."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        rest = b""
        while end:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            first, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
            rest, end = first, begin
        yield rest


def _make_key(path: Path) -> bytes:
    if not path.exists():
        # Whole or not there: half a key would be refused at every later start.
        beside = path.with_name(f".{path.name}.new")
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    return read_key(path)
