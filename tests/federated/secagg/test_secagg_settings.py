"""Every plan is proved, and what cannot be is refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.privacy.section import SecureAggregationSection
from federated.secagg.settings import PlanRefused, bound_of, make_plan, most_colluding
from federated.secagg.stages import Stage


def section(protocol: str = "secagg", **settings: Any) -> SecureAggregationSection:
    return SecureAggregationSection(protocol=protocol, **settings)  # type: ignore[arg-type]


@given(
    protocol=st.sampled_from(["secagg", "secagg+"]),
    malicious=st.booleans(),
    clients=st.integers(3, 150),
    colluding=st.sampled_from([0.0, 0.05, 0.1, 0.3]),
    dropouts=st.sampled_from([0.0, 0.1, 0.3]),
    weight=st.integers(1, 100),
)
def test_a_plan_is_sound_or_refused(
    protocol: str, malicious: bool, clients: int, colluding: float, dropouts: float, weight: int
) -> None:
    asked = section(
        protocol, malicious=malicious, colluding=colluding, dropouts=dropouts, max_weight=weight, clip=1.0
    )
    try:
        plan = make_plan(asked, clients, 10)
    except PlanRefused:
        return
    assert 2 <= plan.threshold <= plan.degree < clients
    assert plan.threshold < plan.least <= plan.most == clients
    assert plan.threshold > plan.colluding
    if malicious:
        assert 2 * plan.threshold > plan.degree + plan.colluding
    assert 2**plan.ring.bits >= 2 * clients * weight * plan.bound + 1 > 2 ** (plan.ring.bits - 1)
    assert plan.describe()


def test_the_ring_of_the_rule() -> None:
    plan = make_plan(section(clip=8.0, step_bits=12, max_weight=64), 1024, 10)
    assert (plan.bound, plan.ring.bits) == (2**15, 33)
    assert "33 bits" in plan.describe()[2]


def test_the_bound_rounds_up_in_decimals() -> None:
    assert bound_of(section(clip=0.1, step_bits=2)) == 1
    assert bound_of(section(clip=0.1, step_bits=30)) == 107_374_183
    assert bound_of(section(clip=8.0, step_bits=16)) == 2**19


def test_noise_widens_the_ring_and_not_the_clip() -> None:
    plan = make_plan(section(clip=1.0, step_bits=8, max_weight=1), 100, 10, bound=4096)
    assert (plan.clip_steps, plan.bound, plan.ring.bits) == (256, 4096, 20)
    with pytest.raises(PlanRefused, match="below the clip"):
        make_plan(section(clip=1.0, step_bits=8), 100, 10, bound=255)


@pytest.mark.parametrize(
    ("asked", "clients", "more", "says"),
    [
        (section("none"), 10, {}, "protocol is secagg or secagg+"),
        (section(), 2, {}, "each would know the other's"),
        (section(), 10_001, {}, "3 to 10000"),
        (section(neighbours=4), 10, {}, "neighbours are for protocol secagg+"),
        (section(threshold=2, colluding=0.3), 10, {}, "breaks t > colluding: use 4 or more"),
        (section(threshold=5, malicious=True), 10, {}, "breaks 2t > holders"),
        (section(threshold=10), 10, {}, "above the 9 holders"),
        (section(threshold=8, dropouts=0.3), 10, {}, "7 of 10 clients remain"),
        (
            section(malicious=True, colluding=0.6, dropouts=0.3),
            10,
            {},
            "lower threshold, colluding or dropouts",
        ),
        (section("secagg+", neighbours=10), 10, {}, "10 neighbours among 10"),
        (section("secagg+", neighbours=5), 20, {}, "must be even"),
        (section("secagg+", neighbours=2, colluding=0.3), 20, {}, "use more neighbours"),
        (section("secagg+", neighbours=6, colluding=0.05), 40, {}, "fall apart"),
        (section("secagg+", neighbours=4, colluding=0.0, malicious=True), 40, {}, "fall apart"),
        (section("secagg+", colluding=0.9, dropouts=0.5), 20, {}, "protocol secagg"),
        (section(), 10, {"least": 11}, "11 clients must remain of 10"),
        (section(dropouts=0.1), 4000, {}, "1.4 GiB of shares.*use protocol secagg[+]"),
        (section(clip=1e9, step_bits=30, max_weight=1000), 1000, {}, "more than 64"),
    ],
)
def test_what_is_unsound_is_refused_with_what_to_change(
    asked: SecureAggregationSection, clients: int, more: dict[str, int], says: str
) -> None:
    with pytest.raises(PlanRefused, match=says):
        make_plan(asked, clients, 10, **more)


def test_the_stages_of_each_variant() -> None:
    of = {
        (protocol, malicious): make_plan(section(protocol, malicious=malicious), 30, 5).stages
        for protocol in ("secagg", "secagg+")
        for malicious in (False, True)
    }
    semi = (Stage.ADVERTISE, Stage.SHARE, Stage.MASKED, Stage.UNMASK)
    assert of["secagg", False] == of["secagg+", False] == semi
    assert of["secagg", True] == (*semi[:3], Stage.CONSISTENT, Stage.UNMASK)
    assert of["secagg+", True] == (semi[0], Stage.CHOOSE, *semi[1:3], Stage.CONSISTENT, Stage.UNMASK)


def test_few_clients_are_each_others_neighbours() -> None:
    plan = make_plan(section("secagg+", neighbours=10, colluding=0.0, dropouts=0.1), 30, 5)
    assert [plan.degree_of(clients) for clients in (30, 11, 10, 5)] == [10, 10, 9, 4]


def test_the_colluding_neighbours_of_a_client_are_the_exact_tail() -> None:
    from math import comb

    clients, degree, bad = 40, 8, 4
    most = most_colluding(clients, degree, 0.1)

    def beyond(count: int) -> float:
        ways = sum(comb(bad, c) * comb(clients - 1 - bad, degree - c) for c in range(count + 1, degree + 1))
        return clients * ways / comb(clients - 1, degree)

    assert beyond(most) <= 2.0**-40 < beyond(most - 1)
