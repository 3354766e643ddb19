"""Random numbers as a function of (seed, purpose, client, time), for many clients at once and without any state.

Whether client c drops out of iteration t is thus the same in every run, whoever asked before, and costs no memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """What a number is drawn for; the same numbers for two purposes would tie them to each other."""

    COMPUTE = 1
    UPLINK = 2
    DOWNLINK = 3
    DROPOUT = 4
    STRAGGLER = 5
    AVAILABLE = 6
    PHASE = 7
    BATTERY = 8
    CHARGING = 9
    UNMETERED = 10
    IDLE = 11
    REPLY = 12


def uniform(seed: int, purpose: Purpose, clients: npt.NDArray[Any], at: npt.NDArray[Any] | int = 0) -> Floats:
    """Numbers in [0, 1), one per client and ``at`` (an iteration or a slot of time), broadcast."""
    with np.errstate(over="ignore"):
        word = _mixed(np.asarray(clients, np.int64).astype(np.uint64) ^ _mixed(_word(seed)))
        word = _mixed(
            word + _mixed(np.asarray(at, np.int64).astype(np.uint64) * np.uint64(31) + _word(purpose))
        )
    numbers: Floats = (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def normal(seed: int, purpose: Purpose, clients: npt.NDArray[Any]) -> Floats:
    """Standard normal numbers by the method of Box and Muller (1958), one per client."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform(seed, purpose, clients, 0)))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(seed, purpose, clients, 1)))


def _word(number: int) -> Words:
    return np.asarray(number & (2**64 - 1), np.uint64)


def _mixed(word: Words) -> Words:
    """The finaliser of SplitMix64 (Steele et al. 2014): each bit of the result depends on each of ``word``."""
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
