"""Clients drawn one by one, as the accounting of amplification by sampling assumes."""

import math
from typing import Any

import numpy as np
import pytest
from support.rounds import KEY, Bench, rounds

from federated.rounds import Admitted, Event, NotYet, Phase, Rounds, RoundSettings, SettingsRefused, Tickets
from federated.selection import Everyone, Poisson, SelectionRefused, earned_sampling, make_selection

RATE = 0.3
CLIENTS = [f"client-{number}" for number in range(40)]
WINDOW_S = 100.0


def bench(rate: float = RATE, **settings: Any) -> Bench:
    chosen = {
        "start_fl_job_threshold": 2, "update_model_ratio": 0.5, "start_fl_job_time_window_s": WINDOW_S,
        "sampled": len(CLIENTS), "come_back_max_s": 1000.0, **settings,
    }  # fmt: skip
    return Bench.of(Poisson(rate), **chosen)


def drawn(b: Bench, clients: list[str] = CLIENTS) -> list[str]:
    iteration = b.desk.header().iteration
    return [client for client in clients if b.rounds.tickets.coin(client, iteration) < RATE]


def let_in(b: Bench, clients: list[str]) -> list[str]:
    return [client for client in clients if isinstance(b.start(client), Admitted)]


def test_whoever_is_drawn_is_in_and_nobody_else() -> None:
    b = bench()
    assert 2 < len(drawn(b)) < len(CLIENTS)
    assert let_in(b, CLIENTS) == drawn(b)
    refused = b.start(next(client for client in CLIENTS if client not in drawn(b)))
    assert isinstance(refused, NotYet)
    assert (refused.reason, refused.detail) == ("not_selected", "not drawn for this iteration")
    # Until the window ends nothing changes for it.
    assert refused.come_back_at >= b.now + WINDOW_S


def test_asking_again_changes_nothing_however_the_dice_fall_and_whoever_is_asked() -> None:
    b = bench()
    first = let_in(b, CLIENTS)
    for draw in (0.0, 0.4, 0.999):
        again = [client for client in CLIENTS if isinstance(b.start(client, draw=draw), Admitted)]
        assert again == first
    other = Bench(b.rounds)
    assert [client for client in CLIENTS if isinstance(other.start(client), Admitted)] == first


def test_who_comes_late_or_not_at_all_changes_nobodys_chance() -> None:
    """In every order, and with any others there or not, the same clients are drawn."""
    whole = bench()
    expected = set(drawn(whole))
    backwards = bench()
    assert set(let_in(backwards, CLIENTS[::-1])) == expected
    half = bench()
    assert set(let_in(half, CLIENTS[::2])) == expected & set(CLIENTS[::2])
    half.now += WINDOW_S / 2
    assert set(let_in(half, CLIENTS)) == expected


def test_the_start_phase_ends_by_its_window_and_then_with_the_last_upload() -> None:
    b = bench()
    cohort = let_in(b, CLIENTS)
    b.desk.tick(b.now + WINDOW_S - 1)
    assert b.desk.header().phase is Phase.STARTING
    b.now += WINDOW_S
    b.desk.tick(b.now)
    assert b.desk.header().phase is Phase.UPDATING
    b.accept(*cohort[:-1])
    assert b.desk.header().phase is Phase.UPDATING
    b.accept(cohort[-1])
    assert b.desk.header().phase is Phase.AGGREGATING
    b.aggregate()
    [closed] = b.log()
    assert (closed.valid, closed.starts, closed.uploads) == (True, len(cohort), len(cohort))


def test_dropouts_are_waited_for_until_the_window_ends() -> None:
    b = bench()
    cohort = let_in(b, CLIENTS)
    b.now += WINDOW_S
    b.desk.tick(b.now)
    b.accept(*cohort[:3])
    b.desk.tick(b.now + 301.0)
    assert b.desk.header().phase is Phase.AGGREGATING
    assert b.desk.header().uploads == 3


def test_an_iteration_that_draws_nobody_ends_and_the_next_draws_anew() -> None:
    """The window opens with the first who asks, drawn or not: else a job whose coins left nobody would stand still."""
    b = bench(1e-9)
    assert let_in(b, CLIENTS) == []
    assert b.desk.header().opened_at == b.now
    b.desk.tick(b.now + WINDOW_S)
    [closed] = b.log()
    assert (closed.valid, closed.why, closed.starts) == (False, Event.TOO_FEW_STARTS, 0)
    assert b.desk.header().iteration == 2


def test_coins_are_fair_independent_and_their_own() -> None:
    """χ² of inclusion against q, and of pairs of clients and of iterations against independence."""
    tickets, clients, iterations = Tickets("job", KEY), 300, 200
    coins = np.array([[tickets.coin(str(c), i) for i in range(iterations)] for c in range(clients)])
    flags = coins < RATE
    total, chances = flags.size, (RATE, 1.0 - RATE)
    found = (flags.sum(), total - flags.sum())
    assert (
        sum((n - total * p) ** 2 / (total * p) for n, p in zip(found, chances, strict=True)) < 10.8
    )  # p = .001
    histogram = np.histogram(coins, 20, (0.0, 1.0))[0]
    assert np.sum((histogram - total / 20) ** 2 / (total / 20)) < 43.8  # 19 degrees, p = .001
    for first, second in ((flags[:-1], flags[1:]), (flags[:, :-1], flags[:, 1:])):
        both = np.array([[np.sum(first & second), np.sum(first & ~second)],
                         [np.sum(~first & second), np.sum(~first & ~second)]])  # fmt: skip
        expected = np.outer((RATE, 1 - RATE), (RATE, 1 - RATE)) * both.sum()
        assert np.sum((both - expected) ** 2 / expected) < 16.3  # 3 degrees, p = .001
    # How many are drawn in an iteration spreads as a binomial does: coins do not share a cause.
    spread = flags.sum(axis=0).var() / (clients * RATE * (1 - RATE))
    assert abs(spread - 1.0) < 4.0 * math.sqrt(2.0 / iterations)
    assert len(np.unique(coins)) == total
    assert not np.any(coins == np.array([[Tickets("other", KEY).coin(str(c), i) for i in range(iterations)]
                                         for c in range(clients)]))  # fmt: skip


def test_a_coin_says_nothing_of_the_ticket() -> None:
    tickets = Tickets("job", KEY)
    words = {
        int.from_bytes(tickets.issue(str(c), 1)[k : k + 8], "little") >> 11
        for c in range(200)
        for k in (0, 8)
    }
    assert not words & {round(tickets.coin(str(c), 1) * 2**53) for c in range(200)}


def test_as_many_as_are_drawn_take_part_up_to_the_population() -> None:
    b = bench(0.999999999)
    assert let_in(b, CLIENTS) == CLIENTS
    assert b.rounds.settings.most_uploads == len(CLIENTS)
    assert b.desk.header().phase is Phase.UPDATING  # nobody is left to wait for


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mode": "buffered"}, "mode sync"),
        ({"mode": "over_selection"}, "mode sync"),
        ({"kind": "cross_silo", "members": ("a", "b"), "start_fl_job_threshold": 0}, "cross_device"),
        ({"early_uploads": True}, "early_uploads"),
        ({"start_fl_job_threshold": 41}, "population"),
    ],
)
def test_thresholds_that_contradict_the_draw_are_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsRefused, match=why):
        bench(**changed)


def test_the_population_and_the_rule_go_together() -> None:
    with pytest.raises(ValueError, match="poisson"):
        rounds(Everyone(), start_fl_job_threshold=2, sampled=9)
    with pytest.raises(ValueError, match="population"):
        Rounds(RoundSettings(start_fl_job_threshold=2), Tickets("job", KEY), Poisson(0.1))


def test_poisson_stands_alone_and_needs_a_rate_in_between() -> None:
    assert make_selection("poisson", rate=0.25) == Poisson(0.25)
    assert Poisson(0.25).expected(1000) == 250.0
    with pytest.raises(SelectionRefused, match="stands alone"):
        make_selection("poisson+eligible", rate=0.25)
    for rate in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(SelectionRefused, match="rate"):
            Poisson(rate)


def test_amplification_is_earned_by_central_noise_over_a_poisson_sample_alone() -> None:
    assert earned_sampling("central_gaussian", Poisson(0.1)) == 0.1
    for mechanism in (
        "local_gaussian",
        "local_laplace",
        "signds",
        "distributed_gaussian",
        "distributed_skellam",
    ):
        assert earned_sampling(mechanism, Poisson(0.1)) == 1.0
    for selection in (Everyone(), make_selection("random", share=0.1)):
        assert earned_sampling("central_gaussian", selection) == 1.0
