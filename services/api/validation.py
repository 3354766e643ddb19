"""What values mean, beyond their types: ids, times, attributes, contexts. Pure; returns problems as values.

The check of a good event must cost next to nothing, so the common cases are decided first: ASCII text that is
printable is fine by C code alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from featurestore.schema import FieldError, Schema
from services.api.problems import FieldProblem, join
from services.events import Event, Impression, Interaction, ItemEvent, UserEvent

MAX_ID_BYTES: Final = 256
MAX_ACTION_BYTES: Final = 64
MAX_IMPRESSION: Final = 1_000
MAX_MAGNITUDE: Final = 1e12
"""Of an interaction's value: larger ratings and strengths are mistakes, and would only overflow later."""
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class EventRules:
    """What events are judged by: the schema, and how far ahead a timestamp may lie (ms)."""

    schema: Schema
    max_ahead_ms: int


def text_problem(text: str, most_bytes: int = MAX_ID_BYTES) -> str | None:
    """What is wrong with ``text`` as an id or a name (1 to ``most_bytes`` UTF-8 bytes, no control
    characters), None if nothing is."""
    if text.isascii() and text.isprintable() and 0 < len(text) <= most_bytes:
        return None
    if not text:
        return "must not be empty"
    if _FORBIDDEN.search(text):
        return "must not contain control characters or halves of surrogate pairs"
    if len(text) > most_bytes or len(text.encode()) > most_bytes:
        return f"must not be longer than {most_bytes} bytes"
    return None


def check_text(path: str, text: str | None, most_bytes: int = MAX_ID_BYTES) -> Iterator[FieldProblem]:
    """The problem of ``text`` at ``path``, if there is one; None is no text and no problem."""
    if text is not None and (problem := text_problem(text, most_bytes)):
        yield FieldProblem(path, problem)


def check_time(path: str, time_ms: int | None, latest_ms: int) -> Iterator[FieldProblem]:
    """The problem of an event time: before 1970, or after ``latest_ms``."""
    if time_ms is None or 0 <= time_ms <= latest_ms:
        return
    when = "before 1970" if time_ms < 0 else "in the future"
    yield FieldProblem(path, f"lies {when}; it is in milliseconds since 1970-01-01T00:00:00Z")


def check_features(
    path: str, entity: str, attributes: Mapping[str, object] | None, schema: Schema
) -> Iterator[FieldProblem]:
    """What the schema has against the attributes of an entity (or against a context)."""
    if attributes:
        for error in schema.validate(entity, attributes):
            yield _below(path, error)


def _below(path: str, error: FieldError) -> FieldProblem:
    return FieldProblem(join(path, error.path), error.message)


def check_event(event: Event, rules: EventRules, now_ms: int) -> list[FieldProblem]:
    """Everything that is wrong with ``event``; nothing ([]) if it can be accepted."""
    problems = [
        *check_text("event_id", event.event_id),
        *check_time("timestamp_ms", event.timestamp_ms, now_ms + rules.max_ahead_ms),
    ]
    match event:
        case Interaction():
            problems += _check_interaction(event, rules)
        case Impression():
            problems += _check_impression(event, rules)
        case ItemEvent():
            problems += check_text("item_id", event.item_id)
            problems += check_features("attributes", "item", event.attributes, rules.schema)
        case UserEvent():
            problems += check_text("user_id", event.user_id)
            problems += check_features("attributes", "user", event.attributes, rules.schema)
    return problems


def _check_interaction(event: Interaction, rules: EventRules) -> Iterator[FieldProblem]:
    yield from check_text("user_id", event.user_id)
    yield from check_text("item_id", event.item_id)
    yield from check_text("action", event.action, MAX_ACTION_BYTES)
    yield from check_text("recommendation_id", event.recommendation_id)
    if event.value is not None and not -MAX_MAGNITUDE <= event.value <= MAX_MAGNITUDE:
        yield FieldProblem("value", f"must lie within ±{MAX_MAGNITUDE:g}")
    yield from check_features("context", "context", event.context, rules.schema)


def _check_impression(event: Impression, rules: EventRules) -> Iterator[FieldProblem]:
    yield from check_text("user_id", event.user_id)
    yield from check_text("recommendation_id", event.recommendation_id)
    if not 1 <= len(event.item_ids) <= MAX_IMPRESSION:
        yield FieldProblem("item_ids", f"must name 1 to {MAX_IMPRESSION} items")
    for n, item_id in enumerate(event.item_ids[:MAX_IMPRESSION]):
        yield from check_text(f"item_ids[{n}]", item_id)
    yield from check_features("context", "context", event.context, rules.schema)


def plainly_good(event: Event, latest_ms: int) -> bool:
    """Whether an interaction is good beyond doubt: the cheap test that spares most traffic the full one."""
    if type(event) is not Interaction or event.context:
        return False
    user, item, action, event_id = event.user_id, event.item_id, event.action, event.event_id
    joined = f"{user}{item}{action}{event_id}"
    return (
        joined.isascii()
        and joined.isprintable()
        and 0 < len(user) <= MAX_ID_BYTES
        and 0 < len(item) <= MAX_ID_BYTES
        and 0 < len(action) <= MAX_ACTION_BYTES
        and (event_id is None or 0 < len(event_id) <= MAX_ID_BYTES)
        and (event.timestamp_ms is None or 0 <= event.timestamp_ms <= latest_ms)
        and (event.value is None or -MAX_MAGNITUDE <= event.value <= MAX_MAGNITUDE)
        and event.recommendation_id is None
    )
