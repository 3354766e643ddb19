"""Pulls and batches on the wire: whole again, and nothing else is taken for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.parameter_server.messages import pack, unpack
from services.parameter_server.syncing.messages import (
    SyncReply,
    SyncRequest,
    WirePiece,
    pull_of,
    received,
    reply_of,
    request_of,
)
from services.rpc.codec import Array, Reply
from sync.errors import RecordDamaged
from sync.exchange import Batch, Piece, Pull, Want
from sync.knowledge import Horizon
from sync.pushes import Progress, Source, Watermark
from sync.quantise import Precision, quantise, restore
from sync.records import Generation, Graves, Learned, Rows, Update
from sync.replica import Token

TEMPLATE = SyncRequest("eu/a/x:1", "eu", 4, 0, 0, 0, 0.0, models={"main": "abc"}, precision="int8")


def rows(count: int, dim: int = 3, state: int = 1, table: str = "items") -> Rows:
    generator = np.random.default_rng(count)
    return Rows(
        table,
        generator.permutation(count).astype(np.uint64),
        generator.normal(size=(count, dim)).astype(np.float32),
        generator.normal(size=(count, state)).astype(np.float32),
        np.arange(1, count + 1, dtype=np.uint64),
        np.full(count, 5, np.uint32),
    )


def update(count: int = 7) -> Update:
    graves = Graves("items", np.array([9], np.uint64), np.array([3], np.uint64), np.array([5], np.uint32))
    dense = Generation("dense", 4, np.ones((3, 8), np.float32), 11, 5, {("e", 0): Watermark("e", 0, 1, 2)})
    progress = ((Source("log", 0), Progress(3, Watermark("e", 0, 3, 4))),)
    learned = Learned({5: 100}, Horizon({5: 2}, 3, 1, {1: 2}), progress)
    return Update((rows(count), rows(2, 1, 0, "other")), (graves,), (dense,), {5: 2}, True, learned)


BATCH = Batch(
    7,
    3,
    (
        Piece(("main", 1), 2, update(), True, True, Token(5, 9), 12),
        Piece(("main", 3), 1, Update(epochs={1: 1})),
        Piece(("other", 0), 4, update(9_000)),
    ),
    (("main", 1), ("other", 0)),
    0.25,
    1_700_000_000,
)


def plain(found: Update) -> object:
    arrays = [
        (part.table, part.keys.tobytes(), part.time.tobytes(), part.writer.tobytes())
        for part in found.versioned
    ]
    values = [(part.values.tobytes(), part.state.tobytes()) for part in found.rows]
    dense = [
        (g.table, g.number, g.values.tobytes(), g.time, g.writer, dict(g.watermarks))
        for g in found.generations
    ]
    return arrays, values, dense, dict(found.epochs), found.urgent, found.learned


def answer(batch: Batch, precision: Precision = "float32", declarations: Sequence[bytes] = ()) -> Reply:
    return Reply(1, *reply_of(batch, precision, declarations, "home"))


def test_a_batch_arrives_as_it_was() -> None:
    found = received(answer(BATCH, declarations=(b"one",)))
    assert (found.declarations, found.region) == ((b"one",), "home")
    for sent, came in zip(BATCH.pieces, found.batch.pieces, strict=True):
        assert plain(sent.update) == plain(came.update)
        assert (sent.shard, sent.round, sent.first, sent.whole, sent.token, sent.left) == (
            came.shard, came.round, came.first, came.whole, came.token, came.left,
        )  # fmt: skip
    assert msgspec.structs.replace(unpack(answer(BATCH).body, SyncReply), pieces=[]) == SyncReply(
        7, 3, [], [("main", 1), ("other", 0)], 0.25, 1_700_000_000, False, "float32", [], "home"
    )
    assert abs(found.nbytes / BATCH.nbytes - 1) < 0.1


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_only_values_of_rows_are_quantised(precision: Precision) -> None:
    whole, found = answer(BATCH), received(answer(BATCH, precision))
    for sent, came in zip(BATCH.pieces, found.batch.pieces, strict=True):
        for before, after in zip(sent.update.rows, came.update.rows, strict=True):
            shape = (before.values.shape[0], before.values.shape[1])
            assert (
                after.values.tobytes()
                == restore(quantise(before.values, precision), precision, shape).tobytes()
            )
            assert after.state.tobytes() == before.state.tobytes()
        sent_dense, came_dense = (plain(one.update)[2] for one in (sent, came))  # type: ignore[index]
        assert sent_dense == came_dense
    assert found.nbytes < len(whole.body) + sum(array.nbytes for array in whole.arrays)


def test_a_pull_arrives_as_it_was() -> None:
    pull = Pull(
        9,
        1,
        65_536,
        1.0,
        (Want(("main", 1), 3, {1: 2, 4: 5}, 2, Token(1, 2)), Want(("main", 2), 4)),
        (("main", 0),),
        ((("main", 1), {1: 2}),),
    )
    request = unpack(request_of(pull, TEMPLATE, 77).body, SyncRequest)
    assert pull_of(request) == pull
    assert (request.precision, request.models, request.clock_us) == ("int8", {"main": "abc"}, 77)
    later = unpack(request_of(Pull(9, 2, 1, 1.0), TEMPLATE, 0).body, SyncRequest)
    assert later.models == {}


@pytest.mark.parametrize(
    "change",
    [
        {"puller": ""},
        {"puller": "x" * 300},
        {"stream": 0},
        {"number": 2**63},
        {"wait_s": float("nan")},
        {"wait_s": -1.0},
        {"coalesce_s": float("inf")},
        {"priority_share": 1.5},
        {"unwanted": [("main", 4)]},
        {"unwanted": [("", 0)]},
        {"held": [("main", 0, [(0, 1)])]},
        {"held": [("main", 0, [(1, 2**63)])]},
        {"models": {str(n): "" for n in range(2_000)}},
    ],
)
def test_what_is_no_pull_is_refused(change: dict[str, object]) -> None:
    sent = msgspec.structs.replace(TEMPLATE, stream=1, number=1, budget=1, wait_s=1.0)
    pull_of(sent)
    with pytest.raises(RecordDamaged):
        pull_of(msgspec.structs.replace(sent, **change))


def damaged(change: dict[str, object], arrays: tuple[Array, ...] | None = None) -> Reply:
    """The batch with its first piece changed."""
    body, sent = reply_of(BATCH, "int8")
    found = unpack(body, SyncReply)
    found.pieces[0] = msgspec.structs.replace(found.pieces[0], **change)
    return Reply(1, pack(found), sent if arrays is None else arrays)


@pytest.mark.parametrize(
    "change",
    [
        {"header": b""},
        {"header": b"\xff" * 9},
        {"rows": 0},
        {"rows": 900},
        {"rows": -1},
        {"arrays": []},
        {"arrays": [("u8", (2**62,), False)]},
        {"arrays": [("u8", (2**33, 2**33), True)]},
        {"arrays": [("u8", (-1,), False)]},
        {"arrays": [("O8", (1,), False)]},
        {"arrays": [("u8", (0, 2**62), False)]},
        {"arrays": [("u8", (1, 1, 1), False)]},
        {"model": ""},
        {"shard": -1},
        {"round": -1},
        {"token": (-1, 0)},
        {"left": -5},
    ],
)
def test_what_is_no_batch_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(RecordDamaged):
        received(damaged(change))


def test_frames_that_do_not_fit_are_refused() -> None:
    body, arrays = reply_of(BATCH, "float32")
    for wrong in (
        (),
        arrays[:-1],
        (*arrays, np.zeros(8, np.uint8)),
        (arrays[0][:-8], *arrays[1:]),
        (np.append(arrays[0], np.zeros(8, np.uint8)), *arrays[1:]),
        (arrays[0].view(np.uint32), *arrays[1:]),
    ):
        with pytest.raises(RecordDamaged):
            received(Reply(1, body, tuple(wrong)))


@pytest.mark.parametrize(
    "update",
    [
        Update((rows(1),), epochs={5: 2**24}),
        Update(learned=Learned({}, Horizon(retired=2**24))),
        Update(final=Learned({}, Horizon(retired=2**24))),
    ],
)
def test_an_epoch_beyond_all_shard_maps_is_refused(update: Update) -> None:
    batch = Batch(1, 1, (Piece(("main", 0), 1, update),))
    with pytest.raises(RecordDamaged, match="shard map"):
        received(answer(batch))


@settings(max_examples=400)
@given(st.data())
def test_altered_bytes_are_a_batch_or_refused(data: st.DataObject) -> None:
    body, arrays = reply_of(BATCH, data.draw(st.sampled_from(["float32", "float16", "int8"])))
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    try:
        found = received(Reply(1, bytes(changed), arrays))
    except (RecordDamaged, msgspec.DecodeError):
        return
    assert isinstance(found.batch, Batch)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    block: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
    with suppress(RecordDamaged, msgspec.DecodeError):
        assert isinstance(received(Reply(1, data, (block,))).batch, Batch)


def test_a_piece_is_small() -> None:
    """What an unchanged shard costs is what it takes to say that: nothing."""
    empty = answer(Batch(1, 2, (), (), 1.0, 5))
    assert len(empty.body) + sum(array.nbytes for array in empty.arrays) < 64
    piece = WirePiece("main", 1, 1, b"", 0, [])
    assert len(pack(piece)) < 24
