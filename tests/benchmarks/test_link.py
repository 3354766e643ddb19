"""The benchmark of emulated links runs, and moves what it says."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks import link


def test_every_row_is_measured_and_the_rate_is_kept() -> None:
    with link._ends() as (direct, links):
        rows = list(link._measure(direct, links, 1, 20, 2_000_000, Console(file=io.StringIO())))
    trips, throughput, far, late, share = rows
    assert trips.ours > 0
    assert trips.peer is not None
    assert throughput.ours > 0
    assert far.ours < 125
    assert late.ours >= 0
    # Slower than the rate it may be on a busy machine, faster never.
    assert 0 < share.ours <= 1
