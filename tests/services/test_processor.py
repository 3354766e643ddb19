"""One processor on a real log and store: repeats, rejections, restarts, and what it must not do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest

from featurestore.online import EntityKey
from featurestore.schema import default_schema
from featurestore.sqlite import SqliteStore
from models.samples import decode_batch
from services.backends import open_log
from services.events import Interaction, ItemEvent, encode_event, partition_key
from services.messagelog.contract import Fenced, Message, TopicPartition, partition_of
from services.messagelog.sqlite import SqliteLog
from services.processor.keeping import Keeper
from services.processor.main import make_plan, run
from services.processor.metrics import ProcessorMetrics
from services.processor.processor import SAVE_EVERY_S, Processor, TooLate
from services.settings.model import DataSettings, FeatureSettings, LogSettings, ProcessorSettings, Settings
from services.topics import EVENTS, PROCESSOR_GROUP, REJECTED, SAMPLES, ensure_topics
from services.workers import Backoff, keep_trying

USERS = [EntityKey("user", "ann"), EntityKey("user", "bob")]
NOW = 1_700_000_000_000
SETTINGS = Settings(log=LogSettings(partitions=2), processor=ProcessorSettings(negatives=4))


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tick_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


class Bench:
    """A log, a store, and processors on them."""

    def __init__(self, stack: ExitStack, folder) -> None:
        self.folder, self._stack = folder, stack
        self.log = stack.enter_context(closing(SqliteLog(folder / "log")))
        ensure_topics(self.log, SETTINGS.log)
        self.store = stack.enter_context(closing(SqliteStore(folder / "features.db", max_claims=1_000)))
        self._producer = stack.enter_context(closing(self.log.producer()))
        self.plan = make_plan(SETTINGS, default_schema(), self.log.incarnation(EVENTS))
        self.clock = Clock()
        self.metrics = ProcessorMetrics()

    def processor(self, archive: Keeper | None = None) -> Processor:
        consumer = self._stack.enter_context(
            closing(self.log.consumer(PROCESSOR_GROUP, [EVENTS], member="processor-0"))
        )
        return Processor(consumer, self.store, self.plan, self.metrics, archive, self.clock)

    def send(self, *events: object) -> None:
        messages = []
        for event in events:
            value = event if isinstance(event, bytes) else encode_event(event)
            key = b"k" if isinstance(event, bytes) else partition_key(event)
            messages.append(Message(EVENTS, partition_of(key, 2), key, value, NOW))
        self._producer.append(messages)

    def left(self) -> int:
        return sum(lag.messages for lag in self.log.lag(PROCESSOR_GROUP, EVENTS))

    def drain(self, processor: Processor) -> None:
        while self.left():
            processor.step(0.05)

    def samples(self) -> int:
        return sum(len(decode_batch(value)) for value in self.values(SAMPLES))

    def values(self, topic: str) -> list[bytes]:
        partitions = range(self.log.partitions(topic))
        return [r.value for p in partitions for r in self.log.read(TopicPartition(topic, p), 0, 1_000)]

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"headwater_processor_{name}_total", labels) or 0.0


@pytest.fixture
def bench(tmp_path):
    with ExitStack() as stack:
        yield Bench(stack, tmp_path)


def like(user: str, item: str, event_id: str | None = None) -> Interaction:
    return Interaction(user, item, "like", event_id=event_id, timestamp_ms=NOW)


def test_an_event_id_counts_once(bench):
    bench.send(like("ann", "i1", "e1"), like("ann", "i1", "e1"), like("bob", "i1", "e1"), like("ann", "i2"))
    processor = bench.processor()
    bench.drain(processor)
    bench.send(like("ann", "i1", "e1"))
    bench.drain(processor)
    assert bench.samples() == 2
    assert bench.counted("duplicates") == 3
    likes = [row["likes_total"].value for row in bench.store.read(USERS) if "likes_total" in row]
    assert sum(likes) == 2


def test_what_cannot_be_used_goes_to_the_rejected_topic_and_nothing_stops(bench):
    bench.send(b"junk", like("", "i1"), like("ann", "i1"), ItemEvent("i2", {"year": "old"}), b"\x01")
    bench.drain(bench.processor())
    found = {json.loads(value)["code"] for value in bench.values(REJECTED)}
    assert found == {"undecodable", "bad_id", "bad_attributes"}
    assert len(bench.values(REJECTED)) == 4
    assert bench.counted("rejected", code="undecodable") == 2
    assert bench.samples() == 1
    assert bench.left() == 0


def test_a_batch_that_took_too_long_is_dropped_before_the_store_is_written(bench):
    bench.send(like("ann", "i1", "e1"))
    processor = bench.processor()
    bench.clock.tick_s = 5.0
    with pytest.raises(TooLate):
        processor.step(0.1)
    assert bench.store.read([EntityKey("user", "ann")]) == [{}]
    assert bench.left() == 1
    bench.clock.tick_s = 0.0
    bench.drain(bench.processor())
    assert bench.samples() == 1


def test_a_processor_replaced_while_it_works_sends_nothing(bench, monkeypatch):
    bench.send(like("ann", "i1", "e1"))
    old = bench.processor()
    write, replaced = bench.store.write, []

    def write_and_be_replaced(rows):
        write(rows)
        if not replaced:
            replaced.append(bench.processor())  # the same member: it takes over at once
            bench.drain(replaced[0])

    monkeypatch.setattr(bench.store, "write", write_and_be_replaced)
    with pytest.raises(Fenced):
        old.step(0.1)
    assert bench.samples() == 1
    assert bench.store.read(USERS)[0]["likes_total"].value == 1
    bench.send(like("bob", "i1"), like("cyd", "i1"))
    assert old.step(0.05) == 0
    bench.drain(replaced[0])
    assert bench.samples() == 3


def test_a_restarted_processor_knows_the_recent_positives_again(bench):
    bench.send(*[like(f"u{n}", f"i{n % 5}") for n in range(40)])
    first = bench.processor()
    bench.clock.now_s += SAVE_EVERY_S
    bench.drain(first)
    second = bench.processor()
    second.step(0.05)
    for partition, sampler in second._samplers.items():
        ids = [second._catalogue.ids[row] for row in sampler.recent()]
        before = [first._catalogue.ids[row] for row in first._samplers[partition].recent()]
        assert ids == before
    assert sum(len(sampler) for sampler in second._samplers.values()) > 0


def test_items_that_others_changed_are_followed(bench):
    processor = bench.processor()
    bench.store.write({EntityKey("item", "elsewhere"): {}})
    bench.send(ItemEvent("here", {"year": 1990}))
    bench.drain(processor)
    bench.clock.now_s += 60.0
    processor.step(0.0)
    assert {"here", "elsewhere"} <= set(processor._catalogue.ids)


def test_what_a_killed_processor_had_not_written_offline_is_written_by_the_next(bench):
    from featurestore.offline import EVENTS as COLUMNS
    from featurestore.offline import read

    def keeper(name: str) -> Keeper:
        recipe, labels = bench.plan.context.recipe, bench.plan.context.labels
        return Keeper(bench.folder / "offline", name, bench.log, bench.store, recipe.log, labels)

    def kept() -> list[str]:
        table = read(bench.folder / "offline", COLUMNS, NOW - 10, NOW + 10, ["user_id", "liked"])
        assert set(table["liked"].to_pylist()) <= {True}
        return sorted(table["user_id"].to_pylist())

    bench.send(*[like(f"u{n}", "i1", f"e{n}") for n in range(6)], like("again", "i1", "e0"))
    bench.drain(bench.processor(keeper("a")))  # never closed: its buffer is lost
    assert kept() == []
    bench.send(like("u6", "i1"))
    archive = keeper("b")
    processor = bench.processor(archive)
    bench.drain(processor)
    for _ in range(4):
        processor.step(0.0)
    archive.close()
    assert kept() == [f"u{n}" for n in range(7)]
    archive = keeper("c")
    processor = bench.processor(archive)
    processor.step(0.0)
    archive.close()
    assert kept() == [f"u{n}" for n in range(7)]


def test_backoff_doubles_up_to_its_bound_and_starts_over():
    backoff = Backoff(first_s=1.0, most_s=4.0, draw=lambda: 1.0)
    assert [backoff.pause_s() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    backoff.succeeded()
    assert backoff.pause_s() == 1.0
    assert Backoff(first_s=1.0, draw=lambda: 0.0).pause_s() == 0.5


def test_keep_trying_waits_failures_out_and_lets_other_errors_through():
    stop, seen = threading.Event(), []
    attempts = iter([Fenced("1"), Fenced("2"), None])

    def attempt(progressed):
        error = next(attempts)
        if error is not None:
            raise error
        progressed()
        stop.set()

    keep_trying(attempt, (Fenced,), stop, seen.append)
    assert [str(error) for error in seen] == ["1", "2"]
    with pytest.raises(KeyError):
        keep_trying(lambda progressed: {}["missing"], (Fenced,), threading.Event(), seen.append)


def test_a_processor_drops_what_is_older_than_the_retention_and_read_by_all(tmp_path):
    settings = Settings(
        data=DataSettings(dir=tmp_path),
        log=LogSettings(retention=60.0),
        features=FeatureSettings(offline=False),
    )
    place = TopicPartition(EVENTS, 0)
    with closing(open_log(settings)) as log, closing(log.producer()) as producer:
        message = Message(EVENTS, 0, b"ann", encode_event(Interaction("ann", "film", "like")), NOW)
        producer.append([message] * 3)

        def run_until(done: Callable[[], bool]) -> None:
            stop = threading.Event()
            thread = threading.Thread(target=run, args=(settings, "processor-0", stop))
            thread.start()
            try:
                deadline_s = time.monotonic() + 20.0
                while not done():
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
            finally:
                stop.set()
                thread.join()

        run_until(lambda: all(lag.messages == 0 for lag in log.lag(PROCESSOR_GROUP, EVENTS)))
        run_until(lambda: log.read(place, 0, 10) == [])
        assert log.end_offset(place) == 3
