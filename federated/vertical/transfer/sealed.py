"""Column sums of a peer's encrypted matrix V [n + d, d], weighted by one's own numbers, through the peer's key.

owner      Enc(V), in chunks of whole rows                                     -> ``matrix``
weigher    every slot of Enc(V)·weights gets a mask and a fresh Enc(0)         -> ``masked``
owner      decrypts noise, adds up columns, adds noise of its own              -> ``sums``
weigher    takes off the sums of its masks, modulo 2^64
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import FLOOR, SHALLOW, Opener, Scheme, Sealer, stored
from federated.vertical.masks import Drawn, Masks, gaussian
from federated.vertical.parties import Draw, PeerFault
from federated.vertical.transfer.options import TransferOptions
from federated.vertical.wire import Arr, Blobs, pack, unpack

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

WEIGHT_SCALE: Final = 2.0**26
MOST_SUM: Final = 1e6
"""Of a column's sum over the rows: what is larger was spoilt on the way, or training diverges."""


class Plan:
    """What both parties work out alike. ``rows``: common ones."""

    def __init__(self, options: TransferOptions, rows: int) -> None:
        self.options, self.rows, self.width = options, rows, options.hidden
        self.scheme = Scheme(SHALLOW)
        self.height = rows + options.hidden
        self.chunk = SHALLOW.slots // options.hidden
        self.term_scale = SHALLOW.scale * WEIGHT_SCALE
        # Errors of slots add up like independent ones: a sum's is sqrt(rows) larger, a mean's as much smaller.
        self.masks = Masks.fitting(
            options.precision * math.sqrt(rows), SHALLOW.floor_bits, math.ceil(math.log2(self.term_scale))
        )
        if self.flooding < 1:
            raise ValueError(f"noise {options.noise} is below the error of the encryption")

    @property
    def chunks(self) -> int:
        return -(-self.height // self.chunk)

    @property
    def flooding(self) -> float:
        """The key holder's noise over a bound on what the error of a fresh encryption adds to a mean gradient."""
        return self.options.noise / (SHALLOW.fresh_error * self._weight(1.0))

    def slots(self, matrix: Values) -> list[Values]:
        """``matrix`` [n + d, d] as what fills each ciphertext, [slots]."""
        found = []
        for start in range(0, self.height, self.chunk):
            part = matrix[start : start + self.chunk].reshape(-1)
            filled = np.zeros(SHALLOW.slots)
            filled[: len(part)] = part
            found.append(filled)
        return found

    def columns(self, slots: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
        """Sums of the columns [d] (of integers modulo 2^64) of what lies in the chunks' slots."""
        used = self.chunk * self.width
        found: npt.NDArray[Number] = np.vstack(
            [one[:used].reshape(self.chunk, self.width) for one in slots]
        ).sum(axis=0)
        return found

    def distance(self, features: int) -> float:
        """Statistical distance from noise, at most, of all that a key holder decrypts of a party in the whole job."""
        columns = (features + 1.0) * self.width * self.options.steps
        # Distances add over slots: what counts is the sum of a column's values.
        return self.masks.distance(self._weight(self.rows), columns)

    def _weight(self, rows: float) -> float:
        """The sum of a column's weights, at most, for so many rows: of the rows and, with all of them, of d squares.
        Vectors are at most 1."""
        options = self.options
        return rows * max(options.clip, 1.0) * (0.5 + max(options.gamma, 0.5) + self.width / 4)

    def figures(self, features: int) -> dict[str, float | int | str]:
        """What a party shows of the protection."""
        return {
            "protection": "CKKS, each party's own key",
            "mask_bits": int(math.log2(self.masks.reach)),
            "mask_distance_log2": round(math.log2(self.distance(features)), 1),
            "noise_over_error": round(self.flooding, 1),
        }


@dataclass(frozen=True, slots=True)
class Weigher:
    """Works under the ``peer``'s key."""

    plan: Plan
    sealer: Sealer
    peer: str
    draw: Draw

    def hidden(self, body: bytes, weights: Values) -> tuple[bytes, Drawn]:
        """For ``weights`` [F + 1, n + d, d] and the peer's ``matrix``: the body of ``masked``, and the sums of the
        masks in it [F + 1, d]. Raises PeerFault."""
        plan, scheme = self.plan, self.plan.scheme
        most = scheme.parameters.most_bytes(FLOOR)
        blobs: list[bytes] = unpack(body, self.peer, {"matrix": Blobs(plan.chunks, most, plan.chunks)})[
            "matrix"
        ]
        ciphers = [scheme.read(blob, self.peer, FLOOR, scheme.parameters.scale) for blob in blobs]
        bodies, wholes, parts = [], [], []
        for of_feature in weights:
            drawn = [plan.masks.draw(scheme.parameters.slots, self.draw) for _ in ciphers]
            for cipher, slots, masks in zip(ciphers, plan.slots(of_feature), drawn, strict=True):
                bodies.append(stored(self.sealer.hide(self._product(cipher, slots), plan.masks.split(masks))))
            wholes.append(plan.columns([masks.whole for masks in drawn]))
            parts.append(plan.columns([masks.part for masks in drawn]))
        return pack({"terms": bodies}), Drawn(np.array(wholes), np.array(parts, np.float64))

    def sums(self, body: bytes, masks: Drawn) -> Values:
        """The weighted sums [F + 1, d] from the peer's ``sums``. Raises PeerFault for those that no matrix has."""
        told: Integers = unpack(body, self.peer, {"sums": Arr("<i8", masks.whole.shape)})["sums"]
        with np.errstate(over="ignore"):
            steps = (told - masks.whole) - masks.part
        found: Values = self.plan.masks.values(steps)
        if np.abs(found).max(initial=0.0) > MOST_SUM * self.plan.rows:
            raise PeerFault(self.peer, "gradient", "too large: not of these terms, or training diverged")
        return found

    def _product(self, cipher: sealapi.Ciphertext, slots: Values) -> sealapi.Ciphertext:
        # A product with zero would not be encrypted at all.
        if not slots.any():
            return self.sealer.zero(FLOOR, self.plan.term_scale)
        return self.plan.scheme.weighted(cipher, self.plan.scheme.encode(slots, FLOOR, WEIGHT_SCALE))


class Owner:
    """Has the key of its own matrix."""

    def __init__(self, plan: Plan, peer: str, draw: Draw) -> None:
        self.plan, self.peer, self.draw = plan, peer, draw
        self.opener = Opener(plan.scheme)
        self._sealer = Sealer(plan.scheme, self.opener.public())

    def sealed(self, matrix: Values) -> bytes:
        """The body of ``matrix``: V [n + d, d], encrypted."""
        scale = self.plan.scheme.parameters.scale
        chunks = [stored(self._sealer.seal(slots, FLOOR, scale)) for slots in self.plan.slots(matrix)]
        return pack({"matrix": chunks})

    def answer(self, body: bytes, features: int) -> bytes:
        """The body of ``sums`` for a peer's ``masked``, of F + 1 rows of weights each. Raises PeerFault."""
        plan, scheme = self.plan, self.plan.scheme
        count, most = (features + 1) * plan.chunks, scheme.parameters.most_bytes(FLOOR)
        blobs: list[bytes] = unpack(body, self.peer, {"terms": Blobs(count, most, count)})["terms"]
        opened = [
            plan.masks.integers(
                plan.masks.check(
                    self.opener.open(scheme.read(blob, self.peer, FLOOR, plan.term_scale)), self.peer
                )
            )
            for blob in blobs
        ]
        found = np.array(
            [plan.columns(opened[at : at + plan.chunks]) for at in range(0, count, plan.chunks)], np.int64
        )
        deviation = plan.options.noise * plan.rows * 2.0**plan.masks.grid
        with np.errstate(over="ignore"):
            noisy = found + gaussian(found.size, deviation, self.draw).reshape(found.shape)
        return pack({"sums": noisy})
