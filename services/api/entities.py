"""What a stored entity says: its attributes, whether it is there, its times; and its id in a path."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from featurestore.online import Cell
from featurestore.schema import RESERVED_ATTRIBUTES, Schema
from services.api.problems import Problem
from services.api.validation import text_problem

Kind = Literal["user", "item"]
PRIVATE: Final = RESERVED_ATTRIBUTES
"""Cells that the platform keeps beside the attributes, besides those with @ in their names."""


def path_id(request: Request, name: str) -> str:
    """The id in the request's path, percent-decoded. Raises Problem invalid_value."""
    try:
        text = unquote_to_bytes(request.path_params[name]).decode()
    except UnicodeDecodeError as error:
        raise Problem.field("invalid_value", name, "is not UTF-8") from error
    if problem := text_problem(text):
        raise Problem.field("invalid_value", name, problem)
    return text


def is_gone(row: Mapping[str, Cell]) -> bool:
    """Whether there is no such entity, or it was deleted."""
    return not row or ("deleted" in row and row["deleted"].value is True)


def attributes_of(row: Mapping[str, Cell], entity: Kind, schema: Schema, now_ms: int) -> dict[str, object]:
    """What a client gave as attributes, as far as it is set and has not expired."""
    managed = {feature.attribute for feature in schema.of(entity) if feature.managed}
    return {
        name: cell.value
        for name, cell in sorted(row.items())
        if name not in PRIVATE
        and name not in managed
        and "@" not in name
        and cell.value is not None
        and not isinstance(cell.value, bytes)
        and not expired(cell, now_ms)
    }


def expired(cell: Cell, now_ms: int) -> bool:
    """Whether the cell's time to live is over."""
    return cell.ttl_ms > 0 and cell.event_time_ms + cell.ttl_ms <= now_ms


def updated_at_ms(row: Mapping[str, Cell]) -> int:
    """The newest event time among the cells."""
    return max((cell.event_time_ms for cell in row.values()), default=0)


def rfc3339(time_ms: int) -> str:
    """Unix ms as text in UTC, to the millisecond. Times beyond the year 9999 are given as its end."""
    moment = datetime.fromtimestamp(min(max(time_ms, 0), 253_402_300_799_999) / 1_000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
