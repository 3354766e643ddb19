"""Snapshots give the same bits back, or say what is damaged."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from sync.clock import HybridClock
from sync.errors import SnapshotDamaged
from sync.pushes import Push, Source, Watermark
from sync.shard import Shard
from sync.snapshot import HEADER_BYTES, decode, encode, encode_buffers
from sync.spec import Initialiser, Optimiser, Segment, TableSpec

SPECS = (
    TableSpec("rowwise", 3, Initialiser.uniform(0.1, seed=2)),
    TableSpec("plain", 2, optimiser=Optimiser("sgd")),
    TableSpec(
        "dense", 4, Initialiser((Segment(0, 0.1), Segment(2, 0, 1))), Optimiser("adagrad"), "single", rows=3
    ),
)


def filled(rows: int = 5) -> Shard:
    shard = Shard(3, SPECS, 7, HybridClock(lambda: 123), model="main", fingerprint="ab12")
    keys = np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for offset in range(2):
        mark = Watermark("events", 1, offset, 5)
        parts = (
            ("rowwise", keys, np.full((rows, 3), 0.5, np.float32)),
            ("dense", np.array([2], np.uint64), np.ones((1, 4), np.float32)),
        )
        shard.push(Push(Source("samples é", 4), offset, offset - 1, mark, parts))
    shard.push(Push(Source("other", 0), 9, -1))
    shard.publish_dense("dense")
    return shard


WHOLE = encode(filled().state())


def with_payload(payload: bytes, version: int = 1) -> bytes:
    fields = struct.pack("<8sIIQ", b"HWSHARD\0", version, 0, len(payload))
    return fields + xxhash.xxh3_128(fields + payload).digest() + payload


def test_everything_comes_back_bit_for_bit() -> None:
    state = decode(WHOLE)
    assert encode(state) == WHOLE
    assert (state.model, state.shard_id, state.fingerprint, state.specs) == ("main", 3, "ab12", SPECS)
    assert state.knowledge == {7: state.clock}
    assert state.generations == {"dense": 1}
    assert state.pushes[Source("samples é", 4)].applied == 1
    assert state.pushes[Source("samples é", 4)].watermark == Watermark("events", 1, 1, 5)
    assert state.pushes[Source("other", 0)].watermark is None
    restored = Shard(3, SPECS, 8, HybridClock(lambda: 123), model="main", fingerprint="ab12")
    restored.restore(state)
    again = restored.state()
    assert encode(replace(again, generations=state.generations)) == WHOLE


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 400))
def test_any_number_of_rows(rows: int) -> None:
    data = encode(filled(rows).state())
    assert encode(decode(data)) == data
    assert len(decode(data).columns["rowwise"]["keys"]) == rows


def test_the_payload_is_a_safetensors_file() -> None:
    tensors = load(WHOLE[HEADER_BYTES:])
    state = decode(WHOLE)
    assert set(tensors) == {f"{table}/{name}" for table, columns in state.columns.items() for name in columns}
    assert tensors["rowwise/values"].tobytes() == state.columns["rowwise"]["values"].tobytes()
    assert tensors["rowwise/keys"].dtype == np.uint64


def test_buffers_are_the_same_bytes_without_copying_rows_again() -> None:
    state = filled().state()
    buffers = encode_buffers(state)
    assert b"".join(buffers) == WHOLE
    assert any(
        np.shares_memory(np.frombuffer(b, np.uint8), state.columns["rowwise"]["values"])
        for b in buffers
        if len(b)
    )


def test_a_state_of_views_is_the_same_bytes() -> None:
    shard = filled()
    state = shard.state(copy=False)
    assert np.shares_memory(
        state.columns["rowwise"]["values"], shard.state(copy=False).columns["rowwise"]["values"]
    )
    assert encode(state) == WHOLE


def test_a_state_does_not_change_with_the_shard() -> None:
    shard = filled()
    state = shard.state()
    parts = (("rowwise", np.array([0, 77], np.uint64), np.ones((2, 3), np.float32)),)
    shard.push(Push(Source("other", 0), 10, 9, None, parts))
    assert encode(state) == WHOLE
    assert encode(shard.state()) != WHOLE


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 8 * len(WHOLE) - 1))
def test_one_flipped_bit_anywhere_is_noticed(bit: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SnapshotDamaged):
        decode(damaged)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, len(WHOLE) - 1))
def test_a_missing_end_is_noticed(length: int) -> None:
    with pytest.raises(SnapshotDamaged, match="truncated"):
        decode(WHOLE[:length])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), st.binary(min_size=8, max_size=300))
def test_foreign_bytes_are_noticed(foreign: bytes, payload: bytes) -> None:
    for data in (foreign, with_payload(payload)):
        with pytest.raises(SnapshotDamaged):
            decode(data)


def flipped(at: int) -> bytes:
    return WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04" + WHOLE[4:], "not a snapshot of a shard"),
        (with_payload(WHOLE[HEADER_BYTES:], version=2), "format 2; this version reads 1"),
        (WHOLE + b"x", "followed by something else"),
        (flipped(len(WHOLE) - 1), "checksum"),
        (flipped(HEADER_BYTES - 1), "checksum"),
        (with_payload(WHOLE[HEADER_BYTES:].replace(b'"U64"', b'"I64"')), "keys has type I64"),
        (with_payload(WHOLE[HEADER_BYTES:].replace(b"rowwise/state", b"rowwise/other")), "other"),
        (with_payload(WHOLE[HEADER_BYTES:].replace(b'"shape":[5,3]', b'"shape":[3,5]')), "rowwise/values"),
        (with_payload(WHOLE[HEADER_BYTES:].replace(b'\\"dim\\":3', b'\\"dim\\":0')), "dim"),
    ],
)
def test_says_what_is_wrong(data: bytes, named: str) -> None:
    with pytest.raises(SnapshotDamaged, match=named):
        decode(data)


def test_a_key_that_occurs_twice_is_refused() -> None:
    state = decode(WHOLE)
    columns = dict(state.columns["rowwise"])
    columns["keys"] = np.zeros(5, np.uint64)
    shard = Shard(3, SPECS, 8, HybridClock(lambda: 0))
    with pytest.raises(SnapshotDamaged, match="more than once"):
        shard.restore(replace(state, columns={**state.columns, "rowwise": columns}))
