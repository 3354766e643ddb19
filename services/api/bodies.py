"""Bodies in and out: read under a limit, decode with msgspec, and say exactly what is wrong with them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.problems import FieldProblem, Problem

T = TypeVar("T")

_WHERE: Final = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_FIELD: Final = re.compile(r"^Object (?:missing required|contains unknown) field `(.*)`$", re.DOTALL)
_encoder: Final = msgspec.json.Encoder()


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most ``limit`` bytes. Raises Problem body_too_large as soon as more is announced or
    has arrived, without keeping it."""
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> Problem:
    return Problem("body_too_large", f"At most {limit} bytes are taken.")


class Body(Generic[T]):
    """Decodes bodies of one type. Content-Type is not looked at: what is not JSON shows by itself."""

    def __init__(self, decoder: msgspec.json.Decoder[T]) -> None:
        self._decoder = decoder

    def decode(self, raw: bytes | msgspec.Raw) -> T:
        """Read a body. Raises Problem invalid_json, invalid_request (missing, unknown, wrong type) or
        invalid_value (NaN, numbers out of range, half of a surrogate pair)."""
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise _invalid(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise explain(bytes(raw)) from error


def json_response(value: object, status: int = 200) -> Response:
    """``value`` as a JSON reply."""
    return Response(_encoder.encode(value), status, media_type="application/json")


def _invalid(message: str) -> Problem:
    """The problem that a validation error of msgspec stands for."""
    where = _WHERE.search(message)
    path, what = (where[1], message[: where.start()]) if where else ("", message)
    if field := _FIELD.match(what):
        path = f"{path}.{field[1]}" if path else field[1]
        what = "is required" if "missing" in what[: field.start(1)] else "is not a known field"
    elif what == "Number out of range":
        return Problem.field("invalid_value", path, "is out of the range of numbers")
    elif what.startswith("Invalid value"):
        what = "is not one of the known values"
    return Problem.field("invalid_request", path, what.replace("`", ""))


def explain(raw: bytes) -> Problem:
    """Why ``raw`` is not JSON that msgspec reads: a syntax error, or a value that JSON has no place for."""
    if not raw.strip():
        return Problem("invalid_json", "The body is empty.")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return Problem("invalid_json", "The body is not UTF-8.")
    try:
        value = json.loads(text)
    except RecursionError:
        return Problem("invalid_json", "The body is nested too deeply.")
    except json.JSONDecodeError as error:
        return Problem("invalid_json", f"The JSON breaks in line {error.lineno}, column {error.colno}.")
    except ValueError:
        return Problem("invalid_value", "A number has too many digits.")
    errors = tuple(_meaningless(value))
    return Problem("invalid_value", errors=errors) if errors else Problem("invalid_json")


def lenient_rows(raw: bytes, name: str) -> list[msgspec.Raw | Problem]:
    """The rows in the list ``name`` of a body that is JSON but for values that JSON does not have: each row
    as JSON again, or what is wrong with it. Raises Problem where there is no such list."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise explain(raw) from None
    rows = body.get(name) if isinstance(body, dict) else None
    if not isinstance(rows, list):
        raise Problem.field("invalid_request", name, "must be a list")
    return [_strict(row) for row in rows]


def _strict(row: object) -> msgspec.Raw | Problem:
    errors = tuple(_meaningless(row))
    return Problem("invalid_value", errors=errors) if errors else msgspec.Raw(_encoder.encode(row))


def _meaningless(root: object) -> Iterator[FieldProblem]:
    """The values that Python's lenient reader accepted and JSON (or Unicode) does not have, with paths."""
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield FieldProblem(path, "must be a finite number")
        elif isinstance(value, str) and not _encodable(value):
            yield FieldProblem(path, "holds half of a surrogate pair")
        elif isinstance(value, list):
            waiting += [(f"{path}[{n}]", element) for n, element in enumerate(value)]
        elif isinstance(value, dict):
            for name, element in value.items():
                if _encodable(name):
                    waiting.append((f"{path}.{name}" if path else name, element))
                else:
                    yield FieldProblem(path, "has a name with half of a surrogate pair")


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
