"""How latency, messages and bytes grow with the number of replicas, in virtual time with the very core.

Regions stay as many; each gets more replicas, which all pull from its leader, or in a tree from each other. All that is
written comes in one push a second, and pulls park for long, so that thousands of replicas run in one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from benchmarks.charges import Constants
from benchmarks.overlays import Way, World
from benchmarks.report import Row
from benchmarks.scale import Plan, Scale

WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """``runs``: replicas of a region, and how many pull from one (0: all from the leader); ``seconds``: of virtual
    time, a few pushes."""

    runs: Sequence[tuple[int, int]] = ((10, 0), (100, 0), (400, 0), (400, 20))
    seconds: float = 6.0
    pushes_a_second: float = 1.0


def measure(
    sizes: Sizes, scale: Scale, constants: Constants, console: Console, seed: int = 0
) -> Iterator[Row]:
    """Rows for each number of replicas."""
    for copies, fan_out in sizes.runs:
        grown = replace(scale, copies=copies, pushes_a_second=sizes.pushes_a_second)
        replicas = grown.regions * copies
        label = f"{replicas:,} replicas" + (f", {fan_out} from each" if fan_out else "")
        overlay = f"a tree of {fan_out} within a region" if fan_out else "all pull from their region's leader"
        console.print(f"sync: {label}")
        began_s = time.monotonic()
        world = World(
            grown,
            Way("grown", fan_out=fan_out),
            Plan(grown, sizes.seconds, seed),
            constants,
            seed=seed,
            wait_s=WAIT_S,
        )
        # The first push finds pulls on their way, and the last one needs time to arrive.
        found = world.run(1.5, sizes.seconds - 1.5, sizes.seconds)
        between, inside = found.between, found.inside
        yield Row(
            f"{label}, in {grown.regions} regions", "s, mean between regions", between.mean_s,
            note=f"p50 {between.p50_s:.3g} s, p99 {between.p99_s:.3g} s, not there {between.unfinished:.1%}; inside "
            f"one mean {inside.mean_s:.3g} s, p99 {inside.p99_s:.3g} s; {time.monotonic() - began_s:.0f} s to run",
        )  # fmt: skip
        yield Row(
            f"{label}: messages a second and replica", "messages/s",
            found.messages_a_second / replicas,
            note=f"{grown.pushes_a_second:g} pushes a second; {overlay}",
        )  # fmt: skip
        yield Row(
            f"{label}: bytes between regions, a real row written", "bytes", found.bytes_an_update,
            note=f"{found.bytes_an_update / replicas:,.1f} a replica; a row has {grown.row_bytes} bytes",
        )  # fmt: skip
