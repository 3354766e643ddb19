"""The measured part of ``sync``: what is seen when, and a small run with real processes."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import precision, regions
from benchmarks.region_watch import Numbered, Seen, latencies_ms
from services.datasets.generated import generate
from services.parameter_server.types import Mark
from sync.quantise import Precision

QUIET = Console(file=io.StringIO())


def test_a_push_is_seen_once_all_shards_have_it() -> None:
    seen = Seen()
    seen.note(0, Mark(3, 0), 2)
    assert seen.at_s == []
    seen.note(1, None, 2)
    assert seen.at_s == []
    seen.note(1, Mark(1, 0), 2)
    assert len(seen.at_s) == 2
    first = list(seen.at_s)
    # An older mark takes nothing back, and what was seen was seen then.
    seen.note(1, Mark(0, 0), 2)
    seen.note(1, Mark(7, 0), 2)
    assert len(seen.at_s) == 4
    assert seen.at_s[:2] == first


def test_latencies_count_from_when_a_push_was_due_and_what_is_unseen_is_infinitely_late() -> None:
    pushes = Numbered(due_s=[10.0, 11.0, 12.0, 13.0])
    seen = Seen(at_s=[10.5, 11.25, 12.125])
    assert latencies_ms(pushes, seen, 1, 4).tolist() == [250.0, 125.0, np.inf]


@pytest.mark.parametrize(("kind", "least"), [("float32", 148), ("float16", 84), ("int8", 60)])
def test_rows_take_what_their_values_take_and_a_little(kind: Precision, least: int) -> None:
    values = np.random.default_rng(1).normal(size=(1_000, precision.DIM)).astype(np.float32)
    assert least <= precision.wire_bytes(values, kind) < least + 1


def test_factors_tell_what_was_watched_from_what_was_not() -> None:
    dataset = generate(users=60, items=200, interactions=2_400)
    users, items = precision.factors(dataset, 3)
    scores = users @ items.T
    watched = np.zeros_like(scores, dtype=bool)
    watched[dataset.interactions.user, dataset.interactions.item] = True
    assert scores[watched].mean() > scores[~watched].mean() + 0.3


@pytest.mark.timeout(180)
def test_three_regions_of_processes_are_measured(tmp_path: Path) -> None:
    rate = regions.Rate(1_000, 50, 1.0)
    sizes = regions.Sizes(3_000, (rate,), rate, reads_s=0.3, reads_per_s=50.0)
    rows = {row.work: row for row in regions.measure(sizes, tmp_path, QUIET)}
    latencies = [row for row in rows.values() if row.unit == "ms"]
    assert len(latencies) == 8
    assert all(0.0 < row.ours < 60_000.0 for row in latencies)
    far = next(row for work, row in rows.items() if "far region (delay" in work)
    assert far.ours > 1e3 * regions.DELAY_S
    assert far.aim == regions.FAR_MS
    (caught,) = (row for row in rows.values() if row.unit == "s")
    assert caught.ours > 0.0
    (size,) = (row for row in rows.values() if row.unit == "bytes")
    assert size.ours > 20 + 4 * regions.DIM


@pytest.mark.timeout(120)
def test_less_precision_takes_less_of_a_slow_link(tmp_path: Path) -> None:
    sizes = precision.Sizes(rounds=1, rows=2_000, rows_s=200, each=20, seconds=1.0)
    rows = list(precision._freshness(sizes, tmp_path))
    assert [row.work.split()[3] for row in rows] == list(precision.PRECISIONS)
    assert all(80.0 < row.ours < 60_000.0 for row in rows)
    used = [float(row.note.split("; ")[1].split()[0]) for row in rows]
    assert used[0] > used[1] > used[2]
