"""Freshness tokens: which positions of the event log a reader asks to have been applied.

A client gets one for the events it sent and hands it back as ``min_freshness``. It names the log's
incarnation (as a 64-bit fingerprint, so that a token of a log that was deleted and made again cannot be
mistaken for a fresh one) and, per partition, the last offset. Clients treat it as opaque.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

FORMAT: Final = 1
MAX_POSITIONS: Final = 1_024
_HEAD: Final = struct.Struct("<BQ")
_POSITION: Final = struct.Struct("<Hq")


class TokenError(ValueError):
    """The text is not a token of a format that this version reads."""


@dataclass(frozen=True, slots=True)
class Token:
    """Positions of the event log: the last offset per partition, each partition once, ascending.

    ``log`` is the fingerprint of the log's incarnation (``log_fingerprint``).
    """

    log: int
    positions: tuple[tuple[int, int], ...]


def log_fingerprint(incarnation: str) -> int:
    """The 64 bits by which a token names a log's incarnation."""
    return xxhash.xxh3_64_intdigest(incarnation.encode())


def token_of(incarnation: str, positions: Iterable[tuple[int, int]]) -> Token:
    """The token of some (partition, offset) positions: the largest offset of each partition counts."""
    last: dict[int, int] = {}
    for partition, offset in positions:
        last[partition] = max(offset, last.get(partition, offset))
    return Token(log_fingerprint(incarnation), tuple(sorted(last.items())))


def encode_token(token: Token) -> str:
    """The token as text safe in URLs and headers (12 characters and 14 more per partition)."""
    body = _HEAD.pack(FORMAT, token.log) + b"".join(_POSITION.pack(*position) for position in token.positions)
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def decode_token(text: str) -> Token:
    """Read ``encode_token`` back. Raises TokenError for anything else, without echoing it."""
    if len(text) > 2 * (_HEAD.size + MAX_POSITIONS * _POSITION.size):
        raise TokenError("the token is too long")
    try:
        body = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise TokenError("the token is not base64url text") from error
    if len(body) < _HEAD.size or (len(body) - _HEAD.size) % _POSITION.size:
        raise TokenError("the token has an impossible length")
    version, log = _HEAD.unpack_from(body)
    if version != FORMAT:
        raise TokenError(f"the token has format {version}; this version reads {FORMAT}")
    positions = tuple(_POSITION.iter_unpack(body[_HEAD.size :]))
    partitions = [partition for partition, _ in positions]
    if not positions or sorted(set(partitions)) != partitions or any(offset < 0 for _, offset in positions):
        raise TokenError("the token names impossible positions")
    token = Token(log, positions)
    if encode_token(token) != text.rstrip("="):
        raise TokenError("the token has stray bits")
    return token


def satisfied(token: Token, incarnation: str, applied: Mapping[int, int]) -> bool:
    """Whether everything up to the token's positions is among what was applied.

    ``applied`` holds the last applied offset per partition. A token of another incarnation is never
    satisfied: what it names is gone.
    """
    return token.log == log_fingerprint(incarnation) and all(
        applied.get(partition, -1) >= offset for partition, offset in token.positions
    )
