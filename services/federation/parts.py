"""Uploads in parts: kept in the shared store, so that a client may go on at another server where it was cut off."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from federated.rounds import Keys, Store
from services.api.problems import Problem

MOST_PARTS: Final = 4_096


class OffsetMismatch(ValueError):
    """A part that does not begin where the last one ended; ``there`` says how much is there."""

    def __init__(self, there: int) -> None:
        super().__init__(f"{there} bytes are there")
        self.there = there


class Parts:
    """The parts of one client's body, named by its digest. A part's key says where it begins and ends."""

    def __init__(self, store: Store, keys: Keys, started: int, client: str, digest: bytes) -> None:
        self._store = store
        # A client's id may hold slashes; its parts must not look like another's.
        self._prefix = f"{keys.iteration(started)}part/{digest.hex()}/{quote(client, safe='')}/"

    def there(self) -> int:
        """How many bytes are there, from the beginning on without a gap."""
        return self._whole()[0]

    def add(self, offset: int, body: bytes, most: int) -> int:
        """Keep ``body`` as what begins at ``offset``; gives how much is there then. A repeat changes nothing. Raises
        OffsetMismatch, and ValueError beyond ``most`` bytes or 4,096 parts."""
        there, parts = self._whole()
        if offset + len(body) <= there:
            return there
        if offset != there:
            raise OffsetMismatch(there)
        if offset + len(body) > most or len(parts) >= MOST_PARTS:
            raise ValueError(f"an upload has at most {most} bytes in {MOST_PARTS} parts")
        self._store.put_blob(f"{self._prefix}{offset:012d}-{offset + len(body):012d}", body)
        return offset + len(body)

    def take(self, offset: int, body: bytes, most: int) -> int:
        """``add``, for who sent the part over HTTP. Raises Problem offset_mismatch and body_too_large."""
        try:
            return self.add(offset, body, most)
        except OffsetMismatch as error:
            raise Problem("offset_mismatch", f"{error.there} bytes are here.") from error
        except ValueError as error:
            raise Problem("body_too_large", f"{error}.") from error

    def body(self) -> bytes:
        """All that is there."""
        return b"".join(self._store.get_blob(key) or b"" for key in self._whole()[1])

    def _whole(self) -> tuple[int, list[str]]:
        end, found = 0, []
        for key in self._store.blobs(self._prefix):
            start, stop = (int(number) for number in key.removeprefix(self._prefix).split("-"))
            if start == end and stop > end:  # of two parts that begin at the same place the first counts
                end = stop
                found.append(key)
        return end, found

    def drop(self) -> None:
        """Forget them: the body is stored whole."""
        self._store.delete(self._prefix)
