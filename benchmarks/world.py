"""Made-up catalogues and traffic of any size for benchmarks, and a stack that has learned from them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from services.backends import open_log
from services.datasets.importer import append_events, wait_processed
from services.demo.stack import Stack, local_stack
from services.events import Event, Interaction, ItemEvent
from services.topics import EVENTS, PROCESSOR_GROUP, SAMPLES, TRAINER_GROUP

CATEGORIES = tuple(f"category-{number}" for number in range(20))
USERS = 1_000
_STALL_S = 120.0


def popularity(items: int) -> NDArray[np.float64]:
    """Zipf's law over ``items`` (exponent 1), summing to one."""
    weights: NDArray[np.float64] = 1.0 / np.arange(1, items + 1)
    weights /= weights.sum()
    return weights


def catalogue(items: int, seed: int) -> Iterator[Event]:
    """``items`` item events with one or two categories and a year each."""
    generator = np.random.default_rng(seed)
    for number in range(items):
        names = generator.choice(CATEGORIES, generator.integers(1, 3), replace=False).tolist()
        yield ItemEvent(f"item-{number}", {"categories": names, "year": int(generator.integers(1960, 2026))})


def traffic(items: int, events: int, seed: int) -> list[Interaction]:
    """``events`` likes of Zipf-popular items by evenly drawn users."""
    generator = np.random.default_rng(seed)
    chosen = generator.choice(items, events, p=popularity(items)).tolist()
    users = generator.integers(0, USERS, events).tolist()
    return [
        Interaction(f"user-{user}", f"item-{item}", "like") for user, item in zip(users, chosen, strict=True)
    ]


def single_bodies(interactions: Sequence[Interaction]) -> list[tuple[str, bytes]]:
    """One request an event."""
    return [("/v1/events", msgspec.json.encode(event)) for event in interactions]


def batch_bodies(interactions: Sequence[Interaction], size: int) -> list[tuple[str, bytes]]:
    """One request for each ``size`` events."""
    return [
        ("/v1/events:batch", msgspec.json.encode({"events": interactions[start : start + size]}))
        for start in range(0, len(interactions) - size + 1, size)
    ]


def wait_learned(stack: Stack) -> None:
    """Return once all accepted events are processed and trained. Raises NotProcessed."""
    log = open_log(stack.settings)
    try:
        for group, topic in ((PROCESSOR_GROUP, EVENTS), (TRAINER_GROUP, SAMPLES)):
            ends = {lag.partition: lag.end for lag in log.lag(group, topic)}
            wait_processed(log, group, topic, ends, timeout_s=_STALL_S)
    finally:
        log.close()


@contextmanager
def learned_stack(
    items: int, events: int, console: Console, overrides: Sequence[str] = ()
) -> Iterator[Stack]:
    """A stack of its own in a temporary folder that has learned ``events`` likes of ``items`` items."""
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        given = ["parameters.generation_interval=5s", *overrides]
        with local_stack(Path(folder), given) as stack:
            started = time.monotonic()
            log = open_log(stack.settings)
            producer = log.producer()
            try:
                for source in (catalogue(items, 1), traffic(items, events, 2)):
                    append_events(
                        source,
                        producer,
                        topic=EVENTS,
                        partitions=stack.settings.log.partitions,
                        now_ms=lambda: time.time_ns() // 1_000_000,
                    )
            finally:
                producer.close()
                log.close()
            wait_learned(stack)
            time.sleep(stack.settings.parameters.generation_interval + 1.0)
            console.print(f"{items:,} items, {events:,} events learned in {time.monotonic() - started:.0f} s")
            yield stack


def host_and_port(stack: Stack) -> tuple[str, int]:
    """Where the stack's API listens."""
    host, port = stack.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)
