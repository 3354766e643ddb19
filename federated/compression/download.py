"""Downloads in few bytes: versions of the model on a grid, and differences between them.

The server rounds each version to a grid: for every piece of the vector a step that is a power of two, and a whole
number (code) of steps for every coordinate. A version *is* its codes, so a client that follows differences of codes
holds the server's bits for ever, whichever versions it skipped: no chain of roundings has to be replayed. The server's
strategy keeps the unrounded weights, and each version is rounded from them anew; what one rounding loses, the next one
sees (error feedback on the server's side). The whole model is the difference from nothing, in the same form, and that
is also how a version is stored.

Codes of neighbouring versions differ by little, often by nothing, and deflate makes of that a few bits a coordinate or
less. Differences are taken modulo 2**bits, so they need no more bits than codes do. A checksum of the codes in each
body shows when a client's base is not what the server thinks; it then asks for the whole model.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from federated.compression.errors import BaseUnknown, BodyRefused
from federated.compression.sections import Section, SectionRule, join, read_varint, split, varint
from federated.compression.streams import Floats, Indices
from federated.layout import Layout

Codes = npt.NDArray[np.int32]

FORMAT = 0xD1
CHUNK = 1024
MIN_EXPONENT, MAX_EXPONENT = -100, 60
# Signed codes of 25 bits hold every float32 integer up to 2**24 exactly.
MAX_BITS = 25
MAX_VERSION = 1 << 31
HEAD_BYTES = 16


@dataclass(frozen=True)
class Grid:
    """Pieces of the vector, in order: ``sizes`` and ``bits`` of each. Both sides make it from the model's layout."""

    sizes: tuple[int, ...]
    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.bits) or min(self.sizes) < 1:
            raise ValueError(
                "a grid needs at least one piece, each of at least one coordinate and with its bits"
            )
        if not 2 <= min(self.bits) <= max(self.bits) <= MAX_BITS:
            raise ValueError(f"a code takes 2 to {MAX_BITS} bits, not {min(self.bits)} to {max(self.bits)}")

    @staticmethod
    def of(tensors: Sequence[int], bits: int | Sequence[int] = 8, chunk: int = CHUNK) -> Grid:
        """A grid for tensors of these sizes, in the vector's order, cut into pieces of at most ``chunk``; ``bits`` for
        all, or for each tensor (MAX_BITS gives float32's own precision)."""
        each = [bits] * len(tensors) if isinstance(bits, int) else list(bits)
        sizes, widths = list[int](), list[int]()
        for size, width in zip(tensors, each, strict=True):
            pieces = [min(chunk, size - start) for start in range(0, size, chunk)]
            sizes += pieces
            widths += [width] * len(pieces)
        return Grid(tuple(sizes), tuple(widths))

    @staticmethod
    def for_layout(layout: Layout, bits: int = 8, chunk: int = CHUNK) -> Grid:
        """A grid for a model's vector: ``bits`` for what is trained, full precision for statistics and counters,
        whose values span too much for few bits."""
        each = [bits if field.kind == "weight" else MAX_BITS for field in layout.fields]
        return Grid.of([field.size for field in layout.fields], each, chunk)

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    @property
    def planes(self) -> int:
        """Bytes that a code may take."""
        return -(-max(self.bits) // 8)

    @cached_property
    def starts(self) -> Indices:
        """Where each piece begins."""
        return np.cumsum([0, *self.sizes[:-1]])

    @cached_property
    def limits(self) -> Codes:
        """The largest code of each piece; the smallest is its negative."""
        return np.array([(1 << (width - 1)) - 1 for width in self.bits], np.int32)

    def spread(self, of_pieces: npt.NDArray[np.int32]) -> Codes:
        """A number for each piece as one for each coordinate."""
        return np.repeat(of_pieces, self.sizes)

    def powers(self, exponents: npt.NDArray[np.int32]) -> Floats:
        """2**exponent of its piece for each coordinate, exact."""
        return np.repeat(np.ldexp(np.float32(1.0), exponents), self.sizes)

    def rules(self) -> tuple[SectionRule, ...]:
        """The sections of a body: exponents, then the codes' bytes, low ones first."""
        return (SectionRule(len(self.sizes)), *(SectionRule(self.dimension) for _ in range(self.planes)))

    def most_bytes(self) -> int:
        """The longest body: what a client need accept."""
        return HEAD_BYTES + 1 + sum(rule.most + 5 for rule in self.rules())


@dataclass(frozen=True, slots=True)
class Held:
    """One version as both sides hold it: ``codes [D]`` times 2**``exponents`` of their pieces."""

    version: int
    exponents: npt.NDArray[np.int32]
    codes: Codes

    def vector(self, grid: Grid) -> Floats:
        """The weights ``[D]``."""
        return self.codes.astype(np.float32) * grid.powers(self.exponents)

    def checksum(self) -> int:
        """CRC-32 of codes and exponents."""
        return zlib.crc32(
            self.codes.astype("<i4").tobytes(), zlib.crc32(self.exponents.astype("<i4").tobytes())
        )


def snap(grid: Grid, weights: Floats, version: int, previous: Held | None = None) -> Held:
    """``weights [D]`` rounded to the nearest point of the grid, as ``version``. A piece's step grows as soon as its
    largest weight needs it, and shrinks only when half of ``previous``' would do, lest it change to and fro. Raises
    ValueError on other lengths, what is not finite, and what the largest step cannot hold."""
    if weights.shape != (grid.dimension,):
        raise ValueError(f"weights {weights.shape} for a grid of {grid.dimension}")
    weights = weights.astype(np.float32, copy=False)
    largest = np.maximum.reduceat(np.abs(weights), grid.starts)
    # The negated test also finds NaN.
    if not largest.max() < 2.0**MAX_EXPONENT:
        raise ValueError("a weight is NaN or too large for the grid")
    # largest / limit = fraction · 2**exponent with a fraction of at least a half and below 1.
    fractions, exponents = np.frexp(largest.astype(np.float64) / grid.limits)
    exponents = exponents - (fractions == 0.5)
    exponents = np.where(largest > 0.0, exponents, MIN_EXPONENT).clip(MIN_EXPONENT, MAX_EXPONENT)
    if previous is not None:
        kept = (exponents <= previous.exponents) & (exponents >= previous.exponents - 1)
        exponents = np.where(kept, previous.exponents, exponents)
    exponents = exponents.astype(np.int32)
    return Held(version, exponents, np.rint(weights * grid.powers(-exponents)).astype(np.int32))


def difference(grid: Grid, new: Held, base: Held | None) -> bytes:
    """The body that takes a client from ``base`` (None: from nothing) to ``new``."""
    start = _rebased(grid, base, new.exponents)
    moved = _wrapped(new.codes - start, grid)
    zigzag = (moved << 1) ^ (moved >> 31)
    before = np.zeros_like(new.exponents) if base is None else base.exponents
    # One byte holds the change of an exponent: all lie within a range of 256.
    rows = [(new.exponents - before).astype(np.uint8)]
    rows += [(zigzag >> (8 * plane)).astype(np.uint8) for plane in range(grid.planes)]
    (body,) = join([Section.of_rows(row[None]) for row in rows], grid.rules(), coded=True)
    head = bytes([FORMAT]) + varint(new.version) + varint(0 if base is None else base.version + 1)
    return head + new.checksum().to_bytes(4, "little") + body


def base_of(body: bytes) -> int | None:
    """The version that ``body`` starts from, None for a whole model. Raises BodyRefused."""
    return _read_head(body)[1]


def receive(grid: Grid, body: bytes, base: Held | None = None) -> Held:
    """The version that ``body`` gives to a client which holds ``base``; a whole model needs none. Raises BaseUnknown
    when it starts from another version, or the base differs from the server's, and BodyRefused on any other bytes."""
    version, base_version, checksum, at = _read_head(body)
    if base_version is None:
        base = None
    elif base is None or base.version != base_version:
        raise BaseUnknown(f"a difference from version {base_version}, and that is not held")
    sections = split(body[at:], grid.rules(), coded=True)
    changes = sections[0].body.astype(np.int8).astype(np.int32)
    exponents = changes if base is None else (base.exponents + changes).astype(np.int8).astype(np.int32)
    if exponents.min() < MIN_EXPONENT or exponents.max() > MAX_EXPONENT:
        raise BodyRefused("an exponent lies outside of the grid")
    zigzag = np.zeros(grid.dimension, np.int32)
    for plane, section in enumerate(sections[1:]):
        zigzag |= section.body.astype(np.int32) << (8 * plane)
    moved = (zigzag >> 1) ^ -(zigzag & 1)
    codes = _wrapped(_rebased(grid, base, exponents) + moved, grid)
    if (np.abs(codes) > grid.spread(grid.limits)).any():
        raise BodyRefused("a code lies outside of the grid")
    held = Held(version, exponents, codes)
    if held.checksum() != checksum:
        if base is None:
            raise BodyRefused("the checksum does not fit: the body is damaged")
        raise BaseUnknown("the checksum does not fit: this base is not the server's")
    return held


class DownloadChain:
    """The newest version and the ``keep`` before it, and bodies that lead from any of them to the newest.

    Bodies are made when first asked for, and kept until the next version: at most ``keep`` + 1 of them. A client that
    holds none of these versions gets the whole model, and so does one for which the difference would be longer."""

    def __init__(self, grid: Grid, newest: Held, keep: int = 8) -> None:
        if keep < 0:
            raise ValueError(f"keep at least 0 versions, not {keep}")
        self.grid = grid
        self.newest = newest
        self._keep = keep
        self._held: OrderedDict[int, Held] = OrderedDict()
        self._bodies: dict[int | None, bytes] = {}

    @staticmethod
    def begin(grid: Grid, weights: Floats, version: int = 0, keep: int = 8) -> DownloadChain:
        """A chain whose first version is ``weights [D]``, rounded. Raises ValueError as ``snap`` does."""
        return DownloadChain(grid, snap(grid, weights, version), keep)

    def publish(self, weights: Floats) -> int:
        """Make ``weights [D]``, rounded, the newest version. Raises ValueError as ``snap`` does."""
        newest = snap(self.grid, weights, self.newest.version + 1, self.newest)
        self.adopt(newest)
        return newest.version

    def adopt(self, newest: Held) -> None:
        """Take over a version that another server published. Raises ValueError unless it is newer."""
        if newest.version <= self.newest.version:
            raise ValueError(f"version {newest.version} after {self.newest.version}")
        self._held[self.newest.version] = self.newest
        while len(self._held) > self._keep:
            self._held.popitem(last=False)
        self.newest = newest
        self._bodies.clear()

    def body_for(self, base: int | None) -> bytes:
        """What to send to a client that holds version ``base``, or none."""
        if base == self.newest.version:
            return self._body(base, self.newest)
        held = None if base is None else self._held.get(base)
        whole = self._body(None, None)
        if held is None:
            return whole
        return min(self._body(base, held), whole, key=len)

    def vector(self) -> Floats:
        """The newest version's weights ``[D]``, as every client that is up to date holds them."""
        return self.newest.vector(self.grid)

    def _body(self, base: int | None, held: Held | None) -> bytes:
        if base not in self._bodies:
            self._bodies[base] = difference(self.grid, self.newest, held)
        return self._bodies[base]


def _read_head(body: bytes) -> tuple[int, int | None, int, int]:
    """Version, base, checksum, and where the sections begin."""
    if not body or body[0] != FORMAT:
        raise BodyRefused("this is no download")
    version, at = read_varint(body, 1)
    base, at = read_varint(body, at)
    if version > MAX_VERSION or base > MAX_VERSION or at + 4 > len(body):
        raise BodyRefused("the head is cut short or names an impossible version")
    return version, base - 1 if base else None, int.from_bytes(body[at : at + 4], "little"), at + 4


def _rebased(grid: Grid, base: Held | None, exponents: npt.NDArray[np.int32]) -> Codes:
    """The codes of ``base`` in steps of ``exponents``: whole-number arithmetic alone, the same on both sides."""
    if base is None:
        return np.zeros(grid.dimension, np.int32)
    # Beyond as many places nothing is left of a code, or nothing of it fits.
    shifts = (exponents - base.exponents).clip(-MAX_BITS, MAX_BITS)
    if not shifts.any():
        return base.codes
    places = grid.spread(shifts).astype(np.int64)
    coarser, finer = places.clip(0), (-places).clip(0)
    half = (np.int64(1) << coarser) >> 1
    limits = grid.spread(grid.limits)
    shifted = ((base.codes.astype(np.int64) + half) >> coarser) << finer
    clipped: Codes = shifted.clip(-limits, limits).astype(np.int32)
    return clipped


def _wrapped(numbers: Codes, grid: Grid) -> Codes:
    """Each number modulo 2**bits of its piece, as −2**(bits−1) up to 2**(bits−1) − 1."""
    halves = grid.spread(grid.limits) + np.int32(1)
    wrapped: Codes = ((numbers + halves) & (2 * halves - 1)) - halves
    return wrapped
