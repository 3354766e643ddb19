"""What every online store promises, on SQLite, Redis and a Redis Cluster."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.redis import redis_cluster_url, redis_url

from featurestore import Cell, Claim, EntityKey, OnlineStore, StoreError, Value, open_store, read_status

__all__ = ["redis_cluster_url", "redis_url"]

ROOT = Path(__file__).parents[2]
MAX_CLAIMS = 6_400
NOW = 1_700_000_000_000
_fresh = itertools.count()


@dataclass
class Place:
    """Where the store under test keeps its data; ``open`` gives one more client of it."""

    backend: str
    where: str
    stores: list[OnlineStore] = field(default_factory=list)

    def open(self) -> OnlineStore:
        store = open_store("sqlite" if self.backend == "sqlite" else "redis", self.where, MAX_CLAIMS)
        self.stores.append(store)
        return store

    def start_writer(self, prefix: str, count: int) -> subprocess.Popen[str]:
        script = str(Path(__file__).with_name("writer_process.py"))
        process = subprocess.Popen(
            [sys.executable, script, self.backend, self.where, prefix, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


def empty_redis(url: str) -> None:
    if "+cluster" in url:
        cluster = redis.RedisCluster.from_url(url.replace("+cluster", ""))
        cluster.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
        cluster.close()
    else:
        with redis.Redis.from_url(url) as client:
            client.flushdb()


@pytest.fixture(params=["sqlite", "redis", "redis-cluster"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "sqlite":
        made = Place("sqlite", str(tmp_path / "features.db"))
    else:
        url = request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url")
        empty_redis(url)
        made = Place("redis", url)
    yield made
    for store in made.stores:
        store.close()


@pytest.fixture
def store(place: Place) -> OnlineStore:
    return place.open()


def user(id: str) -> EntityKey:
    return EntityKey("user", id)


def cells(**values: int) -> dict[str, Cell]:
    return {name: Cell(value, NOW) for name, value in values.items()}


def all_changes(store: OnlineStore, entity: str, cursor: int = 0, limit: int = 100) -> tuple[list[str], int]:
    ids: list[str] = []
    while True:
        more, cursor = store.changes(entity, cursor, limit)
        if not more:
            return ids, cursor
        ids.extend(more)


class TestOnlineStore:
    @pytest.mark.parametrize(
        "value",
        [None, True, False, 0, -(2**63), 2**63 - 1, 1.0, -0.5, 1e300, "", "x\0ü\n☃", b"", b"\x00\xff",
         [], ["a", "", "ü"], [1, 2, -3], [0.5, 1.0]],
    )  # fmt: skip
    def test_a_cell_comes_back_as_it_went_in(self, store: OnlineStore, value: Value) -> None:
        cell = Cell(value, NOW, 5_000)
        store.write({user("a"): {"f": cell}})
        (row,) = store.read([user("a")])
        assert row == {"f": cell}
        assert type(row["f"].value) is type(value)

    def test_an_unknown_entity_is_empty(self, store: OnlineStore) -> None:
        store.write({user("a"): cells(x=1)})
        assert store.read([user("b"), EntityKey("item", "a")]) == [{}, {}]

    def test_rows_come_in_the_order_of_the_keys_and_may_repeat(self, store: OnlineStore) -> None:
        store.write({user(id): cells(n=n) for n, id in enumerate("abcde")})
        rows = store.read([user(id) for id in "ecxaec"])
        assert [row["n"].value if row else None for row in rows] == [4, 2, None, 0, 4, 2]

    def test_many_entities_in_one_call(self, store: OnlineStore) -> None:
        keys = [user(f"u{n}") for n in range(20_000)]
        store.write({key: cells(n=n) for n, key in enumerate(keys)})
        rows = store.read(keys[::-1], ["n"])
        assert [row["n"].value for row in rows] == list(range(20_000))[::-1]

    def test_a_write_leaves_other_cells_alone(self, store: OnlineStore) -> None:
        store.write({user("a"): cells(x=1, y=2), user("b"): cells(x=3)})
        store.write({user("a"): cells(y=4, z=5)})
        assert store.read([user("a"), user("b")]) == [cells(x=1, y=4, z=5), cells(x=3)]

    def test_only_the_fields_asked_for(self, store: OnlineStore) -> None:
        store.write({user("a"): cells(x=1, y=2, z=3), user("b"): cells(y=4)})
        assert store.read([user("a"), user("b"), user("c")], ["z", "x", "none"]) == [cells(x=1, z=3), {}, {}]
        assert store.read([user("a")], []) == [{}]

    def test_empty_calls(self, store: OnlineStore) -> None:
        store.write({})
        assert store.read([]) == []
        assert store.delete([]) == []
        assert store.claim([], 1.0) == []
        assert store.changes("user", 0, 10) == ([], 0)
        assert store.scan("user", "", 10) == []

    @pytest.mark.parametrize(
        "id", ["a'b", 'a"b', "a/b", "a}b{c}", "{}", "%s?*", "a b\t", "é☃😀", "x" * 256, "user/a", "-1", "\\"]
    )
    def test_odd_ids_are_ids(self, store: OnlineStore, id: str) -> None:
        store.write({user("a"): cells(x=0), EntityKey("item", "a"): cells(x=2)})
        store.write({user(id): cells(x=1)})
        assert store.read([user(id), user("a"), EntityKey("item", "a")]) == [
            cells(x=1),
            cells(x=0),
            cells(x=2),
        ]
        assert store.claim([Claim(id, "o"), Claim(id, "p")], 60.0) == [True, False]
        assert store.scan("user", "", 10) == sorted(["a", id])
        assert store.changes("user", 0, 10)[0] == ["a", id]
        assert store.delete([user(id)]) == [True]
        assert store.scan("user", "", 10) == ["a"]

    def test_an_expired_cell_is_returned_for_the_reader_to_judge(self, store: OnlineStore) -> None:
        store.write({user("a"): {"f": Cell("x", NOW - 10_000, 1_000)}})
        cell = store.read([user("a")])[0]["f"]
        assert cell == Cell("x", NOW - 10_000, 1_000)
        assert read_status(cell, NOW) == "expired"

    def test_a_value_of_no_storable_type_is_refused_and_nothing_written(self, store: OnlineStore) -> None:
        bad = Cell(2**70, NOW)
        with pytest.raises(StoreError, match="wrong"):
            store.write({user("a"): cells(x=1), user("b"): {"wrong": bad}})
        assert store.read([user("a"), user("b")]) == [{}, {}]
        assert store.changes("user", 0, 10)[0] == []

    def test_another_client_sees_it_at_once(self, place: Place) -> None:
        one, two = place.open(), place.open()
        for n in range(50):
            one.write({user("a"): cells(n=n)})
            assert two.read([user("a")]) == [cells(n=n)]

    def test_it_is_still_there_after_reopening(self, place: Place) -> None:
        first = place.open()
        first.write({user("a"): cells(x=1)})
        _, cursor = first.changes("user", 0, 10)
        first.close()
        second = place.open()
        assert second.read([user("a")]) == [cells(x=1)]
        second.write({user("b"): cells(x=1)})
        assert second.changes("user", cursor, 10)[0] == ["b"]

    def test_a_closed_store_refuses(self, place: Place) -> None:
        store = place.open()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.read([user("a")])
        with pytest.raises(StoreError, match="closed"):
            store.write({user("a"): cells(x=1)})

    # --- deleting

    def test_delete_tells_what_existed_and_removes_all_of_it(self, store: OnlineStore) -> None:
        store.write({user("a"): cells(x=1, y=1), user("b"): cells(x=2), EntityKey("item", "a"): cells(x=3)})
        assert store.delete([user("none"), user("a"), EntityKey("item", "none")]) == [False, True, False]
        assert store.read([user("a"), user("b"), EntityKey("item", "a")]) == [{}, cells(x=2), cells(x=3)]
        assert store.delete([user("a")]) == [False]
        store.write({user("a"): cells(z=9)})
        assert store.read([user("a")]) == [cells(z=9)]

    # --- changes

    def test_changes_come_once_each_and_oldest_first(self, store: OnlineStore) -> None:
        for id in "abcabd":
            store.write({user(id): cells(x=1), EntityKey("item", f"i{id}"): cells(x=1)})
        ids, cursor = store.changes("user", 0, 100)
        assert ids == ["c", "a", "b", "d"]
        assert store.changes("user", cursor, 100) == ([], cursor)
        store.write({user("c"): cells(x=2)})
        assert store.changes("user", cursor, 100)[0] == ["c"]

    def test_changes_page_without_loss_even_inside_one_write(self, store: OnlineStore) -> None:
        written = [f"u{n}" for n in range(57)]
        store.write({user(id): cells(x=1) for id in written})
        for limit in (1, 10, 56, 57, 58):
            assert all_changes(store, "user", limit=limit)[0] == written

    def test_a_deleted_entity_is_a_change_and_an_unknown_one_is_not(self, store: OnlineStore) -> None:
        store.write({user("a"): cells(x=1), user("b"): cells(x=1)})
        _, cursor = store.changes("user", 0, 10)
        store.delete([user("a"), user("none")])
        assert store.changes("user", cursor, 10)[0] == ["a"]
        assert store.changes("user", 0, 10)[0] == ["b", "a"]

    def test_a_cursor_of_a_store_that_is_gone_starts_again(self, store: OnlineStore) -> None:
        assert store.changes("user", 10**12, 10) == ([], 0)
        store.write({user("a"): cells(x=1)})
        ids, cursor = store.changes("user", 10**12, 10)
        assert ids == ["a"]
        assert store.changes("user", cursor, 10) == ([], cursor)

    # --- claims

    def test_the_first_to_claim_wins_and_may_repeat_it(self, store: OnlineStore) -> None:
        assert store.claim([Claim("e1", "log/0/1"), Claim("e2", "log/0/2")], 60.0) == [True, True]
        assert store.claim([Claim("e1", "log/0/1"), Claim("e2", "log/0/9")], 60.0) == [True, False]
        assert store.claim([Claim("e1", "log/1/1"), Claim("e3", "log/1/1")], 60.0) == [False, True]

    def test_within_one_call_the_first_wins_too(self, store: OnlineStore) -> None:
        claims = [Claim("e", "a"), Claim("e", "b"), Claim("e", "a")]
        assert store.claim(claims, 60.0) == [True, False, True]

    def test_a_claim_ends_with_its_time(self, store: OnlineStore) -> None:
        assert store.claim([Claim("e", "a")], 0.15) == [True]
        assert store.claim([Claim("e", "b")], 60.0) == [False]
        time.sleep(0.25)
        assert store.claim([Claim("e", "b")], 60.0) == [True]
        assert store.claim([Claim("e", "a")], 60.0) == [False]

    def test_claims_are_bounded_and_the_oldest_go_first(self, store: OnlineStore) -> None:
        total, step = 3 * MAX_CLAIMS, 400
        for start in range(0, total, step):
            made = [Claim(f"e{n}", "first") for n in range(start, start + step)]
            assert all(store.claim(made, 3_600.0))
        newest = [Claim(f"e{n}", "second") for n in range(total - MAX_CLAIMS // 2, total)]
        assert not any(store.claim(newest, 3_600.0))
        oldest = [Claim(f"e{n}", "second") for n in range(MAX_CLAIMS)]
        assert all(store.claim(oldest, 3_600.0))

    def test_threads_of_several_clients_never_win_the_same_claim(self, place: Place) -> None:
        stores = [place.open(), place.open()]
        ids = [f"e{n}" for n in range(200)]
        start = threading.Barrier(6)

        def compete(worker: int) -> list[bool]:
            start.wait()
            store = stores[worker % 2]
            parts = [
                store.claim([Claim(id, f"w{worker}") for id in ids[n : n + 20]], 60.0)
                for n in range(0, 200, 20)
            ]
            return [won for part in parts for won in part]

        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(compete, range(6)))
        assert [sum(won) for won in zip(*results, strict=True)] == [1] * 200

    # --- scanning

    def test_scan_pages_in_lexicographic_order_of_the_bytes(self, store: OnlineStore) -> None:
        ids = ["b", "a", "ab", "B", "é", "z", "😀", "10", "9", "a\x01"]
        store.write({user(id): cells(x=1) for id in ids} | {EntityKey("item", "aa"): cells(x=1)})
        store.delete([user("z")])
        seen: list[str] = []
        while page := store.scan("user", seen[-1] if seen else "", 3):
            assert len(page) <= 3
            seen.extend(page)
        assert seen == sorted(set(ids) - {"z"}, key=str.encode)

    # --- concurrency

    def test_threads_set_different_cells_of_the_same_entities(self, store: OnlineStore) -> None:
        keys = [user(f"u{n}") for n in range(10)]

        def work(worker: int) -> None:
            for n in range(15):
                store.write({key: {f"w{worker}": Cell(n, n)} for key in keys})
                assert store.read(keys)[worker][f"w{worker}"] == Cell(n, n)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        assert store.read(keys) == [{f"w{worker}": Cell(14, 14) for worker in range(6)}] * 10
        ids, _ = all_changes(store, "user")
        assert sorted(ids) == sorted(key.id for key in keys)

    def test_a_follower_misses_nothing_that_two_processes_write(
        self, place: Place, store: OnlineStore
    ) -> None:
        count = 150
        writers = [place.start_writer(prefix, count) for prefix in ("a", "b")]
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        seen: set[str] = set()
        cursor, running = 0, True
        while True:
            running = any(writer.poll() is None for writer in writers)
            ids, cursor = store.changes("user", cursor, 50)
            # What a mark announces must be readable: a follower will not look again.
            assert all(store.read([user(id) for id in ids]))
            seen.update(ids)
            if not ids and not running:
                break
        for writer in writers:
            writer.communicate()
            assert writer.returncode == 0
        shared = {f"shared{n}" for n in range(7)}
        assert seen == {f"{prefix}{n}" for prefix in "ab" for n in range(count)} | shared
        rows = store.read([user(f"shared{n}") for n in range(7)])
        assert all(set(row) == {"a", "b"} for row in rows)
        last = {n % 7: n for n in range(count)}
        assert [row["a"].value for row in rows] == [last[n] for n in range(7)]

    def test_a_killed_writer_leaves_all_that_was_acknowledged(self, place: Place, store: OnlineStore) -> None:
        writer = place.start_writer("k", 0)
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        acknowledged = [writer.stdout.readline().strip() for _ in range(60)]
        writer.send_signal(signal.SIGKILL)
        rest, _ = writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        acknowledged += rest.split("\n")[:-1]
        rows = store.read([user(id) for id in acknowledged])
        assert [row["n"].value for row in rows] == list(range(len(acknowledged)))
        marked, _ = all_changes(store, "user")
        assert set(acknowledged) <= set(marked)
        store.write({user("after"): cells(x=1)})
        assert store.read([user("after")]) == [cells(x=1)]

    # --- against a model

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.lists(
            st.tuples(
                st.booleans(),
                st.dictionaries(
                    st.sampled_from("abcd"),
                    st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9)),
                    min_size=1,
                ),
            ),
            max_size=8,
        ),
        st.integers(1, 4),
    )
    def test_it_is_a_mapping_with_an_order_of_changes(
        self, store: OnlineStore, operations: list[tuple[bool, dict[str, dict[str, int]]]], limit: int
    ) -> None:
        entity = f"e{next(_fresh)}"
        model: dict[str, dict[str, Cell]] = {}
        order: list[str] = []
        for is_delete, rows in operations:
            if is_delete:
                existed = store.delete([EntityKey(entity, id) for id in rows])
                assert existed == [id in model for id in rows]
                touched = [id for id in rows if model.pop(id, None) is not None]
            else:
                written = {id: cells(**row) for id, row in rows.items()}
                store.write({EntityKey(entity, id): row for id, row in written.items()})
                touched = list(rows)
                for id, row in written.items():
                    model[id] = model.get(id, {}) | row
            order = [id for id in order if id not in touched] + touched
        assert store.read([EntityKey(entity, id) for id in "abcd"]) == [model.get(id, {}) for id in "abcd"]
        assert store.scan(entity, "", 10) == sorted(model)
        marked, _ = all_changes(store, entity, limit=limit)
        assert marked == order
