"""The interactive layer: z = a W of a host's activations a [B, d] and weights W [d, k] that neither party has.

Each holds a share of W, evenly spread modulo PLAIN, W = W_guest + W_host. Numbers are whole: activations in steps of
2^-f (A), gradients of a row's loss along z in steps of 2^-f (D), weights in steps of 2^-(2f + s)::

    host ► guest   Enc(A), Enc(W_host), each number of A once for every column, each of W_host once for every row
    guest ► host   Enc(A * W_guest + masks)                                                         ``masked``
    host ► guest   z + the masks' sum + blur: the sum of what it decrypts over d, and A W_host      ``products``
    guest          takes the masks' sum off, has z, goes on to the loss and back to D
    guest ► host   Enc(A * D + masks), Enc(W_host * D + masks)                                      ``turned``

The masks of the second half of ``turned`` add up, over k, to D W_guest^T + blur: their sum is the gradient along a, and
that is all that the host sees of it. Those of the first half have a sum M over rows that the guest knows, and the host
sees A^T D + M, evenly spread: it takes that off its share, the guest adds M to its own, and W has moved by -A^T D, one
step of gradient descent with the rate B / 2^s, without rounding and without anybody having seen the gradient.

The blur is noise of BLUR_STEPS steps of 2^-f, in z and in the gradient along a. Without it z would be exact sums of
small whole numbers with unknown weights, and k of them of long weights tell all d small numbers (lattice reduction
finds them: Coron and Gini 2020, "A polynomial-time algorithm for solving the hidden subset sum problem").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.privacy.randomness import Randomness, normal
from federated.vertical.parties import Draw, PeerFault
from federated.vertical.split.options import SplitOptions
from federated.vertical.split.ring import (
    HALF,
    MOST_CIPHERTEXT,
    PLAIN,
    SLOTS,
    Hider,
    Ints,
    KeyHolder,
    centred,
    product,
    summed,
    uniform,
)
from federated.vertical.wire import Arr, Blobs, pack, unpack

Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

RANGE_BITS: Final = 7
"""z and the gradient of a row's loss along an activation lie within plus and minus 2^RANGE_BITS."""
MOST_BITS: Final = 14
LEAST_BITS: Final = 8
LARGEST_GRADIENT: Final = 16.0
"""Of a row's loss along one number of z: larger ones are cut."""
BLUR_STEPS: Final = 4.0
MOST_CIPHERTEXTS: Final = 512
"""Of one message: 200 MB."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What both sides work out alike. ``width``: d; ``share``: k; ``stride``: rows of the largest batch; ``bits``: f;
    ``shift``: s. Blocks, of ``stride`` slots each, are numbered by column of a and then by column of W; those of the
    host's share of W follow those of a."""

    width: int
    share: int
    stride: int
    bits: int
    shift: int

    @classmethod
    def of(cls, options: SplitOptions, rows: int) -> Plan:
        """Raises ValueError where numbers would be too coarse."""
        most = min(options.batch, rows)
        stride = -(-rows // -(-rows // most))
        shift = max(0, round(math.log2(stride / options.layer_rate)))
        # z: an activation of up to activation_clip times weights, within plus and minus HALF.
        clip = max(0, math.ceil(math.log2(options.activation_clip)))
        bits = min(MOST_BITS, MOST_BITS + 4 - clip, (HALF.bit_length() - 1 - RANGE_BITS - shift) // 3)
        if bits < LEAST_BITS:
            raise ValueError(
                f"batches of {stride} rows at layer_rate {options.layer_rate} leave {bits} bits for a number, "
                f"{LEAST_BITS} are needed; take smaller batches, a larger layer_rate or a smaller activation_clip"
            )
        found = cls(options.width, options.interactive, stride, bits, shift)
        if found.ciphertexts > MOST_CIPHERTEXTS:
            raise ValueError(
                f"{stride} rows with {options.width} x {options.interactive} weights take {found.ciphertexts} "
                f"ciphertexts a batch, at most {MOST_CIPHERTEXTS}; take smaller batches, width or interactive"
            )
        return found

    @property
    def rate(self) -> float:
        """Of gradient descent on W along the mean loss of a batch of ``stride`` rows."""
        return math.ldexp(self.stride, -self.shift)

    @property
    def weight_bits(self) -> int:
        return 2 * self.bits + self.shift

    @property
    def blur(self) -> float:
        """Standard deviation of the noise in z, and in the gradient of a row's loss along an activation."""
        return math.ldexp(BLUR_STEPS, -self.bits)

    @property
    def pairs(self) -> int:
        """Of a column of a and one of W."""
        return self.width * self.share

    @property
    def blocks(self) -> int:
        """Blocks of ``stride`` slots in a ciphertext."""
        return SLOTS // self.stride

    @property
    def forward(self) -> int:
        """Ciphertexts of ``masked``: those that hold activations."""
        return -(-self.pairs // self.blocks)

    @property
    def ciphertexts(self) -> int:
        """Of ``sealed`` and ``turned``."""
        return -(-2 * self.pairs // self.blocks)

    def initial(self, generator: np.random.Generator) -> Ints:
        """A party's half of small first weights [d, k]: their sum has the variance of numbers within 1/√d."""
        bound = 1 / math.sqrt(2 * self.width)
        drawn = generator.uniform(-bound, bound, (self.width, self.share))
        return np.rint(np.ldexp(drawn, self.weight_bits)).astype(np.int64) % PLAIN

    def activations(self, values: Singles) -> Ints:
        """A [B, d] of activations."""
        return np.rint(np.ldexp(values.astype(np.float64), self.bits)).astype(np.int64)

    def gradients(self, values: Singles) -> Ints:
        """D [B, k] of the gradients of the rows' own losses."""
        cut = np.clip(values.astype(np.float64), -LARGEST_GRADIENT, LARGEST_GRADIENT)
        return np.rint(np.ldexp(cut, self.bits)).astype(np.int64)

    def real(self, numbers: Ints, sender: str) -> Singles:
        """z, or gradients along activations, from numbers of [0, PLAIN). Raises PeerFault for what is out of range:
        somebody changed it, or training diverges."""
        found = np.ldexp(centred(numbers).astype(np.float64), -self.bits - self.weight_bits)
        if np.abs(found).max(initial=0.0) > 2.0 ** (RANGE_BITS - 1):
            raise PeerFault(
                sender,
                "range",
                "not what an honest party computes, or training diverges and needs a lower rate",
            )
        return found.astype(np.float32)

    def weights(self, share: Ints, other: Ints, sender: str) -> Floats:
        """W [d, k] from both shares. Raises PeerFault."""
        found = np.ldexp(centred((share + other) % PLAIN).astype(np.float64), -self.weight_bits)
        if np.abs(found).max(initial=0.0) > 2.0**RANGE_BITS:
            raise PeerFault(sender, "range", "its share is not of these weights")
        return found

    def blurred(self, numbers: Ints, randomness: Randomness) -> Ints:
        """``numbers`` of [0, PLAIN) with noise."""
        steps = math.ldexp(BLUR_STEPS, self.weight_bits)
        noise = np.rint(steps * normal(randomness, numbers.size)).astype(np.int64)
        return (numbers + noise.reshape(numbers.shape)) % PLAIN

    def slots(self, blocks: Ints) -> Ints:
        """``blocks`` [n, stride] as they fill ciphertexts: [m, SLOTS]."""
        count = -(-len(blocks) // self.blocks)
        filled = np.zeros((count * self.blocks, self.stride), np.int64)
        filled[: len(blocks)] = blocks
        found = np.zeros((count, SLOTS), np.int64)
        found[:, : self.blocks * self.stride] = filled.reshape(count, -1)
        return found

    def held(self, slots: Ints, start: int = 0) -> Ints:
        """The blocks [d, k, stride] from block ``start`` on in ``slots`` [m, SLOTS]."""
        blocks = slots[:, : self.blocks * self.stride].reshape(-1, self.stride)
        return blocks[start : start + self.pairs].reshape(self.width, self.share, self.stride)

    def of_gradients(self, turned: Ints) -> Ints:
        """Blocks [d k, stride] of D [B, k]: for each column of a the same."""
        found = np.zeros((self.width, self.share, self.stride), np.int64)
        found[:, :, : len(turned)] = turned.T % PLAIN
        return found.reshape(self.pairs, self.stride)


class HostLayer:
    """The side with the activations and the key. ``share``: its share of W [d, k]."""

    def __init__(self, plan: Plan, guest: str, share: Ints, randomness: Randomness) -> None:
        self.plan, self.share = plan, share
        self._guest, self._randomness = guest, randomness
        self._holder = KeyHolder()
        self._batch = np.empty((0, plan.width), np.int64)

    @property
    def key(self) -> bytes:
        """The public one."""
        return self._holder.public

    def sealed(self, activations: Singles) -> bytes:
        """The body of ``sealed`` for activations [B, d]."""
        plan = self.plan
        self._batch = plan.activations(activations)
        blocks = np.zeros((2, plan.width, plan.share, plan.stride), np.int64)
        blocks[0, :, :, : len(activations)] = self._batch.T[:, None, :] % PLAIN
        blocks[1, :, :, : len(activations)] = self.share[:, :, None]
        slots = plan.slots(blocks.reshape(2 * plan.pairs, plan.stride))
        return pack({"ciphertexts": self._holder.encrypt(slots)})

    def products(self, body: bytes) -> bytes:
        """The body of ``products`` for the guest's ``masked``. Raises PeerFault."""
        plan, rows = self.plan, len(self._batch)
        opened = plan.held(self._holder.decrypt(_blobs(body, self._guest, plan.forward), self._guest))
        own = product(self._batch, self.share)
        sums = (summed(opened[:, :, :rows], 0).T + own) % PLAIN
        return pack({"sums": plan.blurred(sums, self._randomness)})

    def gradients(self, body: bytes) -> Singles:
        """Gradients [B, d] of the batch's mean loss along the activations, from ``turned``; the share moves. Raises
        PeerFault."""
        plan, rows = self.plan, len(self._batch)
        slots = self._holder.decrypt(_blobs(body, self._guest, plan.ciphertexts), self._guest)
        # Rows one after another: how they lie decides in which order a matrix product adds up.
        along = np.ascontiguousarray(summed(plan.held(slots, plan.pairs)[:, :, :rows], 1).T)
        found = plan.real(along, self._guest) / np.float32(rows)
        self.share = (self.share - summed(plan.held(slots)[:, :, :rows], 2)) % PLAIN
        return found


class GuestLayer:
    """The side with the labels, towards one ``host``. ``share``: its share of W [d, k]."""

    def __init__(
        self, plan: Plan, host: str, key: bytes, share: Ints, draw: Draw, randomness: Randomness
    ) -> None:
        self.plan, self.share = plan, share
        self._host, self._draw, self._randomness = host, draw, randomness
        self._hider = Hider(key, host, draw)
        self._ciphers: list[sealapi.Ciphertext] = []
        self._masks = np.empty((0, 0), np.int64)

    def masked(self, body: bytes) -> bytes:
        """The body of ``masked`` for the host's ``sealed``. Raises PeerFault."""
        plan = self.plan
        self._ciphers = [self._hider.read(blob) for blob in _blobs(body, self._host, plan.ciphertexts)]
        weights = np.repeat(self.share.reshape(plan.pairs, 1), plan.stride, axis=1)
        masks = uniform(self._draw, plan.forward * SLOTS).reshape(plan.forward, SLOTS)
        self._masks = summed(plan.held(masks), 0).T
        return self._answer(plan.slots(weights), masks)

    def shares(self, body: bytes, rows: int) -> Singles:
        """z [B, k] of a batch of so many rows from the host's ``products``. Raises PeerFault."""
        sums: Ints = unpack(body, self._host, {"sums": Arr("<i8", (rows, self.plan.share))})["sums"]
        if sums.min() < 0 or sums.max() >= PLAIN:
            raise PeerFault(self._host, "malformed", "a number beyond the modulus")
        return self.plan.real((sums - self._masks[:rows]) % PLAIN, self._host)

    def turned(self, gradients: Singles) -> bytes:
        """The body of ``turned`` for ``gradients`` [B, k] of the batch's mean loss along z; the share moves."""
        plan, rows = self.plan, len(gradients)
        steps = plan.gradients(gradients * np.float32(rows))
        masks = uniform(self._draw, plan.ciphertexts * SLOTS).reshape(plan.ciphertexts, SLOTS)
        blocks = masks[:, : plan.blocks * plan.stride].reshape(-1, plan.stride)
        along = blocks[plan.pairs : 2 * plan.pairs].reshape(plan.width, plan.share, plan.stride)
        own = plan.blurred(product(steps, self.share.T), self._randomness).T
        along[:, -1, :rows] = (own - summed(along[:, :-1, :rows], 1)) % PLAIN if plan.share > 1 else own
        blocks[plan.pairs : 2 * plan.pairs] = along.reshape(plan.pairs, plan.stride)
        masks[:, : plan.blocks * plan.stride] = blocks.reshape(plan.ciphertexts, -1)
        factors = np.tile(plan.of_gradients(steps), (2, 1))
        body = self._answer(plan.slots(factors), masks)
        self.share = (self.share + summed(plan.held(masks)[:, :, :rows], 2)) % PLAIN
        return body

    def _answer(self, factors: Ints, masks: Ints) -> bytes:
        ciphers = self._ciphers[: len(factors)]
        return pack(
            {
                "ciphertexts": [
                    self._hider.hidden(cipher, *slots)
                    for cipher, *slots in zip(ciphers, factors, masks, strict=True)
                ]
            }
        )


def _blobs(body: bytes, sender: str, count: int) -> list[bytes]:
    found: list[bytes] = unpack(body, sender, {"ciphertexts": Blobs(count, MOST_CIPHERTEXT, count)})[
        "ciphertexts"
    ]
    return found
