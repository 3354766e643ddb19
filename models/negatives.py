"""Where negatives come from, and how likely each was: the log Q of the sampling correction. NumPy alone.

A negative is drawn from a mixture: with some probability an item of the recent positives (so that popular
items are pushed back), else any item of the catalogue, all alike. What is drawn is exactly known, and so is
its probability. `FrequencyEstimator` estimates it where it is not known: for items that come with a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]

_FORMAT: Final = b"\x01"
_MULTIPLIERS: Final = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
_HEADER: Final = np.dtype([("step", "<i8"), ("hashes", "<i8"), ("slots", "<i8")])


class EstimatorFormatError(ValueError):
    """The bytes are not a frequency estimator of a format that this version reads."""


@dataclass(frozen=True, slots=True)
class FrequencyEstimator:
    """Streaming estimate of how often an item is in a batch (Yi et al. 2019, Algorithm 2), several hashes.

    State over H hashes and S slots: last_seen (A) ``[H, S]``, interval (B) ``[H, S]``, step t. At step t,
    once per item of the batch: B ← (1 − α)·B + α·(t − A), then A ← t. Q = 1/B, of the largest B over the
    hashes, since a collision can only shorten the interval.
    """

    step: int
    last_seen: Integers
    interval: Doubles

    @staticmethod
    def init(slots: int, hashes: int = 2, interval: float = 1_000.0) -> FrequencyEstimator:
        """An estimator that has seen nothing; ``interval`` is what an unseen item is taken for, in steps."""
        if slots < 1 or not 1 <= hashes <= len(_MULTIPLIERS):
            raise ValueError(f"1 or more slots and 1 to {len(_MULTIPLIERS)} hashes, not {slots} and {hashes}")
        return FrequencyEstimator(
            0, np.zeros((hashes, slots), np.int64), np.full((hashes, slots), interval, np.float64)
        )

    def _slots(self, keys: Keys) -> npt.NDArray[np.intp]:
        hashes, slots = self.last_seen.shape
        mixed = (keys[None, :] ^ (keys[None, :] >> np.uint64(32))) * _MULTIPLIERS[:hashes, None]
        return ((mixed >> np.uint64(33)) % np.uint64(slots)).astype(np.intp)

    def update(self, keys: Keys, alpha: float = 0.05) -> FrequencyEstimator:
        """The state after one more step, whose batch held ``keys`` ``[N]`` (each counts once)."""
        step = self.step + 1
        last_seen, interval = self.last_seen.copy(), self.interval.copy()
        for row, slots in enumerate(self._slots(np.unique(keys))):
            once = np.unique(slots)
            elapsed = step - last_seen[row, once]
            interval[row, once] = (1 - alpha) * interval[row, once] + alpha * elapsed
            last_seen[row, once] = step
        return FrequencyEstimator(step, last_seen, interval)

    def probability(self, keys: Keys) -> Doubles:
        """Q ``[N]``: how likely each key is in a batch, at most 1."""
        slots = self._slots(keys)
        interval: Doubles = np.take_along_axis(self.interval, slots, axis=1).max(axis=0)
        probability: Doubles = 1.0 / np.maximum(interval, 1.0)
        return probability

    def to_bytes(self) -> bytes:
        """The whole state, little-endian behind a format byte."""
        header = np.array([(self.step, *self.last_seen.shape)], _HEADER)
        arrays = (self.last_seen.astype("<i8"), self.interval.astype("<f8"))
        return _FORMAT + header.tobytes() + b"".join(array.tobytes() for array in arrays)

    @staticmethod
    def from_bytes(data: bytes) -> FrequencyEstimator:
        """Read ``to_bytes``'s form back. Raises EstimatorFormatError."""
        if data[:1] != _FORMAT or len(data) < 1 + _HEADER.itemsize:
            raise EstimatorFormatError(f"unknown estimator format; this version reads {_FORMAT.hex()}")
        step, hashes, slots = (int(n) for n in np.frombuffer(data, _HEADER, 1, offset=1)[0])
        body = data[1 + _HEADER.itemsize :]
        cells = hashes * slots
        if not 1 <= hashes <= len(_MULTIPLIERS) or slots < 1 or len(body) != 16 * cells:
            raise EstimatorFormatError(f"{hashes} hashes of {slots} slots do not fit {len(body)} bytes")
        return FrequencyEstimator(
            step,
            np.frombuffer(body, "<i8", cells).reshape(hashes, slots).astype(np.int64),
            np.frombuffer(body, "<f8", cells, offset=8 * cells).reshape(hashes, slots).astype(np.float64),
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """Negatives of B positives. Shapes: items ``[B, K]`` catalogue rows, log_q ``[B, K + 1]``, column 0 the
    positive; +inf where a draw is to be left out."""

    items: Integers
    log_q: Floats


class NegativeSampler:
    """Draws negatives from a mixture of the whole catalogue and a bounded reservoir of recent positives.

    ``popular`` is the share drawn from the reservoir, which holds the last ``reservoir`` positives. A draw is
    a function of the reservoir, the catalogue's size and the seed, so a micro-batch made again is the same.
    """

    def __init__(self, popular: float = 0.5, reservoir: int = 8_192) -> None:
        if not 0 <= popular < 1:
            raise ValueError(f"the popular share lies in [0, 1), not {popular}: unseen items need a chance")
        if reservoir < 1:
            raise ValueError(f"a reservoir holds at least one item, not {reservoir}")
        self.popular = popular
        self._recent = np.zeros(reservoir, np.int64)
        self._counts = np.zeros(1_024, np.int64)
        self._added = 0

    def __len__(self) -> int:
        return min(self._added, len(self._recent))

    def observe(self, items: npt.NDArray[np.integer]) -> None:
        """Remember positives (catalogue rows, in order); beyond the reservoir's size the oldest go."""
        items = np.asarray(items, np.int64)[-len(self._recent) :]
        if len(items) == 0:
            return
        if int(items.max()) >= len(self._counts):
            grown = np.zeros(max(int(items.max()) + 1, 2 * len(self._counts)), np.int64)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        size = len(self._recent)
        slots = (self._added + np.arange(len(items))) % size
        replaced = slots[self._added + np.arange(len(items)) >= size]
        np.subtract.at(self._counts, self._recent[replaced], 1)
        self._recent[slots] = items
        np.add.at(self._counts, items, 1)
        self._added += len(items)

    def recent(self) -> Integers:
        """The positives held, oldest first."""
        size = len(self._recent)
        return self._recent[np.arange(max(self._added - size, 0), self._added) % size]

    def probability(self, items: npt.NDArray[np.integer], catalogue: int) -> Doubles:
        """Q ``[...]``: how likely one draw gives each item of a catalogue of N items."""
        held = len(self)
        share = self.popular if held else 0.0
        inside = np.minimum(items, len(self._counts) - 1)
        counts = np.where(items < len(self._counts), self._counts[inside], 0)
        return (1 - share) / catalogue + share * counts / max(held, 1)

    def draw(
        self,
        positives: npt.NDArray[np.integer],
        catalogue: int,
        negatives: int,
        seed: Sequence[int],
        known: tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]] | None = None,
    ) -> Draw:
        """K negatives for each of B positives (rows of a catalogue of N items).

        ``seed``: what identifies the micro-batch (partition, offset). ``known``: pairs (sample ``[E]``, item
        ``[E]``, -1 for none) that must not serve as that sample's negative, such as what the user liked. A draw of
        the positive itself or of a known pair is marked to be left out. Raises ValueError on an empty
        catalogue with positives to draw for.
        """
        count = len(positives)
        if count and catalogue < 1:
            raise ValueError("there is no item to draw from")
        generator = np.random.default_rng(list(seed))
        shape = (count, negatives)
        items = generator.integers(0, max(catalogue, 1), shape)
        if len(self):
            recent = self._recent[generator.integers(0, len(self), shape)]
            items = np.where(generator.random(shape) < self.popular, recent, items)
        candidates = np.concatenate([np.asarray(positives, np.int64)[:, None], items], axis=1)
        log_q = np.log(self.probability(candidates, max(catalogue, 1))).astype(np.float32)
        left_out = items == candidates[:, :1]
        if known is not None and len(known[0]):
            span = int(max(candidates.max(initial=0), known[1].max())) + 1
            inside = known[1] >= 0  # -1 stands for an item that the catalogue does not hold
            pairs = np.asarray(known[0], np.int64)[inside] * span + known[1][inside]
            left_out |= np.isin(np.arange(count)[:, None] * span + items, pairs)
        log_q[:, 1:][left_out] = np.inf
        return Draw(items, log_q)
