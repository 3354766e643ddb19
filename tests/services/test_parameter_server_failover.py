"""Real parameter servers that replicate, are killed, come back, and hand shards over."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.parameters import (
    EVERYTHING,
    SOURCE,
    SPECS,
    Processes,
    client_of,
    recorded,
    undisturbed,
    wait_ready,
)
from support.service_process import eventually

from services.coordination.shardmap import ShardMap, change_shard_map, read_shard_map
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server import IncarnationChanged, ParameterClient
from services.parameter_server.replication.election import Replication

SHARDS = 2


@contextmanager
def servers(folder: Path, count: int, replicas: int, replication: Replication) -> Iterator[Processes]:
    running = Processes(folder, count, SHARDS, 60.0, replicas, replication)
    try:
        wait_ready(folder, count)
        yield running
    finally:
        running.close()


class Trainer:
    """Pushes the recorded micro-batches as fast as they are acknowledged; remembers what was, and the longest wait."""

    def __init__(self, client: ParameterClient) -> None:
        self._client = client
        self.acknowledged = -1
        self.lost = 0
        self.longest_s = 0.0

    def step(self) -> None:
        started = time.monotonic()
        while True:
            found = self._client.applied("main", SOURCE)
            applied = min(one.applied for one in found.values())
            self.lost = max(self.lost, self.acknowledged - applied)
            offset = applied + 1
            try:
                replies = self._client.push(
                    "main",
                    SOURCE,
                    offset,
                    {shard: min(one.applied, offset - 1) for shard, one in found.items()},
                    0,
                    None,
                    recorded(offset),
                    incarnations={shard: one.incarnation for shard, one in found.items()},
                )
            except IncarnationChanged:
                continue
            if all(reply.applied >= offset for reply in replies.values()):
                break
        self.acknowledged = max(self.acknowledged, offset)
        self.longest_s = max(self.longest_s, time.monotonic() - started)


def shard_map(folder: Path) -> ShardMap:
    with closing(SqliteCoordination(folder / "coordination.db")) as store:
        found = read_shard_map(store)
    assert found is not None
    return found


def behind(client: ParameterClient) -> list[float]:
    """How many steps each follower lacks, as the leaders say."""
    told = "\n".join(client.metrics().values())
    pattern = r"^headwater_parameters_follower_steps_behind\{.*\} (\S+)$"
    return [float(steps) for steps in re.findall(pattern, told, re.MULTILINE)]


def in_step(folder: Path, client: ParameterClient, server: str) -> bool:
    """Whether ``server`` follows again, and nobody lacks anything."""
    if any(place.chain and server not in place.chain for place in shard_map(folder).places):
        return False
    # Who leads a chain hears of all in it by the one behind.
    told = "\n".join(client.metrics().values())
    heard = shard_map(folder).chained or told.count(f'steps_behind{{server="{server}"') > 0
    return heard and set(behind(client)) == {0.0}


@pytest.mark.parametrize("replication", ["quorum", "chain"])
def test_a_killed_leader_loses_nothing_acknowledged_and_comes_back_as_a_follower(
    tmp_path: Path, replication: Replication
) -> None:
    with servers(tmp_path, 3, 3, replication) as processes, client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for _ in range(40):
            trainer.step()
        victim = shard_map(tmp_path).places[0].leader
        processes.kill(victim)
        for _ in range(40):
            trainer.step()
        assert trainer.lost == 0
        assert shard_map(tmp_path).places[0].leader != victim
        processes.start(victim)
        for _ in range(20):
            trainer.step()
        eventually(lambda: in_step(tmp_path, client, victim))
        # Whoever leads now, the one that was away holds everything: it can take over.
        leader = shard_map(tmp_path).places[0].leader
        processes.kill(leader)
        for _ in range(20):
            trainer.step()
        assert trainer.lost == 0
        rows = client.pull("main", EVERYTHING).rows
        total = trainer.acknowledged + 1
    for table, values in undisturbed(total).items():
        assert rows[table].tobytes() == values.tobytes()


@pytest.mark.parametrize("replication", ["quorum", "chain"])
def test_a_leader_paused_for_longer_than_its_lease_follows_when_it_goes_on(
    tmp_path: Path, replication: Replication
) -> None:
    with servers(tmp_path, 3, 3, replication) as processes, client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for _ in range(20):
            trainer.step()
        zombie = shard_map(tmp_path).places[0].leader
        processes.pause(zombie)
        for _ in range(20):
            trainer.step()
        assert shard_map(tmp_path).places[0].leader != zombie
        processes.resume(zombie)
        for _ in range(20):
            trainer.step()
        eventually(lambda: in_step(tmp_path, client, zombie))
        assert trainer.lost == 0
        rows = client.pull("main", EVERYTHING).rows
        total = trainer.acknowledged + 1
    for table, values in undisturbed(total).items():
        assert rows[table].tobytes() == values.tobytes()


@pytest.mark.parametrize("replication", ["quorum", "chain"])
def test_servers_that_are_all_killed_at_once_go_on_from_their_disks_also_where_one_disk_is_gone(
    tmp_path: Path, replication: Replication
) -> None:
    with servers(tmp_path, 3, 3, replication) as processes, client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for _ in range(30):
            trainer.step()
        client.checkpoint(10.0)
        for name in processes.names:
            processes.kill(name)
        shutil.rmtree(tmp_path / "parameters" / processes.names[1])
        for name in processes.names:
            processes.start(name)
        for _ in range(20):
            trainer.step()
        assert trainer.lost == 0
        eventually(lambda: in_step(tmp_path, client, processes.names[1]))
        rows = client.pull("main", EVERYTHING).rows
        total = trainer.acknowledged + 1
    for table, values in undisturbed(total).items():
        assert rows[table].tobytes() == values.tobytes()


def test_async_loses_little_and_trainers_send_it_again(tmp_path: Path) -> None:
    with servers(tmp_path, 2, 2, "async") as processes, client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for _ in range(60):
            trainer.step()
        victim = shard_map(tmp_path).places[0].leader
        processes.kill(victim)
        for _ in range(40):
            trainer.step()
        assert trainer.lost < 30
        processes.start(victim)
        eventually(lambda: in_step(tmp_path, client, victim))
        rows = client.pull("main", EVERYTHING).rows
        total = trainer.acknowledged + 1
    for table, values in undisturbed(total).items():
        assert rows[table].tobytes() == values.tobytes()


def test_a_shard_moves_between_live_servers_while_trainers_push_and_readers_pull(tmp_path: Path) -> None:
    with servers(tmp_path, 2, 1, "async"), client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for _ in range(20):
            trainer.step()
        stop = threading.Event()
        longest: list[float] = []

        def read() -> None:
            slowest = 0.0
            with client_of(tmp_path) as reader:
                while not stop.is_set():
                    started = time.monotonic()
                    reader.pull("main", EVERYTHING)
                    slowest = max(slowest, time.monotonic() - started)
            longest.append(slowest)

        reader = threading.Thread(target=read)
        reader.start()
        trainer.longest_s = 0.0
        names = [f"parameter-server-{n}" for n in range(2)]
        try:
            for move in range(6):
                to = names[(names.index(shard_map(tmp_path).places[move % SHARDS].leader) + 1) % 2]
                with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
                    change_shard_map(store, lambda now, m=move, to=to: now.change({}, {m % SHARDS: to}))  # type: ignore[misc]
                until = time.monotonic() + 20
                while shard_map(tmp_path).places[move % SHARDS].leader != to:
                    assert time.monotonic() < until, "the shard did not move"
                    trainer.step()
        finally:
            stop.set()
            reader.join()
        for _ in range(10):
            trainer.step()
        assert trainer.lost == 0
        rows = client.pull("main", EVERYTHING).rows
        total = trainer.acknowledged + 1
    for table, values in undisturbed(total).items():
        assert rows[table].tobytes() == values.tobytes()
    print(f"longest push {trainer.longest_s:.3f} s, longest pull {longest[0]:.3f} s")
