"""The measurement of finding changed rows runs, and every way finds the same."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from benchmarks.finding import Pair, Sizes, measure


def test_every_way_finds_what_changed() -> None:
    pair, generator = Pair(), np.random.default_rng(0)
    for rows in (1_000, 3_000):
        pair.grow(rows)
        changed = pair.change(generator, 37)
        for way in (pair.by_token, pair.by_cache, pair.by_scan, pair.by_comparing):
            assert sorted(way().tolist()) == sorted(changed.tolist())
        pair.level(changed)
        assert len(pair.by_comparing()) == 0


def test_every_row_is_measured() -> None:
    rows = list(measure(Sizes((2_000, 5_000), rounds=1), Console(file=io.StringIO())))
    assert len(rows) == 2 * 4 + 1
    for row in rows:
        assert row.ours > 0
    for unchanged in (rows[3], rows[7]):
        assert unchanged.unit == "bytes"
        assert unchanged.met
    assert all(row.peer is not None for row in rows[:-1])
