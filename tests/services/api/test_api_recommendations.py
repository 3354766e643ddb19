"""Lists: for whom, from what, and never with what may not be shown, whichever way they were made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.api import LOG, NOW_MS, Harness, quick_settings, running_api

from featurestore import counters
from featurestore.online import Cell, EntityKey, StoreUnavailable
from models.parameters import RETRIEVAL
from services.parameter_server.types import Mark
from services.tokens import encode_token, token_of

ITEMS = {
    f"film-{n}": {"title": f"Film {n}", "categories": ["Drama"] if n % 2 else ["Comedy"]} for n in range(60)
}


def likes(count: float) -> dict[str, Any]:
    """The cell of an item that ``count`` users liked just now."""
    half_lives = (86_400.0, 7 * 86_400.0, 30 * 86_400.0)
    counted = counters.Counts(
        np.zeros(1, np.uint64),
        np.zeros(1, np.int64),
        counters.Decayed(np.array([NOW_MS]), np.full((1, 4), float(count))),
    )
    return {f"{counters.PREFIX}0": counters.encode(counted, half_lives)[0]}


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with running_api(tmp_path_factory.mktemp("films")) as harness:
        harness.write_items({item: {**of, **likes(int(item[5:]))} for item, of in ITEMS.items()})
        yield harness


def ids(body: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in body["items"]]


@pytest.mark.parametrize(
    ("wish", "audience"),
    [
        ({"user_id": "known"}, "user"),
        ({"user_id": "never seen before"}, "user"),
        ({"session_events": [{"item_id": "film-1"}, {"item_id": "film-3"}]}, "session"),
        ({"session_events": [{"item_id": "no such film"}]}, "session"),
        ({}, "nobody"),
    ],
)
def test_everybody_gets_a_list(films: Harness, wish: dict[str, Any], audience: str) -> None:
    films.write_user("known", seen=["film-1"], recent_items=["film-1"], likes_total=1)
    body = films.recommend(**wish, n=7, explain=True)
    assert len(set(ids(body))) == 7
    assert not body["degraded"]
    assert body["model_version"] == "main-1"
    assert body["experiment"] is None
    assert body["took_ms"] > 0
    assert body["explanation"]["audience"] == audience
    scores = [item["score"] for item in body["items"]]
    assert scores[:-1] == sorted(scores[:-1], reverse=True), "the last place may be an explored one"
    assert all(item["reasons"] and item["source"] for item in body["items"])
    assert all(item["stages"].keys() >= {"retrieval", "ranking", "popularity"} for item in body["items"])


def test_n_defaults_to_ten_and_explanations_to_none(films: Harness) -> None:
    body = films.recommend()
    assert len(body["items"]) == 10
    assert body["explanation"] is None
    assert "stages" not in body["items"][0]


def test_attributes_come_when_asked_for_and_nothing_private_does(films: Harness) -> None:
    body = films.recommend(n=3, include_attributes=["title", "none", "deleted", f"{counters.PREFIX}0"])
    for item in body["items"]:
        assert item["attributes"] == {"title": ITEMS[item["item_id"]]["title"]}


def test_a_session_changes_the_list_and_its_items_are_not_shown_again(films: Harness) -> None:
    watched = ["film-1", "film-3", "film-5", "film-7"]
    body = films.recommend(n=10, session_events=[{"item_id": item} for item in watched])
    assert not set(ids(body)) & set(watched)
    assert ids(body) != ids(films.recommend(n=10))
    drama = sum(ITEMS[item]["categories"] == ["Drama"] for item in ids(body))
    assert drama > sum(ITEMS[item]["categories"] == ["Drama"] for item in ids(films.recommend(n=10)))


def test_diversity_mixes_categories(films: Harness) -> None:
    session = [{"item_id": f"film-{n}"} for n in (1, 3, 5, 7)]
    plain = films.recommend(n=10, session_events=session)
    mixed = films.recommend(n=10, session_events=session, diversity=0.9)
    assert ids(plain) != ids(mixed)


def test_the_least_score_cuts_the_list_without_padding(films: Harness) -> None:
    scores = [item["score"] for item in films.recommend(n=20)["items"]]
    middle = sorted(scores)[10]
    body = films.recommend(n=20, min_score=middle)
    assert 0 < len(body["items"]) < 20
    assert all(item["score"] >= middle for item in body["items"])
    assert films.recommend(n=5, min_score=1e9)["items"] == []


WAYS = ["ranked", "deadline past", "no parameters"]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """An API whose lists come about in one of the ways there are."""
    with running_api(tmp_path_factory.mktemp("way")) as harness:
        harness.write_items({item: {**of, **likes(int(item[5:]))} for item, of in ITEMS.items()})
        harness.write_user("u", seen=["film-59", "film-58"], recent_items=["film-59"], likes_total=1)
        if request.param == "no parameters":
            harness.parameters.available = False
        if request.param == "deadline past":
            harness.parameters.delay_s = 0.5
        yield harness


def ask(way: Harness, **wish: Any) -> dict[str, Any]:
    late = {"deadline_ms": 100} if way.parameters.delay_s else {}
    body = way.recommend(user_id="u", **late, **wish)
    short = way.parameters.delay_s > 0 or not way.parameters.available
    assert body["degraded"] == short
    if short:
        assert {item["source"] for item in body["items"]} <= {"popular_fallback"}
    return body


def test_seen_items_are_left_out_on_every_way(way: Harness) -> None:
    assert not {"film-59", "film-58"} & set(ids(ask(way, n=58)))
    assert {"film-59", "film-58"} <= set(ids(ask(way, n=60, exclude_seen=False)))


def test_excluded_items_are_left_out_on_every_way(way: Harness) -> None:
    shown = ids(ask(way, n=20))
    assert not set(shown[:10]) & set(ids(ask(way, n=50, exclude_item_ids=[*shown[:10], "no such film"])))


def test_other_categories_are_left_out_on_every_way(way: Harness) -> None:
    body = ask(way, n=60, categories=["Drama", "no such category"])
    assert len(body["items"]) == 29
    assert {ITEMS[item]["categories"][0] for item in ids(body)} == {"Drama"}


def test_hidden_items_are_left_out_on_every_way(way: Harness) -> None:
    gone = {"film-57": {"hidden": True}, "film-56": {"deleted": True}}
    way.write_items({item: {**ITEMS[item], **of} for item, of in gone.items()})
    assert not set(gone) & set(ids(ask(way, n=60)))
    back = {item: {**ITEMS[item], "hidden": False, "deleted": False} for item in gone}
    way.write_items(back)
    assert set(gone) <= set(ids(ask(way, n=60)))


def test_expired_items_are_left_out_on_every_way_without_a_new_event(way: Harness) -> None:
    way.write_items({"film-55": {**ITEMS["film-55"], "expires_at_ms": NOW_MS + 50_000, **likes(55)}})
    way.until(lambda: way.items.catalogue.available(NOW_MS + 60_000)[way.items.catalogue.row("film-55")] == 0)
    assert "film-55" in ids(ask(way, n=60))
    way.clock[0] = NOW_MS + 50_000
    try:
        assert "film-55" not in ids(ask(way, n=60))
    finally:
        way.clock[0] = NOW_MS


@pytest.mark.parametrize("hidden", [{"hidden": True}, {"deleted": True}, {"expires_at_ms": NOW_MS - 1}])
def test_rankings_and_similar_items_leave_hidden_ones_out(tmp_path: Path, hidden: dict[str, Any]) -> None:
    with running_api(tmp_path) as api:
        api.write_items({"a": {}, "b": {}, "c": hidden})
        api.until(lambda: not api.items.catalogue.available(NOW_MS)[api.items.catalogue.row("c")])
        for available in (True, False):
            api.parameters.available = available
            ranked = api.post("/v1/rankings", json={"item_ids": ["c", "b", "a", "new", "b"]}).json()
            assert sorted(ids(ranked)[:2]) == ["a", "b"]
            assert ids(ranked)[2:] == ["new"]
            assert (ranked["items"][2]["score"], ranked["items"][2]["source"]) == (None, "unknown")
            assert ranked["degraded"] is not available
            similar = api.get("/v1/items/a/similar").json()
            assert ids(similar) == ["b"]


def test_similar_items_obey_categories_and_n(films: Harness) -> None:
    body = films.get("/v1/items/film-1/similar?n=40&category=Drama").json()
    assert {ITEMS[item]["categories"][0] for item in ids(body)} == {"Drama"}
    assert "film-1" not in ids(body)
    assert len(ids(films.get("/v1/items/film-1/similar?n=3").json())) == 3
    assert films.get("/v1/items/film-1/similar?n=101").status_code == 422


def test_padding_says_so(tmp_path: Path) -> None:
    settings = quick_settings()
    small = settings.model_copy(
        update={
            "recommendation": settings.recommendation.model_copy(
                update={"candidates": 5, "popular_candidates": 2, "fresh_candidates": 1}
            )
        }
    )
    with running_api(tmp_path, small) as api:
        api.write_items(ITEMS)
        body = api.recommend(n=12)
        sources = [item["source"] for item in body["items"]]
        assert len(set(ids(body))) == 12
        assert sources.count("popular_fallback") == 7
        assert set(sources[5:]) == {"popular_fallback"}
        scores = [item["score"] for item in body["items"]]
        assert min(scores[:5]) >= max(scores[5:])


def test_pages_repeat_nothing_and_end(films: Harness) -> None:
    films.write_user("pager", seen=["film-0"], recent_items=["film-0"], likes_total=1)
    body = films.recommend(user_id="pager", n=17, include_attributes=["title"])
    shown = ids(body)
    while body["cursor"] is not None:
        body = films.recommend(cursor=body["cursor"])
        assert all("title" in item["attributes"] for item in body["items"]), "the page is as asked at first"
        shown += ids(body)
    assert len(shown) == len(set(shown)) == 59


def test_a_page_can_be_fetched_again_and_cut_otherwise(films: Harness) -> None:
    first = films.recommend(n=10)
    again = [films.recommend(cursor=first["cursor"], n=n) for n in (10, 10, 3)]
    assert ids(again[0]) == ids(again[1])
    assert len(ids(again[2])) == 3
    assert not set(ids(first)) & set(ids(again[2]))


def test_a_cursor_goes_on_with_its_own_list_only(films: Harness) -> None:
    cursor = films.recommend(user_id="a", n=5)["cursor"]
    other = films.post("/v1/recommendations", json={"cursor": cursor, "user_id": "b"})
    assert (other.status_code, other.json()["errors"][0]["path"]) == (422, "user_id")
    assert films.post("/v1/recommendations", json={"cursor": cursor, "user_id": "a"}).status_code == 200


def test_a_list_says_what_it_rests_on(films: Harness) -> None:
    films.write_user("as-of", offset=7, accepted_at_ms=NOW_MS - 40, recent_items=[], likes_total=0)
    partition = films.freshness.partition("as-of")
    films.advance(partition, 6, NOW_MS - 50)
    films.advance(1 - partition, 9, NOW_MS - 10)
    films.until(lambda: films.freshness.marks.get(partition, (-1, 0))[0] == 6)
    films.until(lambda: films.freshness.marks.get(1 - partition, (-1, 0))[0] == 9)
    body = films.recommend(user_id="as-of")
    assert body["parameters_as_of_ms"] == NOW_MS - 50
    assert body["parameters_as_of"] == "2023-11-14T22:13:19.950Z"
    assert body["newest_event"] == {
        "event_id": "event-7",
        "accepted_at_ms": NOW_MS - 40,
        "token": encode_token(token_of(LOG, [(partition, 7)])),
    }
    assert films.recommend()["parameters_as_of_ms"] == NOW_MS - 10
    assert films.recommend()["newest_event"] is None


def test_min_freshness_waits_until_index_and_rows_have_the_event(films: Harness) -> None:
    films.write_user("fresh", offset=20, recent_items=[], likes_total=0)
    partition = films.freshness.partition("fresh")
    token = encode_token(token_of(LOG, [(partition, 20)]))
    late = films.recommend(user_id="fresh", min_freshness=token, deadline_ms=400)
    assert late["degraded"]
    assert "popular_fallback" not in {item["source"] for item in late["items"]}, "time was kept for a list"
    assert (late["parameters_as_of_ms"] or 0) < NOW_MS + 77

    async def wait() -> tuple[float, Any]:
        started = time.perf_counter()
        wish = {"user_id": "fresh", "min_freshness": token, "deadline_ms": 5_000}
        asked = asyncio.create_task(films.client.post("/v1/recommendations", json=wish))
        await asyncio.sleep(0.1)
        assert not asked.done()
        films.parameters.watermarks[LOG, partition] = Mark(20, NOW_MS + 77)
        films.parameters.emit()
        return time.perf_counter() - started, await asked

    _, reply = films.run(wait())
    assert not reply.json()["degraded"]
    assert reply.json()["parameters_as_of_ms"] == NOW_MS + 77
    assert films.recommend(user_id="fresh", min_freshness=token)["degraded"] is False
    assert films.parameters.asked == {"followers": False, "unasked": False}, (
        "a follower may lag behind the index"
    )
    films.recommend(user_id="fresh")
    assert films.parameters.asked == {}, "else as the settings say"


def test_rows_that_are_behind_the_index_are_not_called_fresh(films: Harness) -> None:
    partition = films.freshness.partition("as-of")
    films.advance(partition, 30, NOW_MS + 100)
    films.until(lambda: films.freshness.marks[partition].offset == 30)
    films.parameters.watermarks[LOG, partition] = Mark(25, NOW_MS + 90)
    try:
        assert films.recommend(user_id="as-of")["parameters_as_of_ms"] == NOW_MS + 90
    finally:
        films.parameters.watermarks[LOG, partition] = Mark(30, NOW_MS + 100)


def test_a_change_of_parameters_changes_the_list(films: Harness) -> None:
    """The row of one film moves towards the user's vector; it then leads where it did not."""
    before = films.recommend(user_id="mover", n=60, explain=True)
    last = ids(before)[-1]
    key = int(films.items.catalogue.keys[films.items.catalogue.row(last)])
    leader = int(films.items.catalogue.keys[films.items.catalogue.row(ids(before)[0])])

    def move() -> None:
        row = films.parameters.row(RETRIEVAL, leader) * 30
        films.parameters.rows[RETRIEVAL, key] = row
        films.parameters.emit({RETRIEVAL: (np.array([key], np.uint64), row[None])})

    films.on_loop(move)

    def retrieval(body: dict[str, Any]) -> float:
        return next(item["stages"]["retrieval"] for item in body["items"] if item["item_id"] == last)

    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        after = films.recommend(user_id="mover", n=60, explain=True)
        if retrieval(after) != retrieval(before):
            break
    assert retrieval(after) != retrieval(before)


def test_a_new_item_is_recommendable_as_soon_as_it_is_stored(films: Harness) -> None:
    films.write_items({"brand-new": {"title": "New", "categories": ["Drama"]}})
    assert "brand-new" in ids(films.recommend(n=100, session_events=[{"item_id": "film-1"}]))


def test_a_new_generation_takes_over_whole(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.write_items(ITEMS)
        assert api.recommend()["model_version"] == "main-1"
        first = api.items.current
        assert first is not None
        before = first.index.vectors.copy()

        def publish() -> None:
            api.parameters.generation = 2
            api.parameters._dense = api.parameters._dense * 1.5
            api.parameters.emit()

        api.on_loop(publish)
        api.until(lambda: api.items.current is not None and api.items.current.dense.generation == 2)
        current = api.items.current
        assert current is not None
        assert current.encoded.all()
        assert len(current.index) == len(ITEMS)
        assert not np.allclose(before, current.index.vectors)
        assert api.recommend()["model_version"] == "main-2"


def test_without_any_parameters_lists_are_popular(tmp_path: Path) -> None:
    with running_api(tmp_path, parameters_available=False) as api:
        rows = {
            EntityKey("item", item): {n: Cell(v, NOW_MS) for n, v in likes(count).items()}
            for item, count in (("least", 1), ("most", 9), ("middle", 5))
        }
        api.store.write(rows)
        api.until(lambda: len(api.items.catalogue) == 3)
        body = api.recommend(user_id="u")
        assert ids(body) == ["most", "middle", "least"]
        assert (body["degraded"], body["model_version"], body["parameters_as_of"]) == (True, None, None)
        assert ids(api.get("/v1/items/most/similar").json()) == ["middle", "least"]
        api.parameters.available = True
        api.until(lambda: api.items.current is not None)
        assert not api.recommend(user_id="u")["degraded"]


def test_a_store_that_fails_degrades_a_list(tmp_path: Path) -> None:
    with running_api(tmp_path) as api:
        api.write_items(ITEMS)
        read = api.store.read

        def fail(*_: Any) -> Any:
            raise StoreUnavailable("down")

        api.store.read = fail
        body = api.recommend(user_id="u", n=5, include_attributes=["title"])
        assert body["degraded"]
        assert len(body["items"]) == 5
        assert api.get("/v1/users/u").status_code == 503
        api.store.read = read
        assert not api.recommend(user_id="u")["degraded"]
