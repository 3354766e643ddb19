"""Micro-batches: their bytes come back as they went, and nothing else gets through."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from support.batches import micro_batch

from featurestore.encoded import Encoded, Ragged
from models.samples import MicroBatch, SampleFormatError, decode_batch, encode_batch


def assert_same(one: object, other: object) -> None:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Encoded | Ragged | MicroBatch):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple) and isinstance(other, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1_000), samples=st.integers(0, 7), negatives=st.integers(0, 5))
def test_bytes_come_back_as_they_went(seed, samples, negatives):
    batch = micro_batch(seed, samples=samples, negatives=negatives)
    assert_same(decode_batch(encode_batch(batch)), batch)


def test_decoded_arrays_are_writable():
    batch = decode_batch(encode_batch(micro_batch(0)))
    batch.weight[0] = 5
    assert batch.users.numeric.flags.writeable


def test_taking_samples_keeps_what_they_refer_to():
    batch = micro_batch(2)
    some = batch.take(np.array([4, 1]))
    assert len(some.items) <= len(batch.items)
    for mine, theirs in ((0, 4), (1, 1)):
        np.testing.assert_array_equal(
            some.items.categorical[some.positive[mine]], batch.items.categorical[batch.positive[theirs]]
        )
        np.testing.assert_array_equal(
            some.items.numeric[some.negatives[mine]], batch.items.numeric[batch.negatives[theirs]]
        )
        np.testing.assert_array_equal(some.users.categorical[mine], batch.users.categorical[theirs])


def _with(name, change):
    batch = micro_batch(1)
    array = getattr(batch, name).copy()
    change(array)
    return lambda: replace(batch, **{name: array})


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("positive", 0, 9),
        ("positive", 0, -1),
        ("negatives", (0, 1), 9),
        ("negatives", (0, 1), -1),
        ("log_q", (0, 0), np.inf),
        ("log_q", (0, 0), np.nan),
        ("log_q", (0, 1), np.nan),
        ("log_q", (0, 1), -np.inf),
        ("label", 0, 0.5),
        ("label", 0, np.nan),
        ("weight", 0, -1),
        ("weight", 0, np.inf),
        ("weight", 0, np.nan),
    ],
)
def test_values_outside_their_range_are_refused(name, place, value):
    def change(array):
        array[place] = value

    with pytest.raises(SampleFormatError, match=name):
        _with(name, change)()


@pytest.mark.parametrize("name", ["positive", "negatives", "log_q", "label", "weight", "event_time_ms"])
def test_wrong_types_and_shapes_are_refused(name):
    batch = micro_batch(1)
    array = getattr(batch, name)
    with pytest.raises(SampleFormatError):
        replace(batch, **{name: array.astype(np.float64)})
    with pytest.raises(SampleFormatError):
        replace(batch, **{name: array[:-1]})


@pytest.mark.parametrize(
    "broken",
    [
        lambda e: Encoded(e.categorical, e.numeric * np.float32(np.nan), e.lists),
        lambda e: Encoded(e.categorical.astype(np.int64), e.numeric, e.lists),
        lambda e: Encoded(e.categorical, e.numeric[:-1], e.lists),
        lambda e: Encoded(e.categorical, e.numeric, (Ragged(e.lists[0].values, e.lists[0].offsets[:-1]),)),
        lambda e: Encoded(e.categorical, e.numeric, (Ragged(e.lists[0].values, e.lists[0].offsets + 1),)),
        lambda e: Encoded(e.categorical, e.numeric, (Ragged(e.lists[0].values, e.lists[0].offsets[::-1]),)),
        lambda e: Encoded(e.categorical[:-1], e.numeric[:-1], tuple(r.take(np.arange(5)) for r in e.lists)),
    ],
)
def test_encoded_columns_that_do_not_fit_are_refused(broken):
    batch = micro_batch(1)
    assert len(batch.users.lists[0].values) > 0
    with pytest.raises(SampleFormatError):
        replace(batch, users=broken(batch.users))


def _tampered(change):
    data = encode_batch(micro_batch(1))
    length = int.from_bytes(data[1:9], "little")
    header = json.loads(data[9 : 9 + length])
    change(header)
    text = json.dumps(header).encode()
    return data[:1] + len(text).to_bytes(8, "little") + text + data[9 + length :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x02" + encode_batch(micro_batch(1))[1:],
        encode_batch(micro_batch(1))[:-1],
        encode_batch(micro_batch(1)) + b"\0",
        b"\x01" + save({"a": np.zeros(3, np.float32)}),
        _tampered(lambda h: h.pop("weight")),
        _tampered(lambda h: h["__metadata__"].pop("watermark")),
        _tampered(lambda h: h["__metadata__"].update(watermark="[]")),
        _tampered(lambda h: h["__metadata__"].update(watermark='{"log": "x"}')),
        _tampered(lambda h: h["__metadata__"].update(lists="1")),
        _tampered(lambda h: h["__metadata__"].update(lists="9 9")),
        _tampered(lambda h: h["__metadata__"].update(lists="many 1")),
        _tampered(lambda h: h["weight"].update(dtype="I32")),
        _tampered(lambda h: h["weight"].update(dtype="BF16")),
    ],
)
def test_other_bytes_are_refused_by_name(data):
    with pytest.raises(SampleFormatError):
        decode_batch(data)


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_flipped_byte_is_a_batch_or_a_format_error(place, value):
    data = bytearray(encode_batch(micro_batch(1, samples=2, items=2, negatives=1)))
    data[place % len(data)] = value
    with contextlib.suppress(SampleFormatError):
        assert isinstance(decode_batch(bytes(data)), MicroBatch)
