"""The shared state of rounds on its backends: the contract, and what each adds to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis import redis_url
from support.round_store_contract import StoreContract, read, write

from federated.rounds import Store, StoreUnavailable
from services.federation.store_redis import RedisStore
from services.federation.store_sqlite import LARGEST_ROW, SqliteStore

__all__ = ["redis_url"]

COUNT = """
import sys
from pathlib import Path
from services.federation.store_sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
def step(values):
    return {"counter": str(int(values["counter"] or b"0") + 1).encode()}, None
for _ in range(50):
    store.transact(["counter"], step)
"""


class TestSqlite(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        store = SqliteStore(tmp_path / "rounds")
        yield store
        store.close()

    def test_another_opening_finds_everything(self, tmp_path: Path) -> None:
        first = SqliteStore(tmp_path)
        write(first, {"job/a": b"1"})
        first.put_blob("job/small", b"s")
        first.put_blob("job/large", b"l" * (LARGEST_ROW + 1))
        second = SqliteStore(tmp_path)  # while the first is open, as another server would
        assert read(second, "job/a") == [b"1"]
        assert second.get_blob("job/small") == b"s"
        assert second.get_blob("job/large") == b"l" * (LARGEST_ROW + 1)
        first.close()
        second.close()

    def test_processes_do_not_lose_each_others_writes(self, tmp_path: Path) -> None:
        processes = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)]) for _ in range(2)]
        assert [process.wait(60) for process in processes] == [0, 0]
        store = SqliteStore(tmp_path)
        assert read(store, "counter") == [b"100"]
        store.close()

    def test_large_bodies_are_files_and_go_with_their_rows(self, tmp_path: Path) -> None:
        store, body = SqliteStore(tmp_path), b"x" * (LARGEST_ROW + 1)
        store.put_blob("job/1/a", body)
        store.put_blob("job/1/a", body)  # the file that it replaces goes, too
        store.put_blob("job/2/a", body)
        assert len(list((tmp_path / "bodies").iterdir())) == 2
        store.delete("job/1/")
        assert len(list((tmp_path / "bodies").iterdir())) == 1
        assert store.get_blob("job/2/a") == body
        store.close()

    def test_what_a_killed_writer_left_is_swept_and_nothing_else(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path)
        store.put_blob("job/a", b"x" * (LARGEST_ROW + 1))
        store.close()
        for name in ("orphan", "fresh"):
            (tmp_path / "bodies" / name).write_bytes(b"y")
        for path in (tmp_path / "bodies").iterdir():
            if path.name != "fresh":
                os.utime(path, (1.0, 1.0))
        store = SqliteStore(tmp_path)
        assert not (tmp_path / "bodies" / "orphan").exists()
        assert (tmp_path / "bodies" / "fresh").exists()
        assert store.get_blob("job/a") == b"x" * (LARGEST_ROW + 1)
        store.close()

    def test_bodies_that_wait_together_are_all_kept(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path)
        together = threading.Barrier(8)

        def put(number: int) -> None:
            together.wait(30)
            for n in range(20):
                store.put_blob(f"job/{number}/{n}", f"{number} {n}".encode())

        threads = [threading.Thread(target=put, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(list(store.blobs("job/"))) == 160
        assert store.get_blob("job/7/19") == b"7 19"
        store.close()

    def test_a_folder_that_cannot_be_used_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StoreUnavailable, match="cannot be used"):
            SqliteStore(tmp_path / "file")


class TestRedis(StoreContract):
    @pytest.fixture
    def store(self, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Store]:
        store = RedisStore(redis_url, request.node.name)
        store.delete("")
        yield store
        store.delete("")
        store.close()

    def test_stores_of_other_names_are_apart(self, store: Store, redis_url: str) -> None:
        other = RedisStore(redis_url, "another")
        write(store, {"job/a": b"1"})
        store.put_blob("job/a", b"1")
        assert read(other, "job/a") == [None]
        assert list(other.blobs("")) == []
        other.close()

    def test_what_belongs_to_an_iteration_ends_by_itself(self, redis_url: str) -> None:
        store = RedisStore(redis_url, "ending", life_s=1)
        write(store, {"job/header": b"1", "job/iteration/00000001/entry/a": b"1"})
        store.put_blob("job/iteration/00000001/body/a", b"1")
        store.put_blob("job/state/00000001/1", b"1")
        threading.Event().wait(1.2)
        assert read(store, "job/header", "job/iteration/00000001/entry/a") == [b"1", None]
        assert list(store.blobs("job/")) == ["job/state/00000001/1"]
        store.delete("")
        store.close()

    def test_no_server_is_told_as_such(self) -> None:
        with pytest.raises(StoreUnavailable, match="Redis cannot be used now"):
            RedisStore("redis://127.0.0.1:1/0")
