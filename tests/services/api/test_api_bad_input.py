"""Malformed, oversized, meaningless: each gets a problem document with the right code, and nothing breaks."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from support.api import LOG, NOW_MS, Harness, quick_settings, running_api

from services.tokens import decode_token, encode_token, log_fingerprint, token_of

GOOD: dict[str, Any] = {"type": "interaction", "user_id": "u", "item_id": "i", "action": "like"}
LONG = "x" * 10_000


def event(**changes: Any) -> bytes:
    return msgspec.json.encode({**GOOD, **changes})


EVENTS: list[tuple[str, bytes, int, str, str | None]] = [
    ("empty body", b"", 400, "invalid_json", None),
    ("not JSON", b"{", 400, "invalid_json", None),
    ("text after JSON", event() + b" x", 400, "invalid_json", None),
    ("not UTF-8", b'{"type":"interaction","user_id":"\xff"}', 400, "invalid_json", None),
    ("UTF-16", '{"type":"interaction"}'.encode("utf-16"), 400, "invalid_json", None),
    ("nested deeply", b"[" * 100_000, 400, "invalid_request", ""),
    ("nested deeply inside", event(context={}).replace(b"{}", b'{"a":' * 5_000 + b"1" + b"}" * 5_000),
     400, "invalid_json", None),
    ("a list", b"[]", 400, "invalid_request", ""),
    ("null", b"null", 400, "invalid_request", ""),
    ("no type", b'{"user_id":"u"}', 400, "invalid_request", "type"),
    ("unknown type", event(type="purchase"), 400, "invalid_request", "type"),
    ("type of the wrong type", event(type=3), 400, "invalid_request", "type"),
    ("a part missing", b'{"type":"interaction","user_id":"u","item_id":"i"}', 400, "invalid_request", "action"),
    ("unknown field", event(colour="red"), 400, "invalid_request", "colour"),
    ("number as id", event(user_id=7), 400, "invalid_request", "user_id"),
    ("null as id", event(user_id=None), 400, "invalid_request", "user_id"),
    ("text as value", event(value="many"), 400, "invalid_request", "value"),
    ("fraction of a ms", event(timestamp_ms=1.5), 400, "invalid_request", "timestamp_ms"),
    ("text as time", event(timestamp_ms="now"), 400, "invalid_request", "timestamp_ms"),
    ("list as context", event(context=[]), 400, "invalid_request", "context"),
    ("NaN", event(value=1).replace(b":1", b":NaN"), 422, "invalid_value", "value"),
    ("infinity", event(value=1).replace(b":1", b":Infinity"), 422, "invalid_value", "value"),
    ("too large a float", event(value=1).replace(b":1", b":1e999"), 422, "invalid_value", "value"),
    ("a huge value", event(value=1e300), 422, "invalid_value", "value"),
    ("too many digits", event(timestamp_ms=1).replace(b":1", b":" + b"1" * 5_000),
     400, "invalid_request", "timestamp_ms"),
    ("half a surrogate", event().replace(b'"u"', rb'"\ud800"'), 422, "invalid_value", "user_id"),
    ("before 1970", event(timestamp_ms=-1), 422, "invalid_value", "timestamp_ms"),
    ("far future", event(timestamp_ms=NOW_MS + 10**9), 422, "invalid_value", "timestamp_ms"),
    ("seconds for milliseconds overflow", event(timestamp_ms=2**63), 422, "invalid_value", "timestamp_ms"),
    ("empty user", event(user_id=""), 422, "invalid_value", "user_id"),
    ("empty item", event(item_id=""), 422, "invalid_value", "item_id"),
    ("empty action", event(action=""), 422, "invalid_value", "action"),
    ("long action", event(action="a" * 65), 422, "invalid_value", "action"),
    ("empty event id", event(event_id=""), 422, "invalid_value", "event_id"),
    ("10 kB id", event(item_id=LONG), 422, "invalid_value", "item_id"),
    ("257 bytes in fewer characters", event(item_id="é" * 129), 422, "invalid_value", "item_id"),
    ("NUL", event(item_id="a\0b"), 422, "invalid_value", "item_id"),
    ("line break", event(user_id="a\nb"), 422, "invalid_value", "user_id"),
    ("C1 control", event(user_id="a\x85b"), 422, "invalid_value", "user_id"),
    ("attributes beyond 64 bits", msgspec.json.encode(
        {"type": "item", "item_id": "i", "attributes": {"n": 1}}).replace(b":1", b":99999999999999999999"),
     422, "invalid_value", "attributes.n"),
    ("attribute of the wrong kind", msgspec.json.encode(
        {"type": "item", "item_id": "i", "attributes": {"categories": "Drama"}}),
     422, "invalid_value", "attributes.categories"),
    ("nested attribute", msgspec.json.encode(
        {"type": "user", "user_id": "u", "attributes": {"a": {"b": 1}}}),
     422, "invalid_value", "attributes.a"),
    ("an attribute of ours", msgspec.json.encode(
        {"type": "user", "user_id": "u", "attributes": {"seen": "all"}}),
     422, "invalid_value", "attributes.seen"),
    ("a computed attribute", msgspec.json.encode(
        {"type": "user", "user_id": "u", "attributes": {"likes_total": 3}}),
     422, "invalid_value", "attributes.likes_total"),
    ("context of the wrong kind", event(context={"device": ["a"]}), 422, "invalid_value", "context.device"),
    ("no items in an impression", msgspec.json.encode(
        {"type": "impression", "user_id": "u", "item_ids": []}), 422, "invalid_value", "item_ids"),
    ("bad item in an impression", msgspec.json.encode(
        {"type": "impression", "user_id": "u", "item_ids": ["a", ""]}), 422, "invalid_value", "item_ids[1]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "code", "path"), [e[1:] for e in EVENTS], ids=[e[0] for e in EVENTS]
)
def test_bad_event(api: Harness, body: bytes, status: int, code: str, path: str | None) -> None:
    before = len(api.producer.messages)
    reply = api.post("/v1/events", content=body)
    problem = reply.json()
    assert (reply.status_code, problem["code"]) == (status, code), problem
    assert reply.headers["content-type"] == "application/problem+json"
    assert problem["status"] == status
    assert problem["request_id"] == reply.headers["x-request-id"]
    if path is not None:
        assert [error["path"] for error in problem["errors"]] == [path]
    assert len(api.producer.messages) == before


# What is not JSON, or nested beyond reading, cannot be cut into rows.
ROWS = [e for e in EVENTS if e[3] != "invalid_json" and not e[1].startswith(b"[[")]


@pytest.mark.parametrize(("body", "status", "code", "path"), [e[1:] for e in ROWS], ids=[e[0] for e in ROWS])
def test_bad_row_does_not_cost_the_good_ones(
    api: Harness, body: bytes, status: int, code: str, path: str | None
) -> None:
    rows = b'{"events":[' + b",".join([event(user_id="first"), body, event(user_id="last")]) + b"]}"
    reply = api.post("/v1/events:batch", content=rows)
    results = reply.json()["results"]
    assert reply.status_code == 202, reply.text
    assert [result["status"] for result in results] == ["accepted", "refused", "accepted"]
    assert results[1]["code"] == code
    if path is not None:
        assert [error["path"] for error in results[1]["errors"]] == [path]


BATCHES: list[tuple[str, bytes, int, str]] = [
    ("no list", b"{}", 400, "invalid_request"),
    ("list of the wrong type", b'{"events":{}}', 400, "invalid_request"),
    ("something beside", b'{"events":[],"more":[]}', 400, "invalid_request"),
    ("a bare list", b"[]", 400, "invalid_request"),
    ("not JSON", b'{"events":[', 400, "invalid_json"),
    ("NaN beside the list", b'{"events":NaN}', 400, "invalid_request"),
    ("too many rows", b'{"events":[' + b",".join([event()] * 1_001) + b"]}", 413, "body_too_large"),
    ("too many bad rows", b'{"events":[' + b",".join([b"{}"] * 1_001) + b"]}", 413, "body_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), [b[1:] for b in BATCHES], ids=[b[0] for b in BATCHES])
def test_bad_batch(api: Harness, body: bytes, status: int, code: str) -> None:
    reply = api.post("/v1/events:batch", content=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


WISHES: list[tuple[str, bytes, int, str, str | None]] = [
    ("not JSON", b"nope", 400, "invalid_json", None),
    ("text as n", b'{"n":"ten"}', 400, "invalid_request", "n"),
    ("fraction as n", b'{"n":1.5}', 400, "invalid_request", "n"),
    ("negative n", b'{"n":-1}', 422, "invalid_value", "n"),
    ("zero n", b'{"n":0}', 422, "invalid_value", "n"),
    ("n beyond the maximum", b'{"n":101}', 422, "invalid_value", "n"),
    ("huge n", b'{"n":99999999999999999999999}', 422, "invalid_value", "n"),
    ("unknown field", b'{"count":3}', 400, "invalid_request", "count"),
    ("empty user", b'{"user_id":""}', 422, "invalid_value", "user_id"),
    ("NUL in user", b'{"user_id":"a\\u0000"}', 422, "invalid_value", "user_id"),
    ("10 kB user", msgspec.json.encode({"user_id": LONG}), 422, "invalid_value", "user_id"),
    ("diversity", b'{"diversity":1.01}', 422, "invalid_value", "diversity"),
    ("NaN diversity", b'{"diversity":NaN}', 422, "invalid_value", "diversity"),
    ("NaN least score", b'{"min_score":NaN}', 422, "invalid_value", "min_score"),
    ("bad excluded id", b'{"exclude_item_ids":["ok",""]}', 422, "invalid_value", "exclude_item_ids[1]"),
    ("too many excluded", msgspec.json.encode({"exclude_item_ids": ["a"] * 1_001}),
     422, "invalid_value", "exclude_item_ids"),
    ("bad session", b'{"session_events":[{"item_id":""}]}', 422, "invalid_value", "session_events[0].item_id"),
    ("session of texts", b'{"session_events":["i"]}', 400, "invalid_request", "session_events[0]"),
    ("bad category", b'{"categories":["\\n"]}', 422, "invalid_value", "categories[0]"),
    ("bad context", b'{"context":{"device":{}}}', 422, "invalid_value", "context.device"),
    ("zero deadline", b'{"deadline_ms":0}', 422, "invalid_value", "deadline_ms"),
    ("endless deadline", b'{"deadline_ms":99999999}', 422, "invalid_value", "deadline_ms"),
    ("junk cursor", b'{"cursor":"junk"}', 400, "invalid_cursor", "cursor"),
    ("odd cursor", '{"cursor":"\u00e9\u20ac"}'.encode(), 400, "invalid_cursor", "cursor"),
    ("junk token", b'{"min_freshness":"junk"}', 400, "invalid_token", "min_freshness"),
    ("token of another log",
     msgspec.json.encode({"min_freshness": encode_token(token_of("another", [(0, 0)]))}),
     409, "stale_token", "min_freshness"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "code", "path"), [w[1:] for w in WISHES], ids=[w[0] for w in WISHES]
)
def test_bad_wish(api: Harness, body: bytes, status: int, code: str, path: str | None) -> None:
    reply = api.post("/v1/recommendations", content=body)
    problem = reply.json()
    assert (reply.status_code, problem["code"]) == (status, code), problem
    if path is not None:
        assert [error["path"] for error in problem["errors"]] == [path]


PATHS: list[tuple[str, str, int, str]] = [
    ("GET", "/v1/items/none/similar", 404, "unknown_item"),
    ("GET", "/v1/items/none", 404, "unknown_item"),
    ("GET", "/v1/items/none/features", 404, "unknown_item"),
    ("GET", "/v1/users/none", 404, "unknown_user"),
    ("GET", "/v1/users/none/features", 404, "unknown_user"),
    ("GET", "/v1/users/a%00b", 422, "invalid_value"),
    ("GET", "/v1/users/%FF", 422, "invalid_value"),
    ("GET", f"/v1/users/{LONG}", 422, "invalid_value"),
    ("PUT", "/v1/users/a%0Ab", 422, "invalid_value"),
    ("DELETE", "/v1/items/%ED%A0%80", 422, "invalid_value"),
    ("PUT", "/v1/users/", 404, "not_found"),
    ("GET", "/v1/items?limit=0", 422, "invalid_value"),
    ("GET", "/v1/items?limit=-3", 422, "invalid_value"),
    ("GET", "/v1/items?limit=501", 422, "invalid_value"),
    ("GET", "/v1/items?limit=many", 400, "invalid_request"),
    ("GET", "/v1/items?limit=\u0663", 400, "invalid_request"),
    ("GET", "/v1/items?cursor=junk", 400, "invalid_cursor"),
    ("GET", "/v1/items?cursor=", 400, "invalid_cursor"),
    ("GET", "/v2/items", 404, "not_found"),
    ("GET", "/", 404, "not_found"),
    ("GET", "/v1/events", 405, "method_not_allowed"),
    ("BREW", "/v1/users/u", 405, "method_not_allowed"),
]


@pytest.mark.parametrize(("method", "path", "status", "code"), PATHS)
def test_bad_path(api: Harness, method: str, path: str, status: int, code: str) -> None:
    reply = api.request(method, path)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "\xff"])
def test_content_type_does_not_matter(api: Harness, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type.encode("latin-1")}
    assert api.post("/v1/events", content=event(), headers=headers).status_code == 202


ODD_IDS = [
    "a/b",
    "a b",
    "%",
    "%2F",
    "ü€😀",
    "?x=1#y",
    "...",
    "a:b",
    "x" * 256,
    "é" * 128,
    "similar",
    "\u202e",
]


@pytest.mark.parametrize("odd", ODD_IDS)
def test_odd_ids_are_ids(api: Harness, odd: str) -> None:
    api.write_items({odd: {"title": odd}})
    assert api.post("/v1/events", content=event(item_id=odd, user_id=odd)).status_code == 202
    reply = api.get(f"/v1/items/{quote(odd, safe='')}")
    assert (reply.status_code, reply.json()["item_id"]) == (200, odd)
    assert api.get(f"/v1/items/{quote(odd, safe='')}/similar").json()["item_id"] == odd


def test_body_is_refused_by_its_announced_length_before_it_is_sent(api: Harness) -> None:
    reply = api.post("/v1/events", content=b"", headers={"Content-Length": str(2**40)})
    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")


def test_body_is_refused_while_it_streams_in(api: Harness) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(1_000):
            sent += 1
            yield b" " * 65_536

    limit = api.api.settings.api.max_body
    reply = api.post("/v1/events:batch", content=endless())
    assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")
    assert sent * 65_536 <= limit + 2 * 65_536


def test_many_mistakes_make_a_bounded_document(api: Harness) -> None:
    reply = api.post("/v1/rankings", json={"item_ids": [""] * 1_000})
    problem = reply.json()
    assert reply.status_code == 422
    assert len(problem["errors"]) == 100
    assert "1000" in problem["detail"]


def test_nothing_of_an_exception_reaches_the_client(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with running_api(tmp_path, quick_settings()) as api:
        api.producer.failure = RuntimeError("secret detail")
        reply = api.post("/v1/events", content=event(), headers={"X-Request-ID": "trace-1"})
        assert (reply.status_code, reply.json()["code"]) == (500, "internal")
        assert "secret" not in reply.text
        assert "secret detail" in caplog.text
        api.producer.failure = None
        assert api.post("/v1/events", content=event()).status_code == 202


@pytest.mark.parametrize("given", ["trace-1", "a.b_c-D9"])
def test_a_harmless_request_id_is_taken_over(api: Harness, given: str) -> None:
    assert api.get("/v1/users/none", headers={"X-Request-ID": given}).json()["request_id"] == given


@pytest.mark.parametrize("given", ["two words", "x" * 65, "<b>"])
def test_a_harmful_request_id_is_replaced(api: Harness, given: str) -> None:
    assert api.get("/v1/users/none", headers={"X-Request-ID": given}).json()["request_id"] != given


def test_a_token_that_the_log_gave_is_taken(api: Harness) -> None:
    token = api.post("/v1/events", content=event()).json()["token"]
    assert decode_token(token).log == log_fingerprint(LOG)
    body = api.recommend(user_id="u", min_freshness=token, deadline_ms=1)
    assert body["degraded"]
