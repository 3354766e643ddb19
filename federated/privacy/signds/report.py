"""A SignDS report as bytes: a sign and h coordinates of d, in as many bytes for one vector as for any other.

Ascending coordinates less their ranks, c_i − i, lie in [0, d − h] and never descend: no bytes name a coordinate twice.
They are written as Elias (1974) and Fano (1971) do: the low l bits of each, and the rest in unary, h ones among
h + ⌊(d − h) / 2^l⌋ bits; l makes it shortest. That is .4 to .7 bits a coordinate above log₂ C(d, h), which no code of
fixed length beats, and, unlike ranking all sets, takes no numbers of thousands of bits. The sign is the first bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from federated.compression import BodyRefused, Scheme
from federated.compression.scheme import Encoded
from federated.compression.streams import Floats
from federated.privacy.signds.plan import Plan, plan_for

Bits = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Form:
    """Where the bits of ``named`` = h of ``dimension`` = d coordinates stand: a sign, ``unary`` bits, ``low`` bits of
    each."""

    dimension: int
    named: int
    low: int
    unary: int

    @property
    def length(self) -> int:
        """Bytes of a report, whatever it says."""
        return -(-(1 + self.unary + self.named * self.low) // 8)


def form_of(dimension: int, named: int) -> Form:
    """The shortest form."""
    room = dimension - named
    forms = [Form(dimension, named, low, named + (room >> low)) for low in range(room.bit_length() + 1)]
    return min(forms, key=lambda form: (form.length, form.low))


def encode(form: Form, signs: npt.NDArray[np.int8], places: Integers) -> list[bytes]:
    """Reports of ``signs`` [B], 1 or −1, and ascending ``places`` [B, h]."""
    rows, ranks = len(signs), np.arange(form.named)
    reduced = places - ranks
    bits = np.zeros((rows, 8 * form.length), np.uint8)
    bits[:, 0] = signs < 0
    np.put_along_axis(bits, 1 + (reduced >> form.low) + ranks, np.uint8(1), axis=1)
    shifts = np.arange(form.low)[::-1]
    lows = (reduced[:, :, None] >> shifts & 1).astype(np.uint8).reshape(rows, -1)
    bits[:, 1 + form.unary : 1 + form.unary + lows.shape[1]] = lows
    return [body.tobytes() for body in np.packbits(bits, axis=1)]


def decode(form: Form, body: bytes) -> tuple[int, Integers]:
    """The sign and the places [h], ascending, all different. Raises BodyRefused for bytes that ``encode`` cannot have
    made."""
    if len(body) != form.length:
        raise BodyRefused(f"a report of {len(body)} bytes instead of {form.length}")
    bits = np.unpackbits(np.frombuffer(body, np.uint8))
    end = 1 + form.unary + form.named * form.low
    ones = np.flatnonzero(bits[1 : 1 + form.unary])
    if len(ones) != form.named or bits[end:].any():
        raise BodyRefused(f"{len(ones)} coordinates instead of {form.named}, or bits after the last")
    lows = bits[1 + form.unary : end].reshape(form.named, form.low).astype(np.int64)
    ranks = np.arange(form.named)
    reduced = (ones - ranks << form.low) + lows @ (1 << np.arange(form.low)[::-1])
    if reduced[-1] > form.dimension - form.named or (np.diff(reduced) < 0).any():
        raise BodyRefused("the coordinates do not ascend, or one lies beyond the vector")
    return 1 - 2 * int(bits[0]), reduced + ranks


@dataclass(frozen=True, slots=True)
class SignReports(Scheme):
    """The scheme of SignDS jobs: a vector of one sign at h places and zeros elsewhere. What is longer or shorter or has
    other values is no report."""

    sign_k: float = 0.01
    epsilon: float = 100.0
    ratio: float = 0.6
    named: int = 0

    @property
    def shared_support(self) -> bool:
        """Each client names others."""
        return False

    @property
    def mark(self) -> int:
        """See ``Scheme``; not on the wire."""
        return zlib.crc32(repr((self.sign_k, self.epsilon, self.ratio, self.named)).encode()) & 0xFF

    def plan(self, dimension: int) -> Plan:
        """What is drawn for D. Raises ValueError."""
        return plan_for(dimension, self.sign_k, self.epsilon, self.ratio, self.named)

    def form(self, dimension: int) -> Form:
        """How it is written."""
        return form_of(dimension, self.plan(dimension).named)

    def most_bytes(self, dimension: int) -> int:
        """The length of every report on D."""
        return self.form(dimension).length

    def encode_batch(
        self,
        vectors: Floats,
        generators: Sequence[np.random.Generator],
        residuals: Floats | None = None,
        shared: int = 0,
    ) -> Encoded:
        """See ``Scheme``: ``vectors`` [B, D] are reports. Raises ValueError for others."""
        form = self.form(vectors.shape[1])
        rows, columns = np.nonzero(vectors)
        if residuals is not None or (np.bincount(rows, minlength=len(vectors)) != form.named).any():
            raise ValueError(f"a vector is no report on {form.named} coordinates")
        places = columns.reshape(len(vectors), form.named)
        values = np.take_along_axis(vectors, places, axis=1)
        if (values != values[:, :1]).any() or (np.abs(values) != 1.0).any():
            raise ValueError("a report has one sign for all its coordinates")
        return Encoded(encode(form, values[:, 0].astype(np.int8), places), vectors, None)

    def decode(self, body: bytes, dimension: int, shared: int = 0) -> Floats:
        """The vector [D]. Raises BodyRefused."""
        sign, places = decode(self.form(dimension), body)
        vector = np.zeros(dimension, np.float32)
        vector[places] = sign
        return vector
