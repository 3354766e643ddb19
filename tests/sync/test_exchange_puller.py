"""What a puller asks for, and what it makes of the answers."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.exchange import Batch, FeedConfig, Pace, PaceConfig, Piece, Pull, Puller, ShardName, messages
from sync.exchange import puller as module
from sync.exchange.puller import GRACE_S, LAST_RETRY_S, REPORT_S
from sync.knowledge import Horizon, Knowledge
from sync.records import Learned, Update
from tests.support.exchange import ROW_BYTES, Pair, Wire, keys_of, pieces, run
from tests.support.replicas import learned, push, rows, update
from tests.support.twins import told_by

NAME: ShardName = ("m", 0)


def test_the_first_pull_wants_all_and_the_others_come_once_it_is_heard() -> None:
    pair = Pair(shards=3)
    (first,) = pair.ask()
    assert (first.stream, first.number) == (1, 1)
    assert [want.shard for want in first.wants] == pair.names
    assert all(want.token is None and want.round == 1 for want in first.wants)
    # Not heard yet: nothing more is asked.
    pair.later(0.5)
    assert pair.ask() == []
    for batch in pair.answer():
        pair.take(batch)
    more = pair.ask()
    assert [pull.number for pull in more] == [2, 3, 4]
    assert all(pull.wants == () and pull.budget == pair.pace.budget for pull in more)


def test_everything_arrives_and_what_is_claimed_is_held() -> None:
    pair = Pair(shards=3, pace=PaceConfig(min_bytes=50 * ROW_BYTES, max_bytes=50 * ROW_BYTES))
    for number, name in enumerate(pair.names):
        push(pair.home[name], range(300 + number))
        pair.home[name].delete("rows", np.arange(9, dtype=np.uint64))
        push(pair.home[name], range(4), table="dense")
        pair.home[name].publish_dense("dense")
    pair.exchange()
    assert pair.equal()
    for name in pair.names:
        mine, theirs = pair.region[name], pair.home[name]
        assert mine.dense("dense").values.tobytes() == theirs.dense("dense").values.tobytes()
        assert mine.watermarks() == theirs.watermarks()
    assert pair.puller.counts.rows_total == sum(len(told_by(shard)) for shard in pair.home.values())
    # And it is level, with three pulls parked, for nothing.
    assert all(s.served and s.left == 0 and s.level_s == pair.now_s for s in pair.puller.standings.values())
    assert pair.exchange() == []


def test_batches_out_of_order_are_taken_in_order() -> None:
    pair = Pair(pace=PaceConfig(min_bytes=50 * ROW_BYTES, max_bytes=50 * ROW_BYTES))
    pair.exchange()
    push(pair.home[NAME], range(140))
    first, second, third = pair.answer()
    before = told_by(pair.region[NAME])
    assert pair.take(third).rows == 0
    assert pair.take(second).rows == 0
    assert told_by(pair.region[NAME]) == before
    assert pair.region[NAME].knowledge == {}
    taken = pair.take(first)
    assert (taken.rows, taken.learned) == (140, (NAME,))
    assert pair.equal()


def test_what_comes_twice_late_or_from_elsewhere_changes_nothing() -> None:
    pair = Pair()
    pair.exchange()
    push(pair.home[NAME], [1, 2])
    (batch,) = pair.answer()
    pair.take(batch)
    token = pair.region[NAME].token
    counts = pair.puller.counts.batches_total
    foreign = Piece(NAME, 1, update(rows([(99, pair.clock.now_us, 7, 1.0)])))
    for odd in (
        batch,
        replace(batch, stream=2),
        replace(batch, stream=0, number=3),
        replace(batch, number=77, pieces=(foreign,)),
        replace(batch, number=0, pieces=(foreign,)),
    ):
        assert pair.take(odd).rows == 0
    assert (pair.region[NAME].token, pair.puller.counts.batches_total) == (token, counts)
    # Pieces of another round, and of shards that nobody wanted, are passed over.
    pair.ask()
    number = batch.number + 1
    strange = (replace(foreign, round=0), replace(foreign, shard=("m", 9)), replace(foreign, shard=("x", 0)))
    assert pair.take(Batch(1, number, strange)).rows == 0
    assert (pair.region[NAME].token, pair.puller.counts.batches_total) == (token, counts + 1)


def test_a_broken_stream_goes_on_by_token() -> None:
    pair = Pair()
    push(pair.home[NAME], range(20))
    pair.exchange()
    push(pair.home[NAME], range(100, 130))
    pair.answer()  # lost
    taken = pair.puller.failed(pair.now_s)
    assert taken.fault
    assert pair.ask() == []
    assert pair.now_s < pair.puller.due_s() <= pair.now_s + 0.1
    pair.later(0.2)
    batches = pair.exchange()
    assert batches[0].stream == 2
    assert sorted(keys_of(pieces(batches))) == list(range(100, 130))
    assert pair.feeds.counts.found == {"token": 2, "cache": 1, "scan": 0}
    assert pair.equal()


def test_a_restarted_puller_has_no_token_and_a_restarted_source_knows_none() -> None:
    pair = Pair()
    push(pair.home[NAME], range(20))
    pair.exchange()
    again = Pair()
    again.clock, again.now_s = pair.clock, pair.now_s
    again.served = {NAME: pair.home[NAME]}
    region = pair.clock.shard(2_000, stateless=True)
    region.restore(pair.region[NAME].state())
    again.wanted = {NAME: region}
    push(pair.home[NAME], [3])
    (first, *_) = again.ask()
    assert first.wants[0].token is None
    assert keys_of(pieces(again.answer())) == [3]
    assert again.feeds.counts.found == {"token": 0, "cache": 1, "scan": 0}


def test_an_unknown_stream_begins_again_later_each_time_longer() -> None:
    pair = Pair()
    pauses = []
    for _ in range(12):
        (pull,) = pair.ask()
        pair.feeds.drop("region")
        taken = pair.take(Batch(pull.stream, pull.number, ended=True))
        assert taken.fault
        pauses.append(pair.puller.due_s() - pair.now_s)
        assert pair.puller.ask(pair.now_s) is None
        pair.later(pauses[-1])
    assert max(pauses[:2]) < 0.3
    assert LAST_RETRY_S / 2 <= min(pauses[-4:]) <= max(pauses) <= LAST_RETRY_S
    assert pair.puller.counts.streams_total == 12
    pair.ask()
    assert pair.answer()[0].stream == 13


def test_shards_that_come_and_go_are_wanted_and_unwanted() -> None:
    pair = Pair(shards=3)
    for name in pair.names:
        push(pair.home[name], [1])
    pair.exchange()
    gone = pair.names[1]
    replica = pair.wanted.pop(gone)
    (pull,) = pair.ask()
    assert (pull.unwanted, pull.wants) == ((gone,), ())
    assert set(pair.puller.standings) == set(pair.names) - {gone}
    push(pair.home[gone], [2])
    assert pair.exchange() == []
    pair.wanted[gone] = replica
    # Although all pulls of the window are parked.
    (pull,) = pair.ask()
    # Its token is forgotten with it: somebody else may have written the shard meanwhile.
    assert [(want.shard, want.token, want.round) for want in pull.wants] == [(gone, None, pull.number)]
    pair.exchange()
    assert pair.equal()


def test_nothing_said_is_lost_while_no_pull_may_go() -> None:
    pair = Pair(shards=2, pace=PaceConfig(max_bandwidth=1_000))
    for name in pair.names:
        push(pair.home[name], range(300))
    pair.ask()
    for batch in pair.answer():
        pair.take(batch)
    assert not pair.pace.may_ask(pair.now_s)
    gone = pair.wanted.pop(pair.names[0])
    assert gone is pair.region[pair.names[0]]
    (pull,) = pair.ask()
    assert pull.unwanted == (pair.names[0],)
    assert pair.ask() == []


def test_a_puller_without_shards_asks_all_the_same() -> None:
    """Which models there are it may only hear from the source."""
    pair = Pair()
    pair.wanted.clear()
    (pull,) = pair.ask()
    assert (pull.wants, pull.unwanted) == ((), ())
    pair.later(1.0)
    for batch in pair.answer():
        pair.take(batch)
    pair.wanted[NAME] = pair.region[NAME]
    push(pair.home[NAME], [1])
    pair.exchange()
    assert pair.equal()


def test_a_replica_that_was_not_ours_meanwhile_is_wanted_anew() -> None:
    pair = Pair(pace=PaceConfig(min_bytes=50 * ROW_BYTES, max_bytes=50 * ROW_BYTES))
    push(pair.home[NAME], range(120))
    pair.ask()
    (first,) = pair.answer()
    pair.take(first)
    pair.ask()
    second, third = pair.answer()
    replica = pair.wanted.pop(NAME)
    assert pair.take(second).rows == 0
    # It is back before anything was asked; the last piece still must not be taken for everything.
    pair.wanted[NAME] = replica
    taken = pair.take(third)
    assert (taken.rows, taken.learned) == (0, ())
    assert replica.knowledge == {}
    pair.exchange()
    assert pair.equal()


def test_another_replica_in_its_place_is_fed_from_the_start() -> None:
    pair = Pair()
    push(pair.home[NAME], range(10))
    pair.exchange()
    pair.wanted[NAME] = pair.region[NAME] = pair.clock.shard(3_000, stateless=True)
    pair.exchange()
    assert pair.equal()


class TestFaults:
    """A shard whose piece cannot be taken rests; the others go on."""

    def ahead(self) -> Pair:
        pair = Pair(shards=2)
        pair.exchange()
        # Home's clock is an hour off for one shard.
        pair.home[NAME].clock.observe(pair.clock.now_us + 3_600_000_000)
        for name in pair.names:
            push(pair.home[name], [1, 2, 3])
        return pair

    def test_a_clock_ahead_stops_one_shard_for_some_seconds(self) -> None:
        pair = self.ahead()
        for batch in pair.answer():
            assert not pair.take(batch).fault
        counts = pair.puller.counts
        assert (counts.ahead_total, counts.faults_total, counts.streams_total) == (1, 1, 0)
        assert "ahead of this clock" in counts.last_fault
        assert told_by(pair.region[NAME]) == {}
        assert len(told_by(pair.region[pair.names[1]])) == 3
        (pull,) = pair.ask()[:1]
        assert pull.unwanted == (NAME,)
        assert not pair.puller.standings[NAME].served
        push(pair.home[pair.names[1]], [9])
        pair.exchange()
        assert (counts.ahead_total, len(told_by(pair.region[pair.names[1]]))) == (1, 4)

    def test_it_is_tried_again_and_goes_on_when_the_clocks_agree(self) -> None:
        pair = self.ahead()
        pair.exchange()
        for _ in range(10):
            pair.later(LAST_RETRY_S / 2)
            pair.exchange()
        assert 5 <= pair.puller.counts.ahead_total <= 11
        pair.clock.now_us += 3_600_000_000
        pair.later(LAST_RETRY_S)
        pair.exchange()
        assert pair.equal()
        assert pair.puller.standings[NAME].served

    def test_a_full_table_rests_and_claims_nothing(self) -> None:
        pair = Pair(shards=2, pace=PaceConfig(min_bytes=200 * ROW_BYTES, max_bytes=200 * ROW_BYTES))
        small = pair.clock.shard(4_000, max_rows=256, stateless=True)
        pair.wanted[NAME] = pair.region[NAME] = small
        for name in pair.names:
            push(pair.home[name], range(1_000))
        pair.settle(3)
        assert small.knowledge == {}
        assert len(small.table("rows")) <= 256
        assert pair.puller.counts.faults_total >= 1
        assert told_by(pair.region[pair.names[1]]) == told_by(pair.home[pair.names[1]])

    @pytest.mark.parametrize(
        "bad",
        [
            update(rows([(1, 5, 7, np.nan)])),
            update(rows([(1, 5, 7, 1.0)], "other", state=3)),
            update(replace(rows([(1, 5, 7, 1.0)]), table="nothing")),
        ],
    )
    def test_nonsense_is_not_taken_and_nothing_behind_it(self, bad: Update) -> None:
        pair = Pair()
        pair.exchange()
        push(pair.home[NAME], [1])
        (batch,) = pair.answer()
        (piece,) = batch.pieces
        taken = pair.take(replace(batch, pieces=(Piece(NAME, piece.round, bad), piece)))
        assert (taken.rows, taken.learned) == (0, ())
        assert told_by(pair.region[NAME]) == {}
        pair.settle(3)
        assert pair.equal()


def test_a_replacement_that_is_cut_off_drops_nothing() -> None:
    pair = Pair(pace=PaceConfig(min_bytes=50 * ROW_BYTES, max_bytes=50 * ROW_BYTES))
    push(pair.home[NAME], range(120))
    pair.exchange()
    pair.home[NAME].delete("rows", np.array([5], np.uint64))
    pair.home[NAME].collect(pair.home[NAME].knowledge)
    pair.ask()
    batches = pair.answer()
    assert len(batches) == 3
    for batch in batches[:2]:
        pair.take(batch)
    assert len(told_by(pair.region[NAME])) == 120
    pair.puller.failed(pair.now_s)
    pair.settle(2)
    assert len(told_by(pair.region[NAME])) == 119
    assert pair.equal()


def test_standings_tell_how_far_each_shard_is() -> None:
    pair = Pair(shards=2, pace=PaceConfig(min_bytes=50 * ROW_BYTES, max_bytes=50 * ROW_BYTES))
    one, other = pair.names
    push(pair.home[one], range(500))
    pair.ask()
    (first,) = pair.answer()
    pair.take(first)
    standing = pair.puller.standings
    assert (standing[one].served, standing[one].left > 300, standing[one].level_s) == (True, True, -1.0)
    assert (standing[other].served, standing[other].left, standing[other].level_s) == (True, 0, pair.now_s)
    pair.exchange()
    level_s = pair.now_s
    assert pair.puller.standings[one].level_s == level_s
    # Through a broken stream it is remembered, and renewed although nothing changed since.
    pair.later(1.0)
    pair.puller.failed(pair.now_s)
    assert (pair.puller.standings[one].served, pair.puller.standings[one].level_s) == (False, level_s)
    pair.later(1.0)
    pair.exchange()
    pair.later(1.0)
    pair.exchange()
    assert (pair.puller.standings[one].served, pair.puller.standings[one].level_s) == (True, pair.now_s)
    del pair.served[one]
    pair.later(1.0)
    pair.exchange()
    assert not pair.puller.standings[one].served
    assert pair.puller.standings[one].level_s < pair.now_s


def test_the_source_hears_what_is_held_every_few_seconds() -> None:
    pair = Pair()
    push(pair.home[NAME], [1])
    held: list[Knowledge] = []
    for _ in range(30):
        held += [vector for pull in pair.ask() for _, vector in pull.held]
        for batch in pair.answer():
            pair.take(batch)
        pair.later(REPORT_S / 10)
    assert 3 <= len(held) <= 4
    assert held[0] == {}
    assert held[-1] == pair.home[NAME].knowledge


@pytest.mark.parametrize(("names", "entries"), [(3, 65_536), (1_024, 6)])
def test_what_does_not_fit_one_pull_is_said_in_several(
    names: int, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (module, messages):
        monkeypatch.setattr(where, "MAX_NAMES", names)
        monkeypatch.setattr(where, "MAX_ENTRIES", entries)
    pair = Pair(shards=10)
    for name in pair.names:
        push(pair.home[name], range(5))
        pair.region[name].merge(update(known=learned({98: 7, 99: 5})))
        pair.home[name].merge(update(known=learned({98: 7, 99: 5})))
    pulls: list[Pull] = []
    for wanted in (pair.region, {pair.names[0]: pair.region[pair.names[0]]}):
        pair.wanted = dict(wanted)
        for _ in range(round(6 * REPORT_S)):
            pulls += pair.ask()
            for batch in pair.answer():
                pair.take(batch)
            pair.later(0.5)
    assert pair.equal()
    for pull in pulls:
        assert max(len(pull.wants), len(pull.unwanted), len(pull.held)) <= names
        assert pull.entries <= entries
    assert sorted(want.shard for pull in pulls for want in pull.wants) == pair.names
    assert sorted(name for pull in pulls for name in pull.unwanted) == pair.names[1:]
    # Every shard is told of time and again, and in the end only of what is wanted.
    told = [name for pull in pulls for name, _ in pull.held]
    assert min(told.count(name) for name in pair.names) >= 2
    assert told[-1] == pair.names[0]


def test_the_difference_of_clocks_is_told_within_half_a_round_trip() -> None:
    pair = Pair()
    pair.ask()
    pair.later(0.1)
    (batch,) = pair.answer()
    pair.later(0.1)
    ours = pair.clock.now_us
    pair.puller.take(replace(batch, clock_us=ours + 2_000_000, parked_s=0.0), 100, pair.now_s, ours)
    assert pair.puller.clock_ahead_s == pytest.approx(2.1)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "push",
                "push",
                "push",
                "delete",
                "collect",
                "exchange",
                "lose",
                "step",
                "step",
                "restart",
                "home",
                "flap",
            ]
        ),
        st.integers(0, 10**6),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, st.sampled_from([2, 7, 1_000]), st.sampled_from([4, 1_000]))
def test_whatever_happens_the_region_ends_like_home(
    actions: list[tuple[str, int]], budget_rows: int, capacity: int
) -> None:
    """Lost batches, restarts on both sides, deletes that are forgotten, shards that go: nothing is missed and nothing
    comes back; and what is claimed is held at every moment."""
    budget = 80 + budget_rows * ROW_BYTES
    pair = Pair(
        config=FeedConfig(coalesce_s=0.0, priority_share=0.2, max_staleness_s=1.0),
        pace=PaceConfig(min_bytes=budget, max_bytes=budget),
        change_capacity=capacity,
    )
    writer = 5_000
    for action, seed in actions:
        rng, home = random.Random(seed), pair.home[NAME]
        pair.later(rng.choice([0.001, 0.4, 3.0]))
        keys = [rng.randrange(12) for _ in range(rng.randrange(1, 6))]
        if action == "push":
            push(home, keys, rng.choice([1.0, 300.0]))
        elif action == "delete":
            home.delete("rows", np.array(keys, np.uint64))
        elif action == "collect":
            home.collect({home.writer: max(0, home.clock.last - rng.choice([0, 1_000_000]))})
        elif action == "exchange":
            pair.exchange()
        elif action in ("step", "lose"):
            pair.ask()
            batches = pair.answer()
            for batch in batches if action == "step" else batches[: rng.randrange(3)]:
                pair.take(batch)
            if action == "lose":
                pair.puller.failed(pair.now_s)
        elif action == "flap":
            pair.wanted.pop(NAME)
            pair.ask()
            pair.wanted[NAME] = pair.region[NAME]
        else:
            writer += 1
            mine = pair.region if action == "restart" else pair.home
            again = pair.clock.shard(writer, stateless=action == "restart", change_capacity=capacity)
            again.restore(mine[NAME].state())
            mine[NAME] = again
            pair.wanted[NAME], pair.served[NAME] = pair.region[NAME], pair.home[NAME]
        held = told_by(pair.region[NAME])
        claimed = pair.region[NAME].knowledge
        for (table, key), (version, value) in told_by(pair.home[NAME]).items():
            if version[0] <= claimed.get(version[1], 0):
                assert held.get((table, key)) == (version, value)
    pair.settle()
    assert pair.equal(), actions


@pytest.mark.parametrize("seed", range(3))
def test_over_a_slow_link_with_jitter_it_all_arrives(seed: int) -> None:
    pair = Pair(shards=2, config=FeedConfig(), pace=PaceConfig(min_bytes=2_000))
    rng = np.random.default_rng(seed)

    def work(at_s: float) -> None:
        if at_s < 8.0:
            for name in pair.names:
                push(pair.home[name], rng.integers(0, 3_000, 20).tolist())

    run(pair, Wire(60_000.0, 0.1, jitter_s=0.05), 14.0, work, step_s=0.01)
    assert pair.equal()
    assert pair.puller.counts.streams_total == 0


def test_the_first_pull_of_a_stream_is_answered_at_once() -> None:
    """A server that leads nothing yet, as it starts, must not wait out a pull before it can say what it wants."""
    puller = Puller(dict, Pace(PaceConfig()), 1, random.Random(0))
    first = puller.ask(0.0)
    assert first is not None
    assert (first.number, first.wait_s) == (1, 0.0)
    assert puller.ask(0.0) is None
    puller.take(Batch(1, 1), 50, 0.2)
    second = puller.ask(0.2)
    assert second is not None
    assert second.wait_s > 0.0
    puller.failed(0.3)
    again = puller.ask(10.0)
    assert again is not None
    assert again.wait_s == 0.0


def test_patience_covers_what_stands_in_line_before_an_answer_and_grows_while_none_comes() -> None:
    pair = Pair(pace=PaceConfig(min_bytes=64, max_bytes=64, window=3, max_window=3), wait_s=0.5)
    pair.exchange()  # ends with three pulls open
    pull, least_s = Pull(1, 99, 64, 0.5), 0.5 + GRACE_S
    assert pair.puller.patience_s(pull) == pytest.approx(least_s)
    # Batches that tell little have more bytes than they were asked for: eight times as many here.
    pair.pace.note(512, 64, pair.now_s, 0.0, pair.now_s + 0.512)
    assert pair.puller.patience_s(pull) == pytest.approx(least_s + 2.0 * 3 * 512 / 1_000)
    grown = []
    for _ in range(4):
        pair.later(10.0)
        assert pair.puller.overdue(pair.now_s).fault
        grown.append(pair.puller.patience_s(pull) - least_s)
    assert grown == [1.0, 2.0, 4.0, 4.0]
    pair.later(10.0)
    pair.exchange()
    assert pair.puller.patience_s(pull) < least_s + 4.0


def test_a_retirement_from_elsewhere_in_the_middle_of_a_replacement_makes_it_begin_anew() -> None:
    """Two owners retired the same writer without knowing of each other, and one of them lacked its rows."""
    pair = Pair(pace=PaceConfig(min_bytes=50 * ROW_BYTES, max_bytes=50 * ROW_BYTES))
    home, region = pair.home[NAME], pair.region[NAME]
    push(home, range(120))
    (writer,) = home.knowledge
    home.lead(2_005, 5)
    assert home.retire(5, home.knowledge)
    pair.ask()
    pair.take(pair.answer()[0])
    assert 0 < len(told_by(region)) < 120
    nothing = Learned({}, Horizon({}, 3))
    region.merge(Update(learned=nothing, final=nothing, epochs={writer: home.epochs[writer]}), {})
    assert (told_by(region), region.horizon.retired) == ({}, 3)
    pair.settle(5)
    assert (len(told_by(region)), region.horizon.retired) == (120, 5)
    assert pair.equal()
