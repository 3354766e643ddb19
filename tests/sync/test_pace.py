"""How much is asked for, and when: a link's rate and delay in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from sync.exchange import Batch, FeedConfig, Pace, PaceConfig, ShardName
from tests.support.exchange import Pair, Wire, bulk, run

NAME: ShardName = ("m", 0)
MB = 1_000_000


def flood(
    rate: float, delay_s: float, seconds: float, config: PaceConfig, jitter_s: float = 0.0
) -> tuple[Pair, Wire]:
    """A link with far more to carry than it can."""
    pair = Pair(config=FeedConfig(), pace=config, change_capacity=1_000)
    wire, rounds = Wire(rate, delay_s, jitter_s), 0
    several = int(rate * (seconds + 2) / 28)

    def more(at_s: float) -> None:
        nonlocal rounds
        if rounds == 0:
            bulk(pair.home[NAME], 0, several, pair.clock.now_us)
            rounds += 1

    run(pair, wire, seconds, more)
    return pair, wire


@pytest.mark.parametrize(("rate", "delay_s"), [(0.2 * MB, 0.15), (1 * MB, 0.05), (3 * MB, 0.1)])
def test_a_link_is_filled_whatever_its_rate_and_delay(rate: float, delay_s: float) -> None:
    pair, wire = flood(rate, delay_s, 5.0, PaceConfig(min_bytes=16_384))
    before = wire.carried
    run(pair, wire, 1.0, lambda at_s: None)
    assert wire.carried - before > 0.9 * rate
    assert pair.pace.rate == pytest.approx(rate, rel=0.25)
    # A full batch is on the link for about the time that is aimed at; one waits, not many.
    assert pair.pace.budget == pytest.approx(max(rate * 0.1, 16_384), rel=0.35)
    assert pair.pace.round_trip_s == pytest.approx(2 * delay_s, abs=0.15)
    assert pair.pace.budget * (pair.pace.window - 1) <= 3.5 * max(rate * (2 * delay_s + 0.1), 2 * 16_384)


def test_jitter_does_not_make_a_link_seem_faster_than_it_is() -> None:
    pair, _ = flood(0.5 * MB, 0.1, 10.0, PaceConfig(min_bytes=16_384), jitter_s=0.05)
    assert pair.pace.rate <= 1.3 * 0.5 * MB
    assert pair.pace.bytes_total > 0.7 * 0.5 * MB * 10.0


def test_a_link_that_gets_slower_is_noticed_within_seconds() -> None:
    pair, wire = flood(2 * MB, 0.05, 5.0, PaceConfig(min_bytes=16_384))
    assert pair.pace.rate > 1 * MB
    wire.rate = 0.1 * MB
    bulk(pair.home[NAME], 10**7, 60_000, pair.clock.now_us)
    run(pair, wire, 15.0, lambda at_s: None)
    assert pair.pace.rate < 0.3 * MB


@pytest.mark.parametrize("limit", [50_000, 150_000])
def test_the_bandwidth_that_is_allowed_is_kept_over_time(limit: int) -> None:
    pair = Pair(config=FeedConfig(), pace=PaceConfig(max_bandwidth=limit))
    bulk(pair.home[NAME], 0, limit * 17 // 28, pair.clock.now_us)
    wire = Wire(10 * MB, 0.05)
    run(pair, wire, 4.0, lambda at_s: None)
    before = wire.carried
    run(pair, wire, 12.0, lambda at_s: None)
    assert (wire.carried - before) / 12.0 == pytest.approx(limit, rel=0.05)


def test_what_is_small_and_seldom_does_not_wait_for_the_limit() -> None:
    pair = Pair(config=FeedConfig(), pace=PaceConfig(max_bandwidth=100_000))
    late: list[float] = []
    pushed_s = 0.0
    number = 0

    def now_and_then(at_s: float) -> None:
        nonlocal pushed_s, number
        if int(at_s / 0.5) > number:
            number += 1
            pushed_s = pair.now_s
            bulk(pair.home[NAME], number, 10, pair.clock.now_us)

    def came(batch: Batch) -> None:
        if any(piece.update.rows for piece in batch.pieces):
            late.append(pair.now_s - pushed_s)

    run(pair, Wire(10 * MB, 0.05), 10.0, now_and_then, on_taken=came)
    assert len(late) >= 18
    assert max(late) < 0.075


def test_under_the_brake_batches_are_small() -> None:
    pace = Pace(PaceConfig(min_bytes=1_000, max_bytes=100_000))
    pace.note(100_000, 100_000, 0.0, 0.0, 0.1)
    assert pace.budget == 100_000
    for brake, least in ((0.5, 50_000), (0.9, 10_000), (1.0, 1_000)):
        pace.brake = lambda brake=brake: brake  # type: ignore[misc]
        assert pace._whole == pytest.approx(least, abs=1)
        assert pace.pay(pace.budget, 20.0) == 0.0
    pace.brake = lambda: 0.0
    assert pace.budget == 100_000


class TestNotes:
    """Single notes, without a link."""

    def test_nothing_is_known_at_first(self) -> None:
        pace = Pace(PaceConfig(min_bytes=1_000))
        assert (pace.rate, pace.round_trip_s, pace.budget, pace.window) == (0.0, 0.0, 1_000, 3)
        assert pace.may_ask(0.0)

    def test_waiting_at_the_source_is_no_delay(self) -> None:
        pace = Pace(PaceConfig())
        pace.note(100, 65_536, 10.0, 0.9, 11.0)
        assert pace.round_trip_s == pytest.approx(0.1)
        # A batch that was not full says nothing of the rate.
        assert pace.rate == 0.0

    def test_the_least_delay_is_forgotten_after_a_while(self) -> None:
        pace = Pace(PaceConfig())
        pace.note(100, 65_536, 0.0, 0.0, 0.05)
        for second in range(1, 40):
            pace.note(100, 65_536, float(second), 0.0, second + 0.2)
        assert pace.round_trip_s == pytest.approx(0.2)

    def test_a_batch_is_never_larger_than_is_allowed(self) -> None:
        pace = Pace(PaceConfig(max_bytes=100_000))
        for number in range(5):
            pace.note(pace.budget, pace.budget, float(number), 0.0, number + 0.001)
        assert pace.budget == 100_000
        assert 3 <= pace.window <= 16

    def test_at_most_the_limit_is_asked_for_at_once(self) -> None:
        pace = Pace(PaceConfig(min_bytes=1_000, max_bandwidth=50_000))
        assert pace.budget == 5_000
        for number in range(5):
            pace.note(5_000, 5_000, float(number), 0.0, number + 0.001)
        assert pace.budget == 5_000

    def test_batches_that_come_at_one_moment_are_counted_over_the_whole_wait(self) -> None:
        pace = Pace(PaceConfig())
        for number in range(3):
            pace.note(65_536, 65_536, 10.0, 0.0, 11.0 + 1e-6 * number)
        assert pace.rate == pytest.approx(3 * 65_536, rel=0.01)

    def test_a_full_batch_is_paid_for_before_the_next(self) -> None:
        pace = Pace(PaceConfig(min_bytes=1_000, max_bandwidth=10_000))
        now_s = 50.0
        prices = [pace.pay(2_000, now_s) for _ in range(2)]
        # Four tenths of a second of bytes, one tenth of which was saved up.
        assert pace.due_s == pytest.approx(now_s + 0.3)
        assert not pace.may_ask(now_s + 0.29)
        assert pace.may_ask(now_s + 0.31)
        # Three quarters of it came, of the other one so little that it is free; a third one is lost.
        pace.note(1_500, 2_000, now_s, 0.0, now_s + 0.05, prices[0])
        assert pace.due_s == pytest.approx(now_s + 0.25)
        pace.note(900, 2_000, now_s, 0.0, now_s + 0.05, prices[1])
        assert pace.due_s == pytest.approx(now_s + 0.05)
        pace.refund(pace.pay(2_000, now_s + 100))
        assert pace.due_s == pytest.approx(now_s + 99.9)

    def test_memory_is_bounded(self) -> None:
        pace = Pace(PaceConfig())
        for number in range(5_000):
            pace.note(65_536, 65_536, number * 1e-3, 0.0, number * 1e-3 + 5e-4)
        assert np.isfinite(pace.rate)
        assert len(pace._rates) <= 256
        assert len(pace._delays) <= 256
        assert len(pace._arrived) <= 256


def test_what_a_link_carried_is_forgotten_with_it() -> None:
    pace = Pace(PaceConfig(min_bytes=1_000))
    pace.note(1_000_000, 1_000_000, 0.0, 0.0, 0.1)
    assert pace.budget == 1_000_000
    pace.forget()
    assert (pace.rate, pace.budget) == (0.0, 1_000)
    pace.note(1_000, 1_000, 5.0, 0.0, 6.0)
    assert pace.rate == pytest.approx(1_000.0)


def test_where_there_is_news_all_the_time_a_pull_waits_at_the_source_for_it() -> None:
    """A link of a fifth of a second and a change every 10 ms: with three pulls open, most changes would wait for the
    next one to arrive."""
    pair, rounds = Pair(config=FeedConfig(coalesce_s=0.005), pace=PaceConfig(), change_capacity=1_000), 0
    wire = Wire(10 * MB, 0.1, 0.0)

    def more(at_s: float) -> None:
        nonlocal rounds
        if at_s >= rounds * 0.01:
            bulk(pair.home[NAME], rounds * 10, 10, pair.clock.now_us)
            rounds += 1

    assert pair.pace.window == PaceConfig().window
    run(pair, wire, 6.0, more)
    # About a hundred answers a second, each to a pull that is 0.2 s on its way: twenty, and half as many again.
    assert pair.pace.window == PaceConfig().max_window
    # Together they allow no more than three whole batches do.
    assert (
        pair.pace.budget * pair.pace.window
        <= 3 * max(PaceConfig().min_bytes, round(pair.pace.rate * 0.1)) * 1.01
    )
    run(pair, wire, 6.0, lambda at_s: None)
    assert pair.pace.window < PaceConfig().max_window


def test_where_answers_do_not_come_less_is_open_until_they_come_again() -> None:
    pace = Pace(PaceConfig(window=8))
    windows = [pace.window]
    for _ in range(5):
        pace.forget()
        windows.append(pace.window)
    assert windows == [8, 4, 2, 1, 1, 1]
    for number in range(40):
        pace.note(48, 65_536, float(number), 0.0, number + 0.1)
    assert pace.window == 8
