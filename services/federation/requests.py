"""Requests of devices read under bounds, and replies as frames."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from federated.frames import FrameRefused
from federated.rounds import valid_id
from services.api.bodies import read_body
from services.api.problems import Problem

FRAME: Final = "application/vnd.headwater.frame"
DIGEST_BYTES: Final = 16


async def read_within(request: Request, most: int, seconds: float) -> bytes:
    """The body, of at most ``most`` bytes, arrived within ``seconds``. Raises Problem body_too_large (before anything
    is read where the length is announced) and body_too_slow."""
    try:
        async with asyncio.timeout(seconds):
            return await read_body(request, most)
    except TimeoutError:
        raise Problem("body_too_slow", f"A body may take {seconds:g} s.") from None


@contextmanager
def frames_refused() -> Iterator[None]:
    """What is no frame is a Problem upload_refused."""
    try:
        yield
    except FrameRefused as error:
        raise Problem("upload_refused", str(error)) from error


def framed(frame: bytes) -> Response:
    """A frame as a reply."""
    return Response(frame, media_type=FRAME)


def client_of(request: Request) -> str:
    """The client's id in the path. Raises Problem invalid_value."""
    client = unquote(request.path_params["client"], errors="surrogateescape")
    if not valid_id(client):
        raise Problem.field(
            "invalid_value", "client", "is no id: 1 to 256 UTF-8 bytes, no control characters"
        )
    return client


def digest_in(request: Request) -> bytes:
    """The digest in the path. Raises Problem invalid_value."""
    digest = _hex(request.path_params["digest"], "digest")
    if len(digest) != DIGEST_BYTES:
        raise Problem.field("invalid_value", "digest", f"is not {DIGEST_BYTES} bytes in hexadecimal digits")
    return digest


def ticket_in(request: Request) -> tuple[int, bytes]:
    """Iteration and ticket in the headers of a part. Raises Problem invalid_value."""
    number = request.headers.get("x-iteration", "")
    if not number.isascii() or not number.isdecimal() or len(number) > 10:
        raise Problem.field("invalid_value", "X-Iteration", "is not a number")
    return int(number), ticket_in_header(request)


def ticket_in_header(request: Request) -> bytes:
    """The ticket of a stage. Raises Problem invalid_value."""
    return _hex(request.headers.get("x-ticket", ""), "X-Ticket")


def number_in(request: Request, name: str) -> int | None:
    """A whole number of the query, None where it is not given. Raises Problem invalid_value."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise Problem.field("invalid_value", name, "is not a number")
    return int(text)


def offset_in(request: Request) -> int:
    """Where a part begins. Raises Problem invalid_value."""
    offset = request.headers.get("upload-offset", "")
    if not offset.isascii() or not offset.isdecimal() or len(offset) > 12:
        raise Problem.field("invalid_value", "Upload-Offset", "is not a number")
    return int(offset)


def _hex(text: str, where: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise Problem.field("invalid_value", where, "is not hexadecimal") from None
