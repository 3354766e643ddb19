"""Cursors for lists of entities: opaque to clients, self-contained, and checked before they are believed."""

from __future__ import annotations

import base64
import binascii
from typing import Final

import xxhash
from starlette.requests import Request

from services.api.problems import Problem

FORMAT: Final = b"\x01"
DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 500
_MAX_CURSOR: Final = 512
_CHECK: Final = 4


def encode_cursor(entity: str, after: str) -> str:
    """A cursor that goes on after the id ``after``."""
    body = FORMAT + entity[:1].encode() + after.encode()
    return base64.urlsafe_b64encode(body + _check(body)).rstrip(b"=").decode()


def decode_cursor(entity: str, text: str) -> str:
    """The id to go on after. Raises Problem invalid_cursor for all that ``encode_cursor`` did not make for
    this entity."""
    try:
        if len(text) > _MAX_CURSOR:
            raise ValueError("too long")
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body, check = data[:-_CHECK], data[-_CHECK:]
        if _check(body) != check or body[:2] != FORMAT + entity[:1].encode():
            raise ValueError("not ours")
        return body[2:].decode()
    except (binascii.Error, ValueError) as error:
        raise Problem.field("invalid_cursor", "cursor", "is not a cursor of this list") from error


def _check(body: bytes) -> bytes:
    """Against typing mistakes and cursors of other lists; a forged one would only skip entries."""
    return xxhash.xxh32_digest(body)


def page(request: Request, entity: str) -> tuple[str, int]:
    """The id to list after and how many, from the query. Raises Problem."""
    cursor = request.query_params.get("cursor")
    after = decode_cursor(entity, cursor) if cursor is not None else ""
    return after, query_count(request, "limit", DEFAULT_LIMIT, MAX_LIMIT)


def query_count(request: Request, name: str, default: int, most: int, least: int = 1) -> int:
    """A count from ``least`` to ``most`` in the query. Raises Problem invalid_request or invalid_value."""
    text = request.query_params.get(name)
    if text is None:
        return default
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isascii() and digits.isdecimal()):
        raise Problem.field("invalid_request", name, "must be a whole number")
    if len(digits) > 9 or not least <= int(text) <= most:
        raise Problem.field("invalid_value", name, f"must be from {least} to {most}")
    return int(text)
