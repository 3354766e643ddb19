"""A body as sections: byte runs whose length both sides know, or that carry it; each deflated where that helps.

Deflate is the standard library's zlib, so that a device needs nothing but NumPy. On gaps and codes its Huffman coder
comes near their entropy, and its runs (Z_RLE) near nothing where a difference is mostly zeros; matching longer strings,
or LZMA, finds no more in what is random, at several times the work. Sections are coded apart, since one table for gaps
and codes together would fit neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from federated.compression.errors import BodyRefused
from federated.compression.packing import Bytes
from federated.compression.streams import Indices

MAX_SECTIONS = 8


@dataclass(frozen=True, slots=True)
class SectionRule:
    """What a section may be: ``most`` bytes, or exactly as many when ``fixed``; ``noise`` says that no coder
    can shrink it, so none tries."""

    most: int
    fixed: bool = True
    noise: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """One section of B bodies: all bytes in a row, and where each body's part ends ``[B]``."""

    body: Bytes
    ends: Indices

    @staticmethod
    def of_rows(rows: Bytes) -> Section:
        """Rows ``[B, L]`` of equal length."""
        count, length = rows.shape
        return Section(np.ascontiguousarray(rows).reshape(-1), np.arange(1, count + 1) * length)

    def parts(self) -> list[bytes]:
        """Each body's part."""
        whole = self.body.tobytes()
        return [whole[start:end] for start, end in pairwise([0, *self.ends.tolist()])]

    def rows(self) -> Bytes:
        """The parts as ``[B, L]``; they must be of equal length."""
        return self.body.reshape(len(self.ends), -1)


def deflate(raw: bytes) -> bytes:
    """Huffman-coded ``raw``, its runs shortened, without zlib's header and checksum (the transport has its own)."""
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return coder.compress(raw) + coder.flush()


def inflate(coded: bytes, most: int) -> bytes:
    """The bytes behind ``coded``, at most ``most``. Raises BodyRefused; never allocates beyond the bound."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        raw = decoder.decompress(coded, most + 1)
    except zlib.error as error:
        raise BodyRefused("a section does not inflate") from error
    if len(raw) > most:
        raise BodyRefused(f"a section inflates beyond {most} bytes")
    if not decoder.eof or decoder.unused_data:
        raise BodyRefused("a section is cut short or followed by more")
    return raw


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, low ones first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(body: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` and the place after it. Raises BodyRefused; at most five bytes are read."""
    number = 0
    for step in range(5):
        if at + step >= len(body):
            raise BodyRefused("the body ends inside a length")
        byte = body[at + step]
        number |= (byte & 0x7F) << (7 * step)
        if byte < 0x80:
            return number, at + step + 1
    raise BodyRefused("a length of more than five bytes")


def join(sections: Sequence[Section], rules: Sequence[SectionRule], coded: bool) -> list[bytes]:
    """B bodies: a byte of flags (bit s: section s is deflated), then the sections; a length stands before each
    that is deflated or of variable length."""
    bodies = []
    for parts in zip(*(section.parts() for section in sections), strict=True):
        flags, out = 0, bytearray(1)
        for place, (raw, rule) in enumerate(zip(parts, rules, strict=True)):
            shorter = deflate(raw) if coded and raw and not rule.noise else raw
            # A deflated section costs its length too, where a fixed one has none.
            if len(shorter) + rule.fixed * len(varint(len(shorter))) < len(raw):
                flags |= 1 << place
                out += varint(len(shorter)) + shorter
            elif rule.fixed:
                out += raw
            else:
                out += varint(len(raw)) + raw
        out[0] = flags
        bodies.append(bytes(out))
    return bodies


def split(body: bytes, rules: Sequence[SectionRule], coded: bool) -> list[Section]:
    """The sections of one body. Raises BodyRefused unless it is whole and obeys ``rules``."""
    if not body:
        raise BodyRefused("the body is empty")
    flags, at = body[0], 1
    if flags >> len(rules) or (flags and not coded):
        raise BodyRefused(f"flags {flags:#x} are not of this scheme")
    found = []
    for place, rule in enumerate(rules):
        deflated = bool(flags >> place & 1)
        length = rule.most
        if deflated or not rule.fixed:
            length, at = read_varint(body, at)
        # A deflated section was taken because it is shorter, so it never exceeds what the raw one may take.
        if length > rule.most or at + length > len(body):
            raise BodyRefused(f"section {place} of {length} bytes does not fit")
        raw = body[at : at + length]
        at += length
        if deflated:
            raw = inflate(raw, rule.most)
        if rule.fixed and len(raw) != rule.most:
            raise BodyRefused(f"section {place} holds {len(raw)} bytes, not {rule.most}")
        found.append(Section(np.frombuffer(raw, np.uint8), np.array([len(raw)])))
    if at != len(body):
        raise BodyRefused(f"{len(body) - at} bytes after the last section")
    return found
