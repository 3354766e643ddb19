"""An oblivious pseudo-random function from oblivious transfers (Kolesnikov, Kumaresan, Rosulek and Trieu 2016).

512 base transfers give as many evaluations as wanted: for each bin j the evaluator, who holds x, learns F_j(x); the
owner can evaluate F_j anywhere and learns nothing of x. Only hashes and AES run for each id, no exponentiation.

The evaluator holds both keys of every base transfer and expands them to columns T and T'; it sends T ⊕ T' ⊕ C(x),
64 bytes a bin. The owner, which chose column by column by its secret bits s, then holds q_j = t_j ⊕ (C(x_j) ∧ s).
F_j(y) = H(j, q_j ⊕ (C(y) ∧ s)), and H(j, t_j) for y = x. C is a hash to 512 bits: two ids differ in fewer than 128 of
them with probability below 2**-96 (the entropy bound), so that another y needs 128 bits of s to be guessed.

Assumptions: semi-honest parties; base transfers as in ``transfer``; H correlation robust; AES in counter mode a
pseudo-random generator.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from federated.psi.hashing import Rows, Tags, tags
from federated.psi.terms import numbered, receive_numbered
from federated.psi.transfer import choose, offer
from federated.vertical.parties import Draw, Effect, Incoming, Progress, Send

WIDTH: Final = 512
CODE_BYTES: Final = WIDTH // 8
BLOCK: Final = 16_384  # Bins in a message: 1 MiB, and 8 MiB while its bits are transposed.

Codes = npt.NDArray[np.uint8]


def codes(session: bytes, ids: Sequence[bytes], hash_number: int) -> Codes:
    """C of each id at the place of its hash ``hash_number``: [N, 64]."""
    return tags(f"psi-code-{hash_number}", session, ids, CODE_BYTES)


def outputs(session: bytes, bins: Rows, rows: Codes, length: int) -> Tags:
    """H(bin, row) for each [N, length]: the function's values."""
    joined = np.concatenate([bins.astype("<u8").view(np.uint8).reshape(-1, 8), rows], axis=1).tobytes()
    size = 8 + CODE_BYTES
    return tags("psi-oprf", session, (joined[at : at + size] for at in range(0, len(joined), size)), length)


def evaluate(
    peer: str, session: bytes, chosen: Codes, draw: Draw
) -> Generator[Effect, Incoming | None, Codes]:
    """The evaluator: ``chosen`` [B, 64], the code of each bin's id (random where it has none). Gives t [B, 64]."""
    keys = yield from offer(peer, session, WIDTH, draw)
    zeros, ones = (_Columns([pair[side] for pair in keys]) for side in (0, 1))
    parts: list[Codes] = []
    total = -(-len(chosen) // BLOCK)
    for number in range(total):
        block = _padded(chosen[number * BLOCK : (number + 1) * BLOCK])
        t = zeros.next(len(block))
        yield Send(
            peer, "psi.ot.columns", numbered(number, (t ^ ones.next(len(block)) ^ _columns(block)).tobytes())
        )
        parts.append(_rows(t))
        yield Progress(number + 1, total, "blocks of bins")
    return np.concatenate(parts)[: len(chosen)] if parts else np.empty((0, CODE_BYTES), np.uint8)


class Owner:
    """The owner's side after ``own``: q [B, 64] and the secret bits s."""

    def __init__(self, session: bytes, q: Codes, secret: Codes) -> None:
        self._session, self._q, self._secret = session, q, secret

    def values(self, ids: Sequence[bytes], bins: Rows, hash_number: int, length: int) -> Tags:
        """F at ``bins`` [N] of ``ids`` under the given hash: [N, length]."""
        rows = self._q[bins] ^ (codes(self._session, ids, hash_number) & self._secret)
        return outputs(self._session, bins, rows, length)


def own(peer: str, session: bytes, bins: int, draw: Draw) -> Generator[Effect, Incoming | None, Owner]:
    """The owner of ``bins`` instances. Raises PeerFault."""
    secret = np.frombuffer(draw(CODE_BYTES), np.uint8)
    choices = np.unpackbits(secret)
    keys = yield from choose(peer, session, choices.tolist(), draw)
    columns = _Columns(keys)
    parts: list[Codes] = []
    total = -(-bins // BLOCK)
    for number in range(total):
        height = -(-min(BLOCK, bins - number * BLOCK) // 8) * 8
        body = yield from receive_numbered(peer, "psi.ot.columns", number, WIDTH, height // 8)
        sent = np.frombuffer(body, np.uint8).reshape(WIDTH, -1)
        parts.append(
            _rows(columns.next(height) ^ (sent & (-choices.astype(np.int8))[:, None].view(np.uint8)))
        )
        yield Progress(number + 1, total, "blocks of bins")
    q = np.concatenate(parts)[:bins] if parts else np.empty((0, CODE_BYTES), np.uint8)
    return Owner(session, q, secret)


class _Columns:
    """512 streams of bits, each AES-256 in counter mode under its own key."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._streams: list[CipherContext] = [Cipher(AES256(key), CTR(bytes(16))).encryptor() for key in keys]

    def next(self, height: int) -> Codes:
        """The next ``height`` bits (a multiple of 8) of each: [512, height / 8]."""
        zeros = bytes(height // 8)
        data = b"".join([stream.update(zeros) for stream in self._streams])
        return np.frombuffer(data, np.uint8).reshape(WIDTH, -1)


def _padded(block: Codes) -> Codes:
    """Rows of zeros up to a multiple of 8."""
    return np.concatenate([block, np.zeros((-len(block) % 8, CODE_BYTES), np.uint8)])


def _columns(rows: Codes) -> Codes:
    """[H, 64] bytes as [512, H / 8]: bits transposed."""
    return np.packbits(np.unpackbits(rows, axis=1).T, axis=1)


def _rows(columns: Codes) -> Codes:
    """[512, H / 8] bytes as [H, 64]: bits transposed."""
    return np.packbits(np.unpackbits(columns, axis=1).T, axis=1)
