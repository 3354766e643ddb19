"""``/v1/freshness`` and ``/v1/probes``: what a region says of its freshness, and what it is measured by."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from support.api import LOG, NOW_MS, Harness, quick_settings, running_api

from services.events import Probe, decode_event
from services.freshness.stamps import Marked, Stamp, decode_stamp
from services.freshness.updates import LOG as UPDATES
from services.messagelog.contract import LogUnavailable, partition_of
from services.parameter_server.types import Mark, ParametersUnavailable, ShardChanges
from services.tokens import decode_token, encode_token, token_of


def _send(api: Harness, count: int = 1, kind: str = "event") -> list[dict[str, Any]]:
    reply = api.post("/v1/probes", json={"count": count, "kind": kind})
    assert reply.status_code == 202, reply.text
    body: dict[str, Any] = reply.json()
    probes: list[dict[str, Any]] = body["probes"]
    named = {position for probe in probes for position in decode_token(probe["token"]).positions}
    assert {p: o for p, o in named if o == max(x for q, x in named if q == p)} == dict(
        decode_token(body["token"]).positions
    )
    return probes


def _show(api: Harness, offset: int) -> None:
    """Let the marked updates of slot 3 be visible up to ``offset``."""
    changes = ShardChanges(0, 1, 1, {}, {(UPDATES, 3): Mark(offset, NOW_MS)}, True, False, None)
    api.on_loop(lambda: api.probes.visible.put_nowait(changes))


@pytest.fixture
def own(tmp_path: Path) -> Any:
    with running_api(tmp_path) as harness:
        yield harness


def test_marked_events_go_into_the_log_like_a_clients(own: Harness) -> None:
    probes = _send(own, 3)
    found = [decode_event(message.value) for message in own.producer.messages]
    assert {event.event_id for event in found} == {probe["id"] for probe in probes}
    assert all(type(event) is Probe for event in found)
    for message, event in zip(own.producer.messages, found, strict=True):
        assert event.event_id is not None
        assert message.partition == partition_of(event.event_id.encode(), 2)
    assert all(probe["after_ms"] == {} and probe["kind"] == "event" for probe in probes)
    assert probes[0]["accepted_at_ms"] == NOW_MS


def test_a_client_may_send_a_marked_event_itself(own: Harness) -> None:
    reply = own.post("/v1/events", json={"type": "probe", "event_id": "mine"})
    assert reply.status_code == 202
    assert decode_event(own.producer.messages[0].value) == Probe("mine")
    reply = own.post("/v1/events", json={"type": "probe", "event_id": "mine", "user_id": "u"})
    assert reply.json()["code"] == "invalid_request"


def test_the_stages_of_a_probe_come_from_stamps_and_watermarks(own: Harness) -> None:
    own.until(lambda: own.freshness.marks == {})
    (probe,) = _send(own)
    ((partition, offset),) = decode_token(probe["token"]).positions
    where = LOG, partition, offset
    own.probes.stamped += [
        Stamp("processed", "event", *where, NOW_MS + 7.5, [Marked(probe["id"], offset, NOW_MS)]),
        Stamp("trained", "event", *where, NOW_MS + 9.0),
    ]
    own.clock[0] = NOW_MS + 12
    own.parameters.watermarks[LOG, 1 - partition] = Mark(99, NOW_MS)
    own.advance(partition, offset)
    own.until(lambda: own.freshness.marks.get(partition, Mark(-1, 0)).offset == offset)
    found = own.get(f"/v1/probes/{probe['id']}").json()
    assert found["after_ms"] == {
        "processed": 7.5, "trained": 9.0, "parameters": 12.0, "recommendations": 12.0,
    }  # fmt: skip
    own.probes.stamped.append(Stamp("applied", "event", *where, NOW_MS + 11.0))
    assert own.get(f"/v1/probes/{probe['id']}").json()["after_ms"]["applied"] == 11.0
    summary = own.get("/v1/freshness").json()["summary"]
    assert summary["events"]["recommendations"] == {
        "n": 1, "p50_ms": 12.0, "p95_ms": 12.0, "p99_ms": 12.0, "max_ms": 12.0,
    }  # fmt: skip
    assert summary["updates"] == {}


def test_probes_of_other_apis_are_known_by_their_stamps(own: Harness) -> None:
    own.probes.stamped.append(
        Stamp("processed", "event", LOG, 0, 5, NOW_MS + 3.0, [Marked("theirs", 5, NOW_MS)])
    )
    assert own.get("/v1/probes/theirs").json()["after_ms"] == {"processed": 3.0}


def test_a_region_says_how_far_it_is(own: Harness) -> None:
    own.advance(0, 4, NOW_MS - 500)
    own.advance(1, 2, NOW_MS - 100)
    own.until(lambda: own.freshness.marks.get(1, Mark(-1, 0)).offset == 2)
    found = own.get("/v1/freshness").json()
    assert (found["region"], found["as_of_ms"]) == ("here", NOW_MS)
    for stage in ("parameters", "recommendations"):
        standing = found["stages"][stage]
        assert standing["reached"] is None
        assert standing["as_of_ms"] == NOW_MS - 100
        assert decode_token(standing["token"]) == token_of(LOG, [(0, 4), (1, 2)])


def test_a_long_poll_ends_when_the_stage_has_the_token(own: Harness) -> None:
    own.advance(0, 1)
    own.until(lambda: own.freshness.marks.get(0, Mark(-1, 0)).offset == 1)
    token = encode_token(token_of(LOG, [(0, 8)]))

    async def poll(stage: str) -> tuple[bool, bool]:
        path = f"/v1/freshness?token={token}&wait_ms=9000&stage={stage}"
        reply = await own.client.get(path)
        stages = reply.json()["stages"]
        assert reply.json()["summary"] is None
        return stages["parameters"]["reached"], stages["recommendations"]["reached"]

    async def both() -> list[tuple[bool, bool]]:
        waiting = [asyncio.create_task(poll(stage)) for stage in ("parameters", "recommendations")]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        own.parameters.watermarks[LOG, 0] = Mark(8, NOW_MS)
        own.parameters.emit()
        return await asyncio.gather(*waiting)

    first, last = own.run(both())
    assert first[0]
    assert last == (True, True)


def test_without_patience_the_answer_comes_at_once_and_says_no(own: Harness) -> None:
    token = encode_token(token_of(LOG, [(0, 8)]))
    found = own.get(f"/v1/freshness?token={token}").json()["stages"]["recommendations"]
    assert (found["reached"], found["token"]) == (False, None)
    found = own.get(f"/v1/freshness?token={token}&wait_ms=20").json()["stages"]["recommendations"]
    assert found["reached"] is False


def test_marked_updates_are_followed_once_somebody_asks(own: Harness) -> None:
    assert own.probes.followed == 0
    first, second = _send(own, 2, "update")
    assert first["after_ms"] == {"applied": 2.5}
    own.until(lambda: own.probes.followed == 1)
    token = second["token"]
    stages = own.get(f"/v1/freshness?token={token}").json()["stages"]
    assert stages.keys() == {"parameters"}
    assert stages["parameters"]["reached"] is False
    own.clock[0] = NOW_MS + 6
    _show(own, 100)
    own.until(lambda: own.probing.updates.marks != {})
    assert own.get(f"/v1/freshness?token={first['token']}").json()["stages"]["parameters"]["reached"]
    assert not own.get(f"/v1/freshness?token={token}").json()["stages"]["parameters"]["reached"]
    assert own.get(f"/v1/probes/{first['id']}").json()["after_ms"] == {"applied": 2.5, "parameters": 6.0}
    announced = [decode_stamp(m.value) for m in own.producer.messages if m.topic == "probes"]
    assert [stamp.probes[0].id for stamp in announced] == [first["id"], second["id"]]
    assert own.probes.followed == 1


def test_probes_are_listed_by_pages(own: Harness) -> None:
    sent = [probe["id"] for probe in _send(own, 5)]
    listed: list[str] = []
    path = "/v1/probes?limit=2"
    while True:
        body = own.get(path).json()
        listed += [probe["id"] for probe in body["probes"]]
        if body["cursor"] is None:
            break
        path = f"/v1/probes?limit=2&cursor={body['cursor']}"
    assert listed == sent


def test_a_log_that_is_away_costs_the_stamps_alone(own: Harness) -> None:
    (probe,) = _send(own)
    own.probes.failure = LogUnavailable("away")
    reply = own.get(f"/v1/probes/{probe['id']}")
    assert (reply.status_code, reply.json()["after_ms"]) == (200, {})
    assert own.get("/v1/freshness").status_code == 200


def test_without_parameter_servers_updates_are_refused_for_now(own: Harness) -> None:
    own.probes.failure = ParametersUnavailable("push", ("server-0",), 0.1)
    reply = own.post("/v1/probes", json={"kind": "update"})
    assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
    assert reply.headers["retry-after"]


@pytest.mark.parametrize("wait", ["", "&wait_ms=0", "&wait_ms=00"])
def test_who_does_not_wait_is_answered_at_once(api: Harness, wait: str) -> None:
    token = encode_token(token_of(LOG, [(0, 10**9)]))
    reply = api.get(f"/v1/freshness?token={token}{wait}")
    assert reply.status_code == 200
    assert reply.json()["stages"]["parameters"]["reached"] is False


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/freshness?token=rubbish", 400, "invalid_token"),
        (f"/v1/freshness?token={encode_token(token_of('gone', [(0, 1)]))}", 409, "stale_token"),
        (f"/v1/freshness?token={encode_token(token_of(LOG, [(0, 1)]))}&stage=applied", 422, "invalid_value"),
        (f"/v1/freshness?token={encode_token(token_of(LOG, [(0, 1)]))}&wait_ms=x", 400, "invalid_request"),
        (f"/v1/freshness?token={encode_token(token_of(LOG, [(0, 1)]))}&wait_ms=10001", 422, "invalid_value"),
        (f"/v1/freshness?token={encode_token(token_of(LOG, [(0, 1)]))}&wait_ms=-1", 422, "invalid_value"),
        (f"/v1/freshness?token={encode_token(token_of(UPDATES, [(0, 1)]))}&stage=recommendations", 422,
         "invalid_value"),
        ("/v1/probes/nobodys", 404, "unknown_probe"),
        ("/v1/probes?cursor=x", 400, "invalid_cursor"),
        ("/v1/probes?limit=0", 422, "invalid_value"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_gets_a_problem(api: Harness, path: str, status: int, code: str) -> None:
    reply = api.get(path)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"count": 0}, 422, "invalid_value"),
        ({"count": 1_001}, 422, "invalid_value"),
        ({"count": 101, "kind": "update"}, 422, "invalid_value"),
        ({"count": "2"}, 400, "invalid_request"),
        ({"kind": "click"}, 400, "invalid_request"),
        ({"rate": 3}, 400, "invalid_request"),
    ],
)
def test_orders_are_checked(api: Harness, body: dict[str, Any], status: int, code: str) -> None:
    reply = api.post("/v1/probes", json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


def test_a_reading_key_may_look_and_not_send(tmp_path: Path) -> None:
    stored = [f"read:{hashlib.sha256(b'reader').hexdigest()}"]
    with running_api(tmp_path, quick_settings(keys=stored)) as locked:
        headers = {"X-API-Key": "reader"}
        assert locked.get("/v1/freshness").status_code == 401
        assert locked.get("/v1/freshness", headers=headers).status_code == 200
        assert locked.get("/v1/probes", headers=headers).status_code == 200
        reply = locked.post("/v1/probes", json={}, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (403, "scope_missing")
        assert locked.producer.messages == []
