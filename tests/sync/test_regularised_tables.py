"""Whole tables that clip and decay, with every optimiser: pushes equal the reference, in one shard or many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.clock import HybridClock
from sync.placement import shard_of
from sync.pushes import Push, Source
from sync.reference import ReferenceTable
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, OptimiserKind, TableSpec

Rows = npt.NDArray[np.float32]
KINDS: list[OptimiserKind] = ["sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"]
SPECS = tuple(
    TableSpec(
        f"{kind}-{number}",
        5,
        Initialiser.uniform(0.5),
        Optimiser(kind, 0.2, l1=0.01),
        l2=l2,
        clip=clip,
        guard=0.0,
    )
    for kind in KINDS
    for number, (clip, l2) in enumerate([(0.0, 0.0), (1.5, 0.0), (0.0, 0.3), (1.5, 0.3)])
)
ASKED = np.arange(9, dtype=np.uint64)
PUSHES = st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=8), st.integers(0, 99)), max_size=6)


def make() -> Shard:
    return Shard(0, SPECS, 1, HybridClock(lambda: 1_000))


def push(shard: Shard, offset: int, keys: npt.NDArray[np.uint64], gradients: Rows) -> None:
    parts = tuple((spec.name, keys, gradients) for spec in SPECS)
    assert shard.push(Push(Source("samples", 0), offset, offset - 1, parts=parts)).status == "applied"


@settings(deadline=None, max_examples=40)
@given(pushes=PUSHES, shards=st.integers(2, 4))
def test_pushes_equal_the_reference_in_any_number_of_shards(
    pushes: list[tuple[list[int], int]], shards: int
) -> None:
    one, many = make(), [make() for _ in range(shards)]
    tables = [ReferenceTable(spec) for spec in SPECS]
    for offset, (asked, seed) in enumerate(pushes):
        keys = np.array(asked, np.uint64)
        gradients = np.random.default_rng(seed).standard_normal((len(keys), 5)).astype(np.float32)
        push(one, offset, keys, gradients)
        homes = shard_of(keys, shards)
        for number, shard in enumerate(many):
            push(shard, offset, keys[homes == number], gradients[homes == number])
        for table in tables:
            table.push(keys, gradients, (offset, 1))
    for table in tables:
        expected = table.pull(ASKED)
        assert one.pull(table.spec.name, ASKED).tobytes() == expected.tobytes()
        homes = shard_of(ASKED, shards)
        spread = np.stack(
            [many[homes[at]].pull(table.spec.name, ASKED[at : at + 1])[0] for at in range(len(ASKED))]
        )
        assert spread.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_decay_reaches_the_initial_value_of_a_new_row(kind: OptimiserKind) -> None:
    shard, keys = make(), np.array([3], np.uint64)
    start = shard.pull(f"{kind}-2", keys)
    push(shard, 0, keys, np.full((1, 5), 1e-3, np.float32))
    decayed, plain = shard.pull(f"{kind}-2", keys), shard.pull(f"{kind}-0", keys)
    assert np.abs(decayed).sum() < np.abs(start).sum()
    assert not np.array_equal(decayed - start, plain - start)


def test_clipping_bounds_a_step_of_sgd() -> None:
    shard, keys = make(), np.array([3, 4], np.uint64)
    start = shard.pull("sgd-1", keys)
    push(shard, 0, keys, np.array([[300, 0, 0, 0, 400], [0.3, 0, 0, 0, 0.4]], np.float32))
    moved = np.linalg.norm(shard.pull("sgd-1", keys) - start, axis=1)
    assert moved == pytest.approx([0.2 * 1.5, 0.2 * 0.5], rel=1e-5)
