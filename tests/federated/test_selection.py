import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rounds import Bench

from federated.rounds import Admitted, NotYet, Phase, StartRequest
from federated.selection import AllOf, DeviceFacts, Poisson, Selection, SelectionRefused, make_selection

RULES = [
    make_selection("everyone"),
    make_selection("random", share=0.25),
    make_selection("eligible", battery=0.5, unmetered=False),
    make_selection("capability", deadline_s=10.0, examples=100, upload_bytes=1000),
    make_selection("capability", deadline_s=10.0),
    make_selection("fairness", most=2, window=4),
    make_selection("random+eligible+capability+fairness", share=0.9, deadline_s=100.0),
]
facts = st.builds(
    DeviceFacts, st.floats(0, 1), st.booleans(), st.booleans(), st.booleans(), st.floats(0, 1e4), st.floats(0, 1e6),
    st.integers(0, 5000),
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@given(
    clients=st.lists(
        st.tuples(facts, st.floats(0, 1, exclude_max=True), st.integers(0, 5)), min_size=1, max_size=8
    )
)
def test_one_by_one_and_all_at_once_are_the_same(
    rule: Selection, clients: list[tuple[DeviceFacts, float, int]]
) -> None:
    names = ("battery", "charging", "unmetered", "idle", "compute", "bandwidth", "examples")
    columns = {name: np.array([getattr(fact, name) for fact, _, _ in clients]) for name in names}
    draws = np.array([draw for _, draw, _ in clients])
    recent = np.array([seen for _, _, seen in clients])
    expected = [rule.judge(*client) == "" for client in clients]
    assert rule.mask(columns, draws, recent).tolist() == expected


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_missing_column_means_the_default(rule: Selection) -> None:
    expected = rule.judge(DeviceFacts(), 0.1, 0) == ""
    assert rule.mask({}, np.full(3, 0.1), np.zeros(3, np.int64)).tolist() == [expected] * 3


@pytest.mark.parametrize(
    ("fact", "why"),
    [
        ({"battery": 0.1}, "battery below 30%"),
        ({"battery": float("nan")}, "battery below 30%"),
        ({"charging": False}, "not charging"),
        ({"unmetered": False}, "not unmetered"),
        ({"idle": False}, "not idle"),
        ({}, ""),
    ],
)
def test_eligible_says_why_not(fact: dict[str, Any], why: str) -> None:
    assert make_selection("eligible").judge(DeviceFacts(**fact), 0.0, 0) == why


def test_capability_counts_training_and_upload() -> None:
    rule = make_selection("capability", deadline_s=60.0, upload_bytes=1_000_000)
    assert (
        rule.judge(DeviceFacts(compute=10.0, bandwidth=50_000.0, examples=400), 0.0, 0) == ""
    )  # 40 s and 20 s
    assert "would take 61 s" in rule.judge(
        DeviceFacts(compute=10.0, bandwidth=50_000.0, examples=410), 0.0, 0
    )
    assert rule.judge(DeviceFacts(compute=0.0), 0.0, 0) == "no speed"


def test_random_lets_its_share_in() -> None:
    draws = np.random.default_rng(1).random(10_000)
    share = make_selection("random", share=0.25).mask({}, draws, np.zeros(10_000, np.int64)).mean()
    assert 0.23 < share < 0.27


def test_names_are_joined_and_options_go_to_whom_they_belong() -> None:
    rule = make_selection("eligible + fairness", battery=0.2, most=3, window=7)
    assert isinstance(rule, AllOf)
    assert rule.window == 7
    assert rule.judge(DeviceFacts(battery=0.25), 0.0, 2) == ""
    assert "took part in 3" in rule.judge(DeviceFacts(), 0.0, 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eligable", {}, "unknown or repeated"),
        ("random+random", {}, "unknown or repeated"),
        ("random", {"shear": 1}, "no option shear; it has "),
        ("everyone", {"select": "poisson"}, "no option select; .* selection.name is one of .*poisson"),
        ("random", {"name": 1}, "no option name"),
        ("random", {"share": 0}, "share must be in"),
        ("eligible", {"battery": 30}, "battery must be in"),
        ("capability", {"deadline_s": 0}, "deadline_s must be positive"),
        ("fairness", {"most": 0}, "most must be at least 1"),
        ("fairness", {"window": 65}, "window in"),
    ],
)
def test_senseless_rules_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SelectionRefused, match=message):
        make_selection(name, **options)


def test_a_device_that_is_not_fit_is_told_to_come_back() -> None:
    b = Bench.of(make_selection("eligible"), start_fl_job_threshold=2)
    [reply] = b.desk.handle([StartRequest("a", DeviceFacts(charging=False))], b.now, [0.5])
    assert isinstance(reply, NotYet)
    assert (reply.reason, reply.detail) == ("not_selected", "not charging")
    assert b.desk.header().starts == 0
    [reply] = b.desk.handle([StartRequest("a", DeviceFacts())], b.now, [0.5])
    assert isinstance(reply, Admitted)


def test_the_fairness_cap_holds_on_servers_without_a_list_of_clients() -> None:
    b = Bench.of(
        make_selection("fairness", most=1, window=2),
        start_fl_job_threshold=2, update_model_ratio=1, fl_iteration_num=10,
    )  # fmt: skip
    names = [f"c{i}" for i in range(6)]
    took: list[set[str]] = []
    for _ in range(6):
        admitted = []
        for name in names:  # always in the same order: without the cap always the same two
            if isinstance(b.start(name), Admitted):
                admitted.append(name)
            if b.desk.header().phase is Phase.UPDATING:
                break
        b.accept(*admitted)
        b.aggregate()
        took.append(set(admitted))
    assert took == [{"c0", "c1"}, {"c2", "c3"}, {"c4", "c5"}] * 2


@pytest.mark.parametrize(
    ("population", "rate", "fewest"), [(1, 0.3, 1), (5, 0.3, 2), (8, 0.6, 5), (6, 0.5, 6), (9, 0.2, 0)]
)
def test_a_valid_iteration_tells_how_likely_one_was_drawn(population: int, rate: float, fewest: int) -> None:
    """Against all sets that poisson may draw."""
    valid = with_it = 0.0
    for drawn in itertools.product((False, True), repeat=population):
        chance = math.prod(rate if one else 1.0 - rate for one in drawn)
        if sum(drawn) >= fewest:
            valid += chance
            with_it += chance * drawn[0]
    assert Poisson(rate).rate_if_valid(population, fewest) == pytest.approx(with_it / valid, rel=1e-12)


def test_of_a_large_population_what_is_learned_of_one_is_what_was_drawn() -> None:
    assert Poisson(0.01).rate_if_valid(1_000_000, 5_000) == pytest.approx(0.01, rel=1e-12)
    assert Poisson(0.01).rate_if_valid(1_000_000, 10_000) > 0.01
