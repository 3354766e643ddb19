"""Snapshots give the same bits back, or say what is damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.clock import HybridClock
from sync.errors import SnapshotDamaged
from sync.pushes import Push, Source, Watermark
from sync.records import End
from sync.shard import Shard
from sync.snapshot import HEADER_BYTES, decode, encode, encode_buffers, encode_record
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


def test_everything_comes_back_bit_for_bit() -> None:
    state = decode(WHOLE)
    head = state.head
    assert encode(state) == WHOLE
    assert (head.model, head.shard_id, head.fingerprint, head.specs) == ("main", 3, "ab12", SPECS)
    assert head.knowledge == {7: head.clock}
    assert [(one.table, one.number) for one in head.generations] == [("dense", 1)]
    assert head.pushes[Source("samples é", 4)].applied == 1
    assert head.pushes[Source("samples é", 4)].watermark == Watermark("events", 1, 1, 5)
    assert head.pushes[Source("other", 0)].watermark is None
    assert (head.position, head.history) == (4, ((0, 1),))
    restored = Shard(3, SPECS, 8, HybridClock(lambda: 123), model="main", fingerprint="ab12")
    restored.restore(state)
    again = restored.state()
    assert encode(replace(again, head=replace(again.head, generations=head.generations))) == WHOLE


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 400))
def test_any_number_of_rows(rows: int) -> None:
    data = encode(filled(rows).state())
    assert encode(decode(data)) == data
    assert sum(len(page.keys) for page in decode(data).rows if page.table == "rowwise") == rows


def test_buffers_are_the_same_bytes_without_copying_rows_again() -> None:
    state = filled().state()
    buffers = encode_buffers(state)
    assert b"".join(buffers) == WHOLE
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), state.rows[0].values) for b in buffers if len(b))


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
    with pytest.raises(SnapshotDamaged):
        decode(WHOLE[:length])


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300))
def test_foreign_bytes_are_noticed(foreign: bytes, header: bytes, body: bytes) -> None:
    for data in (foreign, forged(header, body), forged(header, struct.pack("<Q", len(body)) + body)):
        with pytest.raises(SnapshotDamaged):
            decode(data)


def forged(header: bytes, body: bytes, arrays: int = 0) -> bytes:
    """A record whose checksum is right."""
    fields = struct.pack("<4sIQQ", b"HWR1", arrays, len(header), len(body))
    padded = header + b"\xc0" * (-len(header) % 8)
    return fields + xxhash.xxh3_128(fields + padded + body).digest() + padded + body


def changed(change: Callable[[dict[str, object]], None]) -> bytes:
    """The whole snapshot with a changed header of its first rows, and a right checksum."""
    state = decode(WHOLE)
    buffers = [bytes(b) for b in encode_record(state.rows[0])]
    fields = struct.unpack("<4sIQQ", buffers[0])
    header = msgspec.msgpack.decode(buffers[2][: fields[2]])
    change(header)
    rows = forged(msgspec.msgpack.encode(header), b"".join(buffers[3:]), fields[1])
    parts = (state.head, *state.rows[1:], End(state.head.position))
    first, *rest = [b"".join(encode_record(part)) for part in parts]
    return first + rows + b"".join(rest)


def flipped(at: int) -> bytes:
    return WHOLE[:at] + bytes([WHOLE[at] ^ 1]) + WHOLE[at + 1 :]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "does not begin with a head"),
        (b"PK\x03\x04" + WHOLE[4:], "not a record"),
        (WHOLE[: -len(b"".join(encode_record(End(4))))], "no end"),
        (WHOLE + b"x", "fewer than a record's header"),
        (WHOLE + WHOLE, "something other than rows"),
        (flipped(len(WHOLE) - 1), "checksum"),
        (flipped(HEADER_BYTES - 1), "checksum"),
        (changed(lambda header: header.update(shape=[5, 4, 1])), r"where its header says float32 \[5, 4\]"),
        (changed(lambda header: header.update(shape=[-1, 3, 1])), r"\[-1"),
        (changed(lambda header: header.update(kind="graves", count=5)), "more arrays|where its header"),
        (changed(lambda header: header.update(kind="other")), "cannot be read"),
    ],
)
def test_says_what_is_wrong(data: bytes, named: str) -> None:
    with pytest.raises(SnapshotDamaged, match=named):
        decode(data)


def test_rows_of_an_unknown_table_are_refused() -> None:
    state = decode(WHOLE)
    shard = Shard(3, SPECS, 8, HybridClock(lambda: 0))
    with pytest.raises(SnapshotDamaged, match="other"):
        shard.restore(replace(state, rows=(replace(state.rows[0], table="other"),)))


def test_rows_of_another_width_are_refused() -> None:
    state = decode(WHOLE)
    shard = Shard(3, SPECS, 8, HybridClock(lambda: 0))
    with pytest.raises(SnapshotDamaged, match="2 values"):
        shard.restore(
            replace(state, rows=(replace(state.rows[0], values=state.rows[0].values[:, :2].copy()),))
        )
