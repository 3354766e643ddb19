"""What one run of an intersection leaves to the next, in a folder for this user alone: as secret as the ids.

signer-BITS         the signer's key
signatures          hashes of the signer's own signatures, added to as they are made
prepared-BITS       the large side of the unbalanced mode
filter-PEER         the filter that a peer sent
asked, asked.lock   how much each peer asked (``budget``)
"""

from __future__ import annotations

import fcntl
import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from federated.psi.signatures import CACHED_BYTES, MemoryCache
from services.vertical.store import StateNotKept, read_whole, write_whole

SIGNATURES: Final = "signatures"
_PLACE_BYTES: Final = 16
_RECORD: Final = _PLACE_BYTES + CACHED_BYTES
_HEAD: Final = struct.Struct("<I32s")


class KeptFolder:
    """See ``federated.psi.own.Kept``. The folder is made when something is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def made(self) -> Path:
        """The folder, which is there now. Raises StateNotKept."""
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StateNotKept(
                f"{self._path} cannot be made: {error.strerror}; name another folder"
            ) from error
        return self._path

    def read(self, name: str) -> bytes:
        """See ``Kept``. Raises StateDamaged."""
        file = self._path / name
        return read_whole(file, name) if file.exists() else b""

    def write(self, name: str, data: bytes) -> None:
        """The whole file anew, or not at all. Raises StateNotKept."""
        write_whole(self.made() / name, data, name)


class FileCache:
    """See ``SignatureCache``: signatures are in the file as soon as they are made, so that no run begins them anew.

    A batch is its count, a digest and its records. A batch that a killed process wrote in part, and what lies behind
    it, is dropped when the file is next read. Raises StateNotKept.
    """

    def __init__(self, folder: Path, most: int = 10_000_000) -> None:
        self._folder, self._path, self._most = KeptFolder(folder), folder / SIGNATURES, most
        self._read: MemoryCache | None = None

    def _held(self) -> MemoryCache:
        if self._read is None:
            self._folder.made()
            self._path.touch(0o600)
            with self._opened("r+b") as file:
                self._read = self._load(file)
        return self._read

    def _load(self, file: IO[bytes]) -> MemoryCache:
        found, whole, count = MemoryCache(self._most), 0, 0
        for batch in _batches(file.read()):
            records = [batch[at : at + _RECORD] for at in range(0, len(batch), _RECORD)]
            found.put([one[:_PLACE_BYTES] for one in records], [one[_PLACE_BYTES:] for one in records])
            whole, count = whole + _HEAD.size + len(batch), count + len(records)
        file.truncate(whole)
        if count > self._most:
            file.seek(0)
            file.truncate(0)
            file.write(_batch(found.to_bytes()))
        return found

    @contextmanager
    def _opened(self, mode: str) -> Iterator[IO[bytes]]:
        try:
            with self._path.open(mode) as file:
                # Another process of this party may sign in another job.
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        except OSError as error:
            raise StateNotKept(
                f"{self._path} cannot be written: {error.strerror}; make room there"
            ) from error

    def __len__(self) -> int:
        return len(self._held().held)

    def get(self, ids: Sequence[bytes]) -> list[bytes | None]:
        """See ``SignatureCache``."""
        return self._held().get(ids)

    def put(self, ids: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """See ``SignatureCache``."""
        self._held().put(ids, hashes)
        with self._opened("ab") as file:
            file.write(_batch(b"".join(one + other for one, other in zip(ids, hashes, strict=True))))


def _batch(records: bytes) -> bytes:
    return _HEAD.pack(len(records) // _RECORD, hashlib.sha256(records).digest()) + records


def _batches(data: bytes) -> Iterator[bytes]:
    """The records of each batch that is whole."""
    at = 0
    while at + _HEAD.size <= len(data):
        count, digest = _HEAD.unpack_from(data, at)
        records = data[at + _HEAD.size : at + _HEAD.size + count * _RECORD]
        if len(records) != count * _RECORD or hashlib.sha256(records).digest() != digest:
            return
        yield records
        at += _HEAD.size + len(records)
