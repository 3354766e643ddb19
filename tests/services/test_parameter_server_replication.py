"""Replication in virtual time: whoever dies, what was acknowledged is there, once, and all replicas agree."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.adversary import SPECS, Adversary, content, parts, undisturbed, values
from support.cluster import World

from services.coordination.shardmap import Place
from services.parameter_server.acknowledging import Acknowledging
from services.parameter_server.messages import TailShard
from services.parameter_server.replication.cluster import HandOver
from services.parameter_server.replication.election import Election, Replication, Vote
from services.parameter_server.replication.replica import JOIN_S, Replica
from services.parameter_server.replication.streams import Followers, Step, Stream, common, contains
from services.parameter_server.storage.durability import Durability
from services.parameter_server.storage.snapshots import ShardFolder
from sync.clock import HybridClock
from sync.pushes import Push, Source
from sync.records import Delta, History
from sync.shard import Shard

NAMES = ("a", "b", "c")
MODELS = ("one", "two")


class Trainer:
    """Pushes offset after offset to whoever leads, and goes on once it is acknowledged."""

    def __init__(self, world: World, model: str, shard: int = 0) -> None:
        self.world, self.model, self.shard = world, model, shard
        self.source = Source(f"samples of {model}", 0)
        self.acknowledged = -1
        self.retries = 0
        self._waiting: tuple[object, dict[int, tuple[int, int]], int] | None = None

    def turn(self) -> None:
        node = self.world.leader(self.shard)
        if node is None:
            self._waiting = None
            return
        if self._waiting is not None and self._waiting[0] is node:
            settled = node.cluster.settled(self._waiting[1])
            if settled:
                self.acknowledged = max(self.acknowledged, self._waiting[2])
            if settled is not False:
                self._waiting = None
            return
        if node.cluster.takes_pushes(self.shard):
            self.retries += 1
            return
        shard = node.declare(self.model, self.shard)
        applied = shard.applied(self.source)
        outcome = shard.push(Push(self.source, applied + 1, applied, None, parts(applied + 1)))
        assert outcome.status == "applied"
        self._waiting = (node, node.cluster.pending([self.shard]), applied + 1)
        if not self._waiting[1]:
            self.acknowledged, self._waiting = max(self.acknowledged, applied + 1), None


def check(world: World, trainers: list[Trainer], *, lossless: bool = True) -> None:
    """Let everything settle, and compare."""
    for trainer in trainers:
        aim = trainer.acknowledged + 3

        def further(trainer: Trainer = trainer, aim: int = aim) -> bool:
            trainer.turn()
            return trainer.acknowledged >= aim

        world.until(further)
    shard = trainers[0].shard
    replicas = world.place(shard).replicas

    def agreed() -> bool:
        found = [world.nodes[name].of(shard) for name in replicas]
        return all(
            len({one[t.model].position if t.model in one else -1 for one in found}) == 1 for t in trainers
        )

    world.until(agreed)
    for trainer in trainers:
        shards = [world.nodes[name].of(shard)[trainer.model] for name in replicas]
        assert len({content(one) for one in shards}) == 1
        applied = shards[0].applied(trainer.source)
        if lossless:
            assert applied >= trainer.acknowledged
        assert values(shards[0]) == undisturbed(applied + 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("replication", ["quorum", "chain"])
def test_nothing_acknowledged_is_lost_when_one_server_after_another_is_killed(
    replication: Replication, seed: int
) -> None:
    world = World(SPECS, NAMES, replication, seed, loss=0.005 if seed % 2 else 0.0)
    trainers = [Trainer(world, model) for model in MODELS]
    highest = dict.fromkeys(MODELS, -1)
    for _ in range(4):
        for _ in range(world.random.randrange(50, 500)):
            world.tick()
            for trainer in trainers:
                trainer.turn()
        victim = world.random.choice([*NAMES, world.place().leader])
        world.kill(victim)
        for _ in range(world.random.choice([0, 5, 300])):
            world.tick()
            for trainer in trainers:
                trainer.turn()
        world.start(victim)
        for trainer in trainers:
            highest[trainer.model] = max(highest[trainer.model], trainer.acknowledged)

        def healed() -> bool:
            for trainer in trainers:
                trainer.turn()
            leader = world.leader()
            place = world.place()
            if leader is None or (place.chain and set(place.chain) != set(NAMES)):
                return False
            return all(
                (r := world.nodes[name].cluster.replicas.get(0)) is not None and not r.restarted and r.whole
                for name in NAMES
                if name != place.leader
            )

        world.until(healed)
    for trainer in trainers:
        leader = world.leader()
        assert leader is not None
        assert leader.of(0)[trainer.model].applied(trainer.source) >= highest[trainer.model]
        assert trainer.acknowledged > 3
    check(world, trainers)


@pytest.mark.parametrize("seed", range(6))
def test_async_replicas_agree_after_a_kill_and_the_loss_is_counted(seed: int) -> None:
    world = World(SPECS, NAMES, "async", seed)
    trainers = [Trainer(world, "one")]
    for _ in range(300):
        world.tick()
        trainers[0].turn()
    before = trainers[0].acknowledged
    leader = world.leader()
    assert leader is not None
    # Steps that no follower will see: the disk has them, the network does not.
    leader.sync()
    world.loss = 1.0
    for _ in range(5):
        trainers[0].turn()
    leader.sync()
    lost = trainers[0].acknowledged - before
    assert lost == 5
    world.kill(leader.name)
    world.loss = 0.0
    world.until(lambda: world.leader() is not None)
    new = world.leader()
    assert new is not None
    survived = new.of(0)["one"].applied(trainers[0].source)
    assert before - 3 <= survived <= before
    world.start(leader.name)
    check(world, trainers, lossless=False)
    back = world.nodes[leader.name]
    discarded = back.cluster.following_counts.discarded_steps_total
    assert discarded == lost + before - survived


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("replication", "replicas"), [("async", 1), ("quorum", 3), ("chain", 2)])
def test_a_shard_moves_while_trainers_push(replication: Replication, replicas: int, seed: int) -> None:
    world = World(SPECS, ("a", "b", "c", "d"), replication, seed, shards=4, replicas=replicas)
    trainers = [Trainer(world, model, 1) for model in MODELS]
    longest, quiet = 0.0, 0.0
    last = -1
    for _ in range(3):
        for _ in range(100):
            world.tick()
            for trainer in trainers:
                trainer.turn()
        to = world.random.choice([name for name in "abcd" if name != world.place(1).leader])
        before = world.place(1)
        world.move(1, to)
        for _ in range(4_000):
            world.tick()
            for trainer in trainers:
                trainer.turn()
            total = sum(trainer.acknowledged for trainer in trainers)
            quiet = 0.0 if total != last else quiet + 0.002
            last = total
            longest = max(longest, quiet)
            if world.place(1).leader == to and world.leader(1) is not None and not world.map.moves:
                break
        after = world.place(1)
        assert after.leader == to
        assert len(after.replicas) == replicas
        assert (before.leader in after.replicas) == (to in before.replicas)
        assert after.fence > before.fence
    assert longest < 1.0
    check(world, trainers)
    assert "one" not in world.nodes[next(n for n in "abcd" if n not in world.place(1).replicas)].of(1)


@pytest.mark.parametrize("seed", range(4))
def test_a_move_that_the_store_does_not_confirm_loses_nothing(seed: int) -> None:
    world = World(SPECS, ("a", "b", "c"), "async", seed, shards=2, replicas=1)
    trainers = [Trainer(world, model) for model in MODELS]
    for _ in range(200):
        world.tick()
        for trainer in trainers:
            trainer.turn()
    for _ in range(4):
        to = world.random.choice([name for name in "abc" if name != world.place().leader])
        world.move(0, to)
        world.store.failing = 0.5
        for _ in range(600):
            world.tick()
            for trainer in trainers:
                trainer.turn()
        world.store.failing = 0.0
        highest = {trainer.model: trainer.acknowledged for trainer in trainers}

        def going_on(highest: dict[str, int] = highest) -> bool:
            for trainer in trainers:
                trainer.turn()
            return all(trainer.acknowledged > highest[trainer.model] for trainer in trainers)

        world.until(going_on)
    check(world, trainers)


def test_a_move_to_a_server_that_dies_holds_nothing_up() -> None:
    world = World(SPECS, ("a", "b"), "async", 5, replicas=1)
    trainer = Trainer(world, "one")
    world.until(lambda: world.leader() is not None)
    to = "b" if world.place().leader == "a" else "a"
    world.move(0, to)
    world.until(lambda: to in world.nodes[world.place().leader].cluster.replicas[0].followers.held)
    world.kill(to)
    longest, since, last = 0.0, world.now_s, -1
    for _ in range(3_000):
        world.tick()
        trainer.turn()
        if trainer.acknowledged != last:
            since, last = world.now_s, trainer.acknowledged
        longest = max(longest, world.now_s - since)
    assert longest < 1.0
    assert world.place().leader != to


def test_a_replica_far_behind_copies_the_shard_while_pushes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.parameter_server.replication.replica.KEPT_BYTES", 4_096)
    world = World(SPECS, NAMES, "quorum", 3)
    trainers = [Trainer(world, model) for model in MODELS]
    world.until(lambda: world.leader() is not None)
    victim = next(name for name in NAMES if name != world.place().leader)
    world.kill(victim)
    for _ in range(600):
        world.tick()
        for trainer in trainers:
            trainer.turn()
    world.start(victim)
    check(world, trainers)
    copied = world.nodes[victim].cluster.following_counts.copied_rows_total
    assert copied > 0


def test_a_leader_without_word_from_the_store_takes_no_pushes() -> None:
    world = World(SPECS, NAMES, "quorum", 1)
    world.until(lambda: world.leader() is not None)
    leader = world.leader()
    assert leader is not None
    assert leader.cluster.takes_pushes(0) == ""
    world.now_s += 5.1
    assert "nothing was heard of the coordination store" in leader.cluster.takes_pushes(0)


@pytest.mark.parametrize(
    ("replication", "seed"),
    [("quorum", 7), ("quorum", 11), ("chain", 3), ("chain", 113), ("chain", 182), ("async", 0)],
)
def test_whatever_goes_wrong_at_once_the_servers_come_to_agree_and_lose_nothing(
    replication: Replication, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a shard whose steady replicas are all away is led by one that lost something, to be led at all.
    monkeypatch.setattr("services.parameter_server.replication.election.RESTARTED_WAIT_S", 60.0)
    if seed % 4 == 3:
        monkeypatch.setattr("services.parameter_server.replication.replica.KEPT_BYTES", 8_192)
    Adversary(replication, seed).run(20)


def test_servers_killed_all_at_once_go_on_from_their_disks() -> None:
    adversary = Adversary("quorum", 3, ("a", "b", "c"))
    world = adversary.world
    adversary.pass_time(200)
    for node in world.nodes.values():
        node.sync()
    for name in NAMES:
        world.kill(name, lease_ends=False)
    world.lose_disk("b")
    adversary.heal()
    adversary.check()


def flicker(world: World, leader: str, follower: str) -> None:
    """The store has no entry of the leader for a moment, in which one follower looks."""
    node = world.nodes[follower]
    world.without_store.add(leader)
    world._leave(leader)
    node.control.look()
    node.cluster.turn()
    assert node.cluster.replicas[0].upstream is None
    world.without_store.clear()
    world._register(leader, world.nodes[leader].incarnation)


@pytest.mark.parametrize("replication", ["async", "quorum", "chain"])
def test_who_stopped_following_a_leader_that_was_gone_for_a_moment_follows_again_and_copies_nothing(
    replication: Replication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.parameter_server.replication.replica.KEPT_BYTES", 4_096)
    world = World(SPECS, NAMES, replication, 4)
    trainer = Trainer(world, "one")
    for _ in range(400):
        world.tick()
        trainer.turn()
    copied = {name: world.nodes[name].cluster.following_counts.copied_rows_total for name in NAMES}
    leader = world.place().leader
    flicker(world, leader, next(name for name in NAMES if name != leader))
    check(world, [trainer])
    assert copied == {name: world.nodes[name].cluster.following_counts.copied_rows_total for name in NAMES}


def test_a_shard_is_not_handed_to_a_process_that_was_started_since_it_had_everything() -> None:
    world = World(SPECS, ("a", "b"), "async", 5, replicas=1)
    world.until(lambda: world.leader() is not None)
    leader = world.leader()
    assert leader is not None
    to = "b" if leader.name == "a" else "a"
    before = world.nodes[to].incarnation
    world.move(0, to)
    world.kill(to)
    world.start(to)
    fence = world.place().fence
    for incarnation, led_by in ((before, leader.name), (world.nodes[to].incarnation, to)):
        leader.control._write(HandOver(0, fence, to, incarnation))
        assert world.place().leader == led_by


def chained(chain: tuple[str, ...], steps: int) -> Replica:
    """Leader a of a shard with ``steps`` steps, the newest of which is number ``steps`` + 1."""
    replica = Replica(0, "a", "chain", Place("a", NAMES, 1, 5, chain), Stream(), 7, placed=20)
    replica.lead()
    for position in range(1, steps + 1):
        replica.took("m", delta(position))
    return replica


def test_nothing_is_acknowledged_without_a_server_that_may_stand_in_the_chain_already() -> None:
    replica = chained(("a", "b"), 3)
    replica.followers.note("b", 4)
    replica.followers.note("c", 3)
    assert replica.to_join_chain(0.0) is None
    assert (replica.joining, replica.acknowledged) == ("c", 4)
    replica.took("m", delta(4))
    replica.followers.note("b", 5)
    assert replica.acknowledged == 4
    replica.followers.note("c", 5)
    assert replica.to_join_chain(0.1) == "c"
    assert replica.acknowledged == 5
    replica.took("m", delta(5))
    replica.followers.note("b", 6)
    assert replica.to_join_chain(99.0) == "c"
    assert replica.acknowledged == 5
    replica.end_joining(100.0)
    assert replica.acknowledged == 6


def test_a_server_that_does_not_come_holds_the_chain_up_for_a_moment_only() -> None:
    replica = chained(("a", "b"), 3)
    replica.followers.note("b", 4)
    replica.followers.note("c", 3)
    assert replica.to_join_chain(0.0) is None
    replica.took("m", delta(4))
    replica.followers.note("b", 5)
    assert replica.to_join_chain(JOIN_S) is None
    assert (replica.joining, replica.acknowledged) == (None, 5)


def test_who_does_not_know_yet_who_stands_behind_it_speaks_for_nobody() -> None:
    replica = chained(NAMES, 2)
    asked = TailShard(0, 7, 3, 3)
    for epoch, held in ((19, None), (20, 3)):
        assert replica.tail(asked, "b", epoch, {}) is None
        assert replica.followers.held.get("b") == held


def test_what_does_not_pass_leaves_the_chain_and_those_behind_first() -> None:
    replica = chained(NAMES, 2)
    for now_s in (0.0, 1.0, 2.0):
        replica.followers.note("b", 2)
        assert replica.stuck_in_chain(now_s, 2.0) == ()
    replica.followers.note("b", 2)
    assert replica.stuck_in_chain(3.1, 2.0) == ("c",)
    assert replica.stuck_in_chain(5.2, 2.0) == ("b",)
    replica.followers.note("b", 3)
    assert replica.stuck_in_chain(9.9, 2.0) == ()


def test_who_was_restarted_and_lacks_something_is_joined_by_nobody() -> None:
    replica = Replica(0, "b", "chain", Place("a", NAMES, 1, 5, NAMES), Stream(), 7)
    assert replica.restarted
    joining = TailShard(0, 0, 0, 0)
    assert replica.tail(joining, "c", 1, {}) is None
    replica.join(9, 3, newest=4)
    assert replica.tail(joining, "c", 1, {}) is None
    replica.reached(4)
    assert replica.tail(joining, "c", 1, {}) is not None
    # A chain behind it that it has not heard of holds nothing.
    assert replica.holds() == 4
    replica.followers.forget("c")
    assert replica.holds() == 0


def test_a_copy_from_another_line_of_steps_is_made_anew() -> None:
    replica = chained((), 2)
    at = {"m": (1, 2)}
    shards = {"m": Shard(0, SPECS, 0, HybridClock(lambda: 0))}
    found = replica.tail(TailShard(0, 0, 0, -1, at, ["m"], 6), "b", 20, shards)
    assert found is not None
    assert found[0].copy == ["m"]
    assert replica.followers.held["b"] == 0


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [
        ((((1, 1),), 15), (((1, 1), (2, 11)), 20), 10),
        ((((1, 1), (3, 11)), 15), (((1, 1), (4, 14)), 20), 10),
        ((((1, 1), (3, 11)), 15), (((1, 1), (3, 11)), 13), 13),
        ((((2, 1),), 5), (((3, 1),), 5), 0),
        (((), 0), (((3, 1),), 5), 0),
    ],
)
def test_what_two_lines_of_steps_have_in_common(
    one: tuple[History, int], other: tuple[History, int], agreed: int
) -> None:
    assert common(one, other) == common(other, one) == agreed


def test_an_answer_waits_only_for_the_shards_that_took_the_push() -> None:
    class Answers:
        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def answer(self, call: object, body: bytes, arrays: tuple[np.ndarray, ...] = ()) -> None:
            self.sent.append(body)

        def fail(self, call: object, code: str, message: str) -> None:
            raise AssertionError(message)

    answers, stuck = Answers(), {3: (1, 9)}
    waiting = Acknowledging(
        answers,  # type: ignore[arg-type]
        lambda shards: {s: stuck[s] for s in stuck if shards is None or s in shards},
        lambda pending: not pending,
    )
    call = SimpleNamespace(deadline_s=10.0)
    waiting.answer(call, b"free", shards=[0])  # type: ignore[arg-type]
    waiting.answer(call, b"stuck", shards=[0, 3])  # type: ignore[arg-type]
    waiting.answer(call, b"all")  # type: ignore[arg-type]
    waiting.release(1.0)
    assert (answers.sent, waiting.waiting) == ([b"free"], 2)


def test_a_copy_that_is_not_whole_is_not_saved_over_what_was_there(tmp_path: Path) -> None:
    def empty(writer: int = 0) -> Shard:
        return Shard(0, SPECS, writer, HybridClock(), model="one")

    def kept() -> Durability:
        return Durability(lambda model, shard: ShardFolder(tmp_path, model, shard, 1, 2))

    source = Source("s", 0)
    durability = kept()
    held = durability.open("one", 0, empty, lambda head: None)
    held.shard.lead(1, 1)
    held.shard.on_delta = lambda step: durability.record(held, step)
    for offset in range(3):
        held.shard.push(Push(source, offset, offset - 1, None, parts(offset)))
    assert durability.finish(10.0)
    copy = empty(2)
    copy.push(Push(source, 0, -1, None, parts(0)))
    held.shard, held.whole = copy, False
    durability.renew(held)
    durability.snapshot_now()
    for _ in range(20):
        durability.step()
        time.sleep(0.002)
    assert durability.finish(0.0)
    durability.close()
    again = kept()
    found = again.open("one", 0, empty, lambda head: None)
    again.close()
    assert found.shard.applied(source) == 2
    assert values(found.shard) == undisturbed(3)


def delta(position: int, epoch: int = 1) -> Delta:
    return Delta(epoch, position, 1, 1)


def test_a_stream_keeps_the_newest_steps_within_its_bound() -> None:
    stream = Stream(max_bytes=3 * delta(1).nbytes)
    for position in range(1, 6):
        assert stream.add(Step("m", delta(position), 10 * position)) == position
    assert (stream.floor, stream.number) == (2, 5)
    assert [step.delta.position for step in stream.after(3, 10**9)] == [4, 5]
    assert [step.delta.position for step in stream.after(2, 1)] == [3]
    assert [stream.origin(n) for n in (2, 3, 5)] == [0, 30, 50]


def test_who_joins_a_stream_copies_what_it_cannot_follow() -> None:
    stream = Stream(max_bytes=10**6)
    for position in range(4, 7):
        stream.add(Step("m", delta(position, epoch=2)))
    own = {"m": (((1, 1), (2, 4)), 6), "idle": (((1, 1),), 9)}
    at = {"idle": (1, 9)}
    assert stream.join({"m": (2, 6), **at}, own) == 3
    assert stream.join({"m": (2, 5), **at}, own) == 2
    assert stream.join({"m": (1, 3), **at}, own) == 0
    assert stream.join({"m": (1, 2), **at}, own) == {"m"}
    assert stream.join({"m": (1, 5), **at}, own) == {"m"}
    assert stream.join({"m": (3, 5), **at}, own) == {"m"}
    assert stream.join({"m": (2, 6)}, own) == {"idle"}
    assert stream.join({"m": (2, 6)}, {"m": own["m"], "new": ((), 0)}) == 3


@pytest.mark.parametrize(
    ("epoch", "position", "inside"),
    [(0, 0, True), (1, 3, True), (1, 4, False), (4, 4, True), (4, 9, True), (4, 10, False), (2, 2, False)],
)
def test_a_history_contains_the_steps_of_its_owners(epoch: int, position: int, inside: bool) -> None:
    assert contains(((1, 1), (4, 4)), 9, epoch, position) == inside


@pytest.mark.parametrize(
    ("replication", "held", "acknowledged"),
    [
        ("async", {}, 9),
        ("quorum", {}, 0),
        ("quorum", {"b": 5}, 5),
        ("quorum", {"b": 5, "c": 7}, 7),
        ("chain", {"c": 9}, 0),
        ("chain", {"b": 4, "c": 9}, 4),
    ],
)
def test_steps_are_acknowledged_by_the_replicas_that_count(
    replication: Replication, held: dict[str, int], acknowledged: int
) -> None:
    place = Place("a", NAMES, 1, 1, NAMES if replication == "chain" else ())
    assert Followers(replication, place, "a", held).acknowledged(9) == acknowledged


PLACE = Place("a", NAMES, 1, 5)


def vote(server: str, steps: int, epoch: int = 5, fence: int = 5, restarted: bool = False) -> Vote:
    return Vote(server, 1, fence, epoch, steps, restarted)


@pytest.mark.parametrize(
    ("votes", "alive", "waited_s", "winner"),
    [
        ([vote("b", 7)], "bc", 0.0, None),
        ([vote("b", 7), vote("c", 8)], "bc", 0.0, "c"),
        ([vote("b", 7), vote("c", 8, epoch=4)], "bc", 0.0, "b"),
        ([vote("b", 7), vote("c", 7)], "bc", 0.0, "b"),
        ([vote("b", 7), vote("c", 8, fence=4)], "bc", 99.0, None),
        ([vote("b", 7), vote("a", 9, restarted=True)], "abc", 9.0, None),
        ([vote("b", 7), vote("a", 9, restarted=True)], "abc", 10.0, "a"),
        ([vote("b", 7), vote("a", 6, restarted=True), vote("c", 3, restarted=True)], "abc", 0.0, "b"),
        ([vote("b", -1), vote("c", -1)], "bc", 99.0, None),
        ([vote("b", -1), vote("c", 2)], "bc", 9.0, None),
        ([vote("b", -1), vote("c", 2)], "bc", 10.0, "c"),
        ([vote("b", 7), vote("x", 9)], "bx", 99.0, None),
    ],
)
def test_a_quorum_elects_the_one_furthest_on_of_those_that_count(
    votes: list[Vote], alive: str, waited_s: float, winner: str | None
) -> None:
    assert Election(PLACE, "quorum", waited_s).winner(votes, set(alive)) == winner


@pytest.mark.parametrize(
    ("votes", "alive", "waited_s", "winner"),
    [
        ([vote("c", 7)], "bc", 0.1, None),
        ([vote("c", 7)], "bc", 0.5, "c"),
        ([vote("c", 7)], "c", 0.0, "c"),
        ([vote("a", 0, restarted=True)], "abc", 9.0, None),
        ([vote("a", 0, restarted=True)], "abc", 10.0, "a"),
    ],
)
def test_async_waits_a_little_for_those_that_are_alive(
    votes: list[Vote], alive: str, waited_s: float, winner: str | None
) -> None:
    assert Election(PLACE, "async", waited_s).winner(votes, set(alive)) == winner


def test_a_chain_waits_a_little_for_all_of_it_that_are_alive_and_prefers_who_lost_nothing() -> None:
    chain = replace_chain(PLACE, ("a", "b", "c"))
    soon, later, late = (Election(chain, "chain", waited_s) for waited_s in (0.1, 0.5, 10.0))
    assert soon.winner([vote("c", 7)], {"b", "c"}) is None
    assert later.winner([vote("c", 7)], {"b", "c"}) == "c"
    assert soon.winner([vote("c", 7), vote("b", 8)], {"b", "c"}) == "b"
    assert soon.winner([vote("c", 7), vote("a", 9, restarted=True)], {"a", "c"}) == "c"
    assert later.winner([vote("a", 9, restarted=True)], {"a"}) is None
    assert late.winner([vote("a", 9, restarted=True)], {"a"}) == "a"
    restarted = [vote(server, 9, restarted=True) for server in "abc"]
    assert soon.winner(restarted, {"a", "b", "c"}) == "a"
    outside = Election(replace_chain(PLACE, ("a", "b")), "chain", 99.0)
    assert outside.winner([vote("c", 9)], {"c"}) is None


def replace_chain(place: Place, chain: tuple[str, ...]) -> Place:
    return Place(place.leader, place.replicas, place.incarnation, place.fence, chain)
