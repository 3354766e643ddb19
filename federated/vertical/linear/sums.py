"""The gradient between a party and a key holder: masked terms there, masked sums back.

party        every slot of Enc(x * d) gets a mask of its own and a fresh Enc(0)   -> ``masked``
key holder   decrypts noise, adds up each feature's slots, adds noise of its own   -> ``gradient``
party        takes off the sum of its masks, modulo 2^64
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical.ckks import FLOOR, Opener, Scheme, Sealer, stored
from federated.vertical.linear.batches import Batches
from federated.vertical.linear.circuit import FEATURE_SCALE
from federated.vertical.masks import Drawn, Masks, gaussian
from federated.vertical.parties import Draw, PeerFault
from federated.vertical.wire import Arr, Blobs, pack, unpack

Values = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MOST_KEPT: Final = 256 * 2**20
"""Bytes of encoded features that a party keeps between epochs; with more it encodes them again each time."""

MOST_GRADIENT: Final = 1e5
"""Of a mean gradient, in scaled columns: what is larger was spoilt on the way, or training diverges."""


class Terms:
    """A party's columns against encrypted residuals. ``features``: scaled, [N, F] in the joint order."""

    def __init__(
        self, scheme: Scheme, sealer: Sealer, batches: Batches, features: Values, masks: Masks, draw: Draw
    ) -> None:
        self.scheme, self.sealer, self.batches, self.masks = scheme, sealer, batches, masks
        self._features, self._draw = features, draw
        each = FLOOR * scheme.parameters.degree * 8
        total = each * len(batches.rows) * batches.ciphertexts(features.shape[1])
        self._kept: dict[int, list[sealapi.Plaintext | None]] | None = {} if total <= MOST_KEPT else None

    def hidden(self, batch: int, residual: sealapi.Ciphertext) -> tuple[bytes, Drawn]:
        """The body for the key holder, and the sums of the masks [F] in it."""
        bodies, drawn = [], []
        for column in self._columns(batch):
            scale = residual.scale * FEATURE_SCALE
            # A product with zero would not be encrypted at all.
            term = (
                self.sealer.zero(FLOOR, scale) if column is None else self.scheme.weighted(residual, column)
            )
            masks = self.masks.draw(self.batches.slots, self._draw)
            bodies.append(stored(self.sealer.hide(term, self.masks.split(masks))))
            drawn.append(masks)
        width = self._features.shape[1]
        whole = self.batches.sums([masks.whole for masks in drawn], width)
        part = self.batches.sums([masks.part for masks in drawn], width)
        return pack({"terms": bodies}), Drawn(whole, part)

    def gradient(self, batch: int, sums: Integers, masks: Drawn, keeper: str) -> Values:
        """The mean gradient [F] of ``batch`` from the ``sums`` [F] of ``keeper``. Raises PeerFault for one that no
        residuals have."""
        with np.errstate(over="ignore"):
            steps = (sums - masks.whole) - masks.part
        found: Values = self.masks.values(steps) / len(self.batches.rows[batch])
        if np.abs(found).max(initial=0.0) > MOST_GRADIENT:
            raise PeerFault(
                keeper,
                "gradient",
                f"beyond {MOST_GRADIENT:.0e}: not of these terms, or training diverges and needs a lower rate",
            )
        return found

    def _columns(self, batch: int) -> list[sealapi.Plaintext | None]:
        if self._kept is not None and batch in self._kept:
            return self._kept[batch]
        rows = self._features[self.batches.rows[batch]]
        found = [
            self.scheme.encode(column, FLOOR, FEATURE_SCALE) if column.any() else None
            for column in self.batches.columns(rows)
        ]
        if self._kept is not None:
            self._kept[batch] = found
        return found


@dataclass(frozen=True, slots=True)
class Sums:
    """The key holder's side. ``scale``: of the terms. ``noise``: standard deviation that a mean gradient gets."""

    opener: Opener
    batches: Batches
    masks: Masks
    scale: float
    noise: float
    draw: Draw = os.urandom

    def answer(self, body: bytes, sender: str, batch: int, features: int) -> bytes:
        """What ``sender``, who has so many features, gets for its ``masked``. Raises PeerFault."""
        count = self.batches.ciphertexts(features)
        most = self.opener.scheme.parameters.most_bytes(FLOOR)
        blobs: list[bytes] = unpack(body, sender, {"terms": Blobs(count, most, count)})["terms"]
        terms = [self.opened(blob, sender, self.scale, self.masks) for blob in blobs]
        sums = self.batches.sums(terms, features)
        deviation = self.noise * len(self.batches.rows[batch]) * 2.0**self.masks.grid
        with np.errstate(over="ignore"):
            noisy = sums + gaussian(features, deviation, self.draw)
        return pack({"sums": noisy})

    def opened(self, blob: bytes, sender: str, scale: float, masks: Masks) -> Integers:
        """The slots of a masked ciphertext in whole steps of the masks' grid [slots]. Raises PeerFault."""
        return masks.integers(self.values(blob, sender, scale, masks))

    def values(self, blob: bytes, sender: str, scale: float, masks: Masks) -> Values:
        """The slots of a masked ciphertext [slots]. Raises PeerFault."""
        values = self.opener.open(self.opener.scheme.read(blob, sender, FLOOR, scale))
        return masks.check(values, sender)


def read_sums(body: bytes, sender: str, features: int) -> Integers:
    """The key holder's answer [F]. Raises PeerFault."""
    fields: Mapping[str, Integers] = unpack(body, sender, {"sums": Arr("<i8", (features,))})
    return fields["sums"]
