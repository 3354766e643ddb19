from typing import Any

import pytest
from support.rounds import Bench

from federated.rounds import Accepted, Admitted, Closed, Event, NotYet, Phase, Refused


def bench(**settings: Any) -> Bench:
    defaults = {"mode": "buffered", "buffer_size": 3, "max_concurrency": 6, "max_staleness": 2}
    return Bench.of(**(defaults | settings))


def test_uploads_make_a_version_without_waiting_for_others() -> None:
    b = bench()
    b.admit(*"abcdef")
    b.accept(*"abc")
    assert b.desk.header().phase is Phase.AGGREGATING
    b.aggregate()
    header = b.desk.header()
    assert (header.version, header.iteration, header.phase) == (1, 2, Phase.BUFFERING)


def test_concurrency_is_bounded_and_freed_by_uploads_and_by_time() -> None:
    b = bench()
    b.admit(*"abcdef")
    reply = b.start("g")
    assert isinstance(reply, NotYet)
    assert reply.reason == "busy"
    b.accept("a")
    assert isinstance(b.start("g"), Admitted)
    assert isinstance(b.start("h"), NotYet)
    later = b.now + 300 * 9 / 8 + 0.1  # those who never came back are forgotten
    assert isinstance(b.start("h", later), Admitted)
    assert b.desk.header().in_flight == 1


def test_a_stale_upload_weighs_less() -> None:
    b = bench()
    b.admit("late", *"abc")
    b.accept(*"abc")
    b.aggregate()
    b.admit("a")
    assert isinstance(b.upload("late", 1), Accepted)
    b.admit("b", "c")
    b.accept("b", "c")
    task = b.desk.claim("server", b.now)
    assert task is not None
    slots = {slot.client: slot for slot in b.desk.slots(task)}
    assert slots["late"].staleness == 1
    assert slots["late"].weight == pytest.approx(20 / 2**0.5)
    assert slots["late"].started == 1
    assert slots["b"].weight == 20


def test_too_stale_is_refused() -> None:
    b = bench()
    b.admit("late")
    for _ in range(3):
        b.admit(*"abc")
        b.accept(*"abc")
        b.aggregate()
    reply = b.upload("late", 1)
    assert isinstance(reply, Refused)
    assert reply.code == "too_stale"


def test_longer_than_the_update_window_is_refused_and_may_start_anew() -> None:
    b = bench()
    b.admit("a")
    reply = b.upload("a", 1, b.now + 300.5)
    assert isinstance(reply, Refused)
    assert reply.code == "expired"
    again = b.start("a", b.now + 301)
    assert isinstance(again, Admitted)
    assert again.until == b.now + 601
    assert isinstance(b.upload("a", 1, b.now + 302), Accepted)


def test_what_comes_during_aggregation_fills_the_next_buffer_up_to_its_size() -> None:
    b = bench(max_concurrency=20)
    b.admit(*"abcdefgh")
    b.accept(*"abc")
    assert isinstance(b.upload("d", 1), Accepted)
    assert isinstance(b.upload("e", 1), Accepted)
    assert isinstance(b.upload("f", 1), Accepted)
    wait = b.upload("g", 1)
    assert isinstance(wait, NotYet)
    assert wait.reason == "aggregating"
    b.aggregate()  # aggregates the first, closes the second at once, and aggregates that too
    assert [(closed.iteration, closed.uploads) for closed in b.log()] == [(1, 3), (2, 3)]
    header = b.desk.header()
    assert (header.version, header.uploads, header.phase) == (2, 0, Phase.BUFFERING)
    assert isinstance(b.upload("g", 1), Accepted)


def test_a_buffer_that_does_not_fill_is_aggregated_with_enough_and_void_with_fewer() -> None:
    def closes(clients: str) -> tuple[Phase, list[Closed]]:
        b = bench(update_model_ratio="0.6")  # 2 of 3
        b.admit(*"abc")
        b.accept(*clients)
        closed = b.desk.tick(b.now + 3600)
        return b.desk.header().phase, closed

    assert closes("ab") == (Phase.AGGREGATING, [])
    phase, [closed] = closes("a")
    assert phase is Phase.BUFFERING
    assert closed.why is Event.GLOBAL_WINDOW


def test_the_last_iteration_takes_nothing_for_a_next_one() -> None:
    b = bench(fl_iteration_num=1)
    b.admit(*"abcdef")
    b.accept(*"abc")
    assert isinstance(b.upload("d", 1), NotYet)
    b.aggregate()
    assert b.desk.header().phase is Phase.FINISHED
    late = b.upload("d", 1)
    assert isinstance(late, Refused)


def test_stop_keeps_what_was_counted_for_the_next_buffer() -> None:
    b = bench()
    b.admit(*"abcdef")
    b.accept(*"abc")
    b.upload("d", 1)
    b.desk.stop(b.now)
    b.aggregate()
    assert b.desk.header().phase is Phase.STOPPED
    b.desk.resume(b.now + 5)
    header = b.desk.header()
    assert (header.uploads, header.phase, header.opened_at) == (1, Phase.BUFFERING, b.now + 5)


def test_what_came_while_an_aggregation_ran_that_failed_is_as_old_as_it_is() -> None:
    b = bench(aggregation_attempts=1)
    b.admit(*"abcdef")
    b.accept(*"abc")
    b.accept("d")  # while the buffer of a, b and c is aggregated: expected to be one version old
    failed = b.desk.claim("server", b.now)
    assert failed is not None
    b.desk.give_up(failed, b.now)
    assert (b.desk.header().version, b.desk.header().iteration) == (0, 2)
    assert all(isinstance(b.upload(client, 1), Accepted) for client in "ef")
    task = b.desk.claim("server", b.now)
    assert task is not None
    ages = {slot.client: (slot.staleness, slot.weight) for slot in b.desk.slots(task)}
    assert ages == dict.fromkeys("def", (0, 20.0))
