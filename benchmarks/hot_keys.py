"""Hot keys: reads and writes by Zipf's law over several parameter servers, and who of them bears the load.

A call carries draws as they come, the repeats of hot keys included, as from many readers that do not know of each
other. The same calls with evenly drawn keys stand beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.draws import Keys, Zipf, even, gradients, ranges, table
from benchmarks.report import Row
from benchmarks.servers import MODEL, Pusher, parameter_servers
from benchmarks.turns import Block, faced, in_turn
from services.parameter_server.client import ParameterClient

SERVERS: Final = 4
SHARDS: Final = 16
EXPONENT: Final = 1.1
DIM: Final = 32
ASKED: Final = 4_096
EVEN: Final = "evenly drawn keys, in this run"
_TABLE: Final = f"rows-{DIM}"

What = Literal["pulled", "pushed"]
Draw = Callable[[np.random.Generator], Keys]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to read hot keys: what the servers and the client are told beside the usual. ``cached``: rows that the
    client keeps."""

    name: str
    overrides: tuple[str, ...] = ()
    cached: int = 0

    def settings(self) -> tuple[str, ...]:
        """As ``section.key=value``."""
        cache = (f"parameters.cached_rows={self.cached}",) if self.cached else ()
        return (f"parameters.shards={SHARDS}", *self.overrides, *cache)


WAYS: Final = (
    Way("plain"),
    Way("two replicas, any of them read", ("parameters.replicas=2", "parameters.reads=any")),
    Way("client's cache of 65,536, every row asked for", cached=65_536),
    Way("client's cache of 65,536, used for 1 s unasked", ("parameters.cache_age=1s",), cached=65_536),
)
"""Every way is measured on servers of its own."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: a table of ``rows``, read in ``ways``; ``calls`` of ``ASKED`` draws in a block."""

    rows: int
    calls: int
    rounds: int
    ways: Sequence[Way] = WAYS


@dataclass(slots=True)
class _Loads:
    """Rows that each server handled since the last look."""

    client: ParameterClient
    what: What
    _before: dict[str, float]

    @staticmethod
    def of(client: ParameterClient, what: What) -> _Loads:
        return _Loads(client, what, rows_by_server(client, what))

    def look(self) -> dict[str, float]:
        now = rows_by_server(self.client, self.what)
        found = {server: count - self._before.get(server, 0.0) for server, count in now.items()}
        self._before = now
        return found


def measure(sizes: Sizes, folder: Path, console: Console) -> Iterator[Row]:
    """For each way to read: rates of pulls and pushes, and the busiest server's load."""
    for number, way in enumerate(sizes.ways):
        console.print(f"hot keys: {sizes.rows:,} keys on {SERVERS} servers, {way.name}")
        with parameter_servers(folder / str(number), [table(_TABLE, DIM)], SERVERS, way.settings()) as client:
            pusher = Pusher(client)
            for keys in ranges(0, sizes.rows, ASKED):
                pusher.push(_TABLE, keys, gradients(len(keys), DIM))
            yield from _measure(client, pusher, way, sizes)


def _measure(client: ParameterClient, pusher: Pusher, way: Way, sizes: Sizes) -> Iterator[Row]:
    some = gradients(ASKED, DIM)
    zipf = Zipf(sizes.rows, EXPONENT)
    calls: tuple[tuple[str, What, Callable[[Keys], object]], ...] = (
        ("pulls", "pulled", lambda keys: client.pull(MODEL, {_TABLE: keys})),
        ("pushes", "pushed", lambda keys: pusher.push(_TABLE, keys, some)),
    )
    # To a cache of the client pushes are nothing new.
    for name, what, call in calls[:1] if way.cached else calls:
        generator = np.random.default_rng(4)
        loads = _Loads.of(client, what)
        hot: list[dict[str, float]] = []
        flat: list[dict[str, float]] = []
        ours, peer = in_turn(
            [
                _block(call, lambda g: zipf.draw(g, ASKED), generator, sizes.calls, loads, hot),
                _block(call, lambda g: even(g, sizes.rows, ASKED), generator, sizes.calls, loads, flat),
            ],
            sizes.rounds,
        )
        work = (
            f"Zipf {EXPONENT:g} {name} of {ASKED:,} of {sizes.rows:,} keys over {SERVERS} servers, {way.name}"
        )
        yield faced(work, "rows/s", ours, peer, EVEN)
        loaded, usual = busiest(hot), busiest(flat)
        yield Row(
            f"{work}: rows on the busiest server",
            "times the mean",
            loaded,
            peer=usual,
            peer_name=EVEN,
            ratio=usual / loaded,
            note=f"by server: {', '.join(f'{share:.0%}' for share in shares(hot))}; they handled "
            f"{sum(map(total, hot)) / (len(hot) * sizes.calls * ASKED):.0%} of the rows drawn",
        )


def _block(
    call: Callable[[Keys], object],
    draw: Draw,
    generator: np.random.Generator,
    calls: int,
    loads: _Loads,
    found: list[dict[str, float]],
) -> Block:
    def block() -> float:
        asked = [draw(generator) for _ in range(calls)]
        started_s = time.perf_counter()
        for keys in asked:
            call(keys)
        rate = calls * ASKED / (time.perf_counter() - started_s)
        found.append(loads.look())
        return rate

    return block


def shares(loads: list[dict[str, float]]) -> list[float]:
    """Each server's share of all rows, the busiest first."""
    sums = [sum(load[server] for load in loads) for server in loads[0]]
    return sorted((each / max(sum(sums), 1.0) for each in sums), reverse=True)


def total(load: dict[str, float]) -> float:
    """Rows of all servers."""
    return sum(load.values())


def busiest(loads: list[dict[str, float]]) -> float:
    """The busiest server's rows over the mean of all servers."""
    return shares(loads)[0] * len(loads[0])


def rows_by_server(client: ParameterClient, what: What) -> dict[str, float]:
    """Rows ``pulled`` or ``pushed`` since each server started."""
    return {server: rows_in(text, what) for server, text in client.metrics().items()}


def rows_in(metrics: str, what: What) -> float:
    """The rows ``pulled`` or ``pushed`` in one server's metrics, all shards together."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "headwater_parameters_rows_total" and sample.labels["what"] == what
    )
