"""Every record of the log is either usable or refused with a reason; none stops the processor."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featurestore.schema import default_schema
from services.events import Impression, Interaction, ItemEvent, UserEvent, encode_event
from services.messagelog.contract import Record
from services.processor.records import MAX_SHOWN, Rules, is_id, sort_records

NOW = 1_700_000_000_000
RULES = Rules(default_schema(), 300_000)


def record(value: bytes, offset: int = 3) -> Record:
    return Record("events", 1, offset, b"k", value, NOW)


def code_of(event: object) -> str | None:
    usable, rejected = sort_records([record(encode_event(event))], RULES)
    assert len(usable) + len(rejected) == 1
    return rejected[0].code if rejected else None


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Interaction("u", "i", "like"), None),
        (Interaction("u" * 256, "i", "like"), None),
        (Interaction("u" * 257, "i", "like"), "bad_id"),
        (Interaction("ü" * 129, "i", "like"), "bad_id"),
        (Interaction("", "i", "like"), "bad_id"),
        (Interaction("u", "a\0b", "like"), "bad_id"),
        (Interaction("u", "i", "like", event_id="\n"), "bad_id"),
        (Interaction("u", "i", "like", recommendation_id=""), "bad_id"),
        (Interaction("u", "i", ""), "bad_action"),
        (Interaction("u", "i", "rating", math.nan), "not_finite"),
        (Interaction("u", "i", "rating", math.inf), "not_finite"),
        (Interaction("u", "i", "rating"), "no_value"),
        (Interaction("u", "i", "like", timestamp_ms=NOW + 300_000), None),
        (Interaction("u", "i", "like", timestamp_ms=NOW + 300_001), "time_ahead"),
        (Interaction("u", "i", "like", timestamp_ms=-(2**60)), "time_impossible"),
        (Interaction("u", "i", "like", timestamp_ms=2**62), "time_ahead"),
        (Interaction("u", "i", "like", context={"hour": [1]}), "bad_context"),
        (Impression("u", ["i"] * MAX_SHOWN), None),
        (Impression("u", ["i"] * (MAX_SHOWN + 1)), "too_many_items"),
        (Impression("u", ["i", ""]), "bad_id"),
        (ItemEvent("i", {"year": 1990}), None),
        (ItemEvent("i", {"year": "long ago"}), "bad_attributes"),
        (ItemEvent("i", {"year": math.nan}), "bad_attributes"),
        (ItemEvent("i", {"likes_1d": 5}), "bad_attributes"),
        (ItemEvent("", {}), "bad_id"),
        (UserEvent("u", {"age": 30}), None),
        (UserEvent("u", {"seen": "all"}), "bad_attributes"),
    ],
)
def test_rules(event, code):
    assert code_of(event) == code


@given(st.binary(max_size=200))
def test_any_bytes_are_sorted(data):
    usable, rejected = sort_records([record(data), record(b"\x01" + data, 4)], RULES)
    assert len(usable) + len(rejected) == 2
    for each in rejected:
        assert json.loads(each.to_json())["code"] == each.code


def test_deep_nesting_is_refused():
    nested = b"\x81\xa1a" * 100_000 + b"\x01"
    body = msgspec.msgpack.encode({"type": "item", "item_id": "i", "attributes": {"a": 1}})
    data = b"\x01" + body.replace(b"\xa1a\x01", b"\xa1a" + nested)
    usable, (rejected,) = sort_records([record(data)], RULES)
    assert usable == []
    assert rejected.code == "undecodable"


def test_a_rejection_says_where_and_shows_the_event_cut_short():
    event = ItemEvent("i", {"year": "x" * 50_000})
    _, (rejected,) = sort_records([record(encode_event(event), 17)], RULES)
    body = json.loads(rejected.to_json())
    assert (body["partition"], body["offset"]) == (1, 17)
    assert "year" in body["reason"]
    assert len(body["event"]) == 2_000


@given(st.text(max_size=300))
def test_an_id_has_1_to_256_bytes_and_no_control_characters(text):
    size = len(text.encode("utf-8", "surrogatepass"))
    control = any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)
    assert is_id(text) == (1 <= size <= 256 and not control)
