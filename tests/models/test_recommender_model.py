"""Gradients against finite differences and the sum law; serving against training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import SCHEMA, SMALL, dense_of, encoded, micro_batch, values_of

from featurestore.encoded import MISSING, Encoded, Ragged
from models.gather import Index
from models.parameters import RANKING, RETRIEVAL
from models.samples import decode_batch, encode_batch
from models.training import ModelConfig, RecommenderModel

MODEL = RecommenderModel(SCHEMA, SMALL)


def total_loss(model, batch, rows, dense):
    losses = model.gradients(batch, rows, dense).losses
    return losses["retrieval"] * float((batch.weight * batch.label).sum()) + losses["ranking"] * float(
        batch.weight.sum()
    )


def test_gradients_agree_with_finite_differences():
    # A tenth of the elements is enough to notice a wrong or missing term, and takes a second.
    batch = micro_batch(3)
    rows, dense = values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL)
    gradients = MODEL.gradients(batch, rows, dense)
    generator = np.random.default_rng(0)
    step = 1e-2
    for values, gradient in [
        (rows[RETRIEVAL], gradients.tables[RETRIEVAL]),
        (rows[RANKING], gradients.tables[RANKING]),
        (dense, gradients.dense),
    ]:
        strongest = np.argsort(-np.abs(gradient).reshape(-1))[:12]
        for place in np.concatenate([strongest, generator.integers(0, values.size, 12)]):
            at = np.unravel_index(place, values.shape)
            kept = values[at]
            values[at] = kept + step
            above = total_loss(MODEL, batch, rows, dense)
            values[at] = kept - step
            below = total_loss(MODEL, batch, rows, dense)
            values[at] = kept
            assert gradient[at] == pytest.approx((above - below) / (2 * step), abs=0.02, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_gradients_of_a_batch_are_the_sum_over_its_parts(seed, cut):
    batch = micro_batch(seed)
    dense = dense_of(MODEL)
    keys = MODEL.keys(batch)
    whole = MODEL.gradients(batch, values_of(MODEL, keys), dense)
    sums = {name: np.zeros_like(values) for name, values in whole.tables.items()}
    dense_sum = np.zeros_like(whole.dense)
    for part in (np.arange(cut), np.arange(cut, len(batch))):
        smaller = batch.take(part)
        part_keys = MODEL.keys(smaller)
        gradients = MODEL.gradients(smaller, values_of(MODEL, part_keys), dense)
        dense_sum += gradients.dense
        for name, values in gradients.tables.items():
            sums[name][np.searchsorted(keys[name], part_keys[name])] += values
    np.testing.assert_allclose(dense_sum, whole.dense, atol=2e-4, rtol=1e-3)
    for name, values in whole.tables.items():
        np.testing.assert_allclose(sums[name], values, atol=2e-4, rtol=1e-3)


def test_in_batch_candidates_change_the_loss_and_only_that_of_retrieval():
    batch = micro_batch(5)
    rows, dense = values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL)
    alone = MODEL.gradients(batch, rows, dense)
    together = MODEL.gradients(batch, rows, dense, in_batch=True)
    assert together.losses["retrieval"] > alone.losses["retrieval"]
    np.testing.assert_array_equal(together.tables[RANKING], alone.tables[RANKING])


def test_in_batch_leaves_out_other_samples_of_the_same_positive():
    batch = micro_batch(5)
    same = replace(batch, positive=np.full(len(batch), 2, np.int32))
    rows, dense = values_of(MODEL, MODEL.keys(same)), dense_of(MODEL)
    alone = MODEL.gradients(same, rows, dense)
    together = MODEL.gradients(same, rows, dense, in_batch=True)
    assert together.losses["retrieval"] == pytest.approx(alone.losses["retrieval"], rel=1e-6)


def test_a_micro_batch_of_one_learns_from_its_negatives():
    batch = micro_batch(1).take(np.array([0]))
    batch = replace(batch, label=np.ones(1, np.float32))
    gradients = MODEL.gradients(batch, values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL))
    assert gradients.losses["retrieval"] > 0
    assert np.abs(gradients.tables[RETRIEVAL]).max() > 0


def test_negatives_left_out_have_no_influence():
    batch = micro_batch(2)
    without = replace(batch, log_q=batch.log_q.copy())
    without.log_q[:, 2] = np.inf
    other = replace(without, negatives=without.negatives.copy())
    other.negatives[:, 1] = (other.negatives[:, 1] + 1) % len(batch.items)
    rows, dense = values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL)
    first, second = MODEL.gradients(without, rows, dense), MODEL.gradients(other, rows, dense)
    np.testing.assert_allclose(first.dense, second.dense, atol=1e-6)
    assert np.isfinite(first.dense).all()


def test_dislikes_do_not_pull_in_retrieval_and_push_in_ranking():
    batch = replace(micro_batch(4), label=np.zeros(6, np.float32))
    gradients = MODEL.gradients(batch, values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL))
    assert np.abs(gradients.tables[RETRIEVAL]).max() == 0
    assert np.abs(gradients.tables[RANKING]).max() > 0


def test_an_empty_micro_batch_gives_zero_gradients_in_shape():
    empty = micro_batch(0).take(np.array([], np.int64))
    dense = dense_of(MODEL)
    gradients = MODEL.gradients(empty, values_of(MODEL, MODEL.keys(empty)), dense)
    assert gradients.dense.shape == dense.shape
    assert not gradients.dense.any()
    assert all(len(values) == 0 for values in gradients.tables.values())


def test_unused_floats_of_a_chunk_have_no_gradient():
    batch = micro_batch(6)
    gradients = MODEL.gradients(batch, values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL))
    unused = np.ones(gradients.dense.shape, np.float32)
    for view in MODEL.needs.dense.unpack(unused).values():
        view[...] = 0
    assert unused.any()
    assert not gradients.dense[unused > 0].any()


def test_learns_from_the_decoded_message_without_warnings():
    batch = decode_batch(encode_batch(micro_batch(7)))
    rows = {name: np.array(v) for name, v in values_of(MODEL, MODEL.keys(batch)).items()}
    dense = dense_of(MODEL)
    for values in (*rows.values(), dense):
        values.flags.writeable = False
    gradients = MODEL.gradients(batch, rows, dense)
    assert np.isfinite(gradients.dense).all()


def test_a_step_does_not_change_its_arguments():
    batch = micro_batch(8)
    rows, dense = values_of(MODEL, MODEL.keys(batch)), dense_of(MODEL)
    before = {name: values.copy() for name, values in rows.items()}
    dense_before = dense.copy()
    MODEL.gradients(batch, rows, dense)
    np.testing.assert_array_equal(dense, dense_before)
    for name, values in rows.items():
        np.testing.assert_array_equal(values, before[name])


def test_the_retrieval_loss_is_what_the_serving_vectors_say():
    batch = micro_batch(9)
    dense = dense_of(MODEL)
    users = MODEL.encode_users(batch.users, values_of(MODEL, MODEL.user_keys(batch.users)), dense)
    items = MODEL.encode_items(batch.items, values_of(MODEL, MODEL.item_keys(batch.items)), dense)
    np.testing.assert_array_equal(users[:, -1], 1)
    candidates = np.concatenate([batch.positive[:, None], batch.negatives], axis=1)
    scores = np.einsum("bd,bcd->bc", users, items[candidates]) / SMALL.temperature - batch.log_q
    losses = np.log(np.exp(scores).sum(axis=1)) - scores[:, 0]
    weight = batch.weight * batch.label
    expected = float((losses * weight).sum() / weight.sum())
    gradients = MODEL.gradients(batch, values_of(MODEL, MODEL.keys(batch)), dense)
    assert gradients.losses["retrieval"] == pytest.approx(expected, rel=1e-4)


def test_ranking_loss_is_what_the_serving_logits_say():
    batch = micro_batch(10, samples=1)
    batch = replace(batch, label=np.ones(1, np.float32), log_q=np.full((1, 5), -2.0, np.float32))
    dense = dense_of(MODEL)
    logits = MODEL.rank(
        batch.users, batch.items, values_of(MODEL, MODEL.pair_keys(batch.users, batch.items)), dense
    )
    chosen = logits[np.concatenate([batch.positive[:, None], batch.negatives[:, :3]], axis=1)[0]]
    corrected = chosen + 2.0 - np.log(3)
    expected = np.log1p(np.exp(-corrected[0])) + np.log1p(np.exp(corrected[1:])).sum()
    gradients = MODEL.gradients(batch, values_of(MODEL, MODEL.keys(batch)), dense)
    assert gradients.losses["ranking"] == pytest.approx(float(expected), rel=1e-4)


def test_large_catalogues_are_encoded_by_parts_alike():
    generator = np.random.default_rng(2)
    items = encoded(generator, "item", 5_000)
    dense, keys = dense_of(MODEL), MODEL.item_keys(items)
    whole = MODEL.encode_items(items, values_of(MODEL, keys), dense)
    last = items.take(np.arange(4_990, 5_000))
    np.testing.assert_allclose(
        MODEL.encode_items(last, values_of(MODEL, MODEL.item_keys(last)), dense), whole[-10:], atol=1e-5
    )


def test_the_bias_ignores_what_is_learned_per_item():
    items = encoded(np.random.default_rng(3), "item", 4)
    dense, keys = dense_of(MODEL), MODEL.item_keys(items)
    rows = values_of(MODEL, keys)
    vectors = MODEL.encode_items(items, rows, dense)
    moved = MODEL.encode_items(items, {name: values + 1 for name, values in rows.items()}, dense)
    np.testing.assert_allclose(moved[:, -1], vectors[:, -1])
    assert np.abs(moved[:, :-1] - vectors[:, :-1]).max() > 0.1


def test_a_missing_key_is_an_error_not_another_row():
    batch = micro_batch(0)
    other = encoded(np.random.default_rng(77), "user", 1)
    stranger = Encoded(other.categorical + np.uint64(1), other.numeric, other.lists)
    rows = values_of(MODEL, MODEL.keys(batch))
    index_keys = MODEL.keys(batch)[RETRIEVAL]
    with pytest.raises(KeyError):
        Index.into(index_keys, stranger)
    assert len(rows[RETRIEVAL]) == len(index_keys)


def test_item_own_keys_are_the_ids():
    items = encoded(np.random.default_rng(3), "item", 4)
    np.testing.assert_array_equal(MODEL.item_own_keys(items), items.categorical[:, 0])


def _one_genre_world(likes: int) -> Encoded:
    """A user whose recent items are ``likes`` of the first group."""
    recent = np.arange(1, likes + 1, dtype=np.uint64)
    return Encoded(
        np.array([[900, 901, 902, 903]], np.uint64),
        np.zeros((1, 1), np.float32),
        (Ragged(recent, np.array([0, likes])),),
    )


def test_learns_that_users_like_what_goes_with_their_recent_items():
    # Two groups of ten items; who liked some of a group likes the others of it. Ids alone say so.
    model = RecommenderModel(SCHEMA, ModelConfig(retrieval_dim=8, ranking_dim=8, chunk=64))
    groups = np.arange(1, 21, dtype=np.uint64)
    items = Encoded(
        np.stack([groups, np.full(20, 800, np.uint64)], axis=1),
        np.zeros((20, 4), np.float32),
        (Ragged(np.empty(0, np.uint64), np.zeros(21, np.int64)),),
    )
    generator = np.random.default_rng(0)
    store = {
        table.name: generator.uniform(-table.scale, table.scale, (1_000, table.dim)).astype(np.float32)
        for table in model.needs.tables
    }
    sums = {name: np.zeros(1_000) for name in store}
    dense = model.needs.dense.initial(generator)
    dense_sums = np.zeros_like(dense)
    for step in range(300):
        group = generator.integers(0, 2, 32)
        recent = generator.integers(0, 10, (32, 4)) + 10 * group[:, None] + 1
        batch = replace(
            micro_batch(step, samples=32, items=20, negatives=6),
            users=Encoded(
                np.tile(np.array([[0, 901, 902, 903]], np.uint64), (32, 1)),
                np.zeros((32, 1), np.float32),
                (Ragged(recent.astype(np.uint64).reshape(-1), np.arange(0, 129, 4)),),
            ),
            items=items,
            positive=(generator.integers(0, 10, 32) + 10 * group).astype(np.int32),
            negatives=generator.integers(0, 20, (32, 6)).astype(np.int32),
            log_q=np.full((32, 7), -np.log(20), np.float32),
            label=np.ones(32, np.float32),
            weight=np.ones(32, np.float32),
        )
        keys = model.keys(batch)
        gradients = model.gradients(batch, {n: store[n][k.astype(int)] for n, k in keys.items()}, dense)
        for name, gradient in gradients.tables.items():
            rows = keys[name].astype(int)
            sums[name][rows] += (gradient**2).mean(axis=1)
            store[name][rows] -= 0.1 * gradient / (np.sqrt(sums[name][rows]) + 1e-8)[:, None]
        dense_sums += gradients.dense**2
        dense = dense - 0.02 * gradients.dense / (np.sqrt(dense_sums) + 1e-8)

    def rows_of(keys):
        return {name: store[name][k.astype(int)] for name, k in keys.items()}

    user = _one_genre_world(5)
    vectors = model.encode_items(items, rows_of(model.item_keys(items)), dense)
    scores = vectors @ model.encode_users(user, rows_of(model.user_keys(user)), dense)[0]
    assert set(np.argsort(-scores)[:8].tolist()) <= set(range(10))
    logits = model.rank(user, items, rows_of(model.pair_keys(user, items)), dense)
    assert logits[:10].mean() > logits[10:].mean() + 1


def test_users_who_lack_an_attribute_share_no_row():
    model = RecommenderModel(SCHEMA, SMALL)
    batch = micro_batch(5)
    lacking = batch.users.categorical.copy()
    lacking[:, 1:] = MISSING
    without = replace(batch, users=replace(batch.users, categorical=lacking))
    keys = model.keys(without)
    assert all(MISSING not in found for found in keys.values())
    gradients = model.gradients(without, values_of(model, keys), dense_of(model))
    assert all(np.isfinite(found).all() for found in gradients.tables.values())
    nobody = replace(batch.users, categorical=np.full_like(lacking, MISSING)).take(np.arange(1))
    nobody = replace(nobody, lists=tuple(Ragged(r.values[:0], np.zeros(2, np.int64)) for r in nobody.lists))
    rows = values_of(model, model.user_keys(nobody))
    assert model.encode_users(nobody, rows, dense_of(model)).shape == (1, SMALL.retrieval_dim)
