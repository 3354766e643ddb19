"""What only one backend can show: files and formats, unreachable and refusing servers, what gets imported."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from support.redis import free_port, redis_server, redis_url

from featurestore import Cell, Claim, EntityKey, StoreError, StoreUnavailable, open_store
from featurestore.cells import pack, unpack
from featurestore.sqlite import SqliteStore
from featurestore.sqlite_file import SqliteFile

__all__ = ["redis_url"]

KEY = EntityKey("user", "a")
ROOT = Path(__file__).parents[2]


def test_the_form_of_a_cell_is_fixed() -> None:
    assert pack("x", Cell(["a"], 258, 3)).hex() == "9391a161cd010203"
    assert unpack(bytes.fromhex("9391a161cd010203")) == Cell(["a"], 258, 3)


def test_a_later_version_may_append_to_a_cell() -> None:
    assert unpack(bytes.fromhex("9491a161cd010203a3616263")) == Cell(["a"], 258, 3)


@pytest.mark.parametrize(
    ("backend", "unwanted"), [("sqlite", {"redis", "hiredis", "pyarrow"}), ("redis", {"sqlite3", "pyarrow"})]
)
def test_only_the_chosen_backend_is_imported(tmp_path: Path, backend: str, unwanted: set[str]) -> None:
    where = str(tmp_path / "f.db") if backend == "sqlite" else f"redis://127.0.0.1:{free_port()}"
    script = (
        "import sys; from featurestore import *\n"
        f"try: open_store({backend!r}, {where!r})\n"
        "except StoreUnavailable: pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert unwanted.isdisjoint(done.stdout.split())


class TestSqlite:
    def test_what_is_acknowledged_is_synced(self, tmp_path: Path) -> None:
        file = SqliteFile(tmp_path / "f.db", "", 1)
        with file.writing() as writer, file.reading() as reader:
            for db in (writer, reader):
                assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
                assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        file.close()

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "f.db"
        SqliteStore(path, max_claims=10).close()
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version=7")
        db.close()
        with pytest.raises(StoreError, match="format 7; this version reads 1"):
            SqliteStore(path, max_claims=10)

    def test_what_is_no_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "f.db"
        path.write_bytes(b"something else" * 100)
        with pytest.raises(StoreError, match=r"f\.db"):
            SqliteStore(path, max_claims=10)

    def test_a_folder_that_cannot_be_made_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreUnavailable, match=r"f\.db"):
            SqliteStore(tmp_path / "file" / "f.db", max_claims=10)

    def test_a_lock_that_is_never_released_is_unavailable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("featurestore.sqlite_file.BUSY_TIMEOUT_S", 0.1)
        store = SqliteStore(tmp_path / "f.db", max_claims=10)
        other = sqlite3.connect(tmp_path / "f.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked"):
            store.write({KEY: {"x": Cell(1, 1)}})
        assert store.read([KEY]) == [{}]
        other.execute("ROLLBACK")
        store.write({KEY: {"x": Cell(1, 1)}})
        other.close()
        store.close()

    def test_a_failed_write_leaves_nothing_and_the_store_usable(self, tmp_path: Path) -> None:
        file = SqliteFile(tmp_path / "f.db", "CREATE TABLE IF NOT EXISTS t (x)", 1)

        def fail_half_way() -> None:
            with file.writing() as db:
                db.execute("INSERT INTO t VALUES (1)")
                raise KeyError

        with pytest.raises(KeyError):
            fail_half_way()
        with file.writing() as db:
            db.execute("INSERT INTO t VALUES (2)")
        with file.reading() as db:
            assert db.execute("SELECT x FROM t").fetchall() == [(2,)]
        file.close()

    def test_many_open_a_new_file_at_once(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            stores = list(pool.map(lambda _: SqliteStore(tmp_path / "f.db", max_claims=10), range(8)))
        for n, store in enumerate(stores):
            store.write({KEY: {f"x{n}": Cell(n, 0)}})
        assert len(stores[0].read([KEY])[0]) == 8
        for store in stores:
            store.close()

    def test_a_claim_lives_exactly_its_time(self, tmp_path: Path) -> None:
        now = [1_000]
        store = SqliteStore(tmp_path / "f.db", max_claims=10, now_ms=lambda: now[0])
        assert store.claim([Claim("e", "a")], 5.0) == [True]
        now[0] = 5_999
        assert store.claim([Claim("e", "b"), Claim("e", "a")], 5.0) == [False, True]
        now[0] = 6_000
        assert store.claim([Claim("e", "b")], 5.0) == [True]
        store.close()

    def test_claims_that_expired_leave_the_file(self, tmp_path: Path) -> None:
        now = [0]
        store = SqliteStore(tmp_path / "f.db", max_claims=10**9, now_ms=lambda: now[0])
        for second in range(100):
            now[0] = second * 1_000
            store.claim([Claim(f"e{second}-{n}", "a") for n in range(100)], 10.0)
        store.close()
        with sqlite3.connect(tmp_path / "f.db") as db:
            (left,) = db.execute("SELECT count(*) FROM claims").fetchone()
        db.close()
        assert 1_000 <= left <= 1_300

    def test_repeated_claims_do_not_push_out_others(self, tmp_path: Path) -> None:
        store = SqliteStore(tmp_path / "f.db", max_claims=100)
        for _ in range(500):
            store.claim([Claim("repeated", "a")], 60.0)
        store.claim([Claim("kept", "a")], 60.0)
        for _ in range(500):
            store.claim([Claim("repeated", "a")], 60.0)
        assert store.claim([Claim("kept", "b"), Claim("repeated", "b")], 60.0) == [False, False]
        store.close()

    def test_reading_uses_the_index(self, tmp_path: Path) -> None:
        from featurestore.sqlite import _select_statement

        SqliteStore(tmp_path / "f.db", max_claims=10).close()
        with sqlite3.connect(tmp_path / "f.db") as db:
            plan = db.execute(
                f"EXPLAIN QUERY PLAN {_select_statement(2)}", ["user", "a", "user", "b"]
            ).fetchall()
        db.close()
        assert any("SEARCH rows USING INDEX" in row[-1] for row in plan)
        assert not any("SCAN rows" in row[-1] for row in plan)


class TestRedis:
    def test_a_server_that_is_not_there_is_unavailable(self) -> None:
        with pytest.raises(StoreUnavailable) as caught:
            open_store("redis", f"redis://:secret-word@127.0.0.1:{free_port()}/0")
        assert "secret-word" not in str(caught.value)

    def test_a_cluster_that_is_not_there_is_unavailable(self) -> None:
        with pytest.raises(StoreUnavailable):
            open_store("redis", f"redis+cluster://127.0.0.1:{free_port()}")

    def test_what_is_no_redis_url_is_refused_without_showing_it(self) -> None:
        with pytest.raises(StoreError, match="not a Redis URL: http") as caught:
            open_store("redis", "http://user:secret-word@host")
        assert "secret-word" not in str(caught.value)

    def test_a_wrong_password_is_refused_not_unavailable(self, tmp_path: Path) -> None:
        with redis_server(tmp_path, "--requirepass", "right") as port:
            for url in (f"redis://127.0.0.1:{port}", f"redis://:wrong@127.0.0.1:{port}"):
                with pytest.raises(StoreError, match="credentials") as caught:
                    open_store("redis", url)
                assert not isinstance(caught.value, StoreUnavailable)
            open_store("redis", f"redis://:right@127.0.0.1:{port}").close()

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        with redis_server(tmp_path) as port:
            url = f"redis://127.0.0.1:{port}"
            open_store("redis", url).close()
            with redis.Redis.from_url(url) as client:
                client.set("hw:features:format", "7")
            with pytest.raises(StoreError, match="format b'7'; this version reads b'1'"):
                open_store("redis", url)

    def test_a_server_that_restarts_is_found_again_with_its_data(self, tmp_path: Path) -> None:
        options = ("--appendonly", "yes", "--appendfsync", "always")
        with redis_server(tmp_path, *options) as port:
            store = open_store("redis", f"redis://127.0.0.1:{port}")
            store.write({KEY: {"x": Cell(1, 1)}})
        with pytest.raises(StoreUnavailable):
            store.read([KEY])
        with redis_server(tmp_path, *options, port=port):
            assert store.read([KEY]) == [{"x": Cell(1, 1)}]
            assert store.changes("user", 0, 10)[0] == ["a"]
        store.close()

    def test_claims_that_expired_leave_the_server(self, tmp_path: Path) -> None:
        with redis_server(tmp_path) as port:
            url = f"redis://127.0.0.1:{port}"
            store = open_store("redis", url)
            with redis.Redis.from_url(url) as client:
                for n in range(200):
                    store.claim([Claim(f"e{n}-{k}", "a") for k in range(64)], 0.02)
                lists = sum(client.llen(key) for key in client.scan_iter("hw:{claim:*}:order"))
            assert lists < 6_400
            store.close()
