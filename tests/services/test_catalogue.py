"""The catalogue says the same as encoding every item afresh, however it got there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featurestore import counters
from featurestore.encoded import Encoded, Ragged
from featurestore.encoder import Encoder
from featurestore.online import Cell, EntityKey, OnlineStore
from featurestore.schema import default_schema
from featurestore.sqlite import SqliteStore
from services.catalogue import FIRST_SEEN, Catalogue
from services.columns import RaggedColumn

NOW = 1_700_000_000_000
DAY = 86_400_000


@pytest.fixture
def store(tmp_path):
    with_claims = SqliteStore(tmp_path / "features.db", max_claims=100)
    yield with_claims
    with_claims.close()


def put(store: OnlineStore, item: str, **attributes) -> None:
    cells = {name: Cell(value, NOW) for name, value in attributes.items()}
    store.write({EntityKey("item", item): cells})


def stats(likes: list[int]) -> bytes:
    """A counter cell that counted one like at each of the times."""
    half_lives = default_schema().half_lives("item")
    times = np.array(likes, np.int64)
    counts = counters.add(
        counters.empty(1, half_lives),
        np.zeros(len(times), np.int64),
        times,
        np.arange(len(times), dtype=np.int64),
        np.ones(len(times)),
        log=1,
        half_lives=half_lives,
    )
    return counters.encode(counts, half_lives)[0]


def assert_same(a: Encoded, b: Encoded) -> None:
    np.testing.assert_array_equal(a.categorical, b.categorical)
    np.testing.assert_allclose(a.numeric, b.numeric, rtol=1e-5, atol=1e-5)
    for left, right in zip(a.lists, b.lists, strict=True):
        np.testing.assert_array_equal(left.values, right.values)
        np.testing.assert_array_equal(left.offsets, right.offsets)


def test_encodes_like_the_encoder_at_any_time(store):
    encoder = Encoder(default_schema())
    for n in range(50):
        put(store, f"i{n}", categories=["Drama", f"c{n % 7}"][: n % 3], year=1930 + n)
    for partition in (0, 2):
        for n in range(0, 50, 3):
            cell = Cell(stats([NOW - (n + partition) * DAY, NOW - n * DAY // 2]), NOW)
            store.write({EntityKey("item", f"i{n}"): {counters.cell_name(partition): cell}})
    catalogue = Catalogue(encoder)
    assert len(catalogue.refresh(store, NOW)) == 50
    cells = store.read([EntityKey("item", item) for item in catalogue.ids])
    rows = np.arange(50)[::-1].copy()
    for later in (NOW, NOW + 10 * DAY):
        fresh = encoder.encode("item", catalogue.ids, cells, later)
        assert_same(catalogue.encoded(rows, later), fresh.take(rows))


def test_refresh_returns_only_what_changed(store):
    catalogue = Catalogue(Encoder(default_schema()))
    for n in range(10):
        put(store, f"i{n}", year=1990)
    catalogue.refresh(store, NOW)
    assert len(catalogue.refresh(store, NOW)) == 0
    put(store, "i3", year=2000)
    put(store, "new", year=2001)
    changed = catalogue.refresh(store, NOW)
    assert [catalogue.ids[row] for row in changed] == ["i3", "new"]
    assert catalogue.row("new") == 10
    assert catalogue.rows(["new", "nobody"]).tolist() == [10, -1]


def test_hidden_deleted_and_expired_items_are_not_available(store):
    catalogue = Catalogue(Encoder(default_schema()))
    put(store, "plain", year=1990)
    put(store, "hidden", hidden=True)
    put(store, "deleted", deleted=True)
    put(store, "expired", expires_at_ms=NOW)
    put(store, "later", expires_at_ms=NOW + 1)
    put(store, "gone", year=1990)
    catalogue.refresh(store, NOW)
    store.delete([EntityKey("item", "gone")])
    catalogue.refresh(store, NOW)
    available = catalogue.available(NOW)
    assert {catalogue.ids[row] for row in np.flatnonzero(available)} == {"plain", "later"}
    put(store, "hidden", hidden=False)
    catalogue.refresh(store, NOW)
    assert catalogue.available(NOW)[catalogue.row("hidden")]


def test_categories_can_be_filtered(store):
    catalogue = Catalogue(Encoder(default_schema()))
    put(store, "a", categories=["Drama", "War"])
    put(store, "b", categories=["Comedy"])
    put(store, "c")
    catalogue.refresh(store, NOW)

    def found(*names: str) -> set[str]:
        return {catalogue.ids[row] for row in np.flatnonzero(catalogue.in_categories(names))}

    assert found("War", "Comedy") == {"a", "b"}
    assert found("Western") == set()
    put(store, "a", categories=["Comedy"])
    catalogue.refresh(store, NOW)
    assert found("War") == set()
    assert found("Comedy") == {"a", "b"}
    assert np.diff(catalogue.categories(catalogue.rows(["a", "c"])).offsets).tolist() == [1, 0]


def test_popularity_decays_and_local_counts_add_up(store):
    catalogue = Catalogue(Encoder(default_schema()))
    store.write({EntityKey("item", "a"): {"stats@0": Cell(stats([NOW]), NOW)}})
    put(store, "b")
    catalogue.refresh(store, NOW)
    a = catalogue.row("a")
    assert catalogue.popularity(86_400, NOW + DAY)[a] == pytest.approx(0.5)
    rows = catalogue.rows(["a", "a", "b"])
    catalogue.count(rows, np.array([NOW + DAY, NOW, NOW]), np.ones(3))
    assert catalogue.popularity(86_400, NOW + DAY).tolist() == pytest.approx([0.5 + 1 + 0.5, 0.5])
    assert catalogue.counts(NOW + DAY)[:, -1].tolist() == [3, 1]


def test_added_items_keep_their_first_sight_until_the_store_knows(store):
    catalogue = Catalogue(Encoder(default_schema()))
    catalogue.add(["a"], NOW)
    put(store, "a", year=1990)
    catalogue.refresh(store, NOW + 5)
    assert catalogue.first_seen_ms.tolist() == [NOW]
    put(store, "a", **{FIRST_SEEN: NOW - 7})
    catalogue.refresh(store, NOW + 5)
    assert catalogue.first_seen_ms.tolist() == [NOW - 7]


@given(st.lists(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 5), max_size=6), max_size=5)))
@settings(deadline=None, max_examples=60)
def test_ragged_column_is_a_list_of_lists(puts):
    column, model = RaggedColumn(), [[] for _ in range(10)]
    column.grow(10)
    for lists in [*puts, *puts, *puts]:
        rows = np.array(list(lists), np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(lists[row]) for row in rows])]).astype(np.int64)
        values = np.array([value for row in rows for value in lists[row]], np.uint64)
        column.put(rows, Ragged(values, offsets))
        for row in rows:
            model[row] = lists[row]
        taken = column.take(np.arange(10))
        got = [taken.values[taken.offsets[n] : taken.offsets[n + 1]].tolist() for n in range(10)]
        assert got == model
        assert column.holding(np.array([3], np.uint64)).tolist() == [3 in of for of in model]
