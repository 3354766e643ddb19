"""Users and items: writes become events, reads come from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.api import NOW_MS, Harness, running_api

from featurestore.online import Cell, EntityKey
from services.events import ItemEvent, UserEvent, decode_event
from services.tokens import decode_token

PLURALS = ["users", "items"]


def written(api: Harness, reply: Any) -> ItemEvent | UserEvent:
    ((partition, offset),) = decode_token(reply.json()["token"]).positions
    event = decode_event(api.producer.partitions[partition][offset].value)
    assert isinstance(event, ItemEvent | UserEvent)
    return event


def id_of(event: ItemEvent | UserEvent) -> str:
    return event.item_id if isinstance(event, ItemEvent) else event.user_id


@pytest.mark.parametrize("plural", PLURALS)
@pytest.mark.parametrize(
    ("method", "replace", "deleted"), [("PUT", True, False), ("PATCH", False, False), ("DELETE", False, True)]
)
def test_a_write_becomes_an_event(
    api: Harness, plural: str, method: str, replace: bool, deleted: bool
) -> None:
    body = {} if deleted else {"json": {"attributes": {"title": "T"}, "timestamp_ms": 7, "event_id": "w"}}
    reply = api.request(method, f"/v1/{plural}/one%2Ftwo", **body)
    assert reply.status_code == 202
    event = written(api, reply)
    assert (id_of(event), event.replace, event.deleted) == ("one/two", replace, deleted)
    if not deleted:
        assert (event.attributes, event.timestamp_ms, event.event_id) == ({"title": "T"}, 7, "w")


@pytest.mark.parametrize("plural", PLURALS)
def test_a_put_without_body_makes_an_empty_entity(api: Harness, plural: str) -> None:
    event = written(api, api.request("PUT", f"/v1/{plural}/bare"))
    assert (event.attributes, event.replace) == ({}, True)


@pytest.mark.parametrize("plural", PLURALS)
def test_a_batch_keeps_order_and_good_rows(api: Harness, plural: str) -> None:
    name = plural[:-1] + "_id"
    rows = [{name: "a", "attributes": {"title": "A"}}, {name: ""}, {"id": "b"}, {name: "c", "deleted": True}]
    reply = api.post(f"/v1/{plural}:batch", json={plural: rows})
    results = reply.json()["results"]
    assert [result["status"] for result in results] == ["accepted", "refused", "refused", "accepted"]
    assert [result.get("code") for result in results[1:3]] == ["invalid_value", "invalid_request"]
    ((partition, offset),) = decode_token(results[3]["token"]).positions
    last = decode_event(api.producer.partitions[partition][offset].value)
    assert isinstance(last, ItemEvent | UserEvent)
    assert (id_of(last), last.deleted) == ("c", True)


@pytest.mark.parametrize("plural", PLURALS)
@pytest.mark.parametrize(
    ("body", "status"), [({}, 400), ({"rows": []}, 400), ([], 400), ({"users": 1, "items": 1}, 400)]
)
def test_a_batch_of_another_form_is_refused(api: Harness, plural: str, body: Any, status: int) -> None:
    assert api.post(f"/v1/{plural}:batch", json=body).status_code == status


def test_the_batch_path_may_be_escaped(api: Harness) -> None:
    assert api.post("/v1/items%3Abatch", json={"items": []}).status_code == 202


def test_reads_show_attributes_and_nothing_of_ours(api: Harness) -> None:
    api.store.write(
        {
            EntityKey("user", "reader"): {
                "age": Cell(30, NOW_MS - 5),
                "gone": Cell(None, NOW_MS),
                "old": Cell("x", NOW_MS - 2_000, ttl_ms=1_000),
                "seen": Cell(b"\0" * 8, NOW_MS),
                "state": Cell(b"\x90", NOW_MS),
                "recent_items": Cell(["a"], NOW_MS),
            }
        }
    )
    body = api.get("/v1/users/reader").json()
    assert body == {"user_id": "reader", "attributes": {"age": 30}, "updated_at": "2023-11-14T22:13:20.000Z"}


def test_features_say_value_status_and_time(api: Harness) -> None:
    api.store.write(
        {
            EntityKey("user", "featured"): {
                "age": Cell(30, NOW_MS),
                "gender": Cell(None, NOW_MS - 1),
                "occupation": Cell("x", NOW_MS - 2_000, ttl_ms=1_000),
            }
        }
    )
    body = api.get("/v1/users/featured/features").json()
    assert body["schema_fingerprint"] == api.api.schema.fingerprint
    found = {f["name"]: (f["value"], f["status"], f["event_time_ms"]) for f in body["features"]}
    assert found["user_id"] == ("featured", "present", NOW_MS)
    assert found["age_group"] == (30, "present", NOW_MS)
    assert found["gender"] == (None, "null", NOW_MS - 1)
    assert found["occupation"] == (None, "expired", NOW_MS - 2_000)
    assert found["recent_items"] == (None, "not_found", None)


def test_a_deleted_item_is_unknown(api: Harness) -> None:
    api.store.write({EntityKey("item", "deleted"): {"title": Cell("T", 1), "deleted": Cell(True, 2)}})
    assert api.get("/v1/items/deleted").status_code == 404
    assert api.get("/v1/items/deleted/features").status_code == 404


def test_paging_visits_everything_once(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        ids = sorted(f"item-{n}/é" for n in range(25))
        api.store.write({EntityKey("item", one): {"title": Cell(one, 1)} for one in ids})
        seen: list[str] = []
        cursor, pages = None, 0
        while pages == 0 or cursor is not None:
            body = api.get("/v1/items", params={"limit": 10} | ({"cursor": cursor} if cursor else {})).json()
            seen += [item["item_id"] for item in body["items"]]
            cursor, pages = body["cursor"], pages + 1
        assert (seen, pages) == (ids, 3)
        first = api.get("/v1/items?limit=10").json()["cursor"]
        assert api.get("/v1/users", params={"cursor": first}).json()["code"] == "invalid_cursor"
        changed = first[:-2] + ("AA" if first[-2:] != "AA" else "BB")
        assert api.get("/v1/items", params={"cursor": changed}).json()["code"] == "invalid_cursor"
