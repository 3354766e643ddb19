"""What was asked of this party, one JSON object a line: when, by whom, how many rows, a digest of the ids, the outcome.

Digests are keyed with this party's own key, so that a file that gets out names nobody; the same request has the same
digest. The file is bounded: at its bound it becomes ``NAME.1``, in the place of the one before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

_KEY_BYTES: Final = 32
LEAST_BYTES: Final = 4_096


class AuditLog:
    """Appends to ``path``. Thread-safe. Raises OSError where it cannot be written: nothing is answered unaudited."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path, self._most = path, max(LEAST_BYTES, most_bytes)
        self._key = _key(path.with_name("audit.key"))
        self._lock = threading.Lock()
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def digest(self, ids: Iterable[bytes]) -> str:
        """A keyed digest of ``ids``, in their order."""
        hashed = hmac.new(self._key, digestmod=hashlib.sha256)
        for one in ids:
            hashed.update(len(one).to_bytes(4, "little") + one)
        return hashed.hexdigest()[:32]

    def write(self, who: str, rows: int, digest: str, outcome: str, **more: str | int | float | bool) -> None:
        """One line, on its way to the disk when this returns."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {"at": at, "who": who, "rows": rows, "ids": digest, "outcome": outcome, **more}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with self._lock:
            if os.fstat(self._file).st_size + len(line) > self._most:
                os.close(self._file)
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._file = self._open()
            os.write(self._file, line)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            os.close(self._file)


def _key(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != _KEY_BYTES:
            raise OSError(
                f"{path} is not a key of {_KEY_BYTES} bytes; remove it, and a new one is made"
            ) from None
        return key
    with os.fdopen(descriptor, "wb") as file:
        key = secrets.token_bytes(_KEY_BYTES)
        file.write(key)
    return key
