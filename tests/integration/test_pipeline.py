"""Processor, trainer and parameter servers as processes, killed at random points; SQLite, nothing installed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from support.kafka import kafka_broker
from support.local_parameters import LocalParameters
from support.service_process import eventually, service

from featurestore import counters
from featurestore.online import EntityKey
from featurestore.schema import default_schema
from models.samples import MicroBatch, decode_batch
from services.backends import open_coordination, open_log, open_store
from services.events import Event, Interaction, ItemEvent, encode_event, partition_key
from services.messagelog.contract import Message, MessageLog, TopicPartition, partition_of
from services.modelling import build_model
from services.parameter_server.client import ParameterClient
from services.parameter_server.types import ParameterError
from services.processor.main import make_plan
from services.processor.metrics import ProcessorMetrics
from services.processor.processor import Processor
from services.processor.users import RECENT
from services.settings.model import (
    DataSettings,
    FeatureSettings,
    LogSettings,
    ModelSettings,
    ParameterSettings,
    ProcessorSettings,
    Settings,
    TrainerSettings,
)
from services.topics import EVENTS, PROCESSOR_GROUP, REJECTED, SAMPLES, TRAINER_GROUP
from services.trainer.metrics import TrainerMetrics
from services.trainer.trainer import Trainer
from sync.pushes import Source

NOW = 1_700_000_000_000
SCHEMA = default_schema()


def small_settings(folder: Path, *, partitions: int, servers: int = 1, offline: bool = False) -> Settings:
    return Settings(
        data=DataSettings(dir=folder),
        log=LogSettings(partitions=partitions),
        features=FeatureSettings(offline=offline),
        processor=ProcessorSettings(max_batch=40, negatives=6),
        trainer=TrainerSettings(commit_interval=0.1, nice=0),
        parameters=ParameterSettings(servers=servers, shards=4, snapshot_interval=0.3, deadline=2.0),
        model=ModelSettings(retrieval_dim=8, ranking_dim=4),
    )


def some_events(count: int, seed: int = 1) -> list[Event]:
    """Likes, ratings and views of 60 users and 80 items, and the items themselves."""
    chance = random.Random(seed)
    items = [ItemEvent(f"i{n}", {"year": 1950 + n % 60}, event_id=f"item-{n}") for n in range(80)]
    actions = [("like", None), ("rating", 2.0), ("rating", 5.0), ("view", None)]
    return [
        *items,
        *(
            Interaction(
                f"u{chance.randrange(60)}",
                f"i{chance.randrange(80)}",
                *chance.choice(actions),
                event_id=f"event-{n}",
                timestamp_ms=NOW + n,
            )
            for n in range(count)
        ),
    ]


def append(log: MessageLog, events: Sequence[Event]) -> None:
    partitions = log.partitions(EVENTS)
    messages = []
    for event in events:
        key = partition_key(event)
        accepted_ms = time.time_ns() // 1_000_000
        messages.append(Message(EVENTS, partition_of(key, partitions), key, encode_event(event), accepted_ms))
    with closing(log.producer()) as producer:
        producer.append(messages)


def read_all(log: MessageLog, topic: str) -> list[bytes]:
    found = []
    for partition in range(log.partitions(topic)):
        offset = 0
        while records := log.read(TopicPartition(topic, partition), offset, 1_000):
            found += [record.value for record in records]
            offset = records[-1].offset + 1
    return found


def process_all(settings: Settings, log: MessageLog) -> None:
    """Run the processor here until it has caught up."""
    store = open_store(settings)
    plan = make_plan(settings, SCHEMA, log.incarnation(EVENTS))
    with closing(store), closing(log.consumer(PROCESSOR_GROUP, [EVENTS], member="here")) as consumer:
        processor = Processor(consumer, store, plan, ProcessorMetrics())
        while sum(lag.messages for lag in log.lag(PROCESSOR_GROUP, EVENTS)):
            processor.step(0.1)


@contextmanager
def opened(settings: Settings) -> Iterator[tuple[MessageLog, ParameterClient]]:
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(settings)))
        coordination = stack.enter_context(closing(open_coordination(settings)))
        yield log, stack.enter_context(closing(ParameterClient(coordination, deadline_s=2.0)))


def least_applied(client: ParameterClient, source: Source) -> int:
    """The offset that every shard has applied; -1 while the servers cannot say."""
    try:
        return min(state.applied for state in client.applied("main", source).values())
    except ParameterError:
        return -1


def kill_and_finish(settings: Settings, events: Sequence[Event], shares: Sequence[float]) -> None:
    """Process ``events`` by a processor that is killed once so large a share of them is left."""
    chance = random.Random(3)
    with closing(open_log(settings)) as log:
        append(log, events)

        def left() -> int:
            return sum(lag.messages for lag in log.lag(PROCESSOR_GROUP, EVENTS))

        with service("processor-0", settings) as processor:
            for share in shares:
                eventually(lambda share=share: left() < share * len(events), pause_s=0.001)
                time.sleep(chance.uniform(0, 0.02))
                processor.kill()
                processor.start()
            eventually(lambda: left() == 0, timeout_s=60)
        batches = [decode_batch(value) for value in read_all(log, SAMPLES)]
        assert read_all(log, REJECTED) == []
    assert_each_sample_once(events, batches)
    assert_features_are_right(settings, events)


def test_a_processor_killed_at_random_points_makes_each_sample_once(tmp_path):
    settings = small_settings(tmp_path, partitions=3, offline=True)
    events = some_events(2_500)
    kill_and_finish(settings, events, (0.8, 0.5, 0.15))
    assert_offline_log_is_whole(settings, events)


@pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")  # kafka-python's
def test_a_processor_on_kafka_killed_at_a_random_point_makes_each_sample_once(tmp_path):
    with kafka_broker(tmp_path) as broker:
        settings = small_settings(tmp_path, partitions=2)
        kafka = LogSettings(backend="kafka", servers=broker, partitions=2)
        kill_and_finish(settings.model_copy(update={"log": kafka}), some_events(1_500), (0.5,))


def assert_each_sample_once(events: Sequence[Event], batches: Sequence[MicroBatch]) -> None:
    made: Counter[tuple[int, int, int, float]] = Counter()
    for batch in batches:
        users, items = batch.users.categorical[:, 0], batch.items.categorical[batch.positive, 0]
        times = batch.event_time_ms
        made.update(zip(users.tolist(), items.tolist(), times.tolist(), batch.label.tolist(), strict=True))
    wanted: Counter[tuple[int, int, int, float]] = Counter()
    encoder = make_plan(Settings(), SCHEMA, "any").context.recipe.encoder
    for event in events:
        if isinstance(event, Interaction) and event.action != "view":
            label = float(event.action == "like" or event.value == 5.0)
            user, item = encoder.key("user_id", event.user_id), encoder.key("item_id", event.item_id)
            wanted[user, item, event.timestamp_ms or 0, label] += 1
    assert made == wanted


def likes_of(events: Sequence[Event]) -> list[Interaction]:
    return [
        event
        for event in events
        if isinstance(event, Interaction) and (event.action == "like" or event.value == 5.0)
    ]


def assert_features_are_right(settings: Settings, events: Sequence[Event]) -> None:
    half_lives = SCHEMA.half_lives("item")
    liked = likes_of(events)
    with closing(open_store(settings)) as store:
        items = [f"i{n}" for n in range(80)]
        for item, row in zip(items, store.read([EntityKey("item", i) for i in items]), strict=True):
            cells = [c.value for name, c in row.items() if name.startswith(counters.PREFIX)]
            total = counters.decode(cells, half_lives).decayed.values[:, -1].sum()
            assert total == sum(event.item_id == item for event in liked)
            assert row["year"].value == 1950 + int(item[1:]) % 60
        users = [f"u{n}" for n in range(60)]
        for user, row in zip(users, store.read([EntityKey("user", u) for u in users]), strict=True):
            own = [event.item_id for event in liked if event.user_id == user]
            assert row["likes_total"].value == len(own)
            newest = list(dict.fromkeys(reversed(own)))[: settings.processor.recent_items]
            assert row[RECENT].value == newest[::-1]


def assert_offline_log_is_whole(settings: Settings, events: Sequence[Event]) -> None:
    from featurestore.offline import EVENTS as COLUMNS
    from featurestore.offline import read

    table = read(
        settings.data.dir / "offline" / "events", COLUMNS, 0, NOW + 10**9, ["user_id", "event_time_ms"]
    )
    kept = Counter(zip(table["user_id"].to_pylist(), table["event_time_ms"].to_pylist(), strict=True))
    assert kept == Counter((e.user_id, e.timestamp_ms) for e in events if isinstance(e, Interaction))


@pytest.fixture
def recorded(tmp_path) -> Settings:
    """Settings of a log of one partition that holds samples."""
    settings = small_settings(tmp_path, partitions=1)
    with closing(open_log(settings)) as log:
        append(log, some_events(2_500))
        process_all(settings, log)
    return settings


def undisturbed(settings: Settings, log: MessageLog) -> LocalParameters:
    """The parameters after the recorded samples, trained in this process without any fault."""
    torch.set_num_threads(1)  # as in every trainer: sums depend on how they are split
    model = build_model(SCHEMA, settings.model)
    parameters = LocalParameters(model.needs, settings.parameters.shards)
    trainer = Trainer(parameters, model, "main", log.incarnation(SAMPLES), TrainerMetrics())
    offset = trainer.open(0)
    while records := log.read(TopicPartition(SAMPLES, 0), offset, 100):
        for record in records:
            trainer.step(record)
        offset = records[-1].offset + 1
    return parameters


def all_keys(log: MessageLog, settings: Settings) -> dict[str, np.ndarray]:
    model = build_model(SCHEMA, settings.model)
    parts = [model.keys(decode_batch(value)) for value in read_all(log, SAMPLES)]
    return {table: np.unique(np.concatenate([part[table] for part in parts])) for table in parts[0]}


def test_a_trainer_killed_at_random_points_leaves_the_same_bits(recorded):
    chance = random.Random(5)
    with opened(recorded) as (log, client):
        expected, keys = undisturbed(recorded, log), all_keys(log, recorded)
        end = log.end_offset(TopicPartition(SAMPLES, 0))
        source = Source(log.incarnation(SAMPLES), 0)
        last = log.read(TopicPartition(SAMPLES, 0), 0, 10_000)[-1].offset
        with service("parameter-server-0", recorded), service("trainer-0", recorded) as trainer:
            for share in (0.3, 0.7):
                eventually(lambda share=share: least_applied(client, source) > share * end, pause_s=0.002)
                time.sleep(chance.uniform(0, 0.02))
                trainer.kill()
                trainer.start()
            eventually(lambda: least_applied(client, source) == last)
            found = client.pull("main", keys)
            dense = client.dense("main", published=False)
            mark = found.watermarks[log.incarnation(EVENTS), 0]
            client.checkpoint()
            eventually(lambda: log.lag(TRAINER_GROUP, SAMPLES)[0].messages == 0)
        for table, rows in expected.pull("main", keys).rows.items():
            np.testing.assert_array_equal(found.rows[table], rows)
        np.testing.assert_array_equal(dense.values, expected.dense("main", published=False).values)
        assert mark.offset == log.end_offset(TopicPartition(EVENTS, 0)) - 1


def test_a_killed_parameter_server_loses_nothing_that_was_acknowledged(tmp_path):
    settings = small_settings(tmp_path, partitions=2, servers=2)
    events = some_events(1_500)
    with opened(settings) as (log, client), ExitStack() as stack:
        servers = [stack.enter_context(service(f"parameter-server-{n}", settings)) for n in range(2)]
        stack.enter_context(service("processor-0", settings))
        stack.enter_context(service("trainer-0", settings))
        incarnation, topic = log.incarnation(EVENTS), log.incarnation(SAMPLES)

        def visible() -> bool:
            """Whether every event is in the parameters of every shard."""
            try:
                marks = client.pull("main", {"retrieval": np.zeros(0, np.uint64)}).watermarks
            except ParameterError:
                return False
            return all(
                (incarnation, p) in marks
                and marks[incarnation, p].offset >= log.end_offset(TopicPartition(EVENTS, p)) - 1
                for p in range(2)
            )

        for start in range(0, len(events), 800):
            append(log, events[start : start + 800])
            for server in servers:
                time.sleep(0.15)
                server.kill()
                server.start()
            eventually(visible)
        for partition in range(2):
            last = log.read(TopicPartition(SAMPLES, partition), 0, 10_000)[-1].offset
            applied = client.applied("main", Source(topic, partition))
            assert {state.applied for state in applied.values()} == {last}
            assert len(applied) == 4
        assert_each_sample_once(events, [decode_batch(value) for value in read_all(log, SAMPLES)])
        append(log, [Interaction("newcomer", "i1", "like", event_id="last")])
        eventually(visible)
