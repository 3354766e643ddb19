"""Sums over encrypted numbers that tell their key's holder the sums and nothing else: BFV with masks.

The guest holds the key. It sends Enc(g) with rows' numbers in slots (``lanes``); a host multiplies by a candidate's 0/1
row, adds up, and before it answers adds

- a fresh uniform mask whose stretches sum to zero. The guest decrypts uniform slots, and its sums over a stretch are
  exact. Without it the guest reads from the slots which rows are left.
- Enc(0) * r1 * r2: a fresh encryption of zero under the guest's key times two uniform plaintexts. Without it the guest,
  who knows what it sent, divides the answer's second polynomial by its own and reads the same 0/1 slots; and what
  decryption rounds away, the sum of its own errors times the 0/1 polynomials, tells them too. This one's second
  polynomial is u*p1*r1*r2 with a secret u, so no division leads back.

What the second term promises is a heuristic bound, no proof. By sizes of independent coefficients (errors of deviation
3.2, plaintext polynomials of about PLAIN / sqrt(12) and SLOTS coefficients) the errors of a sum over m ciphertexts are
about 3.2 * PLAIN / sqrt(12) * sqrt(SLOTS * m), those of the second term larger by another PLAIN / sqrt(12) *
sqrt(SLOTS) / sqrt(m). Measured by the noise budget: of 129 bits a sum leaves 84 (m = 1) to 81 (m = 98), with the second
term 37. So it is 2^47 to 2^44 times as large as what it covers; if it were uniform, 8,192 coefficients would betray the
rows with an advantage below 2^-30. It is a product of polynomials, not uniform. A third factor would need 47 bits more.

The second term is made with the guest's public key, so the promise is one against a guest that follows the protocol.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
from tenseal import sealapi

from federated.vertical import bfv
from federated.vertical.bfv import ring_of
from federated.vertical.ckks import restored, stored
from federated.vertical.histograms.lanes import MOST_CIPHERTEXT, MOST_KEY, PLAIN, SLOTS, Bools, Ints, Lanes
from federated.vertical.parties import Draw, PeerFault

OUTPUTS_A_TASK: Final = 8
"""Answers that a worker makes at a time: worth reading the inputs for, and few enough that all workers have some."""


@lru_cache(maxsize=1)
def context() -> sealapi.SEALContext:
    """The parameters, the same at every party. A peer has no say in them."""
    return ring_of(SLOTS, PLAIN, sealapi.CoeffModulus.BFVDefault(SLOTS, sealapi.SEC_LEVEL_TYPE.TC128))


class KeyHolder(bfv.KeyHolder):
    """A fresh key, and what only its holder can do: ``decrypt`` what ``masked_sums`` made."""

    def __init__(self) -> None:
        super().__init__(context(), read_ciphertext)


def read_ciphertext(blob: bytes, sender: str) -> sealapi.Ciphertext:
    """A ciphertext of two polynomials at the top level. Raises PeerFault."""
    found = restored(sealapi.Ciphertext, context(), blob, sender, MOST_CIPHERTEXT)
    fresh = list(found.parms_id()) == list(context().first_parms_id())
    if found.size() != 2 or found.is_ntt_form() or not fresh or found.is_transparent():
        raise PeerFault(sender, "ciphertext", "not of the form that a fresh one has")
    return found


def read_key(body: bytes, sender: str) -> sealapi.PublicKey:
    """A public key. Raises PeerFault."""
    return restored(sealapi.PublicKey, context(), body, sender, MOST_KEY)


def uniform(draw: Draw, count: int = SLOTS) -> Ints:
    """``count`` numbers, each of [0, PLAIN) equally likely."""
    numbers = np.empty(0, np.int64)
    while len(numbers) < count:
        # 40 bits at a time; one in seven million is too large and drawn again.
        raw = np.zeros((count, 8), np.uint8)
        raw[:, :5] = np.frombuffer(draw(5 * count), np.uint8).reshape(count, 5)
        drawn = raw.view("<i8")[:, 0]
        numbers = np.concatenate([numbers, drawn[drawn < PLAIN]])
    return numbers[:count]


def permutation(count: int, draw: Draw) -> Ints:
    """A random order of ``count`` things that nobody else can know: sorted by 64 random bits each."""
    return np.argsort(np.frombuffer(draw(8 * count), "<u8"), kind="stable").astype(np.int64)


@dataclass(frozen=True, slots=True)
class SumTask:
    """Masked sums of some candidates over one node, for a worker: all of it plain bytes.

    ``inputs``: the node's ciphertexts, ``sender``'s. ``left``: bits of bool [M, n], in NumPy's packing, row by row.
    """

    key: bytes
    inputs: tuple[bytes, ...]
    sender: str
    lanes: Lanes
    left: npt.NDArray[np.uint8]
    rows: int
    draw: Draw = os.urandom


def sum_tasks(
    key: bytes,
    inputs: tuple[bytes, ...],
    sender: str,
    lanes: Lanes,
    rows: int,
    candidates: int,
    left: Callable[[slice], Bools],
    draw: Draw,
) -> Iterator[SumTask]:
    """The masked sums of so many candidates over ``rows`` rows, in tasks of OUTPUTS_A_TASK answers.

    ``left`` gives the 0/1 rows [m, n] of a range of candidates; none may be empty.
    """
    block = lanes.copies * OUTPUTS_A_TASK
    for start in range(0, candidates, block):
        bits = np.packbits(left(slice(start, min(start + block, candidates))), axis=1)
        yield SumTask(key, inputs, sender, lanes, bits, rows, draw)


def masked_sums(task: SumTask) -> list[bytes]:
    """``lanes.outputs(M)`` ciphertexts; stretch (c, l) of the o-th sums to lane l of candidate ``o * copies + c``.

    No candidate may be empty. Raises PeerFault for inputs that are no ciphertexts.
    """
    inputs = _inputs(task.inputs, task.sender)
    left = np.unpackbits(task.left, axis=1, count=task.rows).astype(np.bool_)
    hider = Hider(task.key, task.sender, task.draw)
    return [
        _masked_sum(task, inputs, left[start : start + task.lanes.copies], hider)
        for start in range(0, len(left), task.lanes.copies)
    ]


@lru_cache(maxsize=2)
def _inputs(blobs: tuple[bytes, ...], sender: str) -> tuple[sealapi.Ciphertext, ...]:
    # A node's candidates come in several tasks, one after another, with the same ciphertexts.
    evaluator = sealapi.Evaluator(context())
    found = tuple(read_ciphertext(blob, sender) for blob in blobs)
    for one in found:
        # Transformed once, a multiplication takes a ninth of its time.
        evaluator.transform_to_ntt_inplace(one)
    return found


class Hider:
    """Fresh Enc(0) * r1 * r2 under the receiver's key."""

    def __init__(self, key: bytes, sender: str, draw: Draw) -> None:
        self._draw = draw
        self._encryptor = sealapi.Encryptor(context(), read_key(key, sender))
        self._encoder, self._evaluator = sealapi.BatchEncoder(context()), sealapi.Evaluator(context())

    def hide(self, total: sealapi.Ciphertext) -> None:
        """Add a term to ``total``, which is in the transformed domain."""
        zero = sealapi.Ciphertext()
        self._encryptor.encrypt_zero(zero)
        self._evaluator.transform_to_ntt_inplace(zero)
        for _ in range(2):
            factor = sealapi.Plaintext()
            self._encoder.encode(uniform(self._draw).tolist(), factor)
            self._evaluator.transform_to_ntt_inplace(factor, zero.parms_id())
            self._evaluator.multiply_plain_inplace(zero, factor)
        self._evaluator.add_inplace(total, zero)


def _masked_sum(task: SumTask, inputs: Sequence[sealapi.Ciphertext], left: Bools, hider: Hider) -> bytes:
    evaluator, encoder = sealapi.Evaluator(context()), sealapi.BatchEncoder(context())
    products: list[sealapi.Ciphertext] = []
    for chunk, cipher in enumerate(inputs):
        chosen = task.lanes.select(left, chunk)
        if not chosen.any():
            # SEAL refuses to multiply by zero, and the sum does not need it.
            continue
        plain, product = sealapi.Plaintext(), sealapi.Ciphertext()
        encoder.encode(chosen.tolist(), plain)
        evaluator.transform_to_ntt_inplace(plain, cipher.parms_id())
        evaluator.multiply_plain(cipher, plain, product)
        products.append(product)
        if len(products) > 1:
            evaluator.add_inplace(products[0], products.pop())
    if not products:
        raise ValueError("no candidate sends any row left")
    total = products[0]
    hider.hide(total)
    evaluator.transform_from_ntt_inplace(total)
    masking = sealapi.Plaintext()
    encoder.encode(task.lanes.zero_sum(uniform(task.draw)).tolist(), masking)
    evaluator.add_plain_inplace(total, masking)
    return stored(total)
