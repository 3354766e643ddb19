"""When clients can be reached and when they knock: functions of (seed, client, time)."""

from __future__ import annotations

import numpy as np
import pytest

from federated.simulator.arrivals import Arrivals, NobodyComes, Position
from federated.simulator.availability import (
    DAY_S,
    Always,
    AvailabilityRefused,
    Bernoulli,
    Diurnal,
    Trace,
    make_availability,
)
from federated.simulator.draws import Purpose, normal, uniform


def test_draws_are_even_independent_and_repeat() -> None:
    clients = np.arange(20_000)
    drawn = uniform(3, Purpose.DROPOUT, clients, 1)
    np.testing.assert_array_equal(drawn[5:9], uniform(3, Purpose.DROPOUT, clients[5:9], 1))
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.histogram(drawn, 20, (0, 1))[0]
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000)
    for other in (
        uniform(4, Purpose.DROPOUT, clients, 1),
        uniform(3, Purpose.STRAGGLER, clients, 1),
        uniform(3, Purpose.DROPOUT, clients, 2),
        uniform(3, Purpose.DROPOUT, clients + 1, 1),
    ):
        assert abs(np.corrcoef(drawn, other)[0, 1]) < 5 / np.sqrt(20_000)
    numbers = normal(3, Purpose.COMPUTE, clients)
    assert abs(numbers.mean()) < 5 / np.sqrt(20_000)
    assert numbers.std() == pytest.approx(1.0, abs=0.03)


def test_bernoulli_and_diurnal_have_their_share_and_the_night_comes_and_goes() -> None:
    clients = np.arange(5_000)
    assert Bernoulli(1, 0.3).available(clients, np.full(5_000, 700.0)).mean() == pytest.approx(0.3, abs=0.03)
    rule = Diurnal(1, 0.3, spread=0.0)
    by_hour = [rule.available(clients, np.full(5_000, hour * 3600.0)).mean() for hour in range(24)]
    assert np.mean(by_hour) == pytest.approx(0.3, abs=0.02)
    assert by_hour[0] == pytest.approx(0.6, abs=0.03)
    assert by_hour[12] == pytest.approx(0.0, abs=0.03)
    again = rule.available(clients, np.full(5_000, DAY_S / 4))
    np.testing.assert_array_equal(again, rule.available(clients, np.full(5_000, DAY_S / 4)))


def test_a_trace_says_who_is_there_and_repeats() -> None:
    trace = Trace.parse("client,from_s,until_s\n0,0,10\n2,5,8\n2,20,30\n0,15,16\n")
    times = np.array([0.0, 9.9, 10.0, 15.5, 16.0, 45.5])
    np.testing.assert_array_equal(
        trace.available(np.zeros(6, np.int64), times), [True, True, False, True, False, True]
    )
    assert not trace.available(np.ones(6, np.int64), times).any()  # client 1 has no span
    np.testing.assert_array_equal(
        trace.available(np.full(4, 2), np.array([4.0, 5.0, 8.0, 29.0])), [False, True, False, True]
    )
    np.testing.assert_array_equal(trace.available(np.full(1, 5), np.array([25.0])), [True])  # as client 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with the line"),
        ("client,from_s,until_s\n", "no row"),
        ("client,from_s,until_s\n0,1\n", "line 2"),
        ("client,from_s,until_s\n0,5,5\n", "no span of time"),
        ("client,from_s,until_s\n0,0,nan\n", "no span of time"),
        ("client,from_s,until_s\n-1,0,5\n", "no span of time"),
        ("client,from_s,until_s\n0,0,5\n0,4,6\n", "overlap"),
    ],
)
def test_traces_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(AvailabilityRefused, match=says):
        Trace.parse(text)


def test_rules_by_name() -> None:
    assert make_availability("always", 1) == Always()
    assert make_availability("diurnal", 1, share=0.2) == Diurnal(1, 0.2)
    with pytest.raises(AvailabilityRefused, match="none of always"):
        make_availability("never", 1)
    with pytest.raises(AvailabilityRefused, match="nobody could ever"):
        make_availability("bernoulli", 1, share=0.0)


def anyone(clients: np.ndarray, times: np.ndarray) -> np.ndarray:
    return np.ones(len(clients), np.bool_)


def test_clients_knock_evenly_at_their_rate_and_a_position_is_enough_to_go_on() -> None:
    arrivals = Arrivals(50, 10.0, 4, Always(), 1e6)
    seen = [arrivals.next(anyone, np.inf) for _ in range(2_000)]
    assert all(one is not None for one in seen)
    clients, times = (np.array(column) for column in zip(*seen, strict=True))
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(2_000 * 10.0 / 50, rel=0.1)
    assert abs(np.bincount(clients, minlength=50) - 40).max() < 5 * np.sqrt(40)
    position = arrivals.position
    ahead = [arrivals.next(anyone, np.inf) for _ in range(600)]
    resumed = Arrivals(
        50, 10.0, 4, Always(), 1e6, Position(position.block, position.begins_s, position.taken)
    )
    assert [resumed.next(anyone, np.inf) for _ in range(600)] == ahead


def test_nobody_before_a_time_and_nobody_at_all() -> None:
    arrivals = Arrivals(5, 10.0, 4, Always(), 500.0)
    first = arrivals.next(anyone, np.inf)
    assert first is not None
    again = Arrivals(5, 10.0, 4, Always(), 500.0)
    assert again.next(anyone, first[1]) is None
    assert again.next(anyone, np.inf) == first
    assert again.next(lambda clients, times: np.zeros(len(clients), np.bool_), first[1] + 100.0) is None
    later = again.next(anyone, np.inf)
    assert later is not None
    assert later[1] >= first[1] + 100.0
    with pytest.raises(NobodyComes, match="no client could start for 500 s"):
        again.next(lambda clients, times: np.zeros(len(clients), np.bool_), np.inf)


def test_skipping_goes_ahead_in_time_and_never_back() -> None:
    arrivals = Arrivals(5, 10.0, 4, Always(), 500.0)
    arrivals.skip_to(1_000.0)
    one = arrivals.next(anyone, np.inf)
    assert one is not None
    assert one[1] >= 1_000.0
    arrivals.skip_to(10.0)
    two = arrivals.next(anyone, np.inf)
    assert two is not None
    assert two[1] >= one[1]
