"""``serve``: latency and throughput of POST /v1/recommendations while events arrive and the trainer runs.

The load comes from a process of its own: an open loop at 100 requests a second (latency from when a request
was due), then a closed loop for the most that one API process answers. 200 candidates are ranked per request.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.load import Load, Outcome, run_load
from benchmarks.report import Row, at_most
from benchmarks.world import USERS, host_and_port, learned_stack, single_bodies, traffic
from services.demo.stack import Stack

RATE = 100.0
EVENT_RATE = 50.0
AIM_P99_MS = 25.0
_PEER = "Gorse 0.5 (docker run zhenghaoz/gorse-in-one)"


def run(quick: bool, console: Console) -> list[Row]:
    """One group of rows a catalogue size."""
    seconds = 8.0 if quick else 30.0
    rows = []
    for items in (1_682,) if quick else (1_682, 100_000):
        with learned_stack(items, 5_000 if quick else 20_000, console) as stack:
            rows += _measure(stack, items, seconds)
    return rows


def _measure(stack: Stack, items: int, seconds: float) -> list[Row]:
    generator = np.random.default_rng(3)
    bodies = [
        ("/v1/recommendations", msgspec.json.encode({"user_id": f"user-{user}", "n": 10}))
        for user in generator.integers(0, USERS, 2_000).tolist()
    ]
    host, port = host_and_port(stack)
    events = Load(host, port, single_bodies(traffic(items, 2_000, 4)), seconds + 6.0, 8, EVENT_RATE)
    run_load(Load(host, port, bodies, 3.0, 8, RATE))
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run_load, events)
        steady = run_load(Load(host, port, bodies, seconds, 32, RATE))
        training.result()
    most = run_load(Load(host, port, bodies, seconds / 2, 8))
    work = f"recommendations, {items:,} items, {RATE:.0f}/s + {EVENT_RATE:.0f} events/s"
    p50, p99 = steady.percentile(50), steady.percentile(99)
    return [
        Row(f"{work}: p50", "ms", p50, note=_status(steady)),
        Row(f"{work}: p99", "ms", p99, AIM_P99_MS, at_most(AIM_P99_MS, p99), peer_name=_PEER),
        Row(
            f"recommendations, {items:,} items, closed loop",
            "requests/s",
            most.per_second,
            note=_status(most),
        ),
    ]


def _status(outcome: Outcome) -> str:
    failed = {status: count for status, count in outcome.statuses.items() if status >= 300}
    return f"{len(outcome.latency_ms):,} answers" + (f", of them {failed}" if failed else ", all 200")
