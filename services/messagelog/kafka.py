"""The message log on Apache Kafka, by kafka-python.

Producers are idempotent with acks=all. Consumers read committed records alone and are static members of their
group, so that a restarted one has its partitions again at once. Transactions have an id that is the same over
restarts: a new start aborts what its killed former self left open, which would block readers until the time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from kafka import IsolationLevel, KafkaAdminClient, KafkaConsumer, KafkaProducer, errors
from kafka import TopicPartition as KafkaPartition
from kafka.admin import MemberToRemove
from kafka.consumer.fetcher import ConsumerRecord
from kafka.structs import OffsetAndMetadata

from services.messagelog.contract import (
    Fenced,
    Lag,
    LogError,
    LogUnavailable,
    Message,
    Record,
    TopicPartition,
    TopicSpec,
    UnknownTopic,
)
from services.messagelog.kafka_errors import translate, translated

SESSION_MS: Final = 6_000
TRANSACTION_MS: Final = 10_000
MAX_MESSAGE_BYTES: Final = 16 * 2**20
_BLOCK_MS: Final = 10_000
_METADATA_MS: Final = 10_000
# The client would wait up to 30 s before it looks whether a broker that restarted is back.
_RECONNECT_MS: Final = 1_000
_READY_S: Final = 15.0
_SETTLE_S: Final = 0.5

T = TypeVar("T")


def _make_producer(servers: str, transactional_id: str | None) -> KafkaProducer:
    return KafkaProducer(
        bootstrap_servers=servers,
        acks="all",
        enable_idempotence=True,
        transactional_id=transactional_id,
        transaction_timeout_ms=TRANSACTION_MS,
        max_block_ms=_BLOCK_MS,
        max_request_size=MAX_MESSAGE_BYTES,
        allow_auto_create_topics=False,
        retry_backoff_ms=5 if transactional_id else 50,
        reconnect_backoff_max_ms=_RECONNECT_MS,
        metrics_enabled=False,
    )


def _make_consumer(servers: str, group: str | None, member: str | None) -> KafkaConsumer:
    return KafkaConsumer(
        bootstrap_servers=servers,
        group_id=group,
        group_instance_id=member,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        isolation_level="read_committed",
        allow_auto_create_topics=False,
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=SESSION_MS // 4,
        fetch_max_wait_ms=100,
        metadata_max_age_ms=_METADATA_MS,
        reconnect_backoff_max_ms=_RECONNECT_MS,
        max_partition_fetch_bytes=MAX_MESSAGE_BYTES,
        metrics_enabled=False,
    )


def _send(producer: KafkaProducer, message: Message) -> Callable[[], int]:
    future = producer.send(
        message.topic,
        value=message.value,
        key=message.key,
        partition=message.partition,
        timestamp_ms=message.accepted_at_ms,
    )
    return lambda: int(future.get(_BLOCK_MS / 1e3).offset)


def _records(found: Mapping[KafkaPartition, Sequence[ConsumerRecord]]) -> list[Record]:
    return [
        Record(at.topic, at.partition, r.offset, r.key or b"", r.value or b"", r.timestamp)
        for at, fetched in found.items()
        for r in fetched
    ]


class _Topics:
    """Numbers of partitions, asked for once per topic. Producers look here before they send, since the client
    would let the broker make a topic that is missing, or wait a long time for it."""

    def __init__(self, ask: Callable[[str], int]) -> None:
        self._ask = ask
        self._known: dict[str, int] = {}

    def require(self, messages: Sequence[Message]) -> None:
        """Raises UnknownTopic if a message goes to a topic or partition that does not exist."""
        for topic, partition in {(message.topic, message.partition) for message in messages}:
            if topic not in self._known:
                self._known[topic] = self._ask(topic)
            if not 0 <= partition < self._known[topic]:
                raise UnknownTopic(f"topic {topic} has {self._known[topic]} partitions; {partition} is none")


def _foreign(at: TopicPartition) -> KafkaPartition:
    return KafkaPartition(at.topic, at.partition)


def _patiently(ask: Callable[[], T]) -> T:
    """Ask again while the broker says that it is not ready yet (a fresh one has no group coordinator)."""
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            return ask()
        except errors.KafkaError as error:
            # Kafka calls an unknown topic retriable, since metadata may be late; ours are made before use.
            hopeless = isinstance(error, errors.UnknownTopicOrPartitionError) or not error.retriable
            if hopeless or time.monotonic() >= deadline:
                raise translate(error) from error
            time.sleep(0.1)


class KafkaLogProducer:
    """Appends messages; see the contract."""

    def __init__(self, servers: str, topics: _Topics) -> None:
        self._topics = topics
        with translated():
            self._producer = _make_producer(servers, None)

    def append(self, messages: Sequence[Message]) -> list[int]:
        self._topics.require(messages)
        with translated():
            offsets = [_send(self._producer, message) for message in messages]
            self._producer.flush(_BLOCK_MS / 1e3)
            return [offset() for offset in offsets]

    def close(self) -> None:
        self._producer.close(timeout=5)


class KafkaLogConsumer:
    """A member of a consumer group; see the contract."""

    def __init__(self, servers: str, group: str, names: Sequence[str], member: str, topics: _Topics) -> None:
        self._servers, self._group, self._member, self._topics = servers, group, member, topics
        self._transactional: KafkaProducer | None = None
        self._closed = False
        with translated():
            self._consumer = _make_consumer(servers, group, member)
            try:
                self._subscribe(names)
                self._open_transactions()
            except BaseException:
                self._consumer.close(autocommit=False)
                raise

    def _subscribe(self, names: Sequence[str]) -> None:
        """Subscribe, and learn the partitions before the group is joined.

        The client may mistake the answer to its first question about the cluster for one about these topics; as
        leader of the group it then hands out no partition until its metadata grow old.
        """
        self._consumer.bootstrap(timeout_ms=_BLOCK_MS)
        self._consumer.subscribe(list(names))
        for name in names:
            self._consumer.partitions_for_topic(name)

    def _open_transactions(self) -> KafkaProducer:
        if self._transactional is None:
            producer = _make_producer(self._servers, f"{self._group}-{self._member}")
            producer.init_transactions()
            self._transactional = producer
        return self._transactional

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_ms = max(0, int((deadline - time.monotonic()) * 1e3))
            with translated():
                # Short steps, since a rebalance inside a long poll would eat the whole time-out.
                found = self._consumer.poll(timeout_ms=min(remaining_ms, 200), max_records=max_records)
            records = _records(found)
            if records or remaining_ms == 0:
                return records

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(TopicPartition(at.topic, at.partition) for at in self._consumer.assignment())

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if partition not in self.assignment():
            raise Fenced(f"{self._member} does not own {partition.topic}/{partition.partition}")
        with translated():
            self._consumer.seek(_foreign(partition), offset)

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._require(offsets)
        with translated():
            self._consumer.commit(self._positions(offsets))

    def transact(self, offsets: Mapping[TopicPartition, int], messages: Sequence[Message]) -> None:
        self._require(offsets)
        self._topics.require(messages)
        with translated():
            producer = self._open_transactions()
            try:
                producer.begin_transaction()
                acknowledged = [_send(producer, message) for message in messages]
                producer.send_offsets_to_transaction(
                    self._positions(offsets), self._consumer.group_metadata()
                )
                producer.commit_transaction()
                for offset in acknowledged:
                    offset()
            except BaseException:
                self._abandon(producer)
                raise

    def _abandon(self, producer: KafkaProducer) -> None:
        """Close the producer: opening the next one under its id aborts what it left, however it failed."""
        self._transactional = None
        producer.close(timeout=1)

    def _require(self, offsets: Mapping[TopicPartition, int]) -> None:
        lost = sorted(offsets.keys() - self.assignment())
        if lost:
            names = ", ".join(f"{at.topic}/{at.partition}" for at in lost)
            raise Fenced(f"{self._member} of group {self._group} does not own {names} any more")

    @staticmethod
    def _positions(offsets: Mapping[TopicPartition, int]) -> dict[KafkaPartition, OffsetAndMetadata]:
        return {_foreign(at): OffsetAndMetadata(offset, "", -1) for at, offset in offsets.items()}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        member_id = self._consumer.group_metadata().member_id
        self._consumer.close(autocommit=False)
        if self._transactional is not None:
            self._transactional.close(timeout=5)
        if member_id:
            self._leave(member_id)

    def _leave(self, member_id: str) -> None:
        """A static member that merely closes keeps its partitions for the session time-out; so take it out.

        ``member_id`` is the broker's name for this instance: without it a successor would be taken out.
        """
        with translated():
            admin = KafkaAdminClient(bootstrap_servers=self._servers)
            try:
                admin.remove_group_members(self._group, [MemberToRemove(member_id, self._member)])
            except (errors.UnknownMemberIdError, errors.GroupIdNotFoundError):
                pass  # Gone already, which is what was wanted.
            finally:
                admin.close()


class KafkaLog:
    """The log on the brokers ``servers`` (comma-separated); see the contract."""

    def __init__(self, servers: str, *, replication: int = 1) -> None:
        self._servers, self._replication = servers, replication
        with translated():
            self._admin = KafkaAdminClient(bootstrap_servers=servers, reconnect_backoff_max_ms=_RECONNECT_MS)

    def ensure_topic(self, spec: TopicSpec) -> None:
        wanted = {
            spec.name: {
                "num_partitions": spec.partitions,
                "replication_factor": self._replication,
                "configs": {
                    "retention.ms": str(int(spec.retention_s * 1e3)),
                    "max.message.bytes": str(MAX_MESSAGE_BYTES),
                    "message.timestamp.type": "CreateTime",
                },
            }
        }
        try:
            _patiently(lambda: self._admin.create_topics(wanted, wait_for_metadata=True))
        except LogError as error:
            if not isinstance(error.__cause__, errors.TopicAlreadyExistsError):
                raise
        have = self.partitions(spec.name)
        if have != spec.partitions:
            raise LogError(
                f"topic {spec.name} has {have} partitions, not {spec.partitions}; that cannot change"
            )

    def delete_topic(self, topic: str) -> bool:
        try:
            _patiently(lambda: self._admin.delete_topics([topic]))
        except UnknownTopic:
            return False
        deadline = time.monotonic() + _READY_S
        while self._described(topic) is not None:
            if time.monotonic() > deadline:
                raise LogUnavailable(f"topic {topic} is still there {_READY_S:g} s after its deletion")
            time.sleep(0.05)
        return True

    def _described(self, topic: str) -> Mapping[str, object] | None:
        [found] = _patiently(lambda: self._admin.describe_topics([topic]))
        return None if found["error_code"] else found

    def _known(self, topic: str) -> Mapping[str, object]:
        found = self._described(topic)
        if found is None:
            raise UnknownTopic(f"there is no topic {topic}; make it with ensure_topic")
        return found

    def incarnation(self, topic: str) -> str:
        return str(self._known(topic)["topic_id"])

    def partitions(self, topic: str) -> int:
        listed = self._known(topic)["partitions"]
        assert isinstance(listed, list)
        return len(listed)

    def producer(self) -> KafkaLogProducer:
        return KafkaLogProducer(self._servers, _Topics(self.partitions))

    def consumer(self, group: str, names: Sequence[str], *, member: str) -> KafkaLogConsumer:
        for name in names:
            self._known(name)
        return KafkaLogConsumer(self._servers, group, names, member, _Topics(self.partitions))

    def read(self, partition: TopicPartition, offset: int, max_records: int) -> list[Record]:
        """See the contract. What a transaction has just committed shows a moment later: so this waits a little
        for what is still open, but not for the time-out of one whose producer died."""
        stable = self._end(partition, IsolationLevel.READ_COMMITTED)
        end = self._end(partition, IsolationLevel.READ_UNCOMMITTED)
        with translated():
            consumer = _make_consumer(self._servers, None, None)
            try:
                return self._read_with(consumer, partition, offset, (stable, end), max_records)
            finally:
                consumer.close(autocommit=False)

    def _read_with(
        self,
        consumer: KafkaConsumer,
        partition: TopicPartition,
        offset: int,
        ends: tuple[int, int],
        max_records: int,
    ) -> list[Record]:
        stable, end = ends
        at = _foreign(partition)
        consumer.assign([at])
        first = consumer.beginning_offsets([at])[at]
        consumer.seek(at, max(offset, first))
        records: list[Record] = []
        began = time.monotonic()
        while len(records) < max_records and (position := consumer.position(at)) < end:
            if time.monotonic() - began > (_READY_S if position < stable else _SETTLE_S):
                break
            found = consumer.poll(timeout_ms=100, max_records=max_records - len(records))
            records += _records(found)
        return records

    def end_offset(self, partition: TopicPartition) -> int:
        return self._end(partition, IsolationLevel.READ_UNCOMMITTED)

    def _end(self, partition: TopicPartition, isolation: IsolationLevel) -> int:
        """Where readers of that isolation stop now; a transaction that is open holds up the committed ones."""
        self._known(partition.topic)
        at = _foreign(partition)
        found = _patiently(lambda: self._admin.list_partition_offsets({at: -1}, isolation_level=isolation))
        return int(found[at].offset)

    def lag(self, group: str, topic: str) -> list[Lag]:
        """See the contract. ``messages`` counts transaction markers too, so it is an upper bound."""
        every = [TopicPartition(topic, number) for number in range(self.partitions(topic))]
        stored = _patiently(lambda: self._admin.list_group_offsets({group: [_foreign(at) for at in every]}))
        lags = []
        for at in every:
            known = stored.get(group, {}).get(_foreign(at))
            committed = max(known.offset, 0) if known is not None else 0
            end = self._end(at, IsolationLevel.READ_COMMITTED)
            oldest = self.read(at, committed, 1) if committed < end else []
            seconds = max(0.0, time.time() - oldest[0].accepted_at_ms / 1e3) if oldest else 0.0
            lags.append(Lag(at.partition, committed, end, end - committed if oldest else 0, seconds))
        return lags

    def enforce_retention(self) -> int:
        """Kafka does so by itself (``retention.ms``)."""
        return 0

    def close(self) -> None:
        self._admin.close()
