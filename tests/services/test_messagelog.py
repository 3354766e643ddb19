"""The message log's contract, on every backend, over real files and a real socket."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kafka import kafka_broker

from services.messagelog.contract import (
    Consumer,
    Fenced,
    LogError,
    LogFull,
    Message,
    MessageLog,
    Record,
    TopicPartition,
    TopicSpec,
    UnknownTopic,
    partition_of,
)
from services.messagelog.open import open_message_log
from services.messagelog.sqlite import SqliteLog

# Kafka's client reads its own schemas by a deprecated function of the standard library.
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kafka_broker(tmp_path_factory.mktemp("kafka")) as servers:
        yield servers


@pytest.fixture(params=["sqlite", "kafka"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The backend's name, and its folder or servers."""
    if request.param == "kafka":
        return "kafka", request.getfixturevalue("broker")
    return "sqlite", str(tmp_path / "log")


@pytest.fixture
def log(place: tuple[str, str]) -> Iterator[MessageLog]:
    backend, where = place
    opened = open_message_log(backend, folder=Path(where), servers=where, replication=1)
    yield opened
    opened.close()


@pytest.fixture
def topic(log: MessageLog) -> str:
    return make_topic(log, partitions=3)


@pytest.fixture
def join(log: MessageLog) -> Iterator[Callable[..., Consumer]]:
    """Opens consumers that are closed at the end."""
    opened: list[Consumer] = []

    def open_consumer(group: str, *names: str, member: str = "m0") -> Consumer:
        consumer = log.consumer(group, names, member=member)
        opened.append(consumer)
        return consumer

    yield open_consumer
    for consumer in opened:
        consumer.close()


def make_topic(log: MessageLog, *, partitions: int = 1, retention_s: float = 1e6, name: str = "t") -> str:
    unique = f"{name}-{uuid.uuid4().hex[:12]}"
    log.ensure_topic(TopicSpec(unique, partitions, retention_s))
    return unique


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def messages(topic: str, values: list[bytes], partition: int = 0) -> list[Message]:
    return [Message(topic, partition, b"key", value, now_ms()) for value in values]


def append(log: MessageLog, items: list[Message]) -> list[int]:
    producer = log.producer()
    try:
        return producer.append(items)
    finally:
        producer.close()


def poll_until(consumers: list[Consumer], done: Callable[[], bool], seconds: float = 20.0) -> list[Record]:
    """Poll all in turn until ``done``; what they returned."""
    found: list[Record] = []
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not there after {seconds} s; polled {len(found)} records"
        for consumer in consumers:
            found += consumer.poll(100, 0.05)
    return found


def take(consumer: Consumer, count: int) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + 20.0
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} records after 20 s"
        found += consumer.poll(count - len(found), 0.5)
    return found


def read_all(log: MessageLog, topic: str, partition: int = 0) -> list[Record]:
    at = TopicPartition(topic, partition)
    return log.read(at, 0, 100_000)


class TestContract:
    def test_what_is_appended_is_read_back_as_it_was(self, log: MessageLog, topic: str) -> None:
        sent = [Message(topic, 1, b"", bytes(range(256)), 1_700_000_000_123), *messages(topic, [b"\x00"], 1)]
        offsets = append(log, sent)
        assert offsets == sorted(set(offsets))
        found = read_all(log, topic, 1)
        assert [(r.key, r.value, r.accepted_at_ms, r.offset, r.partition) for r in found] == [
            (m.key, m.value, m.accepted_at_ms, o, 1) for m, o in zip(sent, offsets, strict=True)
        ]
        assert read_all(log, topic, 0) == []
        assert log.end_offset(TopicPartition(topic, 1)) >= offsets[-1] + 1
        assert log.read(TopicPartition(topic, 1), offsets[1], 10) == found[1:]

    def test_offsets_come_back_in_the_order_of_the_messages(self, log: MessageLog, topic: str) -> None:
        sent = [Message(topic, n % 3, b"k", str(n).encode(), now_ms()) for n in range(30)]
        offsets = append(log, sent)
        stored = {(r.partition, r.offset): r.value for p in range(3) for r in read_all(log, topic, p)}
        assert [stored[m.partition, o] for m, o in zip(sent, offsets, strict=True)] == [m.value for m in sent]

    def test_topics_are_made_once_and_named_when_missing(self, log: MessageLog, topic: str) -> None:
        log.ensure_topic(TopicSpec(topic, 3, 1e6))
        assert log.partitions(topic) == 3
        with pytest.raises(LogError, match=r"3 partitions.*4"):
            log.ensure_topic(TopicSpec(topic, 4, 1e6))
        for ask in (log.partitions, log.incarnation, lambda t: log.consumer("g", [t], member="m")):
            with pytest.raises(UnknownTopic, match="nowhere"):
                ask("nowhere")

    def test_a_topic_made_again_has_another_incarnation_and_starts_anew(
        self, log: MessageLog, join: Callable[..., Consumer]
    ) -> None:
        topic = make_topic(log)
        append(log, messages(topic, [b"old"]))
        first = log.incarnation(topic)
        assert first == log.incarnation(topic)
        assert log.delete_topic(topic)
        assert not log.delete_topic(topic)
        log.ensure_topic(TopicSpec(topic, 1, 1e6))
        assert log.incarnation(topic) != first
        append(log, messages(topic, [b"new"]))
        assert [r.value for r in take(join("g", topic), 1)] == [b"new"]

    def test_appending_to_what_does_not_exist_is_refused_and_makes_nothing(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        nowhere = f"nowhere-{uuid.uuid4().hex}"
        append(log, messages(topic, [b"0"]))
        consumer = join("g", topic)
        at = {TopicPartition(topic, 0): take(consumer, 1)[0].offset + 1}
        for missing in (messages(nowhere, [b"x"]), messages(topic, [b"x"], 3), messages(topic, [b"x"], -1)):
            with pytest.raises(UnknownTopic):
                append(log, missing)
            with pytest.raises(UnknownTopic):
                consumer.transact(at, missing)
        with pytest.raises(UnknownTopic):
            log.partitions(nowhere)
        assert {lag.partition: lag.messages for lag in log.lag("g", topic)} == {0: 1, 1: 0, 2: 0}

    def test_first_readers_of_new_topics_get_their_partitions_soon(
        self, log: MessageLog, join: Callable[..., Consumer]
    ) -> None:
        for number in range(8):
            topic = make_topic(log, partitions=2)
            consumer = join(f"g{number}-{topic}", topic)
            deadline = time.monotonic() + 5.0
            while len(consumer.assignment()) < 2:
                assert time.monotonic() < deadline, f"reader {number} owns nothing after 5 s"
                consumer.poll(1, 0.05)

    def test_a_group_goes_on_from_what_it_committed(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        append(log, messages(topic, [b"0", b"1", b"2", b"3"]))
        first = join("g1", topic)
        records = take(first, 4)
        first.commit({TopicPartition(topic, 0): records[1].offset + 1})
        first.close()
        again = log.consumer("g1", [topic], member="m0")
        assert [r.value for r in take(again, 2)] == [b"2", b"3"]
        again.close()
        other = join("g2", topic, member="other")
        assert len(take(other, 4)) == 4

    def test_seek_goes_back_and_refuses_what_is_not_owned(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        append(log, messages(topic, [b"0", b"1", b"2"]))
        consumer = join("g", topic)
        records = take(consumer, 3)
        consumer.seek(TopicPartition(topic, 0), records[1].offset)
        assert [r.value for r in take(consumer, 2)] == [b"1", b"2"]
        with pytest.raises(Fenced):
            consumer.seek(TopicPartition("elsewhere", 0), 0)

    def test_partitions_move_when_members_come_and_go(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        first = join("g", topic, member="a")
        poll_until([first], lambda: len(first.assignment()) == 3)
        second = log.consumer("g", [topic], member="b")

        def shared() -> bool:
            mine, theirs = first.assignment(), second.assignment()
            return bool(mine) and bool(theirs) and not mine & theirs and len(mine | theirs) == 3

        poll_until([first, second], shared)
        append(log, [m for p in range(3) for m in messages(topic, [b"x"], p)])
        found: list[Record] = []
        deadline = time.monotonic() + 20
        while len({r.partition for r in found}) < 3 and time.monotonic() < deadline:
            found += first.poll(10, 0.05) + second.poll(10, 0.05)
        assert sorted(r.partition for r in found) == [0, 1, 2]
        second.close()
        poll_until([first], lambda: len(first.assignment()) == 3)

    def test_a_member_that_lost_a_partition_is_fenced_and_writes_nothing(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        target = make_topic(log)
        append(log, messages(topic, [b"0"]))
        old = log.consumer("g", [topic], member="same")
        take(old, 1)
        new = join("g", topic, member="same")
        taken = take(new, 1)
        at = {TopicPartition(topic, 0): taken[0].offset + 1}
        with pytest.raises(Fenced):
            old.transact(at, messages(target, [b"from the old one"]))
        with pytest.raises(Fenced):
            old.commit(at)
        old.close()  # and its leaving does not take the new one out of the group
        new.transact(at, messages(target, [b"from the new one"]))
        assert [r.value for r in read_all(log, target)] == [b"from the new one"]

    def test_a_transaction_commits_offsets_and_messages_together(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        first, second = make_topic(log, name="a"), make_topic(log, name="b")
        append(log, messages(topic, [b"0", b"1"]))
        consumer = join("g", topic)
        records = take(consumer, 2)
        following = {TopicPartition(topic, 0): records[0].offset + 1}
        consumer.transact(following, [*messages(first, [b"x"]), *messages(second, [b"y"])])
        assert [r.value for r in read_all(log, first)] == [b"x"]
        assert [r.value for r in read_all(log, second)] == [b"y"]
        assert {lag.partition: lag.committed for lag in log.lag("g", topic)}[0] == records[0].offset + 1

    def test_lag_counts_messages_and_seconds(
        self, log: MessageLog, topic: str, join: Callable[..., Consumer]
    ) -> None:
        old = Message(topic, 0, b"", b"0", now_ms() - 5_000)
        append(log, [old, *messages(topic, [b"1"])])
        before = {lag.partition: lag for lag in log.lag("g", topic)}
        assert before[0].messages == 2
        assert 5.0 <= before[0].seconds < 60.0
        assert (before[1].messages, before[1].seconds) == (0, 0.0)
        consumer = join("g", topic)
        last = take(consumer, 2)[-1]
        consumer.commit({TopicPartition(topic, 0): last.offset + 1})
        after = {lag.partition: lag for lag in log.lag("g", topic)}
        assert (after[0].messages, after[0].seconds) == (0, 0.0)

    def test_many_producers_lose_nothing(self, log: MessageLog, topic: str) -> None:
        def produce(producer_number: int) -> None:
            producer = log.producer()
            for step in range(20):
                producer.append(messages(topic, [f"{producer_number}/{step}".encode()], step % 3))
            producer.close()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(produce, range(4)))
        found = [r.value.decode() for p in range(3) for r in read_all(log, topic, p)]
        assert sorted(found) == sorted(f"{n}/{s}" for n in range(4) for s in range(20))

    def test_a_killed_copier_makes_each_output_once(self, log: MessageLog, place: tuple[str, str]) -> None:
        source, target = make_topic(log, name="src", partitions=2), make_topic(log, name="dst", partitions=2)
        values = [str(n).encode() for n in range(400)]
        append(log, [Message(source, n % 2, b"", value, now_ms()) for n, value in enumerate(values)])
        command = [sys.executable, "-m", "support.log_process", *place, source, target, "copier"]

        def copied() -> list[bytes]:
            return [r.value for p in range(2) for r in read_all(log, target, p)]

        deadline = time.monotonic() + 60
        for kill_after in itertools.chain([60, 150, 240], itertools.repeat(len(values))):
            child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS)
            try:
                while len(copied()) < kill_after:
                    assert time.monotonic() < deadline, f"{len(copied())} of {len(values)} copied"
                    time.sleep(0.02)
            finally:
                child.kill()
                child.communicate()
            if kill_after == len(values):
                break
        assert sorted(copied()) == sorted(values)


@given(st.binary(max_size=64), st.integers(1, 1_000))
def test_a_key_always_goes_to_one_partition_that_exists(key: bytes, partitions: int) -> None:
    assert partition_of(key, partitions) == partition_of(bytes(key), partitions) < partitions


def test_keys_spread_evenly_and_never_move() -> None:
    counts = [0] * 8
    for number in range(8_000):
        counts[partition_of(str(number).encode(), 8)] += 1
    assert min(counts) > 800
    assert [partition_of(key, 4) for key in (b"1", b"user-42", "grün".encode())] == [0, 1, 3]


class TestSqlite:
    def test_retention_drops_the_old_but_nothing_that_a_group_has_yet_to_read(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path)
        topic = make_topic(log, retention_s=60.0)
        append(log, [Message(topic, 0, b"", b"old", now_ms() - 120_000), *messages(topic, [b"new"])])
        consumer = log.consumer("g", [topic], member="m")
        assert log.enforce_retention() == 0
        first = take(consumer, 2)[0]
        consumer.commit({TopicPartition(topic, 0): first.offset + 1})
        assert log.enforce_retention() == 1
        assert [r.value for r in read_all(log, topic)] == [b"new"]
        assert append(log, messages(topic, [b"newer"])) == [2]
        consumer.close()
        log.close()

    def test_a_full_file_refuses_loses_nothing_and_still_reads(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path, max_bytes=400_000)
        topic = make_topic(log)
        kept = 0

        def fill() -> None:
            nonlocal kept
            for _ in range(200):
                append(log, messages(topic, [b"x" * 10_000]))
                kept += 1

        with pytest.raises(LogFull):
            fill()
        assert 5 < kept < 60
        assert len(read_all(log, topic)) == kept
        log.close()

    def test_a_silent_member_is_dropped_after_the_session_timeout(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path, session_s=0.5)
        topic = make_topic(log, partitions=2)
        silent = log.consumer("g", [topic], member="silent")
        silent.poll(1, 0.0)
        lively = log.consumer("g", [topic], member="lively")
        poll_until([lively], lambda: len(lively.assignment()) == 2)
        with pytest.raises(Fenced):
            silent.commit({TopicPartition(topic, 0): 1})
        silent.close()
        lively.close()
        log.close()

    def test_a_partition_that_moved_away_and_back_is_fenced(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path)
        source, target = make_topic(log, partitions=2), make_topic(log)
        at = TopicPartition(source, 1)
        append(log, messages(source, [b"0", b"1"], 1))

        def copy(consumer: Consumer, records: list[Record]) -> None:
            consumer.transact({at: records[-1].offset + 1}, messages(target, [r.value for r in records]))

        slow = log.consumer("g", [source], member="a")
        polled = take(slow, 2)
        guest = log.consumer("g", [source], member="b")
        copy(guest, take(guest, 2))
        guest.close()
        with pytest.raises(Fenced):
            copy(slow, polled)
        assert slow.poll(10, 0.05) == []
        assert [r.value for r in read_all(log, target)] == [b"0", b"1"]
        append(log, messages(source, [b"2"], 1))
        copy(slow, take(slow, 1))
        assert [r.value for r in read_all(log, target)] == [b"0", b"1", b"2"]
        slow.close()
        log.close()

    def test_a_member_back_from_silence_reads_on_where_the_others_stopped(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path, session_s=0.5)
        topic = make_topic(log)
        append(log, messages(topic, [b"0", b"1", b"2", b"3"]))
        silent = log.consumer("g", [topic], member="silent")
        take(silent, 1)
        time.sleep(0.7)
        other = log.consumer("g", [topic], member="other")
        other.commit({TopicPartition(topic, 0): take(other, 3)[-1].offset + 1})
        other.close()
        time.sleep(0.5)  # a member says once a second that it lives; the next poll does, and joins again
        assert [r.value for r in take(silent, 1)] == [b"3"]
        silent.close()
        log.close()

    def test_a_reader_of_a_topic_made_again_reads_it_from_the_start(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path)
        topic = make_topic(log)
        append(log, messages(topic, [b"old", b"older"]))
        consumer = log.consumer("g", [topic], member="m")
        following = {TopicPartition(topic, 0): take(consumer, 2)[-1].offset + 1}
        assert log.delete_topic(topic)
        with pytest.raises(Fenced):
            consumer.commit(following)
        log.ensure_topic(TopicSpec(topic, 1, 1e6))
        append(log, messages(topic, [b"new"]))
        assert [r.value for r in take(consumer, 1)] == [b"new"]
        consumer.close()
        log.close()

    def test_closing_twice_is_harmless(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path)
        producer, topic = log.producer(), make_topic(log)
        producer.close()
        other = log.producer()  # gets the descriptors that the first gave back
        producer.close()
        assert other.append(messages(topic, [b"x"])) == [0]
        other.close()
        log.close()

    def test_an_idle_reader_wakes_when_another_process_appends(self, tmp_path: Path) -> None:
        log = SqliteLog(tmp_path)
        topic = make_topic(log)
        consumer = log.consumer("g", [topic], member="m")
        consumer.poll(1, 0.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(consumer.poll, 1, 30.0)
            append(log, messages(topic, [b"news"]))
            assert [r.value for r in waiting.result(10)] == [b"news"]
        consumer.close()
        log.close()

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        batches=st.lists(
            st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20)), max_size=6), max_size=6
        )
    )
    def test_every_partition_is_the_sequence_of_its_appends(
        self, tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[int, bytes]]]
    ) -> None:
        log = SqliteLog(tmp_path_factory.mktemp("log"))
        topic = make_topic(log, partitions=3)
        for batch in batches:
            append(log, [Message(topic, partition, b"", value, 1) for partition, value in batch])
        for partition in range(3):
            expected = [value for batch in batches for p, value in batch if p == partition]
            found = read_all(log, topic, partition)
            assert [r.value for r in found] == expected
            assert [r.offset for r in found] == list(range(len(expected)))
        log.close()


class TestKafka:
    def test_an_open_transaction_does_not_hold_up_listing(self, broker: str) -> None:
        from kafka import KafkaProducer  # not at the top: importing it warns, which only tests may ignore

        log = open_message_log("kafka", folder=Path(), servers=broker, replication=1)
        topic = make_topic(log)
        append(log, messages(topic, [b"committed"]))
        producer = KafkaProducer(bootstrap_servers=broker, transactional_id=f"open-{topic}")
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, value=b"open", partition=0).get(10)
        began = time.monotonic()
        assert [r.value for r in read_all(log, topic)] == [b"committed"]
        [lag] = log.lag("g", topic)
        assert lag.messages == 1
        assert time.monotonic() - began < 8.0  # well under the time-out that would end the transaction
        producer.abort_transaction()
        producer.close()
        log.close()
