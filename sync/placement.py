"""Which shard holds a key. NumPy alone, so that clients need no compiled kernels.

The mix differs from the index's hash: keys of one shard would otherwise crowd into one part of its index.
Changing these functions moves every row; golden values in the tests hold them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from sync.errors import BadSpec

MAX_SHARDS: Final = 65_536


def shard_of(keys: npt.NDArray[np.uint64], shards: int) -> npt.NDArray[np.int32]:
    """The shard of each key ``[N]`` uint64: int32 ``[N]`` in [0, ``shards``).

    Murmur3's 64-bit finaliser (Appleby), then the upper 32 bits scaled to the range (Lemire 2019).
    """
    _check(shards)
    mixed = keys ^ (keys >> np.uint64(33))
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    mixed >>= np.uint64(32)
    mixed *= np.uint64(shards)
    mixed >>= np.uint64(32)
    return mixed.astype(np.int32)


def single_shard(name: str, shards: int) -> int:
    """The one shard that holds the table ``name`` when its placement is ``single``."""
    _check(shards)
    return xxhash.xxh3_64_intdigest(name.encode()) % shards


def _check(shards: int) -> None:
    if not 1 <= shards <= MAX_SHARDS:
        raise BadSpec(f"shards {shards} is not in [1, {MAX_SHARDS}]")
