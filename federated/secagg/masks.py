"""Masks: a seed of 32 bytes expanded to a vector of ring elements by AES-256 in counter mode.

The seed is the key and the counter starts at zero, so a seed makes one mask, ever. The key stream is read as
little-endian words of the ring's type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from federated.secagg.ring import Ring, Words

SEED_BYTES: Final = 32

Sign = Literal[1, -1]


def mask(seed: bytes, length: int, ring: Ring) -> Words:
    """The mask [L] of a 32-byte seed."""
    total = ring.zeros(length)
    add_masks(total, [(seed, 1)], ring)
    return total


def add_masks(total: Words, seeds: Iterable[tuple[bytes, Sign]], ring: Ring, threads: int = 1) -> None:
    """Add the mask of every seed, times its sign, to ``total`` [L] in place. Blockwise, over ``threads`` threads."""
    raise NotImplementedError
