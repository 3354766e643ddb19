"""Random choices that both sides derive from a seed of 32 bits: masks, signs, buckets.

They read the raw words of Philox, whose stream NumPy promises to keep (NEP 19). The methods of ``Generator``
may change with NumPy's version, and then a device and a server would disagree on what was sent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

SEED_BITS = 32


def words(seed: int, purpose: int, count: int) -> Words:
    """``count`` random words of 64 bits, ``[count]``, of the stream (seed, purpose)."""
    return np.random.Philox(key=np.array([seed, purpose], np.uint64)).random_raw(count)


def support(seed: int, dimension: int, chosen: int) -> Indices:
    """``chosen`` of ``dimension`` places, drawn evenly without repetition, ascending ``[chosen]``: those with
    the smallest random keys. Two equal keys of 64 bits would be told apart by place."""
    keys = words(seed, 1, dimension)
    if chosen == dimension:
        return np.arange(dimension)
    limit = np.partition(keys, chosen - 1)[chosen - 1]
    return np.flatnonzero(keys <= limit)[:chosen]


def signs(seed: int, purpose: int, dimension: int) -> Floats:
    """Even random signs ``[D]``, each −1 or 1."""
    bits = np.unpackbits(words(seed, purpose, -(-dimension // 64)).view(np.uint8), count=dimension)
    return (bits.astype(np.float32) * np.float32(2.0)) - np.float32(1.0)


def buckets(seed: int, purpose: int, dimension: int, columns: int) -> Indices:
    """An even random bucket below ``columns`` for each place, ``[D]`` (high word times columns)."""
    high = words(seed, purpose, dimension) >> np.uint64(32)
    return ((high * np.uint64(columns)) >> np.uint64(32)).astype(np.int64)
