"""A job that may release so many sums finishes before one more would begin."""

import json
from typing import Any

import pytest
from support.rounds import Bench

from federated.rounds import (
    Closed,
    Desk,
    Event,
    Finished,
    Header,
    NotYet,
    Phase,
    RecordRefused,
    SettingsRefused,
)


def bench(**settings: Any) -> Bench:
    return Bench.of(
        **{
            "start_fl_job_threshold": 2,
            "update_model_ratio": 1,
            "fl_iteration_num": 9,
            "most_releases": 2,
            **settings,
        }
    )


def one_iteration(b: Bench) -> None:
    b.admit("a", "b")
    b.accept("a", "b")
    assert b.aggregate() == 2


def test_the_last_release_that_the_budget_affords_ends_the_job() -> None:
    b = bench()
    one_iteration(b)
    assert (b.desk.header().releases, b.rounds.over(b.desk.header())) == (1, "")
    one_iteration(b)
    header = b.desk.header()
    assert (header.phase, header.version, header.releases) == (Phase.FINISHED, 2, 2)
    assert b.rounds.over(header) == "budget"
    assert b.start("c") == Finished(2, 2)
    assert [closed.releases for closed in b.log()] == [1, 2]
    assert b.desk.claim("server", b.now + 1e6) is None


def test_a_job_without_budget_ends_with_its_last_iteration() -> None:
    b = bench(most_releases=0, fl_iteration_num=1)
    one_iteration(b)
    assert b.rounds.over(b.desk.header()) == "last"
    assert b.desk.header().releases == 1


def test_an_iteration_that_nobody_uploaded_to_costs_nothing() -> None:
    b = bench()
    b.admit("a", "b")
    b.desk.tick(b.now + 1e5)
    [closed] = b.log()
    assert (closed.valid, closed.releases) == (False, 0)
    assert b.desk.header().phase is Phase.STARTING


def test_a_sum_that_was_given_up_is_counted_all_the_same() -> None:
    """Some server may have made a model of it and published it before it died."""
    b = bench()
    for _ in range(2):
        b.admit("a", "b")
        b.accept("a", "b")
        b.now += 1e5
        b.desk.tick(b.now)
    assert [(c.valid, c.why, c.releases) for c in b.log()] == [
        (False, Event.AGGREGATION_WINDOW, 1), (False, Event.AGGREGATION_WINDOW, 2),
    ]  # fmt: skip
    assert b.rounds.over(b.desk.header()) == "budget"


def test_a_retried_merge_is_one_release() -> None:
    b = bench()
    b.admit("a", "b")
    b.accept("a", "b")
    task = b.desk.claim("dies", b.now)
    assert task is not None
    b.desk.give_up(task, b.now)
    assert b.aggregate() == 2
    assert b.desk.header().releases == 1


def test_a_server_that_starts_again_goes_on_counting() -> None:
    b = bench()
    one_iteration(b)
    b.desk = Desk(b.store, b.rounds)
    one_iteration(b)
    assert b.rounds.over(b.desk.header()) == "budget"


def test_a_stop_during_the_last_release_ends_the_job_and_it_cannot_be_resumed() -> None:
    b = bench(most_releases=1)
    b.admit("a", "b")
    b.accept("a", "b")
    b.desk.stop(b.now)
    assert b.aggregate() == 2
    assert b.desk.header().phase is Phase.FINISHED
    b.desk.resume(b.now)
    assert b.desk.header().phase is Phase.FINISHED


def test_no_upload_is_taken_for_a_buffer_that_the_budget_does_not_afford() -> None:
    b = bench(mode="buffered", buffer_size=2, max_concurrency=5, most_releases=1)
    b.admit("a", "b", "c")
    b.accept("a", "b")
    assert b.desk.header().phase is Phase.AGGREGATING
    assert isinstance(b.upload("c", 1), NotYet)
    assert b.aggregate() == 2
    assert b.rounds.over(b.desk.header()) == "budget"


def test_records_that_an_older_version_wrote_are_read() -> None:
    header = Header(Phase.STARTING, 3, releases=2)
    closed = Closed(7, 6, True, Event.AGGREGATED, 100, 3, 1.5, 2.5, 4)
    records: list[Header | Closed] = [header, closed]
    for record in records:
        fields = json.loads(record.to_bytes())
        assert fields.pop("releases") > 0
        assert type(record).from_bytes(json.dumps(fields).encode()).releases == 0
        fields.pop("version")
        with pytest.raises(RecordRefused):
            type(record).from_bytes(json.dumps(fields).encode())
        with pytest.raises(RecordRefused):
            type(record).from_bytes(json.dumps({**json.loads(record.to_bytes()), "more": 1}).encode())


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(SettingsRefused, match="most_releases"):
        bench(most_releases=-1)
