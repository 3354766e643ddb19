"""Tags that are collected chunk by chunk and compared at the end, in memory or in buckets of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from federated.psi.hashing import Rows, Tags, as_rows, keys_of, matches, repeats
from federated.psi.members import Folder

IN_MEMORY: Final = 4_000_000
"""Up to so many tags a pool is one bucket; beyond, 256."""
_PLACE: Final = 8


def expect(folder: Folder, length: int, count: int) -> None:
    """``count`` tags of ``length`` bytes are coming. Raises ValueError where ``folder`` is none for as many."""
    folder.expect(count * (length + _PLACE))


class TagPool:
    """Tags of ``length`` bytes in ``folder``, each with the position where it was added."""

    def __init__(self, folder: Folder, name: str, length: int, expected: int) -> None:
        self._folder, self._name, self._length = folder, name, length
        self.buckets = 1 if expected <= IN_MEMORY else 256

    def add(self, added: Tags, first: int) -> None:
        """``added`` [N, L] at the positions from ``first`` on."""
        places = np.arange(first, first + len(added), dtype="<u8").view(np.uint8).reshape(-1, _PLACE)
        records = np.concatenate([added, places], axis=1)
        if self.buckets == 1:
            self._folder.append(self._bucket(0), records.tobytes())
            return
        order = np.argsort(added[:, 0], kind="stable")
        ends = np.cumsum(np.bincount(added[:, 0], minlength=256))
        for number, part in enumerate(np.split(records[order], ends[:-1])):
            if len(part):
                self._folder.append(self._bucket(number), part.tobytes())

    def bucket(self, number: int) -> tuple[Tags, Rows]:
        """Tags [N, L] and positions [N] of one bucket."""
        records = as_rows(self._folder.read(self._bucket(number)), self._length + _PLACE)
        places = np.ascontiguousarray(records[:, self._length :]).view("<u8").reshape(-1)
        return np.ascontiguousarray(records[:, : self._length]), places.astype(np.int64)

    def repeats(self) -> int:
        """How many tags were there before."""
        return sum(repeats(self.bucket(number)[0]) for number in range(self.buckets))

    def sorted_chunks(self, size: int) -> Iterator[bytes]:
        """All tags in rising order, ``size`` at a time: nothing is left of the order in which they came."""
        held = b""
        for number in range(self.buckets):
            held += np.sort(keys_of(self.bucket(number)[0])).tobytes()
            while len(held) >= size * self._length:
                yield held[: size * self._length]
                held = held[size * self._length :]
        if held:
            yield held

    def _bucket(self, number: int) -> str:
        return f"{self._name}-{number:03d}"


def common(mine: TagPool, theirs: TagPool) -> Rows:
    """The positions in ``mine`` of what is in ``theirs`` too, rising. Both have as many buckets."""
    if mine.buckets != theirs.buckets:
        raise ValueError(f"{mine.buckets} and {theirs.buckets} buckets")
    found: list[Rows] = []
    for number in range(mine.buckets):
        tags, places = mine.bucket(number)
        found.append(places[matches(tags, theirs.bucket(number)[0])])
    return np.sort(np.concatenate(found))
