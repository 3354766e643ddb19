"""Which moves of shards are allowed, and which make the shares fair: pure maps."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.coordination.membership import Member
from services.coordination.shardmap import Place, ShardMap
from services.parameter_server.client.moving import MoveNotNow, MoveRefused, fair_moves, ordered

NAMES = ("a", "b", "c", "d")


def there(*names: str, ready: bool = True) -> dict[str, Member]:
    return {name: Member(name, "parameter-server", "", 1, 1, 0, ready) for name in names}


def placed(*leaders: str, replicas: tuple[str, ...] = ()) -> ShardMap:
    """A map in which each shard is led by one of ``leaders`` and held by it and ``replicas``."""
    places = (Place(name, tuple(dict.fromkeys((name, *replicas))), 1, 1) for name in leaders)
    return ShardMap(5, tuple(places))


class TestOrdered:
    def test_a_move_is_written_into_the_next_map(self) -> None:
        changed = ordered(placed("a", "b"), there("a", "b"), 1, "a")
        assert changed is not None
        assert (changed.epoch, changed.moves) == (6, {1: "a"})
        assert changed.places == placed("a", "b").places

    def test_what_is_so_already_changes_nothing(self) -> None:
        now = placed("a", "b")
        assert ordered(now, there("a", "b"), 1, "b") is None
        moving = now.change({}, {1: "a"})
        assert ordered(moving, there("a", "b"), 1, "a") is None

    def test_to_its_leader_a_move_is_taken_back_and_others_stay(self) -> None:
        moving = placed("a", "b").change({}, {1: "a", 0: "b"})
        changed = ordered(moving, there("a", "b"), 1, "b")
        assert changed is not None
        assert changed.moves == {0: "b"}

    @pytest.mark.parametrize("shard", [-1, 2])
    def test_there_are_only_so_many_shards(self, shard: int) -> None:
        with pytest.raises(MoveRefused, match="they are 0 to 1"):
            ordered(placed("a", "b"), there("a", "b"), shard, "a")

    def test_the_server_has_to_be_there_and_ready(self) -> None:
        with pytest.raises(MoveRefused, match="no parameter server x") as refused:
            ordered(placed("a"), there("a", "b"), 0, "x")
        assert "a, b" in refused.value.next_step
        with pytest.raises(MoveNotNow, match="b is not ready"):
            ordered(placed("a"), there("a") | there("b", ready=False), 0, "b")

    def test_nobody_can_hand_over_what_nobody_leads(self) -> None:
        with pytest.raises(MoveNotNow, match="a is gone"):
            ordered(placed("a"), there("b"), 0, "b")
        restarted = {**there("b"), "a": msgspec.structs.replace(there("a")["a"], incarnation=2)}
        with pytest.raises(MoveNotNow, match="no leader"):
            ordered(placed("a"), restarted, 0, "b")

    def test_a_move_under_way_is_not_turned_aside(self) -> None:
        moving = placed("a").change({}, {0: "b"})
        with pytest.raises(MoveNotNow, match="moves to b already") as refused:
            ordered(moving, there("a", "b", "c"), 0, "c")
        assert "move 0 --to a" in refused.value.next_step


class TestFairMoves:
    @given(
        leaders=st.lists(st.sampled_from(NAMES), min_size=1, max_size=12),
        alive=st.sets(st.sampled_from(NAMES), min_size=1),
        replicas=st.sets(st.sampled_from(NAMES)),
    )
    def test_every_share_is_fair_after_the_fewest_moves(
        self, leaders: list[str], alive: set[str], replicas: set[str]
    ) -> None:
        moves = fair_moves(placed(*leaders, replicas=tuple(sorted(replicas))), there(*alive))
        led = Counter(dict.fromkeys(alive, 0))
        led.update(name for name in leaders if name in alive)
        share, more = divmod(sum(led.values()), len(alive))
        # What is above its share has to move, and who leads most may keep one more than the others.
        ranked = sorted(led.values(), reverse=True)
        assert len(moves) == sum(max(n - share - (rank < more), 0) for rank, n in enumerate(ranked))
        for move in moves:
            assert leaders[move.shard] == move.source != move.to
            led[move.source] -= 1
            led[move.to] += 1
        assert len({move.shard for move in moves}) == len(moves)
        assert max(led.values()) - min(led.values()) <= 1

    def test_who_holds_a_shard_comes_first(self) -> None:
        places = (Place("a", ("a", "c"), 1, 1), Place("a", ("a", "b"), 1, 1), Place("a", ("a",), 1, 1))
        moves = fair_moves(ShardMap(1, places), there("a", "b", "c"))
        assert [(move.shard, move.to, move.copies) for move in moves] == [(0, "c", False), (1, "b", False)]

    def test_a_new_server_gets_its_share_by_copies(self) -> None:
        [move] = fair_moves(placed("a", "a", "b", "b", "b"), there("a", "b", "c"))
        assert (move.source, move.to, move.copies) == ("b", "c", True)

    def test_what_moves_already_counts_where_it_goes(self) -> None:
        moving = placed("a", "a").change({}, {0: "b"})
        assert fair_moves(moving, there("a", "b")) == ()

    def test_servers_that_are_not_ready_get_none(self) -> None:
        assert fair_moves(placed("a", "a"), there("a") | there("b", ready=False)) == ()
        assert fair_moves(placed("a", "a"), {}) == ()
