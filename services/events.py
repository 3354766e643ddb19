"""The kinds of event, as clients send them and as the log carries them.

One definition serves the API (JSON), the log (MessagePack behind a format byte) and the importers.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

FORMAT: Final = b"\x01"
Scalar = str | int | float | bool | None
Attributes = dict[str, Any]


class Interaction(msgspec.Struct, frozen=True, tag="interaction", forbid_unknown_fields=True):
    """A user did something with an item. ``action`` is free text; settings say which count as liked.

    ``value`` is a rating or a strength; ``timestamp_ms`` is event time (Unix ms), the API's clock if absent.
    """

    user_id: str
    item_id: str
    action: str
    value: float | None = None
    event_id: str | None = None
    timestamp_ms: int | None = None
    recommendation_id: str | None = None
    context: Attributes | None = None


class Impression(msgspec.Struct, frozen=True, tag="impression", forbid_unknown_fields=True):
    """Items were shown to a user, in this order."""

    user_id: str
    item_ids: list[str]
    event_id: str | None = None
    timestamp_ms: int | None = None
    recommendation_id: str | None = None
    context: Attributes | None = None


class ItemEvent(msgspec.Struct, frozen=True, tag="item", forbid_unknown_fields=True):
    """An item appeared or changed. Attributes given are set, others stay; ``deleted`` hides it for good."""

    item_id: str
    attributes: Attributes = {}
    deleted: bool = False
    replace: bool = False
    event_id: str | None = None
    timestamp_ms: int | None = None


class UserEvent(msgspec.Struct, frozen=True, tag="user", forbid_unknown_fields=True):
    """A user appeared or changed. Attributes given are set, others stay; ``deleted`` forgets the user."""

    user_id: str
    attributes: Attributes = {}
    deleted: bool = False
    replace: bool = False
    event_id: str | None = None
    timestamp_ms: int | None = None


class Probe(msgspec.Struct, frozen=True, tag="probe", forbid_unknown_fields=True):
    """A marked event, by which freshness is measured: it takes the way of an interaction through log, processor,
    trainer and parameter servers, and leaves nothing behind: no user, no item, nothing learned."""

    event_id: str | None = None
    timestamp_ms: int | None = None


Event = Interaction | Impression | ItemEvent | UserEvent | Probe

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


class EventFormatError(ValueError):
    """The bytes are not an event of a format that this version reads."""


def encode_event(event: Event) -> bytes:
    """The log's form of ``event``: a format byte, then MessagePack."""
    return FORMAT + _encoder.encode(event)


def decode_event(data: bytes) -> Event:
    """Read the log's form back. Raises EventFormatError naming what is wrong."""
    if data[:1] != FORMAT:
        raise EventFormatError(f"unknown event format {data[:1].hex() or 'empty'}; this version reads 01")
    try:
        return _decoder.decode(data[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EventFormatError(str(error)) from error


def partition_key(event: Event) -> bytes:
    """What decides an event's partition: its user, its item where no user takes part, or a probe's id."""
    if isinstance(event, Probe):
        return (event.event_id or "").encode()
    return (event.item_id if isinstance(event, ItemEvent) else event.user_id).encode()
