"""Hashes of the protocols, each bound to its purpose, and tags: hashes cut to the length that a comparison needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

STATISTICAL_BITS: Final = 40
"""A whole run holds a false match with probability at most 2**-40."""
LONGEST_TAG: Final = 32
MOST_IDS: Final = 2**31 - 1
"""Ids of one party in one run."""

Tags = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]


def tag_bytes(mine: int, theirs: int) -> int:
    """The length of tags so that no two different ones are equal, but with probability 2**-40, be they of two parties
    (a false match) or of one (taken for a repeat): each pair is with probability 2**-8L, so 8L ≥ 40 + 2·log2 of the
    larger set (a union bound over all pairs)."""
    pairs = max(1, mine, theirs) ** 2
    return min(LONGEST_TAG, -(-(STATISTICAL_BITS + (pairs - 1).bit_length()) // 8))


def tags(purpose: str, session: bytes, values: Iterable[bytes], length: int) -> Tags:
    """BLAKE2b of each value under ``purpose`` and ``session`` (at most 64 bytes as its key), uint8 [N, length]."""
    base = hashlib.blake2b(key=session, digest_size=length, person=purpose.encode())
    found = bytearray()
    for value in values:
        one = base.copy()
        one.update(value)
        found += one.digest()
    return np.frombuffer(bytes(found), np.uint8).reshape(-1, length)


def as_rows(body: bytes, width: int) -> npt.NDArray[np.uint8]:
    """``body`` as uint8 [N, width]. Raises ValueError where it does not divide."""
    if len(body) % width:
        raise ValueError(f"{len(body)} bytes are not rows of {width}")
    return np.frombuffer(body, np.uint8).reshape(-1, width)


def split(body: bytes, width: int) -> list[bytes]:
    """``body`` in pieces of ``width`` bytes."""
    return [body[at : at + width] for at in range(0, len(body), width)]


def keys_of(rows: Tags) -> npt.NDArray[np.void]:
    """Rows as single values that NumPy sorts and compares, by bytes: [N] of [N, L]."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.shape[1]))).reshape(-1)


def matches(mine: Tags, theirs: Tags) -> Rows:
    """The positions in ``mine`` [N, L] of those that are in ``theirs`` [M, L], rising. Both without repeats."""
    if not len(mine) or not len(theirs):
        return np.empty(0, np.int64)
    together = np.concatenate([keys_of(mine), keys_of(theirs)])
    order = np.argsort(together, kind="stable")
    ordered = together[order]
    first = order[:-1][ordered[:-1] == ordered[1:]]
    return np.sort(first[first < len(mine)]).astype(np.int64)


def repeats(rows: Tags) -> int:
    """How many rows [N, L] stood before."""
    return len(rows) - len(np.unique(keys_of(rows))) if len(rows) else 0


def secret_order(ids: Sequence[bytes], key: bytes) -> Rows:
    """A random order of ``ids`` that only the holder of ``key`` (32 bytes) knows and can make again: int64 [N].

    Positions in the order that a peer sees tell nothing of the order in the file.
    """
    drawn = tags("psi-order", key, ids, 16)
    return np.argsort(keys_of(drawn), kind="stable").astype(np.int64) if len(ids) else np.empty(0, np.int64)


def ordered(ids: Sequence[bytes], found: Rows) -> Rows:
    """``found`` (positions in ``ids``) in the joint order: by the ids' bytes, the same at every party."""
    return np.array(sorted(found.tolist(), key=lambda at: ids[at]), np.int64)


def list_digest(session: bytes, ids: Iterable[bytes]) -> bytes:
    """32 bytes that are equal for the same ids in the same order."""
    hashed = hashlib.blake2b(key=session, digest_size=32, person=b"psi-list")
    for one in ids:
        hashed.update(len(one).to_bytes(2, "little") + one)
    return hashed.digest()


def system(count: int) -> bytes:
    """Random bytes of the operating system."""
    return os.urandom(count)
