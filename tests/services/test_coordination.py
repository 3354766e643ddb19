"""One contract for every coordination backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.etcd import etcd_url  # noqa: F401
from support.service_process import eventually

from services.coordination import (
    Change,
    Conflict,
    Coordination,
    CoordinationError,
    LeaseLost,
    Unavailable,
    open_coordination_store,
)
from services.coordination.etcd import EtcdCoordination
from services.coordination.recipes import prefix_end
from services.coordination.sqlite import MARKS_KEPT, SqliteCoordination


@dataclass(frozen=True)
class Backend:
    """A store, another view of the same data (another process would have it), and a way to pass time."""

    store: Coordination
    other: Coordination
    pass_s: Callable[[float], None]
    until_gone: Callable[[str], None]
    """Let a lease of one second that is not kept alive end, with this key."""


@pytest.fixture(params=["sqlite", "etcd"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "sqlite":
        now = [1_000.0]

        def pass_s(seconds: float) -> None:
            now[0] += seconds

        store: Coordination = SqliteCoordination(tmp_path / "c.db", clock=lambda: now[0])
        other: Coordination = SqliteCoordination(tmp_path / "c.db", clock=lambda: now[0])
        found = Backend(store, other, pass_s, lambda key: pass_s(2.0))
    else:
        url = request.getfixturevalue("etcd_url")
        with httpx.Client(trust_env=False) as client:
            client.post(f"{url}/v3/kv/deleterange", json={"key": "AA==", "range_end": "AA=="})
        store, other = EtcdCoordination(url), EtcdCoordination(url)
        found = Backend(
            store, other, time.sleep, lambda key: eventually(lambda: other.get(key) is None, pause_s=0.05)
        )
    yield found
    found.store.close()
    found.other.close()


class TestContract:
    def test_what_is_put_is_read_by_all(self, backend: Backend) -> None:
        revision = backend.store.put("a/b", b"\x00\xff binary")
        entry = backend.other.get("a/b")
        assert entry is not None
        assert (entry.key, entry.value, entry.revision) == ("a/b", b"\x00\xff binary", revision)
        assert backend.other.get("a/c") is None

    def test_an_empty_value_is_a_value(self, backend: Backend) -> None:
        backend.store.put("empty", b"")
        entry = backend.other.get("empty")
        assert entry is not None
        assert entry.value == b""

    def test_revisions_grow_over_all_keys(self, backend: Backend) -> None:
        first = backend.store.put("a", b"1")
        second = backend.other.put("b", b"1")
        third = backend.store.put("a", b"2")
        assert first < second < third

    def test_scan_is_sorted_and_limited_to_the_prefix(self, backend: Backend) -> None:
        for key in ("m/b", "m/a", "m", "m0", "n/a", "m/é", "m/a/x"):
            backend.store.put(key, key.encode())
        found = backend.store.scan("m/")
        assert [entry.key for entry in found] == ["m/a", "m/a/x", "m/b", "m/é"]
        assert [entry.value.decode() for entry in found] == [entry.key for entry in found]
        assert {entry.key for entry in backend.store.scan("")} == {
            "m", "m/a", "m/a/x", "m/b", "m/é", "m0", "n/a",
        }  # fmt: skip

    def test_compare_and_swap(self, backend: Backend) -> None:
        first = backend.store.put("k", b"1", expect_revision=0)
        with pytest.raises(Conflict):
            backend.other.put("k", b"2", expect_revision=0)
        second = backend.other.put("k", b"2", expect_revision=first)
        with pytest.raises(Conflict):
            backend.store.put("k", b"3", expect_revision=first)
        entry = backend.store.get("k")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"2", second)

    def test_a_deleted_key_may_be_created_again(self, backend: Backend) -> None:
        backend.store.put("k", b"1", expect_revision=0)
        assert backend.store.delete("k")
        assert not backend.store.delete("k")
        assert backend.other.get("k") is None
        backend.other.put("k", b"2", expect_revision=0)

    def test_a_key_vanishes_with_its_lease(self, backend: Backend) -> None:
        lease = backend.store.lease(1.0)
        backend.store.put("leased", b"x", lease=lease)
        backend.store.put("kept", b"x")
        assert backend.other.get("leased") is not None
        backend.until_gone("leased")
        assert backend.other.get("leased") is None
        assert [entry.key for entry in backend.other.scan("")] == ["kept"]
        with pytest.raises(LeaseLost):
            lease.keep_alive()
        with pytest.raises(LeaseLost):
            backend.store.put("leased", b"y", lease=lease)

    def test_a_lease_kept_alive_lasts(self, backend: Backend) -> None:
        lease = backend.store.lease(2.0)
        backend.store.put("leased", b"x", lease=lease)
        for _ in range(3):  # etcd looks for ended leases every half second
            backend.pass_s(0.9)
            lease.keep_alive()
        assert backend.other.get("leased") is not None

    def test_a_revoked_lease_takes_its_keys_along_at_once(self, backend: Backend) -> None:
        lease = backend.store.lease(60.0)
        backend.store.put("a", b"x", lease=lease)
        backend.store.put("b", b"x", lease=lease)
        lease.revoke()
        assert backend.other.scan("") == []
        lease.revoke()

    def test_a_key_moves_to_the_lease_of_its_last_write(self, backend: Backend) -> None:
        old, new = backend.store.lease(60.0), backend.other.lease(60.0)
        backend.store.put("member", b"old", lease=old)
        backend.other.put("member", b"new", lease=new)
        old.revoke()
        entry = backend.store.get("member")
        assert entry is not None
        assert entry.value == b"new"

    def test_one_holder_at_a_time_with_growing_epochs(self, backend: Backend) -> None:
        first, second = backend.store.lease(60.0), backend.other.lease(60.0)
        epoch = backend.store.acquire("shard-0", "a", first)
        assert epoch is not None
        assert backend.other.acquire("shard-0", "b", second) is None
        assert backend.other.acquire("shard-0", "a", second) is None
        assert backend.store.acquire("shard-0", "a", first) == epoch
        first.revoke()
        later = backend.other.acquire("shard-0", "b", second)
        assert later is not None
        assert later > epoch

    def test_an_ended_lease_cannot_acquire(self, backend: Backend) -> None:
        lease = backend.store.lease(60.0)
        lease.revoke()
        with pytest.raises(LeaseLost):
            backend.store.acquire("name", "a", lease)

    def test_counters_count_every_caller_once(self, backend: Backend) -> None:
        assert backend.store.increment("c") == 1
        seen: list[int] = []

        def count(store: Coordination) -> None:
            seen.extend(store.increment("c") for _ in range(10))

        threads = [
            threading.Thread(target=count, args=(store,))
            for store in (backend.store, backend.other, backend.store)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == list(range(2, 32))
        assert backend.other.increment("another") == 1

    def test_watch_returns_what_changed_already(self, backend: Backend) -> None:
        before = backend.store.put("w/x", b"0")
        backend.store.put("elsewhere", b"1")
        revision = backend.store.put("w/a", b"1")
        assert backend.other.watch("w/", before, 5.0) == [Change("w/a", b"1", revision)]

    def test_watch_folds_or_lists_several_changes_in_order(self, backend: Backend) -> None:
        before = backend.store.put("w/x", b"0")
        backend.store.put("w/a", b"1")
        last_b = backend.store.put("w/b", b"1")
        last_a = backend.store.put("w/a", b"2")
        found = backend.other.watch("w/", before, 5.0)
        assert found[-1] == Change("w/a", b"2", last_a)
        assert Change("w/b", b"1", last_b) in found
        assert [change.revision for change in found] == sorted(change.revision for change in found)

    def test_watch_wakes_on_a_write_and_on_a_delete(self, backend: Backend) -> None:
        before = backend.store.put("w/a", b"1")

        def later() -> None:
            time.sleep(0.1)
            backend.other.delete("w/a")

        thread = threading.Thread(target=later)
        thread.start()
        started = time.monotonic()
        (change,) = backend.store.watch("w/", before, 10.0)
        assert time.monotonic() - started < 5.0
        assert (change.key, change.value) == ("w/a", None)
        assert change.revision > before
        thread.join()

    def test_watch_times_out_with_nothing(self, backend: Backend) -> None:
        revision = backend.store.put("w/a", b"1")
        started = time.monotonic()
        assert backend.store.watch("w/", revision, 0.2) == []
        assert 0.15 < time.monotonic() - started < 3.0

    def test_watch_sees_a_lease_end(self, backend: Backend) -> None:
        lease = backend.store.lease(1.0)
        revision = backend.store.put("w/member", b"x", lease=lease)
        backend.until_gone("w/member")
        (change,) = backend.other.watch("w/", revision, 5.0)
        assert (change.key, change.value) == ("w/member", None)

    def test_a_watcher_may_use_the_store_meanwhile(self, backend: Backend) -> None:
        revision = backend.store.put("w/a", b"1")
        found: list[Change] = []
        thread = threading.Thread(target=lambda: found.extend(backend.store.watch("w/", revision, 10.0)))
        thread.start()
        time.sleep(0.05)
        backend.store.put("w/b", b"2")
        thread.join(5.0)
        assert [change.key for change in found] == ["w/b"]


def test_the_settings_name_the_backend(tmp_path: Path) -> None:
    sqlite = open_coordination_store("sqlite", tmp_path / "deep" / "c.db", "http://127.0.0.1:1")
    assert isinstance(sqlite, SqliteCoordination)
    sqlite.close()
    etcd = open_coordination_store("etcd", tmp_path / "c.db", "http://127.0.0.1:1")
    assert isinstance(etcd, EtcdCoordination)
    with pytest.raises(Unavailable):
        etcd.get("a")
    with pytest.raises(Unavailable):
        etcd.watch("a", 0, 0.1)
    etcd.close()


def test_sqlite_outlives_its_process(tmp_path: Path) -> None:
    store = SqliteCoordination(tmp_path / "c.db")
    revision = store.put("k", b"v")
    store.increment("n")
    store.close()
    store = SqliteCoordination(tmp_path / "c.db")
    entry = store.get("k")
    assert entry is not None
    assert entry.revision == revision
    assert store.increment("n") == 2
    assert store.put("k2", b"") > revision
    store.close()


def test_sqlite_may_be_made_by_several_at_once(tmp_path: Path) -> None:
    failures: list[Exception] = []
    counts: list[int] = []

    def use(path: Path) -> None:
        try:
            store = SqliteCoordination(path)
            counts.append(store.increment("n"))
            store.close()
        except CoordinationError as error:
            failures.append(error)

    for round_ in range(40):
        threads = [threading.Thread(target=use, args=(tmp_path / f"{round_}.db",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert sorted(counts) == sorted([1, 2, 3, 4] * 40)


def test_sqlite_refuses_another_format(tmp_path: Path) -> None:
    store = SqliteCoordination(tmp_path / "c.db")
    with store._write() as db:
        db.execute("UPDATE state SET format = 99")
    store.close()
    with pytest.raises(CoordinationError, match="format 99"):
        SqliteCoordination(tmp_path / "c.db")


def test_sqlite_refuses_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"certainly not a database" * 100)
    with pytest.raises(Unavailable):
        SqliteCoordination(tmp_path / "c.db")


def test_sqlite_bounds_its_marks_of_deleted_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MARKS_KEPT >= 1_000
    monkeypatch.setattr("services.coordination.sqlite.MARKS_KEPT", 5)
    store = SqliteCoordination(tmp_path / "c.db")
    for number in range(20):
        store.put(f"w/{number:02}", b"")
        store.delete(f"w/{number:02}")
    kept = store.watch("w/", 0, 0.0)
    assert [change.key for change in kept] == [f"w/{number:02}" for number in range(15, 20)]
    store.close()


def test_etcd_answers_a_watch_of_compacted_history_with_what_is_there(
    etcd_url: str,  # noqa: F811
) -> None:
    store = EtcdCoordination(etcd_url)
    first = store.put("compacted/a", b"1")
    last = store.put("compacted/a", b"2")
    with httpx.Client(trust_env=False) as client:
        client.post(f"{etcd_url}/v3/kv/compaction", json={"revision": str(last)}).raise_for_status()
    assert store.watch("compacted/", first - 1, 5.0) == [Change("compacted/a", b"2", last)]
    store.close()


@pytest.mark.parametrize(
    ("prefix", "end"),
    [(b"a", b"b"), (b"a\xff", b"b"), (b"a/", b"a0"), (b"\xff\xff", None), (b"", None), (b"\x00", b"\x01")],
)
def test_prefix_end(prefix: bytes, end: bytes | None) -> None:
    assert prefix_end(prefix) == end
