"""What every Store keeps to. A backend's test subclasses StoreContract and gives the ``store`` fixture."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from federated.rounds.store import Store

Values = Mapping[str, bytes | None]


def write(store: Store, values: Values) -> None:
    store.transact(list(values), lambda _: (values, None))


def read(store: Store, *keys: str) -> list[bytes | None]:
    return store.transact(keys, lambda values: ({}, [values[key] for key in keys]))


class StoreContract:
    def test_records_are_written_read_and_removed(self, store: Store) -> None:
        assert read(store, "job/a", "job/b") == [None, None]
        write(store, {"job/a": b"1", "job/b": b""})
        assert read(store, "job/a", "job/b") == [b"1", b""]
        write(store, {"job/a": None, "job/absent": None})
        assert read(store, "job/a", "job/b", "job/absent") == [None, b"", None]

    def test_any_byte_and_any_id_comes_back(self, store: Store) -> None:
        body = bytes(range(256)) * 5
        keys = [
            "job/iteration/00000001/entry/" + client for client in ("a/b", "ü%_*?[x]", "'; --", "x" * 256)
        ]
        write(store, dict.fromkeys(keys, body))
        assert read(store, *keys) == [body] * 4

    def test_a_step_may_write_keys_that_it_did_not_read(self, store: Store) -> None:
        store.transact(["job/header"], lambda values: ({"job/header": b"1", "job/slot": b"2"}, None))
        assert read(store, "job/slot") == [b"2"]

    def test_the_result_comes_back(self, store: Store) -> None:
        assert store.transact(["job/a"], lambda values: ({}, ("result", values["job/a"]))) == ("result", None)

    def test_a_step_without_keys_runs(self, store: Store) -> None:
        assert store.transact([], lambda values: ({}, dict(values))) == {}

    def test_what_a_step_raises_passes_and_nothing_is_written(self, store: Store) -> None:
        def step(values: Values) -> tuple[Values, None]:
            raise LookupError("no such job")

        write(store, {"job/a": b"before"})
        with pytest.raises(LookupError, match="no such job"):
            store.transact(["job/a"], step)
        write(store, {"job/b": b"after"})  # the store is not left locked
        assert read(store, "job/a", "job/b") == [b"before", b"after"]

    def test_concurrent_steps_on_one_key_all_count(self, store: Store) -> None:
        workers, rounds = 4, 25
        together = threading.Barrier(workers)

        def count(values: Values) -> tuple[Values, int]:
            value = int(values["job/counter"] or b"0") + 1
            return {"job/counter": str(value).encode(), f"job/seen/{value}": b"x"}, value

        def work(_: int) -> list[int]:
            together.wait(30)
            return [store.transact(["job/counter"], count) for _ in range(rounds)]

        with ThreadPoolExecutor(workers) as pool:
            seen = [value for values in pool.map(work, range(workers)) for value in values]
        assert sorted(seen) == list(range(1, workers * rounds + 1))
        assert read(store, "job/counter") == [str(workers * rounds).encode()]
        assert None not in read(store, *(f"job/seen/{value}" for value in seen))

    def test_keys_are_read_as_of_one_moment(self, store: Store) -> None:
        pair = ["job/left", "job/right"]
        write(store, dict.fromkeys(pair, b"0"))
        stop = threading.Event()

        def raise_both(values: Values) -> tuple[Values, None]:
            value = str(int(values["job/left"] or b"0") + 1).encode()
            return dict.fromkeys(pair, value), None

        def writer() -> None:
            while not stop.is_set():
                store.transact(pair, raise_both)

        thread = threading.Thread(target=writer)
        thread.start()
        try:
            torn = [values for _ in range(200) if len(set(values := read(store, *pair))) != 1]
        finally:
            stop.set()
            thread.join(30)
        assert torn == []

    def test_blobs_are_kept_whole_and_replaced_whole(self, store: Store) -> None:
        body = bytes(range(256)) * 4096  # 1 MiB
        assert store.get_blob("job/body/a") is None
        store.put_blob("job/body/a", body)
        assert store.get_blob("job/body/a") == body
        store.put_blob("job/body/a", b"")
        assert store.get_blob("job/body/a") == b""

    def test_a_record_and_a_blob_of_one_key_are_two_things(self, store: Store) -> None:
        write(store, {"job/a": b"record"})
        store.put_blob("job/a", b"blob")
        assert read(store, "job/a") == [b"record"]
        assert store.get_blob("job/a") == b"blob"

    def test_blobs_are_listed_by_prefix_in_order_and_literally(self, store: Store) -> None:
        names = ["job/b/2", "job/b/10", "job/b_/1", "job/bx", "job/B/1", "job/b/*", "other/b/1"]
        for name in names:
            store.put_blob(name, b"x")
        assert list(store.blobs("job/b/")) == ["job/b/*", "job/b/10", "job/b/2"]
        assert list(store.blobs("job/b_")) == ["job/b_/1"]
        assert list(store.blobs("nothing")) == []

    def test_delete_drops_records_and_blobs_of_that_prefix_alone(self, store: Store) -> None:
        write(store, {"job/1/a": b"x", "job/10/a": b"x", "job/1": b"x", "job/1_/a": b"x"})
        for name in ("job/1/a", "job/10/a", "job/1", "job/1_/a"):
            store.put_blob(name, b"x")
        store.delete("job/1/")
        store.delete("job/1/")
        assert read(store, "job/1/a", "job/10/a", "job/1", "job/1_/a") == [None, b"x", b"x", b"x"]
        assert list(store.blobs("job/")) == ["job/1", "job/10/a", "job/1_/a"]
