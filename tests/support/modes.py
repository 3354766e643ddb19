"""Members of a group of trainers in threads of one process, on real parameter servers and recorded samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from support.batches import SCHEMA
from support.parameters import threads

from models.parameters import DENSE
from models.samples import MicroBatch, encode_batch
from models.training import RecommenderModel
from services.backends import open_coordination
from services.messagelog.contract import Record, TopicPartition
from services.parameter_server.client.steps import Seat, StepClient
from services.settings.model import DataSettings, ParameterSettings, Settings
from services.trainer.allreduce import Meeting
from services.trainer.feed import Feed
from services.trainer.hybrid import Hybrid
from services.trainer.learner import Learner
from services.trainer.loop import Loop
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Partitions
from services.trainer.replica import DenseReplica
from services.trainer.stepper import Stepper
from services.trainer.trainer import Trainer
from sync.pushes import Source
from sync.spec import TableSpec

Mode = Literal["async", "sync", "backup", "hybrid"]
MODES: tuple[Mode, ...] = ("async", "sync", "backup", "hybrid")
LOG = "samples-log"


def recorded(partitions: Sequence[Sequence[MicroBatch]]) -> list[list[Record]]:
    """The records of each partition."""
    return [
        [Record("samples", p, n, b"", encode_batch(batch), 1_700_000_000_000) for n, batch in enumerate(some)]
        for p, some in enumerate(partitions)
    ]


class RecordedConsumer:
    """A consumer with a fixed assignment of recorded partitions."""

    def __init__(self, partitions: Mapping[int, Sequence[Record]]) -> None:
        self._partitions = partitions
        self._positions = dict.fromkeys(partitions, 0)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        found: list[Record] = []
        for partition, records in self._partitions.items():
            some = [r for r in records if r.offset >= self._positions[partition]][: max_records - len(found)]
            if some:
                self._positions[partition] = some[-1].offset + 1
                found += some
        if not found:
            time.sleep(min(timeout_s, 0.02))
        return found

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(TopicPartition("samples", partition) for partition in self._partitions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._positions[partition.partition] = offset

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        pass

    def transact(self, offsets: object, messages: object) -> None:
        raise AssertionError("a trainer writes nothing to the log")

    def close(self) -> None:
        pass


def server_settings(folder: Path, *, servers: int, shards: int) -> Settings:
    return Settings(
        data=DataSettings(dir=folder),
        parameters=ParameterSettings(
            servers=servers,
            shards=shards,
            snapshot_interval=3_600.0,
            generation_interval=3_600.0,
            deadline=20.0,
        ),
    )


@contextmanager
def parameter_servers(
    folder: Path, specs: Sequence[TableSpec], *, servers: int = 1, shards: int = 2
) -> Iterator[tuple[Settings, StepClient]]:
    """Servers in threads that hold the model ``main``, and a client of them."""
    settings = server_settings(folder, servers=servers, shards=shards)
    with threads(settings), opened(settings) as client:
        client.declare("main", specs, SCHEMA.fingerprint)
        yield settings, client


@contextmanager
def opened(settings: Settings) -> Iterator[StepClient]:
    with closing(open_coordination(settings)) as store:
        client = StepClient(store, deadline_s=20.0)
        try:
            yield client
        finally:
            client.close()


class TestGroup:
    """A fixed group, whose members a test may replace: what ``GroupFollower`` is to a trainer."""

    __test__ = False

    def __init__(self, members: int, ratio: str = "1") -> None:
        self.generation, self.members, self.ratio = 1, members, Decimal(ratio)

    def of(self, rank: int) -> Callable[[], Seat | None]:
        return lambda: Seat(self.generation, self.members, rank, self.ratio)


class _Follower:
    def __init__(self, group: TestGroup, rank: int) -> None:
        self._group, self.seat = group, group.of(rank)

    def renew(self, seat: Seat) -> None:
        self._group.generation = max(self._group.generation, seat.generation + 1)


def train(
    settings: Settings,
    model: RecommenderModel,
    specs: Sequence[TableSpec],
    mode: Mode,
    members: Sequence[Mapping[int, Sequence[Record]]],
    *,
    ratio: str = "1",
    step_wait_s: float = 5.0,
    slow: Callable[[int], None] = lambda rank: None,
    staleness: int = 64,
) -> list[TrainerMetrics]:
    """Train on all records, member ``i`` on the partitions ``members[i]``; returns once all are applied."""
    torch.set_num_threads(1)
    group = TestGroup(len(members), ratio)
    stop = threading.Event()
    metrics = [TrainerMetrics() for _ in members]
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            with ExitStack() as stack:
                client = stack.enter_context(opened(settings))
                store = stack.enter_context(closing(open_coordination(settings)))
                consumer = RecordedConsumer(members[rank])
                follower = _Follower(group, rank)
                loop = make_loop(
                    client,
                    store,
                    model,
                    specs,
                    mode,
                    consumer,
                    follower,
                    metrics[rank],
                    step_wait_s,
                    staleness,
                )
                while not stop.is_set():
                    loop.turn(0.05, stop)
                    slow(rank)
        except BaseException as error:
            failures.append(error)
            stop.set()

    running = [threading.Thread(target=work, args=(rank,)) for rank in range(len(members))]
    for thread in running:
        thread.start()
    try:
        with opened(settings) as client:
            wait_applied(client, {p: rs for some in members for p, rs in some.items()}, stop)
    finally:
        stop.set()
        for thread in running:
            thread.join()
    if failures:
        raise failures[0]
    return metrics


def make_loop(client, store, model, specs, mode, consumer, follower, metrics, step_wait_s, staleness):
    """What ``services.trainer.main`` makes of the settings, with a group of the test's."""
    if mode == "async":
        return Loop(consumer, Trainer(client, model, "main", LOG, metrics, staleness), metrics, 1.0)
    learner, partitions = Learner(client, model, "main", metrics), Partitions(client, "main", LOG)
    feed = Feed(consumer, partitions, metrics, 1.0)
    if mode == "hybrid":
        meeting, replica = Meeting(store, "127.0.0.1", 5.0), DenseReplica(specs[-1])
        return Hybrid(
            client, learner, partitions, feed, follower, meeting, replica, metrics,
            staleness=staleness, step_wait_s=min(step_wait_s, 0.02), patience_s=2.0,
        )  # fmt: skip
    return Stepper(
        client, learner, partitions, feed, follower.seat, metrics,
        late="drop" if mode == "backup" else "again", step_wait_s=step_wait_s,
    )  # fmt: skip


def wait_applied(
    client: StepClient,
    partitions: Mapping[int, Sequence[Record]],
    stop: threading.Event,
    timeout_s: float = 60,
) -> None:
    """Until every shard has applied every record."""
    deadline = time.monotonic() + timeout_s
    for partition, records in ((p, some) for p, some in partitions.items() if some):
        while not stop.is_set():
            states = client.applied("main", Source(LOG, partition)).values()
            if min(state.applied for state in states) == records[-1].offset:
                break
            assert time.monotonic() < deadline, f"partition {partition} is at {states}"
            time.sleep(0.01)


def weights(
    client: StepClient, model: RecommenderModel, batches: Sequence[MicroBatch]
) -> dict[str, np.ndarray]:
    """The rows of all keys of ``batches``, and the dense weights."""
    keys = {
        table.name: np.unique(np.concatenate([model.keys(b)[table.name] for b in batches]))
        for table in model.needs.tables
    }
    return client.pull("main", {**keys, DENSE: model.needs.dense.keys}).rows
