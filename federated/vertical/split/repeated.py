"""Noise that is the same when the same is sent again.

A restart goes on from a checkpoint and sends again what came after it. Were noise drawn anew each time, a peer that
restarts often enough could average it away. So noise is drawn from a secret key, which is in the checkpoint, and from
everything that it is about: what is protected, and what came from peers since the checkpoint. What is the same gets the
same noise, and the peer learns nothing that it had not seen; what differs in one bit gets noise of its own, as if it
had been drawn by chance.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.privacy.randomness import Words

KEY_BYTES: Final = 32


class RepeatedNoise:
    """A ``Randomness``: SHAKE-256 of a secret ``key``, of what it was told ``about``, and of how often it was drawn
    from since."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._state, self._drawn = key, 0

    def begin(self, place: int) -> None:
        """Forget everything but the key: training is at ``place``, where there is a checkpoint."""
        self._state = b""
        self.about("place", np.array(place, np.int64))

    def about(self, what: str, numbers: npt.NDArray[Any]) -> None:
        """What comes next depends on ``numbers``, too."""
        kind = f"{what} {numbers.dtype.str} {numbers.shape}".encode()
        hashed = hashlib.sha256(self._state + hashlib.sha256(kind).digest())
        hashed.update(np.ascontiguousarray(numbers).data)
        self._state, self._drawn = hashed.digest(), 0

    def words(self, count: int) -> Words:
        """See ``Randomness``."""
        self._drawn += 1
        seed = self.key + self._state + self._drawn.to_bytes(8, "little")
        return np.frombuffer(hashlib.shake_256(seed).digest(8 * count), "<u8")
