"""Each micro-batch is applied once per shard, whatever fails, and a clean run repeats bit for bit."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
from support.batches import SCHEMA, SMALL, micro_batch
from support.local_parameters import LocalParameters

from models.samples import MicroBatch, encode_batch
from models.training import RecommenderModel
from services.messagelog.contract import Record, TopicPartition
from services.parameter_server.types import ParametersUnavailable
from services.trainer.loop import Loop
from services.trainer.metrics import TrainerMetrics
from services.trainer.partitions import Rewind
from services.trainer.trainer import Trainer
from sync.pushes import Source

LOG = "samples-log"
MODEL = RecommenderModel(SCHEMA, SMALL)


def record(offset: int, batch: MicroBatch | bytes | None = None, partition: int = 0) -> Record:
    """A record at 2·offset, since offsets of a log may have gaps."""
    if batch is None:
        batch = micro_batch(offset + 100 * partition)
    value = batch if isinstance(batch, bytes) else encode_batch(batch)
    return Record("samples", partition, 2 * offset, b"", value, 1_700_000_000_000)


def trainer(parameters: LocalParameters) -> tuple[Trainer, TrainerMetrics]:
    metrics = TrainerMetrics()
    return Trainer(parameters, MODEL, "main", LOG, metrics), metrics


def counted(metrics: TrainerMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"headwater_trainer_{name}_total", labels) or 0.0


class FakeConsumer:
    """A consumer of a fixed set of records."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.partitions = {r.partition for r in records}
        self.positions = dict.fromkeys(self.partitions, 0)
        self.committed: dict[int, int] = {}

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        found = [r for r in self.records if r.offset >= self.positions.get(r.partition, 1 << 60)][
            :max_records
        ]
        for each in found:
            self.positions[each.partition] = each.offset + 1
        return found

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(TopicPartition("samples", p) for p in self.partitions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.positions[partition.partition] = offset

    def commit(self, offsets: dict[TopicPartition, int]) -> None:
        self.committed.update({tp.partition: offset for tp, offset in offsets.items()})


def test_steps_change_all_tables_and_count():
    parameters = LocalParameters(MODEL.needs)
    untouched = parameters.bits()
    learner, metrics = trainer(parameters)
    assert learner.open(0) == 0
    assert learner.step(record(0)) == "done"
    assert learner.step(record(1)) == "done"
    assert parameters.bits() != untouched
    assert parameters.history == [[(0, 0), (0, 2)]] * 3
    assert counted(metrics, "samples") == 12


def test_a_step_that_comes_again_changes_nothing():
    parameters = LocalParameters(MODEL.needs)
    learner, _ = trainer(parameters)
    learner.open(0)
    learner.step(record(0))
    before = parameters.bits()
    assert learner.step(record(0)) == "done"
    assert parameters.bits() == before


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (b"\x07 not a micro-batch", "undecodable"),
        (replace(micro_batch(1), model="other"), "model"),
        (replace(micro_batch(1), fingerprint="other"), "fingerprint"),
    ],
)
def test_what_cannot_be_learned_from_is_done_all_the_same(batch, reason):
    parameters = LocalParameters(MODEL.needs)
    before = parameters.bits()
    learner, metrics = trainer(parameters)
    learner.open(0)
    assert learner.step(record(0, batch)) == "done"
    assert parameters.history == [[(0, 0)]] * 3
    assert parameters.bits() == before
    assert counted(metrics, "skipped", reason=reason) == 1


def test_an_empty_micro_batch_moves_the_watermark_alone():
    parameters = LocalParameters(MODEL.needs)
    learner, metrics = trainer(parameters)
    learner.open(0)
    empty = micro_batch(1).take(np.zeros(0, np.int64))
    assert learner.step(record(0, empty)) == "done"
    assert parameters.history == [[(0, 0)]] * 3
    assert counted(metrics, "samples") == 0


def test_a_restarted_trainer_leaves_the_same_bits():
    records = [record(n) for n in range(8)]
    undisturbed = LocalParameters(MODEL.needs)
    learner, _ = trainer(undisturbed)
    learner.open(0)
    for each in records:
        learner.step(each)
    interrupted = LocalParameters(MODEL.needs)
    for stretch in (records[:3], records[3:4], records[4:]):
        learner, _ = trainer(interrupted)
        start = learner.open(0)
        assert [r for r in records if r.offset >= start][: len(stretch)] == stretch
        for each in stretch:
            learner.step(each)
    assert interrupted.bits() == undisturbed.bits()


def test_a_push_that_reached_some_shards_is_finished_by_the_next_trainer():
    parameters = LocalParameters(MODEL.needs)
    learner, _ = trainer(parameters)
    learner.open(0)
    learner.step(record(0))

    def fault(shard: int) -> None:
        if shard == 1:
            raise parameters.unavailable()

    parameters.fault = fault
    with pytest.raises(ParametersUnavailable):
        learner.step(record(1))
    parameters.fault = lambda shard: None
    learner, _ = trainer(parameters)
    assert learner.open(0) == 1
    learner.step(record(1))
    assert parameters.history == [[(0, 0), (0, 2)]] * 3


def test_a_lost_server_makes_it_rewind_also_when_idle():
    parameters = LocalParameters(MODEL.needs)
    learner, metrics = trainer(parameters)
    learner.open(0)
    learner.step(record(0))
    parameters.save(2)
    learner.step(record(1))
    assert learner.check(0) is None
    parameters.crash(2)
    assert learner.check(0) == Rewind(1)
    assert learner.step(record(1)) == "done"
    parameters.crash(0)  # never saved: everything is gone
    assert learner.step(record(2)) == Rewind(0)
    assert counted(metrics, "rewinds") == 2


def test_commits_what_is_durable_on_every_shard():
    parameters = LocalParameters(MODEL.needs)
    learner, metrics = trainer(parameters)
    consumer = FakeConsumer([record(n) for n in range(4)])
    loop = Loop(consumer, learner, metrics, interval_s=0.0)
    stop = threading.Event()
    assert loop.turn(0.0, stop) == 4
    assert consumer.committed == {}
    for shard in range(3):
        assert consumer.committed == {}
        parameters.save(shard)
        loop.turn(0.0, stop)
    assert consumer.committed == {0: 7}


@pytest.mark.parametrize("seed", range(6))
def test_each_offset_is_applied_once_per_shard_whatever_fails(seed):
    chance = random.Random(seed)
    parameters = LocalParameters(MODEL.needs)
    records = [record(n, partition=p) for n in range(12) for p in (0, 1)]
    calls = [0]

    def fault(shard: int) -> None:
        calls[0] += 1
        if calls[0] < 120:
            if chance.random() < 0.05:
                parameters.crash(chance.randrange(3))
            if chance.random() < 0.1:
                parameters.save(chance.randrange(3))
            if chance.random() < 0.1:
                raise parameters.unavailable()

    parameters.fault = fault
    rewinds = restarts = 0.0
    while True:
        learner, metrics = trainer(parameters)
        consumer = FakeConsumer(records)
        loop = Loop(consumer, learner, metrics, interval_s=0.0)
        try:
            while any(len(history) < len(records) for history in parameters.history):
                loop.turn(0.0, threading.Event())
            break
        except ParametersUnavailable:
            restarts += 1
        finally:
            rewinds += counted(metrics, "rewinds")
            for partition, offset in consumer.committed.items():
                assert all(offset <= 1 + durable for durable in durable_of(parameters, partition))
    assert restarts > 0
    assert rewinds > 0
    for history in parameters.history:
        for partition in (0, 1):
            assert [o for p, o in history if p == partition] == [2 * n for n in range(12)]


class BusyParameters(LocalParameters):
    """Others push ``others`` times between each pull and the push after it."""

    others = 0
    pushed = 0

    def pull(self, model, keys):
        found = super().pull(model, keys)
        for _ in range(self.others):
            before = dict.fromkeys(range(3), self.pushed - 1)
            super().push(model, Source("other-log", 0), self.pushed, before, 0, None, {})
            self.pushed += 1
        return found


@pytest.mark.parametrize(("others", "staleness", "stale"), [(0, 0, 0), (3, 3, 0), (1, 0, 8), (4, 3, 8)])
def test_a_push_over_the_bound_is_computed_again_and_in_the_end_pushed_all_the_same(others, staleness, stale):
    parameters = BusyParameters(MODEL.needs)
    parameters.others = others
    metrics = TrainerMetrics()
    learner = Trainer(parameters, MODEL, "main", LOG, metrics, staleness)
    learner.open(0)
    assert learner.step(record(0)) == "done"
    assert counted(metrics, "stale") == stale
    assert counted(metrics, "overdue") == (stale > 0)
    assert counted(metrics, "samples") == 6
    assert all(history.count((0, 0)) == 2 - (others == 0) for history in parameters.history)
    assert {a.applied for a in parameters.applied("main", Source(LOG, 0)).values()} == {0}


def test_a_stale_push_leaves_its_offset_where_it_was():
    parameters = BusyParameters(MODEL.needs)
    parameters.others = 2
    learner = Trainer(parameters, MODEL, "main", LOG, TrainerMetrics(), 1)
    learner.open(0)
    seen: list[int] = []
    stop_after = 3

    def fault(shard: int) -> None:
        if shard == 0:
            seen.append(parameters.applied("main", Source(LOG, 0))[0].applied)
            if len(seen) > 3 * stop_after:
                raise parameters.unavailable()

    parameters.fault = fault
    with pytest.raises(ParametersUnavailable):
        learner.step(record(0))
    assert set(seen) == {-1}


def durable_of(parameters: LocalParameters, partition: int) -> list[int]:
    return [a.durable for a in parameters.applied("main", Source(LOG, partition)).values()]
