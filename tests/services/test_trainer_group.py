"""Who steps together: the record in coordination, and a trainer process killed in the middle of it."""

from __future__ import annotations

import re
import threading
import time
from contextlib import ExitStack, closing
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from support.batches import micro_batch
from support.etcd import etcd_server
from support.service_process import eventually, service

from models.samples import encode_batch
from services.backends import open_coordination, open_log
from services.coordination.contract import Coordination
from services.coordination.membership import Member, Registration
from services.coordination.open import open_coordination_store
from services.messagelog.contract import Message, MessageLog
from services.parameter_server.client import ParameterClient
from services.parameter_server.types import ParameterError
from services.settings.model import (
    CoordinationSettings,
    DataSettings,
    LogSettings,
    ModelSettings,
    ParameterSettings,
    Settings,
    TrainerSettings,
)
from services.topics import SAMPLES
from services.trainer.group import KEY, GroupFollower, GroupRecord, next_record, seat_in
from sync.pushes import Source

LEASE_S = 1.5
SHARDS = 3


def member(name: str, incarnation: int = 1, *, ready: bool = True) -> Member:
    return Member(name, "trainer", "127.0.0.1:1", 1, incarnation, 0, ready)


def test_the_record_changes_with_the_members_alone():
    first = next_record(None, [member("b"), member("a"), member("c", ready=False)], 1_000)
    assert first == GroupRecord(1_000, ("a", "b"), (1, 1))
    assert next_record(first, [member("a"), member("b")], 5_000) is None
    restarted = next_record(first, [member("a", 7), member("b")], 500)
    assert restarted == GroupRecord(1_001, ("a", "b"), (7, 1))
    assert next_record(restarted, [], 9_000) == GroupRecord(9_000, (), ())


def test_a_seat_is_that_of_the_very_process():
    record = GroupRecord(9, ("a", "b"), (1, 4))
    seat = seat_in(record, member("b", 4), Decimal("0.9"))
    assert seat is not None
    assert (seat.generation, seat.members, seat.rank, seat.ratio) == (9, 2, 1, Decimal("0.9"))
    assert seat_in(record, member("b", 3), Decimal(1)) is None
    assert seat_in(None, member("b"), Decimal(1)) is None


@pytest.mark.parametrize("backend", ["sqlite", "etcd"])
def test_members_come_go_and_renew(tmp_path, backend):
    with ExitStack() as stack:
        url = stack.enter_context(etcd_server(tmp_path)) if backend == "etcd" else ""
        store = stack.enter_context(
            closing(open_coordination_store(backend, tmp_path / "coordination.db", url))
        )

        def join(name: str) -> tuple[Registration, GroupFollower]:
            registration = Registration(store, member(name, store.increment("incarnations")), 5.0)
            follower = GroupFollower(store, lambda: registration.member, look_s=0.01)
            return registration, follower

        (one, first), (two, second) = join("a"), join("b")
        stack.enter_context(one)
        stack.enter_context(first)

        def sizes() -> list[tuple[int, int]]:
            return [(s.members, s.rank) for f in (first, second) if (s := f.seat()) is not None]

        eventually(lambda: sizes() == [(2, 0), (2, 1)])
        before = first.seat()
        assert before is not None
        assert before.generation == second.seat().generation
        second.renew(before)
        second.renew(before)  # that generation is over: nothing happens
        eventually(lambda: first.seat() == second.seat().__class__(second.seat().generation, 2, 0))
        assert first.seat().generation > before.generation
        second.close()
        two.close()
        eventually(lambda: sizes()[0] == (1, 0))


def group_settings(folder: Path, mode: str, trainers: int) -> Settings:
    return Settings(
        data=DataSettings(dir=folder),
        log=LogSettings(partitions=trainers),
        coordination=CoordinationSettings(lease_ttl=LEASE_S),
        trainer=TrainerSettings(mode=mode, commit_interval=0.2, nice=0, backup_ratio=0.5),
        parameters=ParameterSettings(servers=1, shards=SHARDS, snapshot_interval=1.0, deadline=5.0),
        model=ModelSettings(retrieval_dim=8, ranking_dim=4),
    )


class Stream:
    """Micro-batches that arrive in every partition, until told to stop."""

    def __init__(self, log: MessageLog, partitions: int, pause_s: float) -> None:
        self._log, self._pause_s = log, pause_s
        self.last = dict.fromkeys(range(partitions), -1)
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with closing(self._log.producer()) as producer:
            while not self._stop.wait(self._pause_s):
                for partition in self.last:
                    value = encode_batch(micro_batch(len(self.last) * self.count + partition))
                    message = Message(SAMPLES, partition, b"", value, time.time_ns() // 1_000_000)
                    self.last[partition] = producer.append([message])[-1]
                self.count += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def progress(client: ParameterClient, log: MessageLog, partition: int) -> int:
    """The offset that every shard has applied; -1 while the servers cannot say."""
    try:
        states = client.applied("main", Source(log.incarnation(SAMPLES), partition)).values()
    except ParameterError:
        return -1
    return min((state.applied for state in states), default=-1)


def longest_standstill(client: ParameterClient, log: MessageLog, partition: int, seconds: float) -> float:
    """The longest time within ``seconds`` in which the partition did not move."""
    until = time.monotonic() + seconds
    at, since, longest = progress(client, log, partition), time.monotonic(), 0.0
    while (now := time.monotonic()) < until:
        if (found := progress(client, log, partition)) != at:
            at, since = found, now
        longest = max(longest, now - since)
        time.sleep(0.01)
    return longest


def eventually_both(coordination: Coordination, before: GroupRecord) -> GroupRecord:
    """The group once it has two members, at least one of which is not the process that it was ``before``."""

    def record() -> GroupRecord | None:
        entry = coordination.get(KEY)
        return None if entry is None else msgspec.json.decode(entry.value, type=GroupRecord)

    def both() -> bool:
        found = record()
        return found is not None and len(found.names) == 2 and found.incarnations != before.incarnations

    eventually(both)
    found = record()
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["sync", "backup", "hybrid"])
def test_a_trainer_killed_in_the_middle_of_a_step_holds_nobody_up_and_loses_nothing(tmp_path, mode):
    settings = group_settings(tmp_path, mode, 2)
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(settings)))
        coordination = stack.enter_context(closing(open_coordination(settings)))
        client = stack.enter_context(closing(ParameterClient(coordination, deadline_s=5.0)))
        stack.enter_context(service("parameter-server-0", settings))
        stack.enter_context(service("trainer-0", settings))
        victim = stack.enter_context(service("trainer-1", settings))
        first = eventually_both(coordination, GroupRecord(0, (), ()))
        stream = Stream(log, 2, 0.03)
        stack.callback(stream.close)
        eventually(lambda: min(progress(client, log, p) for p in range(2)) > 10)
        victim.kill()
        assert longest_standstill(client, log, 0, LEASE_S + 1.5) < LEASE_S + 1.0
        victim.start()
        eventually_both(coordination, first)
        together = stream.last[1]
        eventually(lambda: progress(client, log, 1) > together)
        stream.close()
        eventually(lambda: all(progress(client, log, p) == last for p, last in stream.last.items()), 60.0)
        text = client.metrics()["parameter-server-0"]
    applied = re.findall(r'pushes_total\{model="main",shard="\d",status="applied"\} ([\d.e+]+)', text)
    assert [float(count) for count in applied] == [2.0 * stream.count] * SHARDS
    assert re.search(r'steps_taken_total\{model="main"\} (\d+)', text)


@pytest.mark.parametrize("mode", ["sync", "hybrid"])
def test_a_parameter_server_killed_in_the_middle_of_a_step_loses_nothing_that_counts(tmp_path, mode):
    """It goes back to what it had kept; the trainers go back with it, and end where the samples end."""
    settings = group_settings(tmp_path, mode, 2)
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(settings)))
        coordination = stack.enter_context(closing(open_coordination(settings)))
        client = stack.enter_context(closing(ParameterClient(coordination, deadline_s=5.0)))
        server = stack.enter_context(service("parameter-server-0", settings))
        for number in range(2):
            stack.enter_context(service(f"trainer-{number}", settings))
        eventually_both(coordination, GroupRecord(0, (), ()))
        stream = Stream(log, 2, 0.03)
        stack.callback(stream.close)
        eventually(lambda: min(progress(client, log, p) for p in range(2)) > 10)
        server.kill()
        server.start()
        back = stream.last[0]
        eventually(lambda: min(progress(client, log, p) for p in range(2)) > back)
        stream.close()
        eventually(lambda: all(progress(client, log, p) == last for p, last in stream.last.items()), 60.0)
