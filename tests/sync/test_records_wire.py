"""What replicas tell each other as header and arrays: round trips, and damaged ones that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.errors import RecordDamaged
from sync.knowledge import Horizon
from sync.pushes import Progress, Source, Watermark
from sync.records import Delta, Generation, Head, Learned, Record, Update
from sync.snapshot import encode_record, records
from sync.wire import from_parts, to_parts
from tests.support.replicas import SPECS, Clock, graves, push, rows

VECTORS = st.dictionaries(st.integers(1, 2**32 - 1), st.integers(0, 2**63 - 1), max_size=4)
NUMBERS = st.integers(0, 2**63 - 1)
MARKS = st.one_of(st.none(), st.builds(Watermark, st.text(max_size=3), st.integers(0, 5), NUMBERS, NUMBERS))
PROGRESS = st.dictionaries(
    st.builds(Source, st.text(min_size=1, max_size=3), st.integers(0, 9)),
    st.builds(Progress, st.integers(-1, 2**63 - 2), MARKS),
    max_size=3,
).map(lambda found: tuple(found.items()))
HORIZONS = st.builds(Horizon, VECTORS, NUMBERS, NUMBERS, VECTORS)
LEARNED = st.one_of(st.none(), st.builds(Learned, VECTORS, HORIZONS, PROGRESS))
KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=5, unique=True)


@st.composite
def generations(draw: Any) -> Generation:
    values = np.array(draw(st.lists(st.floats(width=32), min_size=6, max_size=6)), np.float32).reshape(2, 3)
    marks = [mark for mark in draw(st.lists(MARKS, max_size=2)) if mark is not None]
    return Generation(
        "dense", draw(NUMBERS), values, draw(NUMBERS), draw(st.integers(0, 2**32 - 1)),
        {(mark.log, mark.partition): mark for mark in marks},
    )  # fmt: skip


@st.composite
def updates(draw: Any) -> Update:
    told = [(key, draw(NUMBERS), draw(st.integers(0, 2**32 - 1))) for key in draw(KEYS)]
    parts = rows((*one, draw(st.floats(width=32))) for one in told)
    return Update(
        (parts, rows([], "other")) if draw(st.booleans()) else (),
        (graves(told),) if draw(st.booleans()) else (),
        tuple(draw(st.lists(generations(), max_size=2))),
        draw(VECTORS),
        draw(st.booleans()),
        draw(LEARNED),
    )


def plain(value: object) -> object:
    """Records as values that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        return sorted((plain(key), plain(one)) for key, one in value.items())
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value


def again(record: Record) -> Record:
    header, arrays = to_parts(record)
    return from_parts(header, arrays)


@settings(deadline=None)
@given(updates())
def test_an_update_comes_back_as_it_was(update: Update) -> None:
    assert plain(again(update)) == plain(update)
    (stored, _), *rest = records(b"".join(encode_record(update)))
    assert not rest
    assert plain(stored) == plain(update)


@settings(deadline=None)
@given(updates(), LEARNED, st.lists(st.tuples(st.sampled_from(["rows", "other"]), KEYS), max_size=2))
def test_a_merged_step_comes_back_as_it_was(
    update: Update, learned: Learned | None, dropped: list[tuple[str, list[int]]]
) -> None:
    delta = Delta(
        3, 4, 5, 6, rows=update.rows, graves=update.graves, generations=update.generations, epochs=update.epochs,
        learned=learned, dropped=tuple((table, np.array(keys, np.uint64)) for table, keys in dropped),
        collected=(("rows", {4: 5}),), counted=(("other", np.array([8], np.uint64)),),
    )  # fmt: skip
    assert plain(again(delta)) == plain(delta)
    assert delta.nbytes >= 256


@settings(deadline=None)
@given(HORIZONS, VECTORS, generations())
def test_a_head_keeps_what_was_forgotten(horizon: Horizon, vector: dict[int, int], one: Generation) -> None:
    head = Head("m", 1, "fp", SPECS, horizon=horizon, knowledge=vector, epochs=vector, generations=(one,))
    assert plain(again(head)) == plain(head)


def test_generations_are_read_only_on_both_sides() -> None:
    shard = Clock().shard(1)
    push(shard, [1], table="dense")
    shard.publish_dense("dense")
    (one,) = shard.generations()
    found = again(Update(generations=(replace(one, values=one.values.copy()),)))
    assert isinstance(found, Update)
    for values in (one.values, found.generations[0].values):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 0


def sample() -> Update:
    values = np.ones((2, 3), np.float32)
    return Update(
        (rows([(1, 2, 3, 4.0), (5, 6, 7, 8.0)]),),
        (graves([(9, 10, 11)]),),
        (Generation("dense", 1, values, 5, 6, {("e", 0): Watermark("e", 0, 1, 2)}),),
        {3: 1},
        False,
        Learned({3: 4}, Horizon({5: 6}, 7, 6, {8: 9}), ((Source("log", 0), Progress(4)),)),
    )


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_header_with_other_bytes_is_read_or_refused(data: st.DataObject) -> None:
    header, arrays = to_parts(sample())
    broken = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(broken)))
    for bad in (bytes(broken), bytes(header[:cut]) if cut < len(header) else bytes(broken)):
        try:
            found = from_parts(bad, arrays)
        except RecordDamaged:
            continue
        # What is read has the arrays that were sent: nothing of another shape was made of them.
        _, kept = to_parts(found)
        assert [one.tobytes() for one in kept] == [one.tobytes() for one in arrays]


def edited(**changes: object) -> bytes:
    header, _ = to_parts(sample())
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(header), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": [["rows", 3, 2, 1]]},
        {"rows": [["rows", 2, 1, 2]]},
        {"rows": [["rows", -2, 2, 1]]},
        {"rows": []},
        {"graves": [["rows", 2]]},
        {"graves": [["rows", 2**40]]},
        {"generations": [["dense", 1, [3, 2], 5, 6]]},
        {"generations": [["dense", -1, [2, 3], 5, 6]]},
        {"generations": [["dense", 1, [2, 3], 2**63, 6]]},
        {"generations": [["dense", 1, [2, 3], 5, 2**32]]},
        {"generations": [["dense", 1, [2, 3], 5, 6, [["e", 0, 1]]]]},
        {"epochs": [[0, 1]]},
        {"epochs": [[2**32, 1]]},
        {"epochs": [[1, -1]]},
        {"learned": [[[0, 1]], [[]]]},
        {"learned": [[[1, 2**63]], [[]]]},
        {"learned": [[], [[[1, -1]]]]},
        {"learned": [[], [[], -1]]},
        {"learned": [[], [[], 0, 2**63]]},
        {"learned": [[], [[], 0, 0, [[0, 1]]]]},
        {"learned": [[], [[]], [["log", -1, 4]]]},
        {"learned": [[], [[]], [["log", 0, -2]]]},
        {"learned": [[], [[]], [["log", 0, 2**63]]]},
        {"kind": "nothing"},
        {"urgent": 1},
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object]) -> None:
    _, arrays = to_parts(sample())
    with pytest.raises(RecordDamaged):
        from_parts(edited(**changes), arrays)


@pytest.mark.parametrize("missing", range(9))
def test_arrays_must_be_as_the_header_says(missing: int) -> None:
    header, arrays = to_parts(sample())
    assert len(arrays) == 9
    some = list(arrays)
    some[missing] = some[missing].astype(np.float64)
    with pytest.raises(RecordDamaged):
        from_parts(header, some)
    with pytest.raises(RecordDamaged):
        from_parts(header, arrays[:missing])
    with pytest.raises(RecordDamaged, match="more arrays"):
        from_parts(header, [*arrays, arrays[missing]])


def test_versions_beyond_all_clocks_are_refused() -> None:
    header, arrays = to_parts(sample())
    some = [
        np.array([2, 2**63], np.uint64) if one.dtype == np.uint64 and len(one) == 2 else one for one in arrays
    ]
    with pytest.raises(RecordDamaged):
        from_parts(header, some)
