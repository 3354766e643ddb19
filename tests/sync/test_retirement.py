"""What a shard holds of writers that are gone, when they are taken out of its vectors."""

from __future__ import annotations

import numpy as np

from sync.records import Delta, Generation, Update
from sync.retirement import as_own, older, out_of_turn
from sync.shard import Shard
from tests.support.replicas import Clock, graves, learned, rows, update

BASE = 1_000_000
EPOCHS = {8: 1, 9: 3}


def holding() -> Shard:
    """A shard that knows writers 8 and 9 up to ``BASE``, and has a row and a grave beyond that of each."""
    shard = Clock().shard(1)
    shard.lead(20, epoch=3)
    shard.merge(update(rows([(1, BASE, 8, 1.0)]), epochs=EPOCHS, known=learned({8: BASE, 9: BASE})))
    shard.merge(update(rows([(2, BASE + 1, 8, 1.0), (3, BASE + 1, 9, 1.0)]), epochs=EPOCHS))
    shard.merge(update(graves([(4, BASE + 2, 8), (5, BASE + 2, 9)]), epochs=EPOCHS))
    return shard


def test_what_came_out_of_turn_of_older_writers_is_found_and_nothing_else() -> None:
    shard = holding()
    assert older(shard, 3) == {8: BASE}
    found, dug, published = out_of_turn(shard, 3)
    assert [part.keys.tolist() for part in found] == [[2]]
    assert [part.keys.tolist() for part in dug] == [[4]]
    assert published == []
    assert out_of_turn(shard, 1) == ([], [], [])


def test_a_generation_that_is_not_known_of_its_writer_is_found() -> None:
    shard = holding()
    one = Generation("dense", 1, np.ones((4, 3), np.float32), BASE + 3, 8)
    shard.merge(Update(generations=(one,), epochs=EPOCHS))
    assert out_of_turn(shard, 3)[2] == [one]


def test_what_is_written_again_has_the_same_values_and_another_version() -> None:
    (part,), (grave,), _ = out_of_turn(holding(), 3)
    again, buried = as_own(part, BASE + 9, 20), as_own(grave, BASE + 9, 20)
    assert (again.keys.tolist(), again.values.tobytes()) == ([2], part.values.tobytes())
    assert (again.time.tolist(), again.writer.tolist()) == ([BASE + 9], [20])
    assert (buried.keys.tolist(), buried.time.tolist(), buried.writer.tolist()) == ([4], [BASE + 9], [20])
    assert (again.time.dtype, again.writer.dtype) == (np.uint64, np.uint32)


def test_a_retirement_makes_it_the_owners_own() -> None:
    shard = holding()
    assert not shard.retire(3, {})
    assert shard.retire(3, {8: BASE})
    time, writer = shard.table("rows").latest(np.array([2, 4, 3, 1], np.uint64))
    assert writer.tolist() == [20, 20, 9, 8]
    assert (time[:2] > BASE + 2).all()
    assert older(shard, 3) == {}
    assert shard.horizon.last == {8: BASE}


def test_the_next_retirement_leaves_alone_what_was_retired_before() -> None:
    """Else each change of owners would write the whole shard again, and send it to every region."""
    shard = holding()
    assert shard.retire(3, {8: BASE})
    shard.lead(21, epoch=5)
    assert [part.keys.tolist() for part in out_of_turn(shard, 5)[0]] == [[3]]
    deltas: list[Delta] = []
    shard.on_delta = deltas.append
    assert shard.retire(5, shard.knowledge)
    assert [part.keys.tolist() for delta in deltas for part in (*delta.rows, *delta.graves)] == [[3], [5]]
    _, writer = shard.table("rows").latest(np.array([1, 2], np.uint64))
    assert writer.tolist() == [8, 20]
