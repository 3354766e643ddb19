"""An oblivious key-value store: values that only who knows a key can read, in a vector that tells nothing of the keys.

Garimella, Pinkas, Rosulek, Trieu and Yanai (2021), three places a key and a dense part: a key's value is the exclusive
or of three places of the sparse part and of those of 64 dense places that its hash names. Keys are peeled off while
some place belongs to one key alone; what is left (a few keys at most) is solved by elimination over the dense part,
which fails with probability 2**(c − 64) for c keys left. With uniform values the vector is uniform, whatever the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from federated.psi.hashing import Rows, Tags, tags
from federated.vertical.parties import Draw

VALUE_BYTES: Final = 16
DENSE: Final = 64
_PLACES: Final = 3
_EXPANSION: Final = 1.35
_MORE: Final = 192
_MOST_LEFT: Final = 24  # So that the dense part solves them but with probability 2**-40.

Bits = npt.NDArray[np.uint64]


class StoreFull(ArithmeticError):
    """The keys do not fit: less likely than 2**-40 for keys that are hashes; another run has other places."""


def length(count: int) -> int:
    """Rows of a store of ``count`` keys."""
    return _sparse(count) + DENSE


def encode(keys: Sequence[bytes], values: Tags, session: bytes, draw: Draw) -> Tags:
    """The store [length(N), 16] in which each of ``keys`` (different) has its row of ``values`` [N, 16].

    Raises StoreFull.
    """
    sparse = _sparse(len(keys))
    places, dense = _hashed(keys, session, sparse)
    rounds, left = _peel(places, sparse)
    if len(left) > _MOST_LEFT:
        raise StoreFull(f"{len(left)} of {len(keys)} keys are left")
    store = np.frombuffer(draw((sparse + DENSE) * VALUE_BYTES), np.uint8).reshape(-1, VALUE_BYTES).copy()
    if len(left):
        # The sparse places of those left keep what was drawn; the dense part makes up the difference.
        wanted = values[left] ^ _sparse_sum(store, places[left])
        store[sparse:] = _solve(dense[left], wanted, store[sparse:])
    for keys_of_round, slots in reversed(rounds):
        # Each of these keys owns its slot alone: no other key of this round, nor of a later one, has it.
        store[slots] = 0
        read = _sparse_sum(store, places[keys_of_round]) ^ _dense_sum(store[sparse:], dense[keys_of_round])
        store[slots] = values[keys_of_round] ^ read
    return store


def decode(store: Tags, keys: Sequence[bytes], session: bytes) -> Tags:
    """The values [N, 16] of ``keys`` in ``store``: those that were put in, and something random for other keys."""
    sparse = len(store) - DENSE
    places, dense = _hashed(keys, session, sparse)
    return _sparse_sum(store, places) ^ _dense_sum(store[sparse:], dense)


def _sparse(count: int) -> int:
    return int(np.ceil(_EXPANSION * count)) + _MORE


def _hashed(keys: Sequence[bytes], session: bytes, sparse: int) -> tuple[Rows, Bits]:
    """Three different places [N, 3] and 64 bits [N] of each key."""
    drawn = tags("psi-store", session, keys, 8 * (_PLACES + 1)).view("<u8").reshape(-1, _PLACES + 1)
    # One place in each third of the sparse part: different, and as good for peeling.
    third = sparse // _PLACES
    places = (drawn[:, :_PLACES] % np.uint64(third)).astype(np.int64) + np.arange(_PLACES) * third
    return places, drawn[:, _PLACES].astype(np.uint64)


def _peel(places: Rows, sparse: int) -> tuple[list[tuple[Rows, Rows]], Rows]:
    """Rounds of (keys, the slot that each owns), and the keys that are left."""
    count = len(places)
    degree = np.bincount(places.reshape(-1), minlength=sparse)
    mixed = np.zeros(
        sparse, np.int64
    )  # Exclusive or of the keys at a place: the key itself where it is alone.
    for column in places.T:
        np.bitwise_xor.at(mixed, column, np.arange(count))
    remains = np.ones(count, np.bool_)
    rounds: list[tuple[Rows, Rows]] = []
    slots = np.flatnonzero(degree == 1)
    while len(slots):
        owners, first = np.unique(mixed[slots], return_index=True)
        rounds.append((owners, slots[first]))
        remains[owners] = False
        touched = places[owners]
        np.subtract.at(degree, touched.reshape(-1), 1)
        for column in touched.T:
            np.bitwise_xor.at(mixed, column, owners)
        candidates = np.unique(touched)
        slots = candidates[degree[candidates] == 1]
    return rounds, np.flatnonzero(remains)


def _sparse_sum(store: Tags, places: Rows) -> Tags:
    summed: Tags = store[places[:, 0]] ^ store[places[:, 1]] ^ store[places[:, 2]]
    return summed


def _dense_sum(dense_part: Tags, bits: Bits) -> Tags:
    summed = np.zeros((len(bits), VALUE_BYTES), np.uint8)
    for at in range(DENSE):
        chosen = ((bits >> np.uint64(at)) & np.uint64(1)).astype(np.uint8)
        summed ^= dense_part[at] * chosen[:, None]
    return summed


def _solve(bits: Bits, wanted: Tags, free: Tags) -> Tags:
    """A dense part with the given sums; what is not determined keeps the value in ``free`` [64, 16]."""
    rows = [
        (int(mask), int.from_bytes(value.tobytes()))
        for mask, value in zip(bits.tolist(), wanted, strict=True)
    ]
    pivots: dict[int, tuple[int, int]] = {}
    for mask, value in rows:
        for pivot, (other, held) in pivots.items():
            if mask >> pivot & 1:
                mask, value = mask ^ other, value ^ held
        if not mask:
            raise StoreFull("the keys that are left depend on one another")
        pivot = mask.bit_length() - 1
        for at, (other, held) in list(pivots.items()):
            if other >> pivot & 1:
                pivots[at] = (other ^ mask, held ^ value)
        pivots[pivot] = (mask, value)
    found = [int.from_bytes(row.tobytes()) for row in free]
    for pivot, (mask, value) in pivots.items():
        for at in range(DENSE):
            if at != pivot and mask >> at & 1:
                value ^= found[at]
        found[pivot] = value
    return np.frombuffer(b"".join(one.to_bytes(VALUE_BYTES) for one in found), np.uint8).reshape(
        DENSE, VALUE_BYTES
    )
