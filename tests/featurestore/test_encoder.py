"""Laws of the encoder: same value, same key, anywhere; a batch is its rows; no row can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featurestore import Cell, Encoded, Encoder, Feature, Schema, SchemaError, Value, counters, default_schema
from featurestore.encoder import CLIP

NOW = 1_700_000_000_000
DAY_MS = 86_400_000
ENCODER = Encoder(default_schema())
GOLDEN = {
    ("user_id", "u1"): 0x966412E99DC98502,
    ("item_id", "u1"): 0xBA1C3C9E656632AC,
    ("gender", ""): 0,
    ("categories", "Sci-Fi"): 0x54A4D815DD207B90,
    ("occupation", "é☃"): 0x6E72E5E8EAB11A59,
}

values: st.SearchStrategy[Value] = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=8),
    st.binary(max_size=4), st.lists(st.text(max_size=4), max_size=40),
    st.lists(st.integers(0, 9), max_size=5),
)  # fmt: skip
cells = st.builds(Cell, values, st.integers(NOW - 100, NOW + 100), st.sampled_from([0, 1, 50, 1_000]))
user_rows = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("age", "gender", "occupation", "recent_items", "likes_total", "zip"), cells),
)


def row(**attributes: Value) -> dict[str, Cell]:
    return {name: Cell(value, NOW) for name, value in attributes.items()}


def same(a: Encoded, b: Encoded) -> bool:
    columns = zip(
        (a.categorical, a.numeric, *(part for r in a.lists for part in (r.values, r.offsets))),
        (b.categorical, b.numeric, *(part for r in b.lists for part in (r.values, r.offsets))),
        strict=True,
    )
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in columns)


def stats(partition: int, *likes_ms: int) -> Mapping[str, Cell]:
    half_lives = default_schema().half_lives("item")
    n = len(likes_ms)
    counts = counters.add(
        counters.empty(1, half_lives), np.zeros(n, np.int64), np.array(likes_ms, np.int64),
        np.arange(n), np.ones(n), log=1, half_lives=half_lives,
    )  # fmt: skip
    return {counters.cell_name(partition): Cell(counters.encode(counts, half_lives)[0], NOW)}


# --- keys


def test_keys_are_fixed() -> None:
    # Parameters are stored under these: where one changes, what was learned is lost.
    assert {pair: ENCODER.key(*pair) for pair in GOLDEN} == GOLDEN


def test_another_process_gives_the_same_keys() -> None:
    script = "from featurestore import *; print(Encoder(default_schema()).key('user_id', 'u1'))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(done.stdout) == GOLDEN["user_id", "u1"]


@given(st.text(max_size=20), st.text(max_size=20))
def test_different_values_and_different_features_have_different_keys(a: str, b: str) -> None:
    assert (ENCODER.key("user_id", a) == ENCODER.key("user_id", b)) == (a == b)
    assert (ENCODER.key("user_id", a) != ENCODER.key("item_id", a)) == (a != "")


def test_a_list_that_names_a_table_shares_its_keys() -> None:
    assert ENCODER.key("recent_items", "x") == ENCODER.key("item_id", "x")


def test_the_name_and_the_value_cannot_run_into_each_other() -> None:
    schema = Schema([Feature("item", "a", "categorical"), Feature("item", "ab", "categorical")])
    assert Encoder(schema).key("a", "bc") != Encoder(schema).key("ab", "c")


def test_an_owner_of_a_name_wins_over_a_borrower() -> None:
    features = [
        Feature("user", "x", "categorical"),
        Feature("item", "y", "categorical"),
        Feature("item", "x", "categorical", table="y"),
    ]
    one, other = Encoder(Schema(features)), Encoder(Schema(features[::-1]))
    assert one.key("x", "v") == other.key("x", "v") != one.key("y", "v")


@pytest.mark.parametrize(
    ("written", "text"), [(5, "5"), (5.0, "5"), (-1, "-1"), (0.5, "0.5"), (True, "true"), (False, "false")]
)
def test_a_number_is_the_text_that_people_write(written: Value, text: str) -> None:
    assert ENCODER.key("device", written) == ENCODER.key("device", text)
    encoded = ENCODER.encode("context", ["", ""], [row(device=written), row(device=text)], NOW)
    assert encoded.categorical[0, 0] == encoded.categorical[1, 0] == ENCODER.key("device", text)


def test_one_and_true_are_not_the_same() -> None:
    assert len({ENCODER.key("device", value) for value in (1, True, 0, False)}) == 4


def test_a_full_cache_gives_the_same_keys() -> None:
    small = Encoder(default_schema(), cache_size=3)
    ids = [f"u{n % 17}" for n in range(200)]
    expected = ENCODER.keys("user_id", ids)
    for _ in range(3):
        assert np.array_equal(small.keys("user_id", ids[:5]), expected[:5])
        assert np.array_equal(small.keys("user_id", ids), expected)
        assert [small.key("user_id", id) for id in ids] == expected.tolist()


def test_the_cache_is_bounded() -> None:
    small = Encoder(default_schema(), cache_size=100)
    for start in range(0, 5_000, 50):
        small.keys("user_id", [f"u{n}" for n in range(start, start + 50)])
    assert small.cached_keys() <= 2 * (100 + 50)


def test_threads_may_share_an_encoder() -> None:
    shared = Encoder(default_schema(), cache_size=20)
    ids = [f"u{n}" for n in range(100)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: shared.keys("user_id", ids), range(40)))
    assert all(np.array_equal(keys, ENCODER.keys("user_id", ids)) for keys in results)


def test_a_feature_without_keys_is_named() -> None:
    with pytest.raises(SchemaError, match="did you mean 'gender'"):
        ENCODER.key("gendr", "M")
    with pytest.raises(SchemaError, match="likes_total"):
        ENCODER.keys("likes_total", ["1"])


# --- rows


@given(st.lists(user_rows, min_size=1, max_size=6), st.data())
def test_a_batch_is_its_rows_in_any_order(rows: list[dict[str, Cell]], data: st.DataObject) -> None:
    ids = [f"u{n}" for n in range(len(rows))]
    batch = ENCODER.encode("user", ids, rows, NOW)
    single = [ENCODER.encode("user", [id], [of], NOW) for id, of in zip(ids, rows, strict=True)]
    assert same(batch, Encoded.concatenate(single))
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    shuffled = ENCODER.encode("user", [ids[n] for n in order], [rows[n] for n in order], NOW)
    assert same(shuffled, batch.take(order))


@given(st.lists(user_rows, max_size=4))
def test_no_row_can_fail_and_numbers_stay_in_bounds(rows: list[dict[str, Cell]]) -> None:
    encoded = ENCODER.encode("user", ["u"] * len(rows), rows, NOW)
    assert encoded.categorical.shape == (len(rows), 4)
    assert encoded.numeric.shape == (len(rows), 1)
    assert np.isfinite(encoded.numeric).all()
    assert (np.abs(encoded.numeric) <= CLIP).all()
    assert all(np.diff(r.offsets).max(initial=0) <= 30 for r in encoded.lists)


def test_the_order_of_cells_and_unknown_attributes_do_not_matter() -> None:
    attributes: dict[str, Value] = {"age": 24, "gender": "M", "likes_total": 3}
    plain = ENCODER.encode("user", ["u"], [row(**attributes)], NOW)
    other = ENCODER.encode("user", ["u"], [row(zip="85711", **dict(reversed(attributes.items())))], NOW)
    assert same(plain, other)


def test_columns_follow_the_schema() -> None:
    film = row(categories=["Crime", "Drama"], year=1996) | {
        **stats(0, NOW, NOW),
        **stats(3, NOW - 7 * DAY_MS),
    }
    encoded = ENCODER.encode("item", ["i1"], [film], NOW)
    assert encoded.categorical[0, 0] == ENCODER.key("item_id", "i1")
    likes = [2 + 0.5**7, 2 + 0.5, 2 + 0.5 ** (7 / 30)]
    expected = [(1996 - 1990) / 14] + [
        (np.log1p(count) - f.mean) / f.std
        for count, f in zip(likes, default_schema().columns("item").numeric[1:], strict=True)
    ]
    np.testing.assert_allclose(encoded.numeric[0], expected, rtol=1e-5)
    (categories,) = encoded.lists
    assert categories.values.tolist() == ENCODER.keys("categories", ["Crime", "Drama"]).tolist()
    assert categories.offsets.tolist() == [0, 2]


def test_each_row_has_its_own_time() -> None:
    film = row(year=1996) | stats(0, NOW)
    times = np.array([NOW, NOW + 7 * DAY_MS, NOW - DAY_MS])
    batch = ENCODER.encode("item", ["i"] * 3, [film] * 3, times)
    single = [ENCODER.encode("item", ["i"], [film], int(time)) for time in times]
    assert same(batch, Encoded.concatenate(single))
    assert batch.numeric[1, 2] < batch.numeric[0, 2] == batch.numeric[2, 2]


def test_buckets_close_below() -> None:
    ages = [-5, 17.9, 18, 24, 25, 55, 56, 200]
    groups = ENCODER.encode("user", ["u"] * 8, [row(age=age) for age in ages], NOW).categorical[:, 1]
    assert groups.tolist() == ENCODER.keys("age_group", [0, 0, 1, 1, 2, 5, 6, 6]).tolist()


@pytest.mark.parametrize(
    "cell", [None, Cell(None, NOW), Cell([], NOW), Cell(b"x", NOW), Cell("M", NOW - 10, 10)]
)
def test_a_missing_null_unusable_or_expired_value_is_the_default(cell: Cell | None) -> None:
    rows = [dict.fromkeys(("age", "gender", "likes_total"), cell) if cell else {}]
    encoded = ENCODER.encode("user", ["u"], rows, NOW)
    assert encoded.categorical[0, 1:].tolist() == [
        ENCODER.key(n, "") for n in ("age_group", "gender", "occupation")
    ]
    assert encoded.numeric[0, 0] == pytest.approx((0 - 3.0) / 1.5)


def test_defaults_are_those_declared() -> None:
    schema = Schema(
        [
            Feature("item", "colour", "categorical", default="none"),
            Feature("item", "size", "categorical", buckets=(1.0,), default="unknown"),
            Feature("item", "price", "number", mean=5, std=2, default=9),
            Feature("item", "weight", "number", mean=5, std=2),
            Feature("item", "tags", "list", default=("a", "b"), max_values=2),
        ]
    )
    encoder = Encoder(schema)
    encoded = encoder.missing("item")
    assert encoder.width("item") == (2, 2, 1)
    assert encoded.categorical.tolist() == [[encoder.key("colour", "none"), encoder.key("size", "unknown")]]
    assert encoded.numeric.tolist() == [[2.0, 0.0]]
    assert encoded.lists[0].values.tolist() == encoder.keys("tags", ["a", "b"]).tolist()


def test_a_long_list_keeps_its_newest() -> None:
    recent = [f"i{n}" for n in range(50)]
    (got,) = ENCODER.encode("user", ["u"], [row(recent_items=recent)], NOW).lists
    assert got.values.tolist() == ENCODER.keys("item_id", recent[-30:]).tolist()


@pytest.mark.parametrize("entity", ["user", "item", "context"])
def test_one_of_whom_nothing_is_known(entity: str) -> None:
    encoded = ENCODER.missing(entity)
    assert len(encoded) == 1
    widths = (encoded.categorical.shape[1], encoded.numeric.shape[1], len(encoded.lists))
    assert widths == ENCODER.width(entity)


@pytest.mark.parametrize("entity", ["user", "item", "context"])
def test_no_rows_give_the_same_columns(entity: str) -> None:
    encoded = ENCODER.encode(entity, [], [], NOW)
    c, d, lists = ENCODER.width(entity)
    assert encoded.categorical.shape == (0, c)
    assert encoded.numeric.shape == (0, d)
    assert [r.offsets.tolist() for r in encoded.lists] == [[0]] * lists


def test_ids_and_rows_must_match() -> None:
    with pytest.raises(ValueError, match="2 ids for 1 rows"):
        ENCODER.encode("user", ["a", "b"], [{}], NOW)


def test_numbers_alone_are_encoded_without_xxhash() -> None:
    script = (
        "import sys; sys.modules['xxhash'] = None\n"
        "from featurestore import *\n"
        "schema = Schema([Feature('item', 'price', 'number', mean=1, std=2)])\n"
        "print(Encoder(schema).encode('item', ['i'], [{'price': Cell(5, 0)}], 0).numeric.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[[2.0]]"
