"""Events and the group commit behind them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.api import NOW_MS, Harness, quick_settings, running_api

from services.api.problems import Problem
from services.events import Impression, Interaction, ItemEvent, UserEvent, decode_event, partition_key
from services.messagelog.contract import LogFull, LogUnavailable, Message, partition_of
from services.tokens import decode_token

LIKE: dict[str, Any] = {"type": "interaction", "user_id": "u", "item_id": "i", "action": "like"}


def newest(api: Harness) -> Message:
    return max(api.producer.messages, key=lambda message: message.accepted_at_ms)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({**LIKE, "value": 4.5, "recommendation_id": "r", "context": {"device": "tv"}}, Interaction),
        ({"type": "impression", "user_id": "u", "item_ids": ["a", "b"]}, Impression),
        ({"type": "item", "item_id": "a", "attributes": {"title": "A", "categories": ["x"]}}, ItemEvent),
        ({"type": "user", "user_id": "u", "attributes": {"age": 30}, "replace": True}, UserEvent),
    ],
)
def test_each_kind_reaches_the_log_as_sent(tmp_path: Path, event: dict[str, Any], kind: type) -> None:
    with running_api(tmp_path) as api:
        reply = api.post("/v1/events", json={**event, "event_id": "e1", "timestamp_ms": 5})
        assert reply.status_code == 202
        assert reply.json()["event_id"] == "e1"
        message = newest(api)
        logged = decode_event(message.value)
        assert isinstance(logged, kind)
        assert (logged.event_id, logged.timestamp_ms) == ("e1", 5)
        assert message.accepted_at_ms == reply.json()["accepted_at_ms"] == NOW_MS
        assert message.key == partition_key(logged)


def test_the_token_says_where_the_event_lies(api: Harness) -> None:
    reply = api.post("/v1/events", json={**LIKE, "user_id": "token-user"}).json()
    partition = partition_of(b"token-user", 2)
    offset = len(api.producer.partitions[partition]) - 1
    assert decode_token(reply["token"]).positions == ((partition, offset),)


def test_an_event_without_id_gets_one_of_its_own(api: Harness) -> None:
    given = [api.post("/v1/events", json=LIKE).json()["event_id"] for _ in range(3)]
    assert len(set(given)) == 3
    assert decode_event(api.producer.partitions[partition_of(b"u", 2)][-1].value).event_id == given[-1]


def test_a_repeat_is_accepted_again(api: Harness) -> None:
    replies = [api.post("/v1/events", json={**LIKE, "event_id": "same"}) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [202, 202]
    assert [reply.json()["event_id"] for reply in replies] == ["same", "same"]


def test_a_batch_keeps_its_order(api: Harness) -> None:
    events = [{**LIKE, "user_id": f"user-{n}", "event_id": f"e-{n}"} for n in range(50)]
    body = api.post("/v1/events:batch", json={"events": events}).json()
    assert [result["event_id"] for result in body["results"]] == [event["event_id"] for event in events]
    for event, result in zip(events, body["results"], strict=True):
        ((partition, offset),) = decode_token(result["token"]).positions
        logged = decode_event(api.producer.partitions[partition][offset].value)
        assert logged.event_id == event["event_id"]
    whole = dict(decode_token(body["token"]).positions)
    assert whole == {p: len(records) - 1 for p, records in api.producer.partitions.items()}
    assert (body["accepted"], body["refused"]) == (50, 0)


def test_an_empty_batch_is_a_batch(api: Harness) -> None:
    body = api.post("/v1/events:batch", json={"events": []})
    assert body.status_code == 202
    assert body.json() == {"accepted": 0, "refused": 0, "token": None, "results": []}


def test_what_waits_goes_in_one_append(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.producer.gate.clear()

        async def burst() -> list[Any]:
            posts = [asyncio.create_task(api.client.post("/v1/events", json=LIKE)) for _ in range(40)]
            while api.api.ingest.waiting < 40:
                await asyncio.sleep(0.005)
            api.producer.gate.set()
            return await asyncio.gather(*posts)

        assert {reply.status_code for reply in api.run(burst())} == {202}
        assert sum(api.producer.groups) == 40
        assert len(api.producer.groups) <= 2, "all but the first post wait together"


def test_nothing_is_acknowledged_before_it_is_durable(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.producer.gate.clear()

        async def post() -> bool:
            posted = asyncio.create_task(api.client.post("/v1/events", json=LIKE))
            early, _ = await asyncio.wait([posted], timeout=0.2)
            api.producer.gate.set()
            assert (await posted).status_code == 202
            return bool(early)

        assert not api.run(post())


def test_a_full_queue_refuses_at_once_and_recovers(tmp_path: Path) -> None:
    with running_api(tmp_path, quick_settings(queue=10)) as api:
        api.producer.gate.clear()

        async def overflow() -> None:
            waiting = [asyncio.create_task(api.client.post("/v1/events", json=LIKE)) for _ in range(10)]
            while api.api.ingest.waiting < 10:
                await asyncio.sleep(0.005)
            refused = await api.client.post("/v1/events", json=LIKE)
            assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            batch = await api.client.post("/v1/events:batch", json={"events": [LIKE] * 3})
            assert batch.status_code == 429
            api.producer.gate.set()
            replies = await asyncio.gather(*waiting)
            assert {reply.status_code for reply in replies} == {202}
            assert (await api.client.post("/v1/events", json=LIKE)).status_code == 202

        api.run(overflow())
        assert len(api.producer.messages) == 11, "nothing that was refused was written"
        assert api.api.ingest.waiting == 0


@pytest.mark.parametrize("failure", [LogUnavailable("down"), LogFull("disk")])
def test_a_log_that_cannot_write_gives_503_and_recovers(tmp_path: Path, failure: Exception) -> None:
    with running_api(tmp_path) as api:
        api.producer.failure = failure
        reply = api.post("/v1/events", json=LIKE)
        assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
        assert "retry-after" in reply.headers
        api.producer.failure = None
        assert api.post("/v1/events", json=LIKE).status_code == 202
        assert api.api.ingest.waiting == 0


def test_closing_writes_what_was_queued(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.producer.gate.clear()

        async def close() -> int:
            posted = asyncio.create_task(api.client.post("/v1/events", json=LIKE))
            while not api.api.ingest.waiting:
                await asyncio.sleep(0.005)
            threading.Timer(0.1, api.producer.gate.set).start()
            await api.api.ingest.close()
            with pytest.raises(Problem, match="unavailable"):
                await api.api.ingest.append([api.api.ingest.message(Interaction("u", "i", "a"), 0)])
            return (await posted).status_code

        assert api.run(close()) == 202
        assert len(api.producer.messages) == 1


def test_a_request_that_was_given_up_does_not_disturb_the_others(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.producer.gate.clear()

        async def give_up() -> list[int]:
            posts = [asyncio.create_task(api.client.post("/v1/events", json=LIKE)) for _ in range(3)]
            while api.api.ingest.waiting < 3:
                await asyncio.sleep(0.005)
            posts[1].cancel()
            await asyncio.wait([posts[1]])
            api.producer.gate.set()
            return [(await posts[0]).status_code, (await posts[2]).status_code]

        assert api.run(give_up()) == [202, 202]


def test_every_outcome_is_counted(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.post("/v1/events", json=LIKE)
        api.post("/v1/events:batch", json={"events": [LIKE, {"type": "?"}, {**LIKE, "user_id": ""}]})
        metrics = api.get("/metrics").text
        assert 'headwater_api_events_total{outcome="accepted"} 2.0' in metrics
        assert 'headwater_api_events_total{outcome="invalid_request"} 1.0' in metrics
        assert 'headwater_api_events_total{outcome="invalid_value"} 1.0' in metrics
        line = 'headwater_api_requests_total{method="POST",route="/v1/events",status="202"} 1.0'
        assert line in metrics
