"""Images shifted and turned a little, made when asked: which way is a pure function of (seed, client, row).

The ways are a fixed list, so that a population of any size costs the memory of its original images: a device draws a
number, and the image is looked up, or made on the spot where the list of all made images would be too large. Every
pixel is computed by itself, so an image has the same bits whatever batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

_DEGREES: Final = (-15, -10, -5, 0, 5, 10, 15)
_SHIFTS: Final = (-1 / 16, 0.0, 1 / 16)
"""In sides of the image: half a pixel of 8, not quite two of 28."""
_TABLE_BYTES: Final = 64 * 2**20
"""All made images are kept below this, and made on the spot above it."""
_GAMMA: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Augmentation:
    """Ways to shift (a sixteenth of a side) and turn (up to 15°) images of ``height`` x ``width``; who gets which."""

    seed: int
    height: int
    width: int

    @property
    def ways(self) -> int:
        """How many there are."""
        return len(_DEGREES) * len(_SHIFTS) ** 2

    def draw(self, clients: Numbers, rows: Numbers) -> Numbers:
        """The way [K] of each pair of client [K] and row number within the client [K]."""
        state = _mixed(np.full(len(clients), self.seed % 2**64, np.uint64))
        state = _mixed(state ^ clients.astype(np.uint64))
        state = _mixed(state ^ rows.astype(np.uint64))
        return (state % np.uint64(self.ways)).astype(np.int64)

    def apply(self, images: Images, ways: Numbers) -> Images:
        """The images [K, height·width], each changed in its way [K]; what comes in from outside is 0."""
        sources, shares = self._sources
        made = np.zeros_like(images)
        for corner in range(4):
            made += np.take_along_axis(images, sources[ways, corner], axis=1) * shares[ways, corner]
        return made

    def fits_table(self, images: int) -> bool:
        """Whether all ways of ``images`` images may be kept."""
        return images * self.ways * self.height * self.width * 4 <= _TABLE_BYTES

    def table(self, images: Images) -> Images:
        """All ways of ``images`` [N, F], as [N · ways, F]: way w of image n is row n · ways + w."""
        every = np.arange(len(images) * self.ways)
        made = np.empty((len(every), images.shape[1]), np.float32)
        for start in range(0, len(every), 4_096):
            part = every[start : start + 4_096]
            made[part] = self.apply(images[part // self.ways], part % self.ways)
        return made

    @cached_property
    def _sources(self) -> tuple[Numbers, Images]:
        """The four neighbours [ways, 4, F] that each pixel is interpolated from, and their shares [ways, 4, F]."""
        degrees, down, right = (
            axis.ravel() for axis in np.meshgrid(np.deg2rad(_DEGREES), _SHIFTS, _SHIFTS, indexing="ij")
        )
        y, x = (axis.ravel() for axis in np.mgrid[0 : self.height, 0 : self.width])
        middle_y, middle_x = (self.height - 1) / 2, (self.width - 1) / 2
        # The inverse map: which point of the original comes to lie on (y, x).
        dy = y - middle_y - down[:, None] * self.height
        dx = x - middle_x - right[:, None] * self.width
        cos, sin = np.cos(degrees)[:, None], np.sin(degrees)[:, None]
        # Rounded, so that an unturned image takes its pixels whole instead of from 1e-16 of a neighbour.
        from_y = np.round(cos * dy + sin * dx + middle_y, 9)
        from_x = np.round(cos * dx - sin * dy + middle_x, 9)
        top, left = np.floor(from_y), np.floor(from_x)
        sources, shares = [], []
        for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
            share = (1.0 - np.abs(from_y - row)) * (1.0 - np.abs(from_x - column))
            inside = (row >= 0) & (row < self.height) & (column >= 0) & (column < self.width)
            sources.append(np.where(inside, row * self.width + column, 0))
            shares.append(np.where(inside, share, 0.0))
        return (
            np.stack(sources, axis=1).astype(np.int64),
            np.stack(shares, axis=1).astype(np.float32),
        )


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood 2014) of each number; unsigned arithmetic wraps."""
    state = state + np.uint64(_GAMMA)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
