"""Replication in virtual time: whoever dies, what was acknowledged is there, once, and all replicas agree."""

from __future__ import annotations

import numpy as np
import pytest
from support.cluster import World

from services.coordination.shardmap import Place
from services.parameter_server.election import Election, Replication, Vote
from services.parameter_server.replication import Followers, Step, Stream, contains
from sync.pushes import Push, Source
from sync.records import Delta
from sync.shard import Shard
from sync.spec import Initialiser, Optimiser, TableSpec

SPECS = (
    TableSpec("rows", 3, Initialiser.uniform(0.1), Optimiser("rowwise_adagrad", 0.5)),
    TableSpec("dense", 4, Initialiser.uniform(0.1), Optimiser("adagrad", 0.5), placement="single", rows=4),
)
NAMES = ("a", "b", "c")
MODELS = ("one", "two")


def parts(offset: int) -> tuple[tuple[str, np.ndarray, np.ndarray], ...]:
    rng = np.random.default_rng(offset)
    keys = rng.integers(0, 30, 4).astype(np.uint64)
    return (
        ("rows", keys, rng.standard_normal((4, 3)).astype(np.float32)),
        ("dense", np.array([offset % 4], np.uint64), rng.standard_normal((1, 4)).astype(np.float32)),
    )


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


def content(shard: Shard) -> bytes:
    """What two replicas agree on: every row with its state and version, and how far every source is."""
    rows = sorted(
        (
            page.table,
            key,
            page.values[i].tobytes(),
            page.state[i].tobytes(),
            int(page.time[i]),
            int(page.writer[i]),
        )
        for page in shard.state().rows
        for i, key in enumerate(page.keys.tolist())
    )
    return repr((rows, sorted(shard.pushes.progress().items()))).encode()


def undisturbed(offsets: int) -> bytes:
    """The values after ``offsets`` pushes, each applied once."""
    from sync.clock import HybridClock

    shard = Shard(0, SPECS, 1, HybridClock(lambda: 0))
    for offset in range(offsets):
        shard.push(Push(Source("s", 0), offset, offset - 1, None, parts(offset)))
    return values(shard)


def values(shard: Shard) -> bytes:
    return repr(
        sorted(
            (page.table, key, page.values[i].tobytes(), page.state[i].tobytes())
            for page in shard.state().rows
            for i, key in enumerate(page.keys.tolist())
        )
    ).encode()


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


@pytest.mark.parametrize("seed", range(8))
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


@pytest.mark.parametrize("seed", range(6))
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


@pytest.mark.parametrize("seed", range(8))
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
    monkeypatch.setattr("services.parameter_server.replica.KEPT_BYTES", 4_096)
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
