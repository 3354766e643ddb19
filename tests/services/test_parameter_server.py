"""Parameter servers and their clients over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.parameters import (
    ALL_KEYS,
    CHUNK,
    CHUNKS,
    DIM,
    EVERYTHING,
    SOURCE,
    SPECS,
    Fleet,
    a_key_of,
    client_of,
    gradients,
    make_settings,
    recorded,
    threads,
)
from support.service_process import eventually

from models.samples import Watermark
from services.coordination import Member, Registration
from services.coordination.shardmap import change_shard_map, settle_shard_map
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server import (
    AsyncParameterClient,
    IncarnationChanged,
    Mark,
    ModelMismatch,
    ModelUnknown,
    ParameterClient,
    ParametersRefused,
    ParametersUnavailable,
    PushReply,
    ShardChanges,
)
from services.parameter_server.client import operations
from services.parameter_server.client.directory import SERVICE
from services.parameter_server.main import run
from services.rpc import RpcServer

SHARDS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two servers that all tests of this module share; each test uses a model of its own."""
    where = tmp_path_factory.mktemp("parameters")
    with threads(make_settings(where, servers=2, shards=SHARDS)):
        yield where


@pytest.fixture
def client(folder: Path) -> Iterator[ParameterClient]:
    with client_of(folder) as opened:
        yield opened


@pytest.fixture
def model(client: ParameterClient, request: pytest.FixtureRequest) -> str:
    name = f"m{abs(hash(request.node.name)) % 10**9}"
    client.declare(name, SPECS, "fp-1")
    return name


def push(
    client: ParameterClient, model: str, offset: int, mark: Watermark | None = None
) -> dict[int, PushReply]:
    predecessors = dict.fromkeys(range(SHARDS), offset - 1)
    return client.push(model, SOURCE, offset, predecessors, 1_000, mark, recorded(offset))


class TestBlocking:
    def test_pushes_over_the_network_give_what_they_give_without_one(
        self, client: ParameterClient, model: str
    ) -> None:
        fleet = Fleet()
        for offset in range(5):
            replies = push(client, model, offset)
            durable = {shard: reply.durable for shard, reply in replies.items()}
            assert all(-1 <= at <= offset for at in durable.values())
            assert [(s, r.status, r.applied, r.durable) for s, r in replies.items()] == [
                (shard, "applied", offset, durable[shard]) for shard in range(SHARDS)
            ]
            fleet.ask(operations.push(fleet.route, gradients(offset, recorded(offset), 1)))
        expected = fleet.ask(operations.pull(fleet.route, EVERYTHING)).rows
        found = client.pull(model, EVERYTHING).rows
        for table, rows in expected.items():
            np.testing.assert_array_equal(found[table], rows)

    def test_initial_values_are_the_same_everywhere(self, client: ParameterClient, model: str) -> None:
        fleet = Fleet()
        expected = fleet.ask(operations.pull(fleet.route, {"items": ALL_KEYS})).rows["items"]
        np.testing.assert_array_equal(client.pull(model, {"items": ALL_KEYS}).rows["items"], expected)

    def test_watermarks_come_with_pulls(self, client: ParameterClient, model: str) -> None:
        assert client.pull(model, {}).watermarks == {}
        push(client, model, 0, Watermark("events", 3, 50, 9_000))
        assert client.pull(model, EVERYTHING).watermarks == {("events", 3): Mark(50, 9_000)}

    def test_a_checkpoint_makes_everything_durable(self, client: ParameterClient, model: str) -> None:
        push(client, model, 0)
        client.checkpoint()
        assert {(r.applied, r.durable) for r in client.applied(model, SOURCE).values()} == {(0, 0)}

    def test_dense_generations(self, client: ParameterClient, model: str) -> None:
        assert client.dense(model).generation == 0
        push(client, model, 0)
        first = client.dense(model)
        assert first.generation == 1
        assert first.values.shape == (CHUNKS, CHUNK)
        push(client, model, 1)
        assert client.publish(model) == 2
        np.testing.assert_array_equal(client.dense(model).values, client.dense(model, published=False).values)

    def test_another_declaration_is_a_mismatch(self, client: ParameterClient, model: str) -> None:
        client.declare(model, SPECS, "fp-1")
        with pytest.raises(ModelMismatch, match="fp-1 was declared, this one is fp-9"):
            client.declare(model, SPECS, "fp-9")

    def test_an_undeclared_model_is_unknown(self, client: ParameterClient) -> None:
        with pytest.raises(ModelUnknown, match="model nobody is not declared"):
            client.pull("nobody", {})

    def test_a_server_that_missed_the_declaration_is_told(
        self, client: ParameterClient, folder: Path
    ) -> None:
        from services.parameter_server.declarations import Declaration, settle_declaration

        with closing(SqliteCoordination(folder / "coordination.db")) as store:
            settle_declaration(store, Declaration("missed", "fp-1", SPECS))
        assert client.pull("missed", {"items": ALL_KEYS}).rows["items"].shape == (len(ALL_KEYS), DIM)

    def test_bad_keys_are_refused(self, client: ParameterClient, model: str) -> None:
        with pytest.raises(ParametersRefused, match="not below its 3 rows"):
            client.pull(model, {"dense": np.array([CHUNKS], np.uint64)})
        with pytest.raises(ParametersRefused, match="no table 'nothing'"):
            client.pull(model, {"nothing": ALL_KEYS})

    def test_an_old_incarnation_is_told_of_the_new(self, client: ParameterClient, model: str) -> None:
        incarnations = {shard: r.incarnation for shard, r in push(client, model, 0).items()}
        predecessors = dict.fromkeys(range(SHARDS), 0)
        wrong = {shard: number + 1_000 for shard, number in incarnations.items()}
        with pytest.raises(IncarnationChanged):
            client.push(model, SOURCE, 1, predecessors, 0, None, {}, incarnations=wrong)
        assert {r.applied for r in client.applied(model, SOURCE).values()} == {0}
        replies = client.push(model, SOURCE, 1, predecessors, 0, None, {}, incarnations=incarnations)
        assert {r.status for r in replies.values()} == {"applied"}

    def test_servers_describe_and_measure_themselves(self, client: ParameterClient, model: str) -> None:
        push(client, model, 0)
        servers = client.describe()
        assert [server.name for server in servers] == ["parameter-server-0", "parameter-server-1"]
        assert sorted(shard for server in servers for shard in server.shards) == list(range(SHARDS))
        assert {server.fingerprints[model] for server in servers} == {"fp-1"}
        rows = sum(
            table.rows for server in servers for table in server.models[model] if table.name == "items"
        )
        assert rows == len(np.unique(recorded(0)["items"][0]))
        text = "".join(client.metrics().values())
        assert text.count(f'headwater_parameters_pushes_total{{model="{model}"') == 5 * SHARDS
        assert 'status="applied"} 1.0' in text
        assert "headwater_parameters_messages_received_total" in text

    def test_shards_come_from_the_map(self, client: ParameterClient) -> None:
        assert client.shards == SHARDS


class TestUnavailable:
    def test_the_deadline_is_an_error_that_names_the_server(self, tmp_path: Path) -> None:
        silent = RpcServer("127.0.0.1:0")
        with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
            from services.parameter_server.declarations import Declaration, settle_declaration

            settle_shard_map(store, ["silent-one", "absent-one"], 2)
            settle_declaration(store, Declaration("main", "fp", SPECS))
            member = Member("silent-one", SERVICE, f"127.0.0.1:{silent.port}", 1, 1, 0, True)
            with Registration(store, member, 5.0), client_of(tmp_path, deadline_s=0.4) as client:
                started = time.monotonic()
                with pytest.raises(ParametersUnavailable, match=r"absent-one, silent-one") as caught:
                    client.pull("main", EVERYTHING)
                assert 0.3 < time.monotonic() - started < 3.0
                assert caught.value.servers == ("absent-one", "silent-one")
        silent.close()

    def test_without_any_server_the_deadline_says_so(self, tmp_path: Path) -> None:
        missing = pytest.raises(ParametersUnavailable, match="no parameter server is registered")
        with client_of(tmp_path, deadline_s=0.2) as client, missing:
            client.describe()

    def test_a_server_without_shards_is_spare_until_one_moves_to_it(self, tmp_path: Path) -> None:
        with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
            settle_shard_map(store, ["parameter-server-0"], SHARDS)
            with threads(make_settings(tmp_path, 2, SHARDS)), client_of(tmp_path) as client:
                client.declare("main", SPECS, "fp-1")
                for offset in range(3):
                    push(client, "main", offset)
                before = client.pull("main", EVERYTHING).rows
                assert [d.shards for d in client.describe()] == [(0, 1, 2, 3), ()]
                change_shard_map(store, lambda now: now.change({}, {1: "parameter-server-1"}))
                eventually(lambda: [d.shards for d in client.describe()] == [(0, 2, 3), (1,)])
                after = client.pull("main", EVERYTHING).rows
                assert all(after[name].tobytes() == before[name].tobytes() for name in before)
                assert {r.status for r in push(client, "main", 2).values()} == {"duplicate"}
                assert {r.status for r in push(client, "main", 3).values()} == {"applied"}

    def test_a_server_that_waits_for_others_can_be_stopped(self, tmp_path: Path) -> None:
        stop = threading.Event()
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        run(make_settings(tmp_path, servers=2, shards=2), "parameter-server-0", stop)
        timer.join()


async def first(stream: AsyncIterator[ShardChanges], count: int) -> list[ShardChanges]:
    found = []
    async for batch in stream:
        found.append(batch)
        if len(found) == count:
            break
    return found


class TestAsyncio:
    def run(self, folder: Path, test: Callable[[AsyncParameterClient], Awaitable[None]]) -> None:
        async def main() -> None:
            with closing(SqliteCoordination(folder / "coordination.db")) as store:
                client = AsyncParameterClient(store, deadline_s=10.0)
                try:
                    await test(client)
                finally:
                    await client.close()

        asyncio.run(main())

    def test_pull_and_dense_agree_with_the_blocking_client(
        self, folder: Path, client: ParameterClient, model: str
    ) -> None:
        push(client, model, 0, Watermark("events", 0, 7, 70))

        async def test(aio: AsyncParameterClient) -> None:
            pulled, many = await aio.pull(model, EVERYTHING), client.pull(model, EVERYTHING)
            for table, rows in many.rows.items():
                np.testing.assert_array_equal(pulled.rows[table], rows)
            assert pulled.watermarks == many.watermarks == {("events", 0): Mark(7, 70)}
            dense = await aio.dense(model)
            np.testing.assert_array_equal(dense.values, client.dense(model).values)
            assert [server.name for server in await aio.describe()] == [
                "parameter-server-0",
                "parameter-server-1",
            ]
            assert set(await aio.metrics()) == {"parameter-server-0", "parameter-server-1"}
            with pytest.raises(ModelUnknown):
                await aio.pull("nobody", {})
            with pytest.raises(ParametersRefused):
                await aio.pull(model, {"dense": np.array([99], np.uint64)})

        self.run(folder, test)

    def test_following_starts_with_everything_and_goes_on_with_changes(
        self, folder: Path, client: ParameterClient, model: str
    ) -> None:
        push(client, model, 0)

        async def test(aio: AsyncParameterClient) -> None:
            seen: dict[int, np.ndarray] = {}
            marks: dict[int, Mark | None] = {}
            async with aclosing(aio.follow(model, ("items",))) as stream:
                for batch in await first(stream, SHARDS):
                    assert batch.restarted
                    assert batch.complete
                    assert batch.shards == SHARDS
                    for keys, rows in batch.parts.values():
                        seen.update(zip(keys.tolist(), rows, strict=True))
                assert sorted(seen) == np.unique(recorded(0)["items"][0]).tolist()
                for offset in range(1, 6):
                    mark = Watermark("events", 0, 10 * offset, 1)
                    await asyncio.to_thread(push, client, model, offset, mark)
                async for batch in stream:
                    assert not batch.restarted
                    for keys, rows in batch.parts.values():
                        seen.update(zip(keys.tolist(), rows, strict=True))
                    marks[batch.shard] = batch.watermarks.get(("events", 0))
                    if list(marks.values()) == [Mark(50, 1)] * SHARDS:
                        break
            keys = np.array(sorted(seen), np.uint64)
            rows = client.pull(model, {"items": keys}).rows["items"]
            np.testing.assert_array_equal(np.stack([seen[key] for key in keys.tolist()]), rows)

        self.run(folder, test)

    def test_a_parked_poll_wakes_within_milliseconds(
        self, folder: Path, client: ParameterClient, model: str
    ) -> None:
        key = a_key_of(1, SHARDS)

        async def test(aio: AsyncParameterClient) -> None:
            waits: list[float] = []
            async with aclosing(aio.follow(model, ("items",))) as stream:
                await first(stream, SHARDS)
                for offset in range(15):
                    await asyncio.sleep(0.03)
                    parts = {"items": (key, np.ones((1, DIM), np.float32))}
                    given = replace(
                        gradients(offset, parts, SHARDS),
                        predecessors=dict.fromkeys(range(SHARDS), offset - 1),
                    )
                    asked = asyncio.to_thread(
                        client.push, model, SOURCE, offset, given.predecessors, 0, None, given.parts
                    )
                    pushing = asyncio.create_task(asked)
                    started = time.monotonic()
                    async for batch in stream:
                        if batch.shard == 1 and "items" in batch.parts:
                            break
                    waits.append(time.monotonic() - started)
                    await pushing
            # Far below any polling interval; the machine that runs this may be busy.
            assert sorted(waits)[len(waits) // 2] < 0.05

        self.run(folder, test)

    def test_following_waits_for_a_declaration(self, folder: Path, client: ParameterClient) -> None:
        async def test(aio: AsyncParameterClient) -> None:
            async with aclosing(aio.follow("later", ("items",))) as stream:
                waiting = asyncio.create_task(first(stream, SHARDS))
                await asyncio.sleep(0.1)
                assert not waiting.done()
                await asyncio.to_thread(client.declare, "later", SPECS, "fp-1")
                assert len(await waiting) == SHARDS

        self.run(folder, test)

    def test_parked_polls_hold_up_nothing_else(
        self, folder: Path, client: ParameterClient, model: str
    ) -> None:
        async def test(aio: AsyncParameterClient) -> None:
            async with aclosing(aio.follow(model, ("items",))) as stream:
                await first(stream, SHARDS)
                push(client, model, 0)
                await first(stream, SHARDS)
                started = time.monotonic()
                await asyncio.to_thread(client.checkpoint)
                assert time.monotonic() - started < 5.0

        self.run(folder, test)

    def test_following_an_unknown_table_is_refused(
        self, folder: Path, client: ParameterClient, model: str
    ) -> None:
        async def test(aio: AsyncParameterClient) -> None:
            async with aclosing(aio.follow(model, ("nothing",))) as stream:
                with pytest.raises(ParametersRefused, match="nothing"):
                    await first(stream, 1)

        self.run(folder, test)


class TestIntervals:
    def test_snapshots_and_generations_come_by_themselves(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, servers=1, shards=SHARDS)
        quick = settings.parameters.model_copy(update={"snapshot_interval": 0.1, "generation_interval": 0.1})
        with threads(settings.model_copy(update={"parameters": quick})), client_of(tmp_path) as client:
            client.declare("main", SPECS, "fp-1")
            for offset in range(2):
                push(client, "main", offset)
            deadline = time.monotonic() + 20.0
            while (
                client.dense("main").generation < 2
                or min(reply.durable for reply in client.applied("main", SOURCE).values()) < 1
            ):
                assert time.monotonic() < deadline, "nothing was published or saved"
                time.sleep(0.02)

    def test_a_stopped_server_saves_and_the_next_start_goes_on(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, servers=2, shards=SHARDS)
        with threads(settings), client_of(tmp_path) as client:
            client.declare("main", SPECS, "fp-1")
            before = push(client, "main", 0)
            rows = client.pull("main", EVERYTHING).rows
            generation = client.dense("main").generation
        with threads(settings), client_of(tmp_path) as client:
            found = client.applied("main", SOURCE)
            assert {(reply.applied, reply.durable) for reply in found.values()} == {(0, 0)}
            assert all(found[shard].incarnation > before[shard].incarnation for shard in found)
            np.testing.assert_array_equal(client.pull("main", EVERYTHING).rows["items"], rows["items"])
            assert client.dense("main").generation == generation + 1
            assert {reply.status for reply in push(client, "main", 1).values()} == {"applied"}
