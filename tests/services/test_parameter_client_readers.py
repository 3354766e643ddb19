"""Reads from any replica: evenly spread, away from servers that fail, true about their age; with real servers, too."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.parameters import EVERYTHING, SOURCE, SPECS, Processes, recorded, wait_ready
from support.service_process import eventually

from models.samples import Watermark
from services.coordination.shardmap import Place, ShardMap, assign
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server.client import AsyncParameterClient, ParameterClient
from services.parameter_server.client.readers import AVOID_S, Readers, Reading
from services.parameter_server.types import ParametersUnavailable, Pulled

ANY = Reading("any")
NAMES = ("a", "b", "c", "d")
SHARDS = 4


def readers(now: list[float]) -> Readers:
    return Readers(lambda: now[0], random.Random(3).shuffle)


class TestReaders:
    def test_every_replica_of_a_shard_gets_its_share(self) -> None:
        some, shards = readers([0.0]), assign(NAMES, 8, 3)
        counts: Counter[tuple[int, str]] = Counter()
        for _ in range(3_000):
            counts.update(enumerate(some.choose(shards, NAMES).servers))
        for shard, place in enumerate(shards.places):
            for name in NAMES:
                wanted = 1_000 if name in place.replicas else 0
                assert abs(counts[shard, name] - wanted) < 150

    def test_few_servers_are_asked_at_once(self) -> None:
        some, shards = readers([0.0]), assign(NAMES, 8, 3)
        assert max(len(set(some.choose(shards, NAMES).servers)) for _ in range(100)) == 2

    def test_who_failed_is_avoided_for_a_while(self) -> None:
        now = [0.0]
        some, shards = readers(now), assign(NAMES, 8, 2)
        some.avoid("b")
        for _ in range(50):
            choice = some.choose(shards, NAMES)
            assert "b" not in choice.servers
            # Shards that b holds have one replica left, so that one is asked with patience.
            for place, server in zip(shards.places, choice.servers, strict=True):
                assert not ("b" in place.replicas and server in choice.spared)
        now[0] = AVOID_S
        assert any("b" in some.choose(shards, NAMES).servers for _ in range(50))

    def test_a_leader_is_asked_where_nobody_else_is_left(self) -> None:
        some, shards = readers([0.0]), assign(NAMES, 8, 2)
        for name in NAMES:
            some.avoid(name)
        choice = some.choose(shards, NAMES)
        assert choice.servers == shards.servers
        assert choice.spared == frozenset()
        assert readers([0.0]).choose(shards, ()).servers == shards.servers

    def test_a_server_is_spared_only_where_others_hold_all_that_it_is_asked_for(self) -> None:
        shards = ShardMap(1, (Place("a", ("a", "b")), Place("a", ("a",))))
        for _ in range(20):
            choice = readers([0.0]).choose(shards, NAMES)
            assert choice.servers[1] == "a"
            assert "a" not in choice.spared


@contextmanager
def servers(folder: Path, count: int, replicas: int) -> Iterator[Processes]:
    running = Processes(folder, count, SHARDS, 60.0, replicas)
    try:
        wait_ready(folder, count)
        yield running
    finally:
        running.close()


@contextmanager
def client_of(folder: Path, reading: Reading = ANY, deadline_s: float = 10.0) -> Iterator[ParameterClient]:
    with (
        closing(SqliteCoordination(folder / "coordination.db")) as store,
        closing(ParameterClient(store, deadline_s=deadline_s, reading=reading)) as client,
    ):
        yield client


def push(client: ParameterClient, offset: int) -> None:
    before = dict.fromkeys(range(SHARDS), offset - 1)
    mark = Watermark("events", 0, offset, 1_000 + offset)
    replies = client.push("main", SOURCE, offset, before, 0, mark, recorded(offset))
    assert {reply.status for reply in replies.values()} == {"applied"}


def rows_pulled(client: ParameterClient) -> dict[str, float]:
    """By server, how many rows it gave away."""
    return {
        server: sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("headwater_parameters_rows_total") and 'what="pulled"' in line
        )
        for server, text in client.metrics().items()
    }


def caught_up(client: ParameterClient, offset: int) -> bool:
    """Whether every replica has it: several reads in turn tell."""
    return all(
        (mark := client.pull("main", EVERYTHING).watermarks.get(("events", 0))) and mark.offset == offset
        for _ in range(8)
    )


@pytest.mark.parametrize("reading", [ANY, Reading("any", 64)], ids=["plain", "cached"])
def test_followers_answer_and_reads_go_on_when_one_is_killed(tmp_path: Path, reading: Reading) -> None:
    with servers(tmp_path, 3, 3) as processes, client_of(tmp_path, reading) as client:
        client.declare("main", SPECS, "fp-1")
        for offset in range(5):
            push(client, offset)
        eventually(lambda: caught_up(client, 4))
        truth = client.pull("main", EVERYTHING, followers=False)
        before = rows_pulled(client)
        for _ in range(30):
            found = client.pull("main", EVERYTHING)
            assert found.rows["items"].tobytes() == truth.rows["items"].tobytes()
            assert found.moves == {}
        if not reading.cached_rows:
            gave = {name: count - before[name] for name, count in rows_pulled(client).items()}
            assert min(gave.values()) > 0.1 * sum(gave.values()), gave
        processes.kill(processes.names[1])
        longest_s = 0.0
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            started = time.monotonic()
            found = client.pull("main", EVERYTHING)
            longest_s = max(longest_s, time.monotonic() - started)
            assert found.rows["items"].tobytes() == truth.rows["items"].tobytes()
            assert found.watermarks == truth.watermarks
            time.sleep(0.005)
        assert longest_s < 1.5, "another replica answers long before the dead one is replaced"


def test_reads_never_claim_more_than_their_rows_contain(tmp_path: Path) -> None:
    """A reader and a trainer at once: a read at watermark n holds what n pushes made, at least of what it asks."""
    snapshots: dict[int, bytes] = {}
    found: list[Pulled] = []
    done = threading.Event()
    with servers(tmp_path, 3, 3), client_of(tmp_path) as reader, client_of(tmp_path) as trainer:
        trainer.declare("main", SPECS, "fp-1")
        push(trainer, 0)

        def read() -> None:
            while not done.is_set():
                found.append(reader.pull("main", {"dense": EVERYTHING["dense"]}))

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for offset in range(1, 120):
                push(trainer, offset)
                rows = trainer.pull("main", {"dense": EVERYTHING["dense"]}, followers=False).rows
                snapshots[offset] = rows["dense"].tobytes()
        finally:
            done.set()
            thread.join()
    numbers = {rows: offset for offset, rows in snapshots.items()}
    checked = 0
    for pulled in found:
        # Rows that match no snapshot were read before offset 1.
        contained = numbers.get(pulled.rows["dense"].tobytes(), 0)
        if mark := pulled.watermarks.get(("events", 0)):
            assert mark.offset <= contained
            checked += mark.offset > 0
    assert checked > 20


def test_a_server_that_holds_no_copy_is_passed_over(tmp_path: Path) -> None:
    with servers(tmp_path, 3, 2) as processes, client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        for offset in range(3):
            push(client, offset)
        eventually(lambda: caught_up(client, 2))
        truth = client.pull("main", EVERYTHING, followers=False)
        known = client._directory.map()
        # The client believes that all servers hold all shards; a third of them answer that they do not.
        places = tuple(replace(place, replicas=processes.names) for place in known.places)
        refused = 0
        for _ in range(20):
            client._directory._map = ShardMap(known.epoch, places)
            client._pulls.readers._avoided.clear()
            found = client.pull("main", EVERYTHING)
            assert found.rows["items"].tobytes() == truth.rows["items"].tobytes()
            refused += bool(client._pulls.readers._avoided)
        assert refused > 5


def test_the_asyncio_client_reads_from_followers_too(tmp_path: Path) -> None:
    with servers(tmp_path, 3, 3) as processes, client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        for offset in range(3):
            push(client, offset)
        eventually(lambda: caught_up(client, 2))
        truth = client.pull("main", EVERYTHING, followers=False)

        async def read() -> float:
            with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
                aio = AsyncParameterClient(store, deadline_s=10.0, reading=Reading("any", 256))
                longest_s = 0.0
                for number in range(200):
                    if number == 50:
                        await asyncio.to_thread(processes.kill, processes.names[2])
                    started = time.monotonic()
                    several = await asyncio.gather(*(aio.pull("main", EVERYTHING) for _ in range(3)))
                    longest_s = max(longest_s, time.monotonic() - started)
                    for found in several:
                        assert found.rows["items"].tobytes() == truth.rows["items"].tobytes()
                        assert found.watermarks == truth.watermarks
                assert aio.cached.unchanged_total > 0
                for name in processes.names[:2]:
                    await asyncio.to_thread(processes.kill, name)
                with pytest.raises(ParametersUnavailable):
                    await aio.pull("main", EVERYTHING, deadline_s=1.0)
                await aio.close()
                return longest_s

        assert asyncio.run(read()) < 1.5
