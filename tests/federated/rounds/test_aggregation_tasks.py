from typing import Any

import pytest
from support.rounds import Bench

from federated.rounds import Event, Phase, RecordRefused, Task, Work
from federated.rounds.aggregation import UnknownTask, deliver

CLIENTS = [f"c{i}" for i in range(10)]


def bench(**settings: Any) -> Bench:
    """Ten uploads in groups of four, ready to be summed."""
    b = Bench.of(
        **{"start_fl_job_threshold": 10, "update_model_ratio": 1, "aggregation_group": 4, **settings}
    )
    b.admit(*CLIENTS)
    return b


def full(**settings: Any) -> Bench:
    b = bench(**settings)
    b.accept(*CLIENTS)
    return b


def claims(b: Bench, server: str = "s", now: float | None = None) -> list[Task]:
    tasks = []
    while (task := b.desk.claim(server, b.now if now is None else now)) is not None:
        tasks.append(task)
    return tasks


def test_groups_cover_each_upload_once_and_the_merge_waits_for_all() -> None:
    b = full()
    tasks = claims(b)
    assert [(t.kind, t.first, t.last) for t in tasks] == [("group", 0, 4), ("group", 4, 8), ("group", 8, 10)]
    assert [slot.client for task in tasks for slot in b.desk.slots(task)] == CLIENTS
    for task in tasks[:2]:
        assert b.desk.deliver(task, b.now)
    assert claims(b) == []
    assert b.desk.deliver(tasks[2], b.now)
    [merge] = claims(b)
    assert merge.partials == ((0, 1), (1, 1), (2, 1))
    assert b.desk.header().version == 0
    assert b.desk.deliver(merge, b.now)
    header = b.desk.header()
    assert (header.version, header.attempt, header.iteration) == (1, 1, 2)


def test_full_groups_are_summed_while_clients_still_upload() -> None:
    b = bench()
    b.accept(*CLIENTS[:7])
    [task] = claims(b)
    assert (task.first, task.last) == (0, 4)
    b.desk.deliver(task, b.now)
    assert claims(b) == []
    b.accept(*CLIENTS[7:])
    assert [(t.first, t.last) for t in claims(b)] == [(4, 8), (8, 10)]


def test_a_dead_servers_task_goes_to_another_after_its_lease() -> None:
    b = full()
    lost = claims(b, "dead")
    assert claims(b, "other", b.now + 29.9) == []
    taken = claims(b, "other", b.now + 30)
    assert [(t.number, t.attempt) for t in taken] == [(t.number, 2) for t in lost]
    b.now += 30
    for task in taken:
        assert b.desk.deliver(task, b.now)
    [merge] = claims(b, "other")
    assert merge.partials == ((0, 2), (1, 2), (2, 2))
    again = claims(b, "third", b.now + 30)[0]  # who merges may die as well
    assert again.attempt == 2
    assert b.desk.deliver(again, b.now + 31)
    assert b.desk.deliver(merge, b.now + 31) is False
    assert b.desk.header().attempt == 2
    assert b.desk.header().version == 1


def test_a_slow_server_may_still_deliver_and_the_first_counts() -> None:
    b = full()
    slow = claims(b, "slow")[0]
    quick = claims(b, "quick", b.now + 31)[0]
    assert b.desk.deliver(slow, b.now + 32)
    assert b.desk.deliver(quick, b.now + 33) is False
    assert b.desk.deliver(slow, b.now + 33) is False


def test_a_lease_is_renewed_while_it_is_held() -> None:
    b = full()
    [task, *_] = claims(b)
    assert b.desk.renew(task, b.now + 20)
    assert [t.number for t in claims(b, "other", b.now + 40)] == [1, 2]
    taken = claims(b, "other", b.now + 50)
    assert [t.number for t in taken] == [0]
    assert b.desk.renew(task, b.now + 51) is False


def test_a_task_that_fails_again_and_again_voids_the_iteration() -> None:
    b = full(aggregation_attempts=2)
    [task, *_] = claims(b)
    assert b.desk.give_up(task, b.now) == 1
    assert b.desk.give_up(task, b.now) == 2
    [closed] = b.log()
    assert closed.why is Event.AGGREGATION_FAILED
    assert b.desk.deliver(task, b.now) is False
    assert b.desk.header().phase is Phase.STARTING


def test_a_failed_task_is_free_at_once() -> None:
    b = full()
    [task, *_] = claims(b)
    b.desk.give_up(task, b.now)
    assert [(t.number, t.attempt) for t in claims(b, "other")] == [(0, 2)]
    assert b.desk.give_up(task, b.now) == 1  # not its holder any more


def test_what_is_delivered_for_an_iteration_given_up_does_not_count() -> None:
    b = full()
    tasks = claims(b)
    assert b.desk.deliver(tasks[0], b.now + 601) is False
    assert b.desk.header().version == 0
    assert b.log()[0].why is Event.AGGREGATION_WINDOW


def test_two_servers_share_the_work() -> None:
    b = full(aggregation_group=1)
    mine, yours = [], []
    for _ in range(5):
        mine.append(b.desk.claim("mine", b.now))
        yours.append(b.desk.claim("yours", b.now))
    assert sorted(task.number for task in mine + yours if task is not None) == list(range(10))


def test_a_task_that_was_never_given_out_is_our_own_fault() -> None:
    with pytest.raises(UnknownTask):
        deliver(Work(1), Task("group", 1, 0, 1, 0.0))
    b = full()
    task = claims(b)[0]
    with pytest.raises(UnknownTask):
        b.desk.deliver(Task("group", 1, 0, task.attempt + 1, 0.0), b.now)


def test_a_missing_slot_is_an_error_not_a_smaller_sum() -> None:
    b = full()
    task = claims(b)[0]
    b.store.delete(b.desk.keys.slot(1, 2))
    with pytest.raises(RecordRefused, match="1 slots"):
        b.desk.slots(task)


def test_the_merge_is_held_back_while_masks_are_on_and_groups_are_not() -> None:
    b = full()
    held = [b.desk.claim("s", b.now, merge=False) for _ in range(3)]
    for task in held:
        assert task is not None
        b.desk.deliver(task, b.now)
    assert b.desk.claim("s", b.now, merge=False) is None
    merge = b.desk.claim("s", b.now)
    assert merge is not None
    assert merge.kind == "merge"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.UPDATING, Phase.AGGREGATING])
def test_an_iteration_whose_masks_cannot_come_off_is_void_and_the_next_begins(phase: Phase) -> None:
    b = Bench.of(start_fl_job_threshold=3, update_model_ratio=1)
    b.admit(*CLIENTS[: 2 if phase is Phase.STARTING else 3])
    if phase is Phase.AGGREGATING:
        b.accept(*CLIENTS[:3])
    assert b.desk.header().phase is phase
    assert b.desk.void(2, b.now) == []  # another iteration's failure is none of this one
    [closed] = b.desk.void(1, b.now)
    assert (closed.valid, closed.why) == (False, Event.SECURE_AGGREGATION)
    assert b.desk.void(1, b.now) == []
    header = b.desk.header()
    assert (header.iteration, header.phase, header.version) == (2, Phase.STARTING, 0)
