"""Whatever arrives, the answer is not a 5xx, is JSON, and the next request is answered."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.api import Harness

from services.api.bodies import explain
from services.api.problems import KINDS
from services.api.validation import MAX_ID_BYTES, text_problem

anything = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(["", "u", "like", "\0"])
)
NAMES = [
    "type", "user_id", "item_id", "action", "value", "event_id", "timestamp_ms", "recommendation_id",
    "context", "item_ids", "attributes", "deleted", "replace", "events", "users", "items", "session_events",
    "n", "exclude_item_ids", "exclude_seen", "categories", "diversity", "min_score", "include_attributes",
    "explain", "cursor", "min_freshness", "deadline_ms", "age", "hidden",
]  # fmt: skip
names = st.one_of(st.sampled_from(NAMES), st.text(max_size=5))
values = st.recursive(
    st.one_of(scalars, st.sampled_from(["interaction", "impression", "item", "user"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=8)),
    max_leaves=20,
)
bodies = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(names, values, max_size=10).map(lambda body: json.dumps(body).encode()),
)
POSTS = [
    "/v1/events", "/v1/events:batch", "/v1/users:batch", "/v1/items:batch", "/v1/recommendations",
    "/v1/rankings",
]  # fmt: skip


def well_answered(reply: Any) -> None:
    assert reply.status_code < 500, reply.text
    body = reply.json()
    if reply.status_code >= 400:
        assert reply.headers["content-type"] == "application/problem+json"
        assert KINDS[body["code"]].status == reply.status_code == body["status"]


@anything
@given(st.sampled_from(POSTS), bodies)
def test_any_body(api: Harness, path: str, body: bytes) -> None:
    well_answered(api.post(path, content=body))


@anything
@given(st.sampled_from(POSTS), values)
def test_any_json_in_the_place_of_one_part(api: Harness, path: str, value: Any) -> None:
    good: dict[str, Any] = {"type": "interaction", "user_id": "u", "item_id": "i", "action": "like"}
    row = {**good, "context": value, "value": value}
    body = {
        "/v1/events": row,
        "/v1/events:batch": {"events": [good, row, value]},
        "/v1/users:batch": {"users": [{"user_id": "u", "attributes": value}, value]},
        "/v1/items:batch": {"items": [{"item_id": "i", "attributes": {"x": value}}, value]},
        "/v1/recommendations": {"user_id": "u", "n": value, "categories": [value], "context": value},
        "/v1/rankings": {"item_ids": [value, "i"], "session_events": [{"item_id": value}]},
    }[path]
    reply = api.post(path, content=json.dumps(body).encode())
    well_answered(reply)
    if path == "/v1/events:batch":
        assert len(reply.json()["results"]) == 3
        assert reply.json()["results"][0]["status"] == "accepted"


@anything
@given(
    st.sampled_from(["GET", "PUT", "PATCH", "DELETE"]),
    st.sampled_from(["/v1/users/{}", "/v1/items/{}", "/v1/users/{}/features", "/v1/items/{}/similar", "/{}"]),
    st.one_of(st.binary(max_size=20), st.text(max_size=20).map(lambda t: t.encode(errors="surrogatepass"))),
    bodies,
)
def test_any_path(api: Harness, method: str, path: str, part: bytes, body: bytes) -> None:
    content = body if method in ("PUT", "PATCH") else None
    well_answered(api.request(method, path.format(quote(part, safe="")), content=content))


@anything
@given(st.dictionaries(st.sampled_from(["limit", "cursor", "n", "category"]), st.text(max_size=12)))
def test_any_query(api: Harness, query: dict[str, str]) -> None:
    encoded = "&".join(f"{k}={quote(v.encode(errors='surrogatepass'))}" for k, v in query.items())
    for path in ("/v1/items", "/v1/users", "/v1/items/i/similar"):
        well_answered(api.get(f"{path}?{encoded}"))


@given(st.text(max_size=300))
def test_ids_are_1_to_256_bytes_without_controls(text: str) -> None:
    encoded = text.encode(errors="surrogatepass")
    control = any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in text)
    control |= any(c in "\u2028\u2029" for c in text)
    good = 1 <= len(encoded) <= MAX_ID_BYTES and not control
    assert (text_problem(text) is None) == good


@given(values)
def test_what_is_json_is_not_explained_away(value: Any) -> None:
    """Where msgspec reads a body, the lenient reader finds nothing meaningless in it either."""
    raw = json.dumps(value).encode()
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert explain(raw).errors == ()


def test_it_still_answers(api: Harness) -> None:
    event = {"type": "interaction", "user_id": "u", "item_id": "i", "action": "like"}
    assert api.post("/v1/events", json=event).status_code == 202
