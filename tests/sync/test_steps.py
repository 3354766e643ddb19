"""The collector of synchronous steps: whole steps in rank order, whatever comes, whenever."""

from __future__ import annotations

import random
from decimal import Decimal

import pytest

from sync.steps import BadStep, Collector, Group


def collector(members: int, ratio: str = "1", generation: int = 1) -> Collector[str]:
    steps: Collector[str] = Collector()
    assert steps.follow(Group(generation, members, Decimal(ratio))) == "newer"
    return steps


def taken(steps: Collector[str]) -> tuple[tuple[int, str], ...] | None:
    found = steps.take()
    return None if found is None else found.parts


def test_a_step_is_taken_once_all_came_in_rank_order():
    steps = collector(3)
    for rank in (2, 0):
        assert steps.contribute(rank, 1, f"r{rank}")
        assert steps.take() is None
    assert steps.contribute(1, 1, "r1")
    assert taken(steps) == ((0, "r0"), (1, "r1"), (2, "r2"))
    assert steps.open == 2
    assert steps.take() is None
    assert steps.waiting == 0


@pytest.mark.parametrize(
    ("ratio", "members", "needed"), [("0.28", 25, 7), ("0.9", 4, 4), ("0.75", 4, 3), ("0.01", 3, 1)]
)
def test_the_share_is_rounded_up_in_exact_decimals(ratio, members, needed):
    assert Group(1, members, Decimal(ratio)).needed(members) == needed


def test_what_comes_late_is_told_so_and_not_kept():
    steps = collector(4, "0.75")
    for rank in (3, 1, 0):
        steps.contribute(rank, 1, str(rank))
    assert taken(steps) == ((0, "0"), (1, "1"), (3, "3"))
    assert not steps.contribute(2, 1, "2")
    assert steps.counts.late_total == 1
    assert steps.waiting == 0
    assert steps.contribute(2, 2, "2")


def test_a_repeated_contribution_replaces_the_first():
    steps = collector(2)
    steps.contribute(0, 1, "lost reply")
    steps.contribute(0, 1, "again")
    steps.contribute(1, 1, "other")
    assert taken(steps) == ((0, "again"), (1, "other"))
    assert steps.take() is None
    assert steps.counts.repeated_total == 1


def test_whoever_abstains_is_not_waited_for_until_it_joins():
    steps = collector(2)
    steps.abstain(1)
    for step in (1, 2, 3):
        steps.contribute(0, step, "alone")
        assert taken(steps) == ((0, "alone"),)
    steps.contribute(0, 4, "a")
    assert steps.join(1, 0) == 4
    assert steps.take() is None
    steps.contribute(1, 4, "b")
    assert taken(steps) == ((0, "a"), (1, "b"))


def test_a_group_that_abstains_takes_no_step():
    steps = collector(3)
    for rank in range(3):
        steps.abstain(rank)
    assert steps.take() is None
    assert steps.open == 1


def test_a_newer_generation_discards_what_waits_and_an_older_one_is_told_so():
    steps = collector(2)
    steps.contribute(0, 1, "never applied")
    assert steps.follow(Group(2, 1)) == "newer"
    assert steps.counts.discarded_total == 1
    assert steps.take() is None
    assert steps.follow(Group(1, 2)) == "older"
    steps.contribute(0, 1, "new")
    assert taken(steps) == ((0, "new"),)
    with pytest.raises(BadStep, match="has its number"):
        steps.follow(Group(2, 5))


def test_a_server_that_starts_later_finds_the_number_in_use():
    steps = collector(3)
    assert steps.join(0, 51) == 1
    steps.contribute(1, 51, "b")
    assert steps.take() is None
    steps.contribute(2, 51, "c")
    assert steps.take() is None
    assert steps.open == 51
    steps.contribute(0, 51, "a")
    assert taken(steps) == ((0, "a"), (1, "b"), (2, "c"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s.contribute(2, 1, ""),
        lambda s: s.contribute(0, 0, ""),
        lambda s: s.abstain(-1),
        lambda s: s.join(0, -5),
    ],
)
def test_what_no_member_can_send_is_refused(wrong):
    with pytest.raises(BadStep):
        wrong(collector(2))


@pytest.mark.parametrize("group", [(0, 1, "1"), (1, 0, "1"), (1, 1, "0"), (1, 1, "1.1"), (1, 10**9, "1")])
def test_groups_that_cannot_be_are_refused(group):
    with pytest.raises(BadStep):
        Group(group[0], group[1], Decimal(group[2]))


@pytest.mark.parametrize("seed", range(20))
def test_members_that_come_and_go_at_random_all_get_every_contribution_in(seed):
    """Members work, repeat, abstain and join at random: each contribution is in one step, and none blocks."""
    chance = random.Random(seed)
    steps = collector(4)
    left = dict.fromkeys(range(4), 30)
    waits: dict[int, int] = {}
    away: set[int] = set()
    done: list[tuple[int, str]] = []
    while any(left.values()) or waits:
        rank = chance.randrange(4)
        if rank in waits:
            if chance.random() < 0.3:
                steps.contribute(rank, waits[rank], f"{rank}-{left[rank]}")
        elif not left[rank] or (rank not in away and chance.random() < 0.2):
            steps.abstain(rank)
            away.add(rank)
        else:
            if rank in away:
                steps.join(rank, 0)
                away.discard(rank)
            waits[rank] = steps.open
            assert steps.contribute(rank, steps.open, f"{rank}-{left[rank]}")
        while (found := steps.take()) is not None:
            assert [rank for rank, _ in found.parts] == sorted(rank for rank, _ in found.parts)
            for each, contribution in found.parts:
                assert waits.pop(each) == found.number
                left[each] -= 1
                done.append((each, contribution))
        assert steps.waiting <= 4
    assert sorted(done) == sorted((rank, f"{rank}-{n + 1}") for rank in range(4) for n in range(30))
