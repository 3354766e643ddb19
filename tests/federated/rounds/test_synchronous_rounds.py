from dataclasses import replace
from typing import Any

import pytest
from support.rounds import DRAW, KEY, Bench, rounds

from federated.rounds import (
    Accepted,
    Admitted,
    Event,
    Finished,
    MemoryStore,
    NotYet,
    Phase,
    PollRequest,
    Refused,
    Rounds,
    RoundSettings,
    Standing,
    StartRequest,
    Tickets,
)


def bench(**settings: Any) -> Bench:
    return Bench.of(**{"start_fl_job_threshold": 5, "fl_iteration_num": 3, **settings})


def test_a_phase_closes_at_its_threshold_and_a_valid_iteration_raises_the_version() -> None:
    b = bench()
    b.admit("a", "b", "c", "d")
    assert b.desk.header().phase is Phase.STARTING
    b.admit("e")
    assert b.desk.header().phase is Phase.UPDATING
    b.accept("a", "b", "c")
    assert b.desk.header().phase is Phase.UPDATING
    b.accept("d")
    assert b.desk.header().phase is Phase.AGGREGATING
    assert b.aggregate() == 2  # one group, one merge
    header = b.desk.header()
    assert (header.iteration, header.version, header.phase) == (2, 1, Phase.STARTING)
    [closed] = b.log()
    assert (closed.valid, closed.starts, closed.uploads, closed.why) == (True, 5, 4, Event.AGGREGATED)


def test_who_comes_late_is_told_when_to_come_back() -> None:
    b = bench()
    b.admit(*"abcde")
    full = b.start("f", b.now + 10)
    assert isinstance(full, NotYet)
    assert full.reason == "full"
    assert b.now + 10 < full.come_back_at <= b.now + 10 + 60 * 1.25
    b.accept(*"abcd")
    late = b.upload("e", 1)
    assert isinstance(late, Refused)
    assert late.code == "late"
    assert late.come_back_at is not None
    assert late.come_back_at > b.now


def test_come_back_times_are_spread_by_the_draw() -> None:
    b = bench()
    b.admit(*"abcde")
    replies = [b.start("f", b.now + 40, draw) for draw in (0.0, 0.5, 0.999)]
    times = [reply.come_back_at for reply in replies if isinstance(reply, NotYet)]
    assert len(set(times)) == 3
    assert times == sorted(times)


def test_an_upload_before_the_start_phase_has_closed_waits_unless_early_uploads_are_taken() -> None:
    b = bench()
    b.admit("a")
    reply = b.upload("a", 1)
    assert isinstance(reply, NotYet)
    assert reply.reason == "starting"
    early = bench(early_uploads=True)
    early.admit("a")
    assert isinstance(early.upload("a", 1), Accepted)
    assert early.desk.header().uploads == 1


def test_early_uploads_close_the_iteration_at_their_threshold() -> None:
    b = bench(early_uploads=True, update_model_ratio="0.4")
    b.admit("a", "b")
    b.accept("a", "b")
    assert b.desk.header().phase is Phase.AGGREGATING


def test_a_repeated_start_gets_the_same_ticket_and_counts_once() -> None:
    b = bench()
    first, again = b.start("a"), b.start("a", b.now + 5)
    assert isinstance(first, Admitted)
    assert isinstance(again, Admitted)
    assert again.repeated
    assert (again.ticket, again.iteration, again.until) == (first.ticket, first.iteration, first.until)
    assert b.desk.header().starts == 1


def test_a_repeated_upload_gets_the_same_reply_and_counts_once() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept("a")
    again = b.upload("a", 1)
    assert isinstance(again, Accepted)
    assert again.repeated
    assert b.desk.header().uploads == 1
    other = b.upload("a", 1, body="another")
    assert isinstance(other, Refused)
    assert other.code == "different_body"


def test_a_repeat_after_the_iteration_ended_is_still_accepted_once() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept(*"abcd")
    b.aggregate()
    again = b.upload("a", 1)
    assert isinstance(again, Accepted)
    assert again.repeated
    assert b.desk.header().uploads == 0


def test_a_client_whose_upload_is_counted_does_not_start_again_in_that_iteration() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept("a")
    reply = b.start("a")
    assert isinstance(reply, NotYet)
    assert reply.reason == "counted"


def test_an_older_iteration_is_refused() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept(*"abcd")
    b.aggregate()
    b.admit(*"abcde")
    replay = b.upload("e", 1)
    assert isinstance(replay, Refused)
    assert replay.code == "late"
    assert b.desk.header().uploads == 0


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"ticket": b"\0" * 16}, "foreign_ticket"),
        ({"ticket": b""}, "foreign_ticket"),
        ({"ticket": Tickets("job", b"x" * 32).issue("a", 1)}, "foreign_ticket"),
        ({"ticket": Tickets("another", KEY).issue("a", 1)}, "foreign_ticket"),
        ({"ticket": Tickets("job", KEY).issue("b", 1)}, "foreign_ticket"),
        ({"ticket": Tickets("job", KEY).issue("a", 2)}, "foreign_ticket"),
        ({"iteration": -1}, "foreign_ticket"),
        ({"iteration": 2**70}, "foreign_ticket"),
        ({"iteration": 9, "ticket": Tickets("job", KEY).issue("a", 9)}, "future_iteration"),
        ({"client": "never", "ticket": Tickets("job", KEY).issue("never", 1)}, "late"),
        ({"client": ""}, "bad_id"),
        ({"client": "x" * 257}, "bad_id"),
        ({"client": "a\x00"}, "bad_id"),
        ({"client": "\ud800"}, "bad_id"),
        ({"examples": 0}, "bad_examples"),
        ({"examples": -5}, "bad_examples"),
        ({"examples": 2**40}, "bad_examples"),
        ({"loss": float("nan")}, "bad_loss"),
        ({"loss": float("inf")}, "bad_loss"),
    ],
)
def test_foreign_and_senseless_uploads_are_refused_with_a_code(changed: dict[str, Any], code: str) -> None:
    b = bench()
    b.admit(*"abcde")
    request = replace(b.upload_request("a", 1), **changed)
    [reply] = b.desk.handle([request], b.now, [DRAW])
    assert isinstance(reply, Refused)
    assert reply.code == code
    assert b.desk.header().uploads == 0
    b.accept("a")  # the round goes on


def test_too_few_starts_in_the_window_make_the_iteration_invalid() -> None:
    b = bench()
    b.admit("a", "b")
    assert b.desk.tick(b.now + 299.9) == []
    [closed] = b.desk.tick(b.now + 300)
    assert (closed.valid, closed.why, closed.starts) == (False, Event.TOO_FEW_STARTS, 2)
    header = b.desk.header()
    assert (header.iteration, header.version, header.invalid, header.starts) == (2, 0, 1, 0)
    assert b.desk.tick(b.now + 10_000) == []  # no window is open before the next request


def test_too_few_uploads_in_the_window_make_the_iteration_invalid() -> None:
    b = bench()
    b.admit(*"abcde")
    b.upload("a", 1, b.now + 100)
    assert b.desk.tick(b.now + 399) == []
    [closed] = b.desk.tick(b.now + 400)
    assert (closed.why, closed.uploads, closed.closed_at) == (Event.TOO_FEW_UPLOADS, 1, b.now + 400)


def test_without_any_upload_the_global_window_ends_the_iteration() -> None:
    b = bench()
    b.admit(*"abcde")
    assert b.desk.tick(b.now + 3599) == []
    [closed] = b.desk.tick(b.now + 3600)
    assert closed.why is Event.GLOBAL_WINDOW


def test_a_window_that_ran_out_is_applied_by_whoever_comes_next() -> None:
    b = bench()
    b.admit("a", "b")
    reply = b.start("c", b.now + 1000)
    assert isinstance(reply, Admitted)
    assert reply.iteration == 2
    [closed] = b.log()
    assert closed.closed_at == b.now + 300  # when the window ended, not when it was noticed


def test_an_aggregation_that_nobody_finishes_ends_by_its_window() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept(*"abcd")
    [closed] = b.desk.tick(b.now + 600)
    assert closed.why is Event.AGGREGATION_WINDOW


def test_a_clock_set_back_neither_opens_nor_closes() -> None:
    b = bench()
    b.admit("a")
    b.admit("b")
    back = b.start("c", b.now - 1e9)
    assert isinstance(back, Admitted)
    assert b.desk.tick(b.now - 1e9) == []
    header = b.desk.header()
    assert (header.clock, header.opened_at, header.starts) == (b.now, b.now, 3)
    [closed] = b.desk.tick(b.now + 300)
    assert closed.starts == 3


def test_the_job_ends_after_its_iterations_valid_or_not() -> None:
    b = bench()
    for i in range(3):
        b.now += 1000
        b.admit(*"abcde")
        if i != 1:
            b.accept(*"abcd")
            b.aggregate()
        else:
            b.desk.tick(b.now + 3600)
            b.now += 3600
    assert b.desk.header().phase is Phase.FINISHED
    assert b.start("a") == Finished(3, 2)
    assert [closed.valid for closed in b.log()] == [True, False, True]
    late = b.upload("e", 3)
    assert isinstance(late, Refused)
    assert late.come_back_at is None
    assert b.desk.handle([PollRequest("e", 3)], b.now, [DRAW]) == [Finished(3, 2)]
    assert b.aggregate() == 0


def test_poll_says_whether_the_upload_was_counted() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept("a")
    replies = b.desk.handle(
        [PollRequest("a", 1), PollRequest("b", 1), PollRequest("x", 0)], b.now, [DRAW] * 3
    )
    assert [reply.counted for reply in replies if isinstance(reply, Standing)] == [True, False, False]


def test_over_selection_takes_more_starts_and_tells_the_rest_that_it_is_full() -> None:
    b = bench(mode="over_selection", over_selection="1.5")  # 4 uploads of 6 starts
    b.admit(*"abcd")
    b.accept("a")
    b.admit(*"ef")
    full = b.start("g")
    assert isinstance(full, NotYet)
    assert full.reason == "full"
    b.accept(*"bcd")
    late = b.upload("e", 1)
    assert isinstance(late, Refused)
    assert late.code == "late"
    assert b.desk.header().phase is Phase.AGGREGATING


def test_over_selection_goes_on_with_enough_starts_when_the_window_ends() -> None:
    b = bench(mode="over_selection", over_selection="1.5")
    b.admit(*"abcde")
    b.desk.tick(b.now + 300)
    assert b.desk.header().phase is Phase.UPDATING


def test_silo_members_all_take_part_and_nobody_else() -> None:
    b = Bench.of(kind="cross_silo", members=("north", "south", "west"))
    stranger = b.start("east")
    assert isinstance(stranger, Refused)
    assert stranger.code == "not_a_member"
    b.admit("north", "south", "west")
    b.accept("north", "south")
    assert b.desk.header().phase is Phase.UPDATING
    b.accept("west")
    assert b.desk.header().phase is Phase.AGGREGATING


def test_an_absent_member_voids_the_iteration_or_the_others_go_on() -> None:
    members = ("north", "south", "west")
    void = Bench.of(kind="cross_silo", members=members)
    void.admit("north", "south")
    [closed] = void.desk.tick(void.now + 300)
    assert closed.why is Event.TOO_FEW_STARTS

    proceed = Bench.of(kind="cross_silo", members=members, absent="proceed", update_model_ratio="0.6")
    proceed.admit("north", "south")
    proceed.desk.tick(proceed.now + 300)
    proceed.now += 301
    proceed.accept("north", "south")  # who is absent is not waited for
    assert proceed.desk.header().phase is Phase.AGGREGATING

    fails_later = Bench.of(kind="cross_silo", members=members, absent="proceed", update_model_ratio="0.6")
    fails_later.admit(*members)
    fails_later.accept("north", "south")
    assert (
        fails_later.desk.header().phase is Phase.UPDATING
    )  # everyone's update is wanted while there is time
    fails_later.desk.tick(fails_later.now + 300)
    assert fails_later.desk.header().phase is Phase.AGGREGATING


def test_stop_voids_what_clients_are_in_and_resume_begins_the_next() -> None:
    b = bench()
    b.admit("a", "b")
    [closed] = b.desk.stop(b.now)
    assert closed.why is Event.STOP
    assert b.desk.stop(b.now) == []
    reply = b.start("c")
    assert isinstance(reply, NotYet)
    assert reply.reason == "stopped"
    assert b.desk.tick(b.now + 1e6) == []
    b.desk.resume(b.now)
    again = b.start("c")
    assert isinstance(again, Admitted)
    assert again.iteration == 2


def test_stop_before_anybody_came_costs_no_iteration() -> None:
    b = bench()
    assert b.desk.stop(b.now) == []
    b.desk.resume(b.now)
    assert b.desk.header().iteration == 1


def test_stop_during_aggregation_finishes_it_first() -> None:
    b = bench()
    b.admit(*"abcde")
    b.accept(*"abcd")
    assert b.desk.stop(b.now) == []
    b.aggregate()
    header = b.desk.header()
    assert (header.phase, header.version, header.iteration) == (Phase.STOPPED, 1, 2)


def test_ten_million_ids_cost_nothing() -> None:
    b = bench()
    b.admit(*"abcde")
    assert isinstance(b.store, MemoryStore)
    before = len(b.store._records)
    for number in range(2000):
        b.start(f"device-{number}", b.now + 1)
    assert len(b.store._records) == before


def test_virtual_time_may_start_at_zero() -> None:
    b = bench()
    b.now = 0.0
    b.admit(*"abcde")
    assert b.desk.header().opened_at == 0.0
    [closed] = b.desk.tick(3600.0)
    assert closed.opened_at == 0.0


def test_a_job_is_created_once_and_dropped_whole() -> None:
    b = bench()
    b.admit("a")
    assert b.desk.create() is False
    assert b.desk.header().starts == 1
    b.desk.drop()
    assert isinstance(b.store, MemoryStore)
    assert b.store._records == {}


def test_times_that_are_none_are_our_own_fault() -> None:
    machine = Rounds(RoundSettings(start_fl_job_threshold=1), Tickets("job", KEY))
    with pytest.raises(ValueError, match="no time"):
        machine.start(machine.init(), None, StartRequest("a"), float("nan"), DRAW)


def test_old_iterations_are_swept() -> None:
    b = bench(fl_iteration_num=20)
    sizes = []
    for _ in range(12):
        b.admit(*"abcde")
        for client in "abcd":
            b.store.put_blob(b.desk.keys.body(b.desk.header().iteration, client, b"d" * 16), b"body")
        b.accept(*"abcd")
        b.aggregate()
        assert isinstance(b.store, MemoryStore)
        sizes.append(len(b.store._records) + len(b.store._blobs) - len(b.log()))
    assert sizes[-1] == sizes[6]


def test_a_ticket_needs_a_long_key_and_shows_none() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes"):
        Tickets("job", b"short")
    assert "kkkk" not in repr(rounds(start_fl_job_threshold=1))
