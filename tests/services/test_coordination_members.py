"""Membership and the shard map, over the embedded backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordination import (
    CoordinationError,
    Member,
    Registration,
    ShardMap,
    members,
    read_shard_map,
    settle_shard_map,
    wait_for,
)
from services.coordination.membership import member_key
from services.coordination.shardmap import KEY, assign, change_shard_map
from services.coordination.sqlite import SqliteCoordination


def member(name: str, incarnation: int = 1) -> Member:
    return Member(name, "worker", "127.0.0.1:1", 1, incarnation, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteCoordination]:
    opened = SqliteCoordination(tmp_path / "c.db")
    yield opened
    opened.close()


def test_a_member_is_seen_until_it_leaves(store: SqliteCoordination) -> None:
    with Registration(store, member("a"), 5.0) as registration:
        assert members(store, "worker") == [member("a")]
        assert members(store, "work") == []
        registration.update(ready=True, address="127.0.0.1:2")
        (seen,) = members(store, "worker")
        assert (seen.ready, seen.address) == (True, "127.0.0.1:2")
    assert members(store, "worker") == []


def test_a_member_is_kept_alive_beyond_its_lease(store: SqliteCoordination) -> None:
    with Registration(store, member("a"), 0.3):
        time.sleep(0.8)
        assert members(store, "worker") == [member("a")]


def test_a_dead_member_goes_with_its_lease(store: SqliteCoordination) -> None:
    store.put(member_key("worker", "dead"), b"{}", lease=store.lease(0.05))
    time.sleep(0.1)
    assert store.scan("members/") == []


def test_a_member_whose_lease_ended_registers_again(store: SqliteCoordination) -> None:
    with Registration(store, member("a"), 0.3) as registration:
        registration._lease.revoke()
        assert members(store, "worker") == []
        deadline = time.monotonic() + 5.0
        while not members(store, "worker") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert members(store, "worker") == [member("a")]
        assert not registration.replaced.is_set()


def test_a_later_incarnation_replaces_one_whose_lease_ended(store: SqliteCoordination) -> None:
    with Registration(store, member("a", 1), 0.3) as old:
        old._lease.revoke()
        with Registration(store, member("a", 2), 5.0):
            assert old.replaced.wait(5.0)
            assert members(store, "worker") == [member("a", 2)]
            old.close()
            assert members(store, "worker") == [member("a", 2)]


def test_unreadable_members_are_passed_over(store: SqliteCoordination) -> None:
    store.put(member_key("worker", "odd"), b"\xff not json")
    store.put(member_key("worker", "older"), b'{"name": "older"}')
    with Registration(store, member("a"), 5.0):
        assert members(store, "worker") == [member("a")]


def test_waiting_ends_when_enough_are_there(store: SqliteCoordination) -> None:
    with Registration(store, member("a"), 5.0):
        second: list[Registration] = []
        timer = threading.Timer(0.1, lambda: second.append(Registration(store, member("b"), 5.0)))
        timer.start()
        found = wait_for(store, "worker", lambda seen: len(seen) == 2, 10.0)
        timer.join()
        assert [one.name for one in found] == ["a", "b"]
        second[0].close()


def test_waiting_ends_by_time_and_by_stop(store: SqliteCoordination) -> None:
    assert wait_for(store, "worker", lambda seen: len(seen) == 1, 0.05) == []
    stop = threading.Event()
    stop.set()
    started = time.monotonic()
    assert wait_for(store, "worker", lambda seen: len(seen) == 1, 60.0, stop=stop) == []
    assert time.monotonic() - started < 5.0


@given(st.sets(st.text("abc-0123", min_size=1), min_size=1, max_size=8), st.integers(8, 200))
def test_shards_are_dealt_evenly_whatever_the_order_of_names(names: set[str], shards: int) -> None:
    dealt = assign(sorted(names, reverse=True), shards)
    assert dealt == assign(sorted(names), shards)
    counts = [len(dealt.owned_by(name)) for name in names]
    assert sum(counts) == dealt.shards == shards
    assert max(counts) - min(counts) <= 1
    assert {shard for name in names for shard in dealt.owned_by(name)} == set(range(shards))


def test_a_map_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="2 shards cannot be dealt to 0 servers"):
        assign([], 2)
    with pytest.raises(ValueError, match="0 shards"):
        assign(["a"], 0)
    with pytest.raises(ValueError, match="3 replicas of a shard need as many servers; there are 2"):
        assign(["a", "b"], 4, 3)


def test_servers_without_a_shard_are_spare() -> None:
    dealt = assign(["a", "b", "c"], 2)
    assert dealt.servers == ("a", "b")
    assert dealt.held_by("c") == ()


@given(st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_replicas_of_a_shard_are_on_servers_of_their_own(replicas: int, shards: int, chained: bool) -> None:
    dealt = assign("abcde", shards, replicas, chained=chained)
    for place in dealt.places:
        assert len(set(place.replicas)) == replicas
        assert place.leader == place.replicas[0]
        assert place.chain == (place.replicas if chained else ())


def test_a_changed_map_grows_its_epoch_and_a_late_change_sees_the_newest(store: SqliteCoordination) -> None:
    first = settle_shard_map(store, ["a", "b"], 2)
    other = change_shard_map(store, lambda now: now.change({}, {0: "b"}))
    seen: list[int] = []

    def change(now: ShardMap) -> ShardMap:
        if not seen:
            change_shard_map(store, lambda newest: newest.change({}, {1: "a"}))
        seen.append(now.epoch)
        return now.change({}, {}, least_epoch=9)

    assert other is not None
    last = change_shard_map(store, change)
    assert last is not None
    assert (first.epoch, other.epoch, seen, last.epoch) == (1, 2, [2, 3], 9)
    assert change_shard_map(store, lambda now: None) == last


def test_the_first_map_stays(store: SqliteCoordination) -> None:
    assert read_shard_map(store) is None
    first = settle_shard_map(store, ["b", "a"], 4)
    assert (first.epoch, first.servers) == (1, ("a", "b", "a", "b"))
    assert settle_shard_map(store, ["c"], 9) == first
    assert read_shard_map(store) == first


def test_servers_that_race_agree(store: SqliteCoordination, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = settle_shard_map(store, ["a", "b"], 4)
    real, looks = read_shard_map, []

    def first_look_finds_nothing(where: SqliteCoordination) -> ShardMap | None:
        looks.append(where)
        return None if len(looks) == 1 else real(where)

    monkeypatch.setattr("services.coordination.shardmap.read_shard_map", first_look_finds_nothing)
    assert settle_shard_map(store, ["a", "b", "c"], 6) == theirs


def test_a_damaged_map_is_named(store: SqliteCoordination) -> None:
    store.put(KEY, b"[]")
    with pytest.raises(CoordinationError, match=KEY):
        read_shard_map(store)
