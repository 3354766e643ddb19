"""Column sums of a peer's encrypted matrix V [n + d, d], weighted by one's own numbers, through the peer's key.

owner      Enc(V), and once the keys of the rotations that ``Layout`` needs           -> ``matrix``
weigher    Enc(V) by weights, all in one ciphertext (or few), plus a uniform mask
           and a fresh Enc(0), which makes the second polynomial a new one            -> ``masked``
owner      decrypts a uniform polynomial, adds noise of its own, and adds up slots    -> ``sums``
weigher    takes off the sums of its mask, modulo the ciphertexts' modulus
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import (
    FLOOR,
    KEY_ERROR,
    Opener,
    Parameters,
    Scheme,
    Sealer,
    most_rotations,
    read_rotations,
    stored,
)
from federated.vertical.masks import gaussian
from federated.vertical.parties import Draw, PeerFault
from federated.vertical.transfer.layout import Layout
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.transfer.residues import Numbers, Residues
from federated.vertical.wire import Arr, Blobs, Bytes, pack, unpack

Values = npt.NDArray[np.float64]

FLAT: Final = Parameters(8_192, (60, 60, 60), 48)
"""Products with plaintexts alone; 180 bits of 218."""
WEIGHT_SCALE: Final = 2.0**30
TERM_SCALE: Final = FLAT.scale * WEIGHT_SCALE
MOST_SUM: Final = 1e6
"""Of a column's sum over the rows: what is larger was spoilt on the way, or training diverges."""
_NOISE_GRID: Final = 2.0**32
"""Noise is drawn in whole numbers, so many to one standard deviation."""


class Plan:
    """What both parties work out alike for one direction. ``rows``: common ones; ``features``: of the weigher.

    Raises ValueError for a job that is too large, or whose noise is too small."""

    def __init__(self, options: TransferOptions, rows: int, features: int) -> None:
        self.options, self.rows = options, rows
        self.scheme = Scheme(FLAT)
        self.layout = Layout(rows + options.hidden, options.hidden, features + 1, FLAT.slots)
        self.residues = Residues(self.scheme, self.layout.residues)
        if self.flooding < 1:
            raise ValueError(f"noise {options.noise} is below the error of the encryption")
        # A trace is twice the sum, and has a sign.
        if math.log2(4 * TERM_SCALE * self._weight(rows)) > FLAT.floor_bits:
            raise ValueError("gamma, clip and hidden are too large together: sums would not fit the modulus")

    @property
    def flooding(self) -> float:
        """The key holder's noise over a bound on what the error of the encryption adds to a mean gradient."""
        # Each of two digits of a ciphertext times an error (lemma 1 of Cheon et al.), divided by the keys' own prime.
        # Rotations of products come after the weights' scale, which makes their errors nothing.
        rotation = 2 * 16 / math.sqrt(3) * KEY_ERROR * FLAT.degree / FLAT.scale
        return self.options.noise / ((FLAT.fresh_error + rotation) * self._weight(1.0))

    def _weight(self, rows: float) -> float:
        """The sum of a column's weights, at most, for so many rows: of the rows and, with all of them, of d squares.
        Vectors are at most 1."""
        options = self.options
        return rows * max(options.clip, 1.0) * (0.5 + max(options.gamma, 0.5) + options.hidden / 4)


@dataclass(frozen=True, slots=True)
class Mask:
    """``traces``: of the masks of one answer, [groups, FLOOR, residues]."""

    traces: Numbers


class Weigher:
    """Works under the ``peer``'s key."""

    def __init__(self, plan: Plan, body: bytes, peer: str, draw: Draw) -> None:
        """``body``: of the peer's ``keys``. Raises PeerFault."""
        most = FLAT.most_bytes(len(FLAT.bits))
        steps = plan.layout.steps()
        given = unpack(
            body, peer, {"public": Bytes(most), "rotations": Bytes(most_rotations(FLAT, len(steps)))}
        )
        self.plan, self.peer, self.draw = plan, peer, draw
        self._sealer = Sealer.of(plan.scheme, given["public"], peer)
        self._keys = read_rotations(plan.scheme, given["rotations"], peer, steps) if steps else None

    def hidden(self, body: bytes, weights: Values) -> tuple[bytes, Mask]:
        """For ``weights`` [F + 1, n + d, d] and the peer's ``matrix``: the body of ``masked``, and what takes its mask
        off. Raises PeerFault."""
        plan, layout, scheme = self.plan, self.plan.layout, self.plan.scheme
        most, count = FLAT.most_bytes(FLOOR), layout.chunks
        blobs: list[bytes] = unpack(body, self.peer, {"matrix": Blobs(count, most, count)})["matrix"]
        chunks = [scheme.read(blob, self.peer, FLOOR, FLAT.scale) for blob in blobs]
        turned = {
            (chunk, baby): self._rotated(cipher, baby)
            for chunk, cipher in enumerate(chunks)
            for baby in range(layout.babies)
        }
        bodies, traces = [], []
        for group in range(layout.groups):
            mask = plan.residues.uniform(self.draw)
            # A fresh encryption of nothing, from which everything else is indistinguishable as long as RLWE is hard.
            found = self._sealer.zero(FLOOR, TERM_SCALE)
            for giant in range(layout.turns // layout.babies):
                total = self._weighted(turned, weights, group, giant)
                if total is not None:
                    found = scheme.add(found, self._rotated(total, giant * layout.babies))
            bodies.append(stored(scheme.plus_plain(found, plan.residues.plain(mask, TERM_SCALE))))
            traces.append(plan.residues.trace(mask))
        return pack({"terms": bodies}), Mask(np.array(traces))

    def sums(self, body: bytes, mask: Mask) -> Values:
        """The weighted sums [F + 1, d] from the peer's ``sums``. Raises PeerFault for those that no matrix has."""
        residues, layout = self.plan.residues, self.plan.layout
        told: Numbers = unpack(body, self.peer, {"sums": Arr("<u8", mask.traces.shape)})["sums"]
        if (told >= residues.primes).any():
            raise PeerFault(self.peer, "malformed", "numbers beyond the modulus")
        found = layout.gathered(
            np.array(
                [
                    residues.sums(residues.less(trace, own), TERM_SCALE)
                    for trace, own in zip(told, mask.traces, strict=True)
                ]
            )
        )
        if not np.abs(found).max(initial=0.0) <= MOST_SUM * self.plan.rows:
            raise PeerFault(self.peer, "gradient", "too large: not of these terms, or training diverged")
        return found

    def _weighted(
        self, turned: dict[tuple[int, int], sealapi.Ciphertext], weights: Values, group: int, giant: int
    ) -> sealapi.Ciphertext | None:
        """The sum of one giant step's products; None where all weights are 0, whose product would be no encryption."""
        scheme, found = self.plan.scheme, None
        for chunk, baby, slots in self.plan.layout.diagonals(weights, group, giant):
            product = scheme.weighted(turned[chunk, baby], scheme.encode(slots, FLOOR, WEIGHT_SCALE))
            found = product if found is None else scheme.add(found, product)
        return found

    def _rotated(self, cipher: sealapi.Ciphertext, rows: int) -> sealapi.Ciphertext:
        if not rows:
            return cipher
        assert self._keys is not None
        return self.plan.scheme.rotated(cipher, rows * self.plan.layout.stride, self._keys)


class Owner:
    """Has the key of its own matrix. ``plan``: of the peer as weigher."""

    def __init__(self, plan: Plan, peer: str, draw: Draw) -> None:
        self.plan, self.peer, self.draw = plan, peer, draw
        self.opener = Opener(plan.scheme)

    def keys(self) -> bytes:
        """The body of ``keys``."""
        steps = self.plan.layout.steps()
        rotations = stored(self.opener.rotations(steps)) if steps else b""
        return pack({"public": stored(self.opener.public()), "rotations": rotations})

    def sealed(self, matrix: Values) -> bytes:
        """The body of ``matrix``: V [n + d, d], encrypted."""
        chunks = [
            stored(self.opener.seal(slots, FLOOR, FLAT.scale)) for slots in self.plan.layout.spread(matrix)
        ]
        return pack({"matrix": chunks})

    def answer(self, body: bytes) -> bytes:
        """The body of ``sums`` for a peer's ``masked``. Raises PeerFault."""
        scheme, residues, count = self.plan.scheme, self.plan.residues, self.plan.layout.groups
        blobs: list[bytes] = unpack(body, self.peer, {"terms": Blobs(count, FLAT.most_bytes(FLOOR), count)})[
            "terms"
        ]
        traces = []
        for blob in blobs:
            cipher = scheme.read(blob, self.peer, FLOOR, TERM_SCALE)
            # Before the decryption is looked at: exact ones would tell of the key.
            noisy = scheme.plus(cipher, self._noise())
            traces.append(residues.trace(residues.of(self.opener.plain(noisy))))
        return pack({"sums": np.array(traces)})

    def _noise(self) -> Values:
        """For each sum one number, where the trace adds it to that sum, [slots]."""
        drawn = gaussian(self.plan.layout.residues, _NOISE_GRID, self.draw)
        found = np.zeros(FLAT.slots)
        found[: len(drawn)] = drawn / _NOISE_GRID * self.plan.options.noise * self.plan.rows
        return found
