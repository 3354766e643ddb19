"""The offline log: whole files, bounded buffer, each row once; and the point-in-time join against its
definition."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featurestore import Cell, Encoder, EntityKey, Value, default_schema
from featurestore.as_of import as_of
from featurestore.history import HISTORY, Written, history_columns, rows_as_of
from featurestore.offline import (
    DAY_MS,
    EVENTS,
    OfflineError,
    OfflineLog,
    day_name,
    days_in,
    drop_before,
    read,
    read_days,
)

ROOT = Path(__file__).parents[2]
FOREVER = 10**15


def events(
    offsets: list[int], times: list[int], log: str = "log", partition: int = 0
) -> dict[str, list[object]]:
    n = len(offsets)
    columns: dict[str, list[object]] = {name: [None] * n for name in EVENTS.names}
    return columns | {
        "event_time_ms": list(times),
        "log": [log] * n,
        "partition": [partition] * n,
        "offset": list(offsets),
        "position": [0] * n,
        "user_id": [f"u{offset}" for offset in offsets],
    }


def offsets_in(table: pa.Table) -> list[int]:
    return [int(offset) for offset in table.column("offset").to_pylist()]


class TestLog:
    def test_rows_come_back_by_time_in_time_order(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w")
        log.append(events([0, 1, 2, 3], [3 * DAY_MS, DAY_MS + 5, DAY_MS - 1, DAY_MS]))
        log.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1970-01-01", "1970-01-02", "1970-01-04"]
        assert offsets_in(read(tmp_path, EVENTS, 0, FOREVER)) == [2, 3, 1, 0]
        assert offsets_in(read(tmp_path, EVENTS, DAY_MS, DAY_MS + 5)) == [3]
        assert offsets_in(read(tmp_path, EVENTS, DAY_MS - 1, 3 * DAY_MS)) == [2, 3, 1]
        assert [table.num_rows for table in read_days(tmp_path, EVENTS, 0, FOREVER)] == [1, 2, 1]

    def test_only_the_columns_asked_for(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w")
        log.append(events([0], [5]))
        log.close()
        table = read(tmp_path, EVENTS, 0, FOREVER, ["user_id"])
        assert table.to_pylist() == [{"user_id": "u0"}]
        assert read(tmp_path, EVENTS, FOREVER, FOREVER, ["user_id"]).column_names == ["user_id"]

    def test_an_empty_log_reads_as_no_rows(self, tmp_path: Path) -> None:
        table = read(tmp_path / "none", EVENTS, 0, FOREVER)
        assert table.num_rows == 0
        assert table.schema.names == EVENTS.names

    def test_rows_written_twice_are_read_once(self, tmp_path: Path) -> None:
        for writer in ("a", "b"):
            log = OfflineLog(tmp_path, EVENTS, writer)
            log.append(events([0, 1, 2], [5, 6, 7]))
            log.append(events([1], [6], partition=1))
            log.append(events([1], [6], log="other"))
            log.close()
        assert read(tmp_path, EVENTS, 0, FOREVER).num_rows == 5

    def test_the_buffer_is_bounded_by_rows(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w", max_rows=10)
        for n in range(25):
            log.append(events([3 * n, 3 * n + 1, 3 * n + 2], [n, n, n]))
            assert log.buffered <= 10
        assert len(list(tmp_path.glob("*/*.parquet"))) == 8
        assert read(tmp_path, EVENTS, 0, FOREVER).num_rows == 72
        log.close()
        assert read(tmp_path, EVENTS, 0, FOREVER).num_rows == 75

    def test_the_buffer_is_bounded_by_age(self, tmp_path: Path) -> None:
        now = [0.0]
        log = OfflineLog(tmp_path, EVENTS, "w", max_age_s=60.0, monotonic=lambda: now[0])
        log.append(events([0], [5]))
        now[0] = 59.0
        assert log.flush_if_due() == []
        now[0] = 60.0
        (path,) = log.flush_if_due()
        assert path.exists()
        assert log.flush_if_due() == []
        log.append(events([1], [5]))
        now[0] = 200.0
        log.append(events([2], [5]))
        assert offsets_in(read(tmp_path, EVENTS, 0, FOREVER)) == [0, 1]

    def test_what_cannot_be_written_stays_buffered(self, tmp_path: Path) -> None:
        folder = tmp_path / "log"
        folder.write_text("in the way")
        log = OfflineLog(folder, EVENTS, "w", max_rows=2)
        log.append(events([0, 1], [5, 5]))
        with pytest.raises(OfflineError, match="cannot be written"):
            log.append(events([2], [5]))
        assert log.buffered == 2
        folder.unlink()
        log.close()
        assert offsets_in(read(folder, EVENTS, 0, FOREVER)) == [0, 1]

    def test_a_half_written_file_is_not_seen_and_goes_at_the_next_start(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w")
        log.append(events([0], [5]))
        log.close()
        (tmp_path / "1970-01-01" / ".w-dead-00000000.tmp").write_bytes(b"half")
        (tmp_path / "1970-01-01" / ".other-dead-00000000.tmp").write_bytes(b"half")
        assert read(tmp_path, EVENTS, 0, FOREVER).num_rows == 1
        OfflineLog(tmp_path, EVENTS, "w")
        assert [path.name for path in tmp_path.glob("*/.*")] == [".other-dead-00000000.tmp"]

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w")
        log.append(events([0], [5]))
        (path,) = log.flush()
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(OfflineError, match=path.name):
            read(tmp_path, EVENTS, 0, FOREVER)

    def test_a_killed_writer_leaves_whole_files(self, tmp_path: Path) -> None:
        script = (
            "import sys; from pathlib import Path; from featurestore.offline import *\n"
            "log = OfflineLog(Path(sys.argv[1]), EVENTS, 'w', max_rows=50)\n"
            "n = 0\n"
            "while True:\n"
            "    row = dict.fromkeys(EVENTS.names) | {'event_time_ms': n * 1_000_000, 'log': 'l'}\n"
            "    row |= {'partition': 0, 'offset': n, 'position': 0}\n"
            "    log.append({name: [value] for name, value in row.items()})\n"
            "    n += 1\n"
            "    if n % 50 == 0: log.flush(); print(n, flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        for _ in range(4):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        flushed = int(rest.split()[-1]) if rest.split() else 200
        assert offsets_in(read(tmp_path, EVENTS, 0, FOREVER))[:flushed] == list(range(flushed))

    def test_old_days_can_be_dropped(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w")
        log.append(events([0, 1, 2], [5, DAY_MS + 5, 2 * DAY_MS]))
        log.close()
        assert drop_before(tmp_path, 2 * DAY_MS - 1) == 1
        assert offsets_in(read(tmp_path, EVENTS, 0, FOREVER)) == [1, 2]
        assert drop_before(tmp_path, 2 * DAY_MS) == 1
        assert days_in(tmp_path) == [2]

    def test_any_parquet_reader_reads_the_files(self, tmp_path: Path) -> None:
        log = OfflineLog(tmp_path, EVENTS, "w")
        log.append(events([7], [5]))
        (path,) = log.flush()
        assert pq.read_table(path).to_pylist()[0]["offset"] == 7

    def test_a_schema_without_positions_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="lacks log, offset, partition, position"):
            OfflineLog(tmp_path, pa.schema([("event_time_ms", pa.int64())]), "w")

    @given(st.integers(-30_000, 60_000))
    def test_days_have_names(self, day: int) -> None:
        assert int(np.datetime64(day_name(day), "D").astype(np.int64)) == day


# --- the join

rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 12)), max_size=20)
queries = st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 14)), max_size=10)


def columns(found: list[tuple[int, ...]], n: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.array([row[k] for row in found], np.int64) for k in range(n)]


@given(rows, queries, st.booleans(), st.booleans())
def test_the_join_is_its_definition(
    history: list[tuple[int, int, int]], asked: list[tuple[int, int]], inclusive: bool, bitemporal: bool
) -> None:
    keys, times, accepted = columns(list(history), 3)
    query_keys, query_times = columns(list(asked), 2)
    got = as_of(
        keys, times, query_keys, query_times, visible_ms=accepted if bitemporal else None, inclusive=inclusive
    )
    for (key, moment), row in zip(asked, got.tolist(), strict=True):
        best = -1
        for n, (of, time_ms, accepted_ms) in enumerate(history):
            visible = max(time_ms, accepted_ms) if bitemporal else time_ms
            seen = visible <= moment if inclusive else visible < moment
            if of == key and seen and (best < 0 or time_ms >= history[best][1]):
                best = n
        assert row == best


def test_a_late_value_is_not_seen_before_it_was_accepted() -> None:
    of = as_of(
        np.zeros(2, int),
        np.array([10, 20]),
        np.zeros(3, int),
        np.array([25, 29, 30]),
        visible_ms=np.array([10, 30]),
    )
    assert of.tolist() == [0, 0, 1]


def written(offset: int, accepted_at_ms: int, id: str, **cells: Cell) -> Written:
    return Written({EntityKey("user", id): cells}, accepted_at_ms, "log", 0, offset)


def test_entities_come_back_as_they_were(tmp_path: Path) -> None:
    log = OfflineLog(tmp_path, HISTORY, "w")
    messages = [
        written(0, 100, "a", age=Cell(20, 100), gender=Cell("F", 100)),
        written(1, 200, "a", age=Cell(21, 200, 50)),
        written(2, 300, "b", recent_items=Cell(["x", "y"], 300)),
        written(3, 400, "a", gender=Cell(None, 350)),
    ]
    log.append(history_columns(messages))
    log.close()
    history = read(tmp_path, HISTORY, 0, FOREVER)
    names = ["age", "gender", "recent_items", "none"]
    got = rows_as_of(
        history, "user", ["a", "a", "a", "a", "b", "c"], np.array([99, 100, 399, 400, 300, 300]), names
    )
    assert got == [
        {},
        {"age": Cell(20.0, 100), "gender": Cell("F", 100)},
        {"age": Cell(21.0, 200, 50), "gender": Cell("F", 100)},
        {"age": Cell(21.0, 200, 50), "gender": Cell(None, 350)},
        {"recent_items": Cell(["x", "y"], 300)},
        {},
    ]
    strict = rows_as_of(history, "user", ["a"], np.array([100]), names, inclusive=False)
    assert strict == [{}]
    assert rows_as_of(history, "item", ["a"], np.array([100]), names) == [{}]


def test_no_history_and_no_queries() -> None:
    empty = HISTORY.empty_table()
    assert rows_as_of(empty, "user", ["a"], np.array([5]), ["age"]) == [{}]
    some = pa.Table.from_pydict(dict(history_columns([written(0, 1, "a", age=Cell(20, 1))])), schema=HISTORY)
    assert rows_as_of(some, "user", [], np.array([], np.int64), ["age"]) == []


values: st.SearchStrategy[Value] = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=5),
    st.binary(max_size=4), st.lists(st.text(max_size=3), max_size=4), st.lists(st.integers(0, 9), max_size=3),
)  # fmt: skip


@given(values, values, values)
def test_what_comes_back_encodes_to_the_same(gender: Value, device_like: Value, items: Value) -> None:
    cells = {"gender": Cell(gender, 5), "occupation": Cell(device_like, 5), "recent_items": Cell(items, 5)}
    table = pa.Table.from_pydict(dict(history_columns([written(0, 5, "a", **cells)])), schema=HISTORY)
    (back,) = rows_as_of(table, "user", ["a"], np.array([5]), list(cells))
    encoder = Encoder(default_schema())
    one, other = (encoder.encode("user", ["a"], [row], 5) for row in (cells, back))
    assert one.categorical.tolist() == other.categorical.tolist()
    assert one.lists[0].values.tolist() == other.lists[0].values.tolist()
