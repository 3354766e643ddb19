"""Which records of the events log can be used, and why the others cannot.

Everything here is pure. A record that is refused becomes a message of the ``rejected`` topic; it never stops
the processor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from featurestore.schema import FieldError, Schema
from services.events import (
    Event,
    EventFormatError,
    Impression,
    Interaction,
    ItemEvent,
    Probe,
    decode_event,
)
from services.messagelog.contract import Record

MAX_ID_BYTES: Final = 256
MAX_SHOWN: Final = 1_000
"""Items that one impression may hold."""
_EARLIEST_MS: Final = -(2**52)
_EVENT_SHOWN: Final = 2_000
_ID: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,256}")


@dataclass(slots=True)
class Incoming:
    """A usable event with its place in the log. Times are Unix ms; ``time_ms`` is event time."""

    partition: int
    offset: int
    accepted_at_ms: int
    time_ms: int
    event: Event


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that cannot be used: a stable ``code`` for programs, a ``reason`` for people."""

    partition: int
    offset: int
    accepted_at_ms: int
    code: str
    reason: str
    event: str | None = None

    def to_json(self) -> bytes:
        """The form in which the ``rejected`` topic carries it."""
        body = {
            "code": self.code,
            "reason": self.reason,
            "partition": self.partition,
            "offset": self.offset,
            "event": self.event,
        }
        return json.dumps(body, ensure_ascii=True).encode()


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides: the schema, and how far ahead of its acceptance an event may claim to have happened."""

    schema: Schema
    max_ahead_ms: int


def sort_records(records: Sequence[Record], rules: Rules) -> tuple[list[Incoming], list[Rejected]]:
    """The usable events in the records' order, and the others with their reasons."""
    usable: list[Incoming] = []
    rejected: list[Rejected] = []
    for record in records:
        found = _judge(record, rules)
        if type(found) is Incoming:
            usable.append(found)
        else:
            assert isinstance(found, Rejected)
            rejected.append(found)
    return usable, rejected


def is_id(text: str) -> bool:
    """Whether ``text`` may name a user, an item, an event or a recommendation."""
    return _ID.fullmatch(text) is not None and (text.isascii() or len(text.encode()) <= MAX_ID_BYTES)


def _judge(record: Record, rules: Rules) -> Incoming | Rejected:
    try:
        event = decode_event(record.value)
    except (EventFormatError, RecursionError) as error:
        return Rejected(
            record.partition,
            record.offset,
            record.accepted_at_ms,
            "undecodable",
            str(error) or "nested too deeply",
        )
    time_ms = record.accepted_at_ms if event.timestamp_ms is None else event.timestamp_ms
    problem = _problem(event, time_ms, record.accepted_at_ms, rules)
    if problem is None:
        return Incoming(record.partition, record.offset, record.accepted_at_ms, time_ms, event)
    code, reason = problem
    return Rejected(record.partition, record.offset, record.accepted_at_ms, code, reason, _shown(event))


def _problem(event: Event, time_ms: int, accepted_at_ms: int, rules: Rules) -> tuple[str, str] | None:
    """Code and reason of what is wrong with an event, None if it can be used."""
    if time_ms > accepted_at_ms + rules.max_ahead_ms:
        return "time_ahead", f"timestamp_ms {time_ms} is {time_ms - accepted_at_ms} ms after the acceptance"
    if time_ms < _EARLIEST_MS:
        return "time_impossible", f"timestamp_ms {time_ms} is too long ago to be a time"
    if event.event_id is not None and not is_id(event.event_id):
        return "bad_id", "event_id must have 1 to 256 bytes and no control characters"
    if isinstance(event, Interaction):
        return _interaction_problem(event, rules)
    if isinstance(event, Impression):
        return _impression_problem(event, rules)
    if isinstance(event, Probe):
        return None
    entity, entity_id = ("item", event.item_id) if isinstance(event, ItemEvent) else ("user", event.user_id)
    if not is_id(entity_id):
        return "bad_id", f"{entity}_id must have 1 to 256 bytes and no control characters"
    if event.attributes and (errors := rules.schema.validate(entity, event.attributes)):
        return "bad_attributes", _listed("attributes", errors)
    return None


def _interaction_problem(event: Interaction, rules: Rules) -> tuple[str, str] | None:
    if not is_id(event.user_id):
        return "bad_id", "user_id must have 1 to 256 bytes and no control characters"
    if not is_id(event.item_id):
        return "bad_id", "item_id must have 1 to 256 bytes and no control characters"
    if not is_id(event.action):
        return "bad_action", "action must have 1 to 256 bytes and no control characters"
    if event.value is not None and not math.isfinite(event.value):
        return "not_finite", "value must be a finite number"
    if event.action == "rating" and event.value is None:
        return "no_value", "a rating needs a value"
    return _common_problem(event, rules)


def _impression_problem(event: Impression, rules: Rules) -> tuple[str, str] | None:
    if not is_id(event.user_id):
        return "bad_id", "user_id must have 1 to 256 bytes and no control characters"
    if len(event.item_ids) > MAX_SHOWN:
        return "too_many_items", f"{len(event.item_ids)} items are more than {MAX_SHOWN}"
    for n, item_id in enumerate(event.item_ids):
        if not is_id(item_id):
            return "bad_id", f"item_ids[{n}] must have 1 to 256 bytes and no control characters"
    return _common_problem(event, rules)


def _common_problem(event: Interaction | Impression, rules: Rules) -> tuple[str, str] | None:
    if event.recommendation_id is not None and not is_id(event.recommendation_id):
        return "bad_id", "recommendation_id must have 1 to 256 bytes and no control characters"
    if event.context and (errors := rules.schema.validate("context", event.context)):
        return "bad_context", _listed("context", errors)
    return None


def _listed(where: str, errors: Sequence[FieldError]) -> str:
    return "; ".join(f"{where}.{error.path} {error.message}" for error in errors[:5])


def _shown(event: Event) -> str:
    """The event as JSON text, cut short: it may be as large as a message can be."""
    return msgspec.json.encode(event).decode(errors="replace")[:_EVENT_SHOWN]
