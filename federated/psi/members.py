"""A party's set in a secret random order, held in memory or, sorted into buckets, in a folder of bytes.

On disk, each id goes to one of 256 buckets by the first byte of its keyed hash, and each bucket is then sorted by the
whole hash. One pass so gives both: equal ids meet in one bucket, where they are counted; and the order in which the
ids are sent is that of a keyed hash, which tells nothing of the file's. Memory: one bucket, 1/256 of the set.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import numpy as np

from federated.psi.hashing import MOST_IDS, Rows, secret_order, tags
from federated.psi.ids import EXAMPLES, IdRefused, IdRule, Ids, IdsRefused, Named, complaint_of
from federated.vertical.parties import MOST_BODY

BUCKETS: Final = 256
_RECORD: Final = struct.Struct("<QH")
_FLUSH_BYTES: Final = 2**16
_MOST_MARK: Final = MOST_BODY - 2**16  # A checkpoint has a few fields beside it.


class Folder(Protocol):
    """Named runs of bytes that only grow, or are cut back. What lies in memory here lies on disk where there is one."""

    def expect(self, length: int) -> None:
        """So many bytes are coming in all. Raises ValueError where ``mark`` would not take them."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Add ``data`` at the end of ``name``, which need not be there yet."""
        ...

    def read(self, name: str) -> bytes:
        """All of ``name``; empty where it is not there."""
        ...

    def remove(self, name: str) -> None:
        """Forget ``name``."""
        ...

    def mark(self) -> bytes:
        """What ``back_to`` needs to bring everything back to now, written through to what outlives this process."""
        ...

    def back_to(self, mark: bytes) -> None:
        """As it was at ``mark``. Raises ValueError where that cannot be."""
        ...


class MemoryFolder:
    """A folder in memory; its mark is its content, so that it comes back in a new process too."""

    def __init__(self) -> None:
        self._held: dict[str, bytearray] = {}

    def expect(self, length: int) -> None:
        """See ``Folder``."""
        if length > _MOST_MARK:
            raise ValueError(
                f"{length} bytes of tags are more than a checkpoint takes ({_MOST_MARK}): have them on disk, or accept "
                "fewer ids of the peer"
            )

    def append(self, name: str, data: bytes) -> None:
        """See ``Folder``."""
        self._held.setdefault(name, bytearray()).extend(data)

    def read(self, name: str) -> bytes:
        """See ``Folder``."""
        return bytes(self._held.get(name, b""))

    def remove(self, name: str) -> None:
        """See ``Folder``."""
        self._held.pop(name, None)

    def mark(self) -> bytes:
        """See ``Folder``."""
        parts = []
        for name, data in self._held.items():
            encoded = name.encode()
            parts += [
                len(encoded).to_bytes(2, "little"),
                encoded,
                len(data).to_bytes(8, "little"),
                bytes(data),
            ]
        return b"".join(parts)

    def back_to(self, mark: bytes) -> None:
        """See ``Folder``."""
        held: dict[str, bytearray] = {}
        at = 0
        while at < len(mark):
            name_end = at + 2 + int.from_bytes(mark[at : at + 2], "little")
            length = int.from_bytes(mark[name_end : name_end + 8], "little")
            at_data, at_end = name_end + 8, name_end + 8 + length
            if at_end > len(mark):
                raise ValueError("a folder's mark that is cut short")
            held[mark[at + 2 : name_end].decode()] = bytearray(mark[at_data:at_end])
            at = at_end
        self._held = held


class Members(Protocol):
    """N different ids in a secret order."""

    def __len__(self) -> int: ...

    def chunks(self, size: int, first: int = 0) -> Iterator[list[bytes]]:
        """The ids from chunk ``first`` on, ``size`` at a time."""
        ...

    def take(self, positions: Rows) -> tuple[list[bytes], Rows]:
        """The ids at rising ``positions`` of the order, and the rows where they stand in the file."""
        ...


Arrange = Callable[[bytes], Members]
"""Makes a party's members in the order of a secret key of 32 bytes; again for the same key. For ids in memory:
``functools.partial(MemoryMembers, ids)``."""


class MemoryMembers:
    """``ids`` in the order that ``key`` (32 bytes) makes."""

    def __init__(self, ids: Ids, key: bytes) -> None:
        self._ids, self._order = ids, secret_order(ids.values, key)

    def __len__(self) -> int:
        return len(self._order)

    def chunks(self, size: int, first: int = 0) -> Iterator[list[bytes]]:
        """See ``Members``."""
        values = self._ids.values
        for at in range(first * size, len(self), size):
            yield [values[place] for place in self._order[at : at + size].tolist()]

    def take(self, positions: Rows) -> tuple[list[bytes], Rows]:
        """See ``Members``."""
        places = self._order[positions]
        return [self._ids.values[place] for place in places.tolist()], self._ids.rows[places]


class SpooledMembers:
    """Ids beyond memory, sorted into ``folder`` by ``spool``."""

    def __init__(self, folder: Folder, counts: list[int], empty: Named, repeated: Named) -> None:
        self._folder, self._ends = folder, np.cumsum(counts)
        self.complaint = complaint_of(empty, repeated)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def chunks(self, size: int, first: int = 0) -> Iterator[list[bytes]]:
        """See ``Members``."""
        bucket = int(np.searchsorted(self._ends, first * size, side="right"))
        skip = first * size - (int(self._ends[bucket - 1]) if bucket else 0)
        held: list[bytes] = []
        for number in range(bucket, BUCKETS):
            held += [value for _, value in _records(self._folder.read(_bucket(number)))][skip:]
            skip = 0
            at = 0
            while len(held) - at >= size:
                yield held[at : at + size]
                at += size
            held = held[at:]
        if held:
            yield held

    def take(self, positions: Rows) -> tuple[list[bytes], Rows]:
        """See ``Members``."""
        values: list[bytes] = []
        rows: list[int] = []
        start = 0
        for number, end in enumerate(self._ends.tolist()):
            low, high = np.searchsorted(positions, [start, end])
            if low < high:
                records = list(_records(self._folder.read(_bucket(number))))
                for place in (positions[low:high] - start).tolist():
                    rows.append(records[place][0])
                    values.append(records[place][1])
            start = end
        return values, np.array(rows, np.int64)


def spool(texts: Iterable[str], rule: IdRule, folder: Folder, key: bytes) -> SpooledMembers:
    """The set of ids in ``texts``, sorted into ``folder`` in the order that ``key`` makes.

    Raises IdsRefused for texts that are no ids, and for more than 2**31 - 1.
    """
    waiting: list[bytearray] = [bytearray() for _ in range(BUCKETS)]
    refused: list[tuple[int, str]] = []
    empty: list[tuple[int, str]] = []
    counts = [0, 0]
    for row, text in enumerate(texts):
        if row >= MOST_IDS:
            raise IdsRefused(f"more than {MOST_IDS} rows")
        try:
            value = rule.apply(text)
        except IdRefused as why:
            counts[0] += 1
            refused = [*refused, (row, f"{text[:40]} {why}")][:EXAMPLES]
            continue
        if not value:
            counts[1] += 1
            empty = [*empty, (row, text[:40])][:EXAMPLES]
            continue
        number = _drawn([value], key)[0, 0]
        waiting[number] += _RECORD.pack(row, len(value)) + value
        if len(waiting[number]) >= _FLUSH_BYTES:
            folder.append(_bucket(number), bytes(waiting[number]))
            waiting[number].clear()
    if refused:
        raise IdsRefused(f"texts that are no ids: {Named(counts[0], tuple(refused))}")
    sizes: list[int] = []
    repeated: list[tuple[int, str]] = []
    total = 0
    for number in range(BUCKETS):
        folder.append(_bucket(number), bytes(waiting[number]))
        records = list(_records(folder.read(_bucket(number))))
        kept, again = _sorted_once(records, key)
        folder.remove(_bucket(number))
        folder.append(_bucket(number), b"".join(_RECORD.pack(row, len(value)) + value for row, value in kept))
        sizes.append(len(kept))
        total += len(again)
        repeated += [(row, value.decode()[:40]) for row, value in again[:EXAMPLES]]
    repeated.sort()
    return SpooledMembers(
        folder, sizes, Named(counts[1], tuple(empty)), Named(total, tuple(repeated[:EXAMPLES]))
    )


def _sorted_once(
    records: list[tuple[int, bytes]], key: bytes
) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """``records`` by their keyed hash, each id with its first row; and those that stood before."""
    drawn = _drawn([value for _, value in records], key)
    order = sorted(range(len(records)), key=lambda at: (drawn[at].tobytes(), records[at][0]))
    kept: list[tuple[int, bytes]] = []
    again: list[tuple[int, bytes]] = []
    for at in order:
        (again if kept and kept[-1][1] == records[at][1] else kept).append(records[at])
    return kept, again


def _drawn(values: list[bytes], key: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tags("psi-order", key, values, 16)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        row, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        yield row, data[at : at + length]
        at += length


def _bucket(number: int) -> str:
    return f"ids-{number:03d}"
