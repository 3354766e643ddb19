"""Masks: a seed of 32 bytes expanded to a vector of ring elements by AES-256 in counter mode.

The seed is the key and the counter starts at zero, so a seed makes one mask, ever. The key stream is read as
little-endian words of the ring's type: uniform words, which stay uniform when they are reduced to the ring's width.

Words are added to the total a block at a time, for many seeds in turn, so that the total, the key stream and the zeros
that are encrypted stay in the cache. `cryptography` and NumPy release the interpreter's lock meanwhile: threads each
take their own part of the vector, where the counter starts accordingly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from federated.secagg.ring import Ring, Words

SEED_BYTES: Final = 32

_BLOCK_BYTES = (
    65_536  # Three such buffers share a core's cache, and a call's own cost is small beside its work.
)
_GROUP = 128  # Seeds whose ciphers are held at once.
_COUNTER_BYTES = 16


def mask(seed: bytes, length: int, ring: Ring) -> Words:
    """The mask [L] of a 32-byte seed."""
    total = ring.zeros(length)
    add_masks(total, [(seed, 1)], ring)
    return total


def add_masks(total: Words, seeds: Iterable[tuple[bytes, int]], ring: Ring, threads: int = 1) -> None:
    """Add the mask of every (seed, sign), times its sign of 1 or -1, to ``total`` [L] in place.

    ``threads`` share the work; the result does not depend on their number. Raises ValueError for a seed of another
    length than 32 bytes or another sign, before anything of its group of 128 is added.
    """
    if total.dtype != ring.dtype or total.ndim != 1:
        raise TypeError(f"a vector of {ring.dtype}, not {total.ndim} dimensions of {total.dtype}")
    parts = _parts(total, threads)
    remaining = iter(seeds)
    with ThreadPoolExecutor(max(1, len(parts))) as pool:  # starts threads only for what is submitted
        while group := list(islice(remaining, _GROUP)):
            for seed, sign in group:
                if len(seed) != SEED_BYTES or sign not in (1, -1):
                    raise ValueError(f"a seed has {SEED_BYTES} bytes and a sign of 1 or -1")
            if len(parts) == 1:
                _add_part(*parts[0], group)
                continue
            for future in [pool.submit(_add_part, part, start, group) for part, start in parts]:
                future.result()


def _parts(total: Words, threads: int) -> list[tuple[Words, int]]:
    """The vector in at most ``threads`` parts of whole blocks, each with the byte where it starts."""
    if threads < 1:
        raise ValueError(f"{threads} threads")
    block = _BLOCK_BYTES // total.itemsize
    blocks = -(-len(total) // block)
    share = max(1, -(-blocks // threads)) * block
    return [(total[at : at + share], at * total.itemsize) for at in range(0, len(total), share)]


def _add_part(part: Words, start: int, seeds: Sequence[tuple[bytes, int]]) -> None:
    """Add the masks' words from byte ``start`` on to ``part``."""
    counter = CTR((start // _COUNTER_BYTES).to_bytes(_COUNTER_BYTES))
    streams: list[tuple[CipherContext, np.ufunc]] = [
        (Cipher(AES256(seed), counter).encryptor(), np.add if sign == 1 else np.subtract)
        for seed, sign in seeds
    ]
    zeros = bytes(_BLOCK_BYTES)
    stream = bytearray(_BLOCK_BYTES)
    block = _BLOCK_BYTES // part.itemsize
    words = np.frombuffer(stream, part.dtype.newbyteorder("<"))
    for at in range(0, len(part), block):
        target = part[at : at + block]
        if len(target) < block:
            zeros, words = bytes(target.nbytes), words[: len(target)]
        for cipher, apply in streams:
            cipher.update_into(zeros, stream)
            apply(target, words, out=target)
