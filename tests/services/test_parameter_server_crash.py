"""Real parameter servers that are killed while they are pushed to, restarted, and damaged on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest
from support.parameters import (
    ALL_KEYS,
    EVERYTHING,
    SOURCE,
    SPECS,
    Processes,
    client_of,
    make_settings,
    recorded,
    threads,
    undisturbed,
    wait_ready,
)

from services.coordination.sqlite import SqliteCoordination
from services.parameter_server import (
    Applied,
    AsyncParameterClient,
    ParameterClient,
    ParametersUnavailable,
)
from services.parameter_server.storage.recovery import read_records
from sync.records import Delta

SHARDS = 4


class Trainer:
    """Pushes the recorded micro-batches in order, and goes back to what is applied when it must."""

    def __init__(self, client: ParameterClient) -> None:
        self._client = client
        self.next = 0
        self.durable = dict.fromkeys(range(SHARDS), -1)

    def step(self) -> None:
        """One push; afterwards ``next`` is the offset to go on from."""
        offset = self.next
        replies = self._client.push(
            "main", SOURCE, offset, dict.fromkeys(range(SHARDS), offset - 1), 0, None, recorded(offset)
        )
        statuses = {reply.status for reply in replies.values()}
        assert statuses <= {"applied", "duplicate", "gap"}
        for shard, reply in replies.items():
            self._keeps_what_was_durable(shard, Applied(reply.applied, reply.durable, reply.incarnation))
        self.next = min(reply.applied for reply in replies.values()) + 1

    def settle(self) -> bool:
        """Ask how far the shards are, as an idle trainer does; whether there is nothing left to repeat."""
        found = self._client.applied("main", SOURCE)
        for shard, applied in found.items():
            self._keeps_what_was_durable(shard, applied)
        went_on = self.next
        self.next = min(applied.applied for applied in found.values()) + 1
        return self.next == went_on

    def _keeps_what_was_durable(self, shard: int, found: Applied) -> None:
        assert found.durable >= self.durable[shard], "something durable was lost"
        assert found.applied >= found.durable
        self.durable[shard] = found.durable


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path, servers=2, shards=SHARDS, snapshot_s=0.05)
    yield running
    running.close()


def test_killed_servers_end_where_an_undisturbed_run_does(tmp_path: Path, processes: Processes) -> None:
    total = 400
    kills = {60: "parameter-server-0", 150: "parameter-server-1", 300: "parameter-server-0"}
    wait_ready(tmp_path, 2)
    with client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        while trainer.next < total or not trainer.settle():
            if trainer.next in kills:
                name = kills.pop(trainer.next)
                processes.kill(name)
                processes.start(name)
            if trainer.next < total:
                trainer.step()
        assert kills == {}
        assert max(trainer.durable.values()) > 0
        rows = client.pull("main", EVERYTHING).rows
        client.checkpoint()
        assert {found.durable for found in client.applied("main", SOURCE).values()} == {total - 1}
    expected = undisturbed(total)
    for table, values in expected.items():
        assert rows[table].tobytes() == values.tobytes()


def test_what_a_checkpoint_covered_survives_a_kill_without_any_rewind(
    tmp_path: Path, processes: Processes
) -> None:
    with client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for _ in range(5):
            trainer.step()
        client.checkpoint()
        for name in processes.names:
            processes.kill(name)
            processes.start(name)
        assert trainer.settle()
        assert {found.applied for found in client.applied("main", SOURCE).values()} == {4}
        assert client.pull("main", EVERYTHING).rows["items"].tobytes() == undisturbed(5)["items"].tobytes()


def test_a_dead_server_is_an_error_that_names_it_and_a_follower_outlives_it(
    tmp_path: Path, processes: Processes
) -> None:
    async def follow(client: ParameterClient) -> None:
        with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
            aio = AsyncParameterClient(store, deadline_s=20.0)
            async with aclosing(aio.follow("main", ("items",))) as stream:
                incarnations: dict[int, int] = {}
                async for batch in stream:
                    incarnations[batch.shard] = batch.incarnation
                    if len(incarnations) == SHARDS:
                        break
                await asyncio.to_thread(client.checkpoint)
                processes.kill("parameter-server-1")
                with client_of(tmp_path, deadline_s=0.5) as hasty:
                    with pytest.raises(ParametersUnavailable) as caught:
                        await asyncio.to_thread(hasty.pull, "main", {"items": ALL_KEYS})
                    assert caught.value.servers == ("parameter-server-1",)
                processes.start("parameter-server-1")
                again: set[int] = set()
                async for batch in stream:
                    if batch.incarnation != incarnations[batch.shard]:
                        assert batch.restarted
                        again.add(batch.shard)
                    if again == {1, 3}:
                        break
            await aio.close()

    wait_ready(tmp_path, 2)
    with client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        Trainer(client).step()
        asyncio.run(follow(client))


def test_a_damaged_log_costs_only_what_came_after_the_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(tmp_path, servers=1, shards=SHARDS)
    with threads(settings), client_of(tmp_path) as client:
        client.declare("main", SPECS, "fp-1")
        trainer = Trainer(client)
        for steps in (3, 2):
            for _ in range(steps):
                trainer.step()
            client.checkpoint()
    (newest,) = (tmp_path / "parameters" / "parameter-server-0" / "main" / "2-of-4").glob("*.log")
    before = {
        record.progress[0][1].applied: end
        for record, end in read_records(newest)
        if isinstance(record, Delta) and record.progress
    }
    data = bytearray(newest.read_bytes())
    data[before[2] + 100] ^= 1
    newest.write_bytes(data)
    with threads(settings), client_of(tmp_path) as client:
        assert str(newest) in caplog.text
        found = client.applied("main", SOURCE)
        assert {shard: one.applied for shard, one in found.items()} == {0: 4, 1: 4, 2: 2, 3: 4}
        trainer = Trainer(client)
        assert not trainer.settle()
        assert trainer.next == 3
        while trainer.next < 7:
            trainer.step()
        rows = client.pull("main", EVERYTHING).rows
    for table, values in undisturbed(7).items():
        assert rows[table].tobytes() == values.tobytes()


def test_a_terminated_process_saves_everything_and_ends_well(tmp_path: Path) -> None:
    processes = Processes(tmp_path, servers=1, shards=SHARDS, snapshot_s=3_600.0)
    try:
        with client_of(tmp_path) as client:
            client.declare("main", SPECS, "fp-1")
            Trainer(client).step()
            assert processes.terminate("parameter-server-0") == 0
            started = time.monotonic()
            processes.start("parameter-server-0")
            assert {found.durable for found in client.applied("main", SOURCE).values()} == {0}
            assert time.monotonic() - started < 20.0
    finally:
        processes.close()


def test_a_second_process_of_one_name_waits_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from services.parameter_server import main
    from services.parameter_server.storage.snapshots import FolderHeld

    settings = make_settings(tmp_path, servers=1, shards=SHARDS)
    monkeypatch.setattr(main, "LOCK_S", 0.2)
    with threads(settings), pytest.raises(FolderHeld, match="parameter-server-0 is held"):
        main.run(settings, "parameter-server-0", threading.Event())
