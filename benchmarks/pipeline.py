"""``pipeline``: events accepted and learned a second, and freshness under load.

Accepted means durable in the log; learned means that the gradients are in the parameter servers. Freshness is
that of marked events among the traffic: from when one was due to be sent until the item index contains it.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from benchmarks.load import Load, Outcome, run_load
from benchmarks.report import Row, at_most
from benchmarks.world import (
    batch_bodies,
    host_and_port,
    learned_stack,
    single_bodies,
    traffic,
    wait_learned,
)
from services.demo.stack import Stack
from services.freshness.measure import Plan, measure
from services.freshness.report import report

ITEMS = 1_682
_PEER = "Gorse 0.5 (docker run zhenghaoz/gorse-in-one)"
_AIM_P99_MS = 1_000.0
_PROBES_PER_S = 20.0


def run(quick: bool, console: Console) -> list[Row]:
    """Freshness at one to three rates first, then throughput, which leaves work behind (offline log)."""
    seconds = 4.0 if quick else 15.0
    rows = []
    with learned_stack(ITEMS, 5_000 if quick else 20_000, console) as stack:
        for rate in (200.0,) if quick else (50.0, 200.0, 1_000.0):
            rows += _freshness(stack, rate, seconds)
            wait_learned(stack)
        rows += [
            _learned(stack, 10_000 if quick else 40_000),
            _accepted(stack, "single posts", single_bodies(traffic(ITEMS, 5_000, 5)), 1, seconds, 3_000.0),
            _accepted(
                stack, "batches of 100", batch_bodies(traffic(ITEMS, 20_000, 6), 100), 100, seconds, 30_000.0
            ),
        ]
    return rows


def _accepted(
    stack: Stack, name: str, bodies: list[tuple[str, bytes]], size: int, seconds: float, aim: float
) -> Row:
    host, port = host_and_port(stack)
    outcome = run_load(Load(host, port, bodies, seconds, 32 if size == 1 else 4))
    wait_learned(stack)
    good = sum(count for status, count in outcome.statuses.items() if status < 300)
    rate = good * size / outcome.seconds
    return Row(
        f"events accepted durably, {name}, pipeline running",
        "events/s",
        rate,
        aim,
        rate >= aim,
        peer_name=_PEER,
        note=f"p99 {outcome.percentile(99):.1f} ms{_refusals(outcome)}",
    )


def _learned(stack: Stack, events: int) -> Row:
    host, port = host_and_port(stack)
    bodies = batch_bodies(traffic(ITEMS, events, 7), 100)
    started = time.monotonic()
    outcome = run_load(Load(host, port, bodies, seconds=1e-3 + len(bodies) / 50.0, connections=4, rate=50.0))
    wait_learned(stack)
    done = len(outcome.latency_ms) * 100
    return Row("from POST to applied update", "events/s", done / (time.monotonic() - started))


def _freshness(stack: Stack, rate: float, seconds: float) -> list[Row]:
    host, port = host_and_port(stack)
    size = 1 if rate <= 200.0 else 10
    likes = traffic(ITEMS, 5_000, 8)
    bodies = single_bodies(likes) if size == 1 else batch_bodies(likes, size)
    load = Load(host, port, bodies, seconds + 3.0, 16, rate / size)
    plan = Plan(stack.url, rate=_PROBES_PER_S, seconds=seconds, kinds=("event",))
    with ThreadPoolExecutor(1) as pool:
        background = pool.submit(run_load, load)
        time.sleep(2.0)
        found = report(measure(plan, (), lambda _n: None))
        outcome = background.result()
    row = found.row("event", found.home, "recommendations")
    assert row is not None, "every kind that is sent has a row for each stage"
    # A probe that never became visible is as late as can be, and p99 must not pass without it.
    p50, p99 = (row.ms.p50_ms, row.ms.p99_ms) if row.ms and not row.missing else (float("inf"),) * 2
    work = f"freshness, {rate:,.0f} events/s"
    sent = len(outcome.latency_ms) * size / outcome.seconds
    note = f"{row.sent} probes, {row.missing} of them never seen, {sent:,.0f} events/s arrived{_refusals(outcome)}"
    aimed = rate == 200.0
    return [
        Row(f"{work}: p50", "ms", p50, note=note),
        Row(
            f"{work}: p99",
            "ms",
            p99,
            _AIM_P99_MS if aimed else None,
            at_most(_AIM_P99_MS, p99) if aimed else None,
        ),
    ]


def _refusals(outcome: Outcome) -> str:
    refused = {status: count for status, count in outcome.statuses.items() if status >= 300}
    return f", refused {refused}" if refused else ""
