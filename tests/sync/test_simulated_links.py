"""Links of the simulator: uplinks and downlinks of places and of single nodes, and nodes that poll."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sync.clock import HybridClock
from sync.exchange import Batch, Pull
from sync.pushes import Push, Source
from sync.shard import Shard
from sync.simulator.machine import MachineClock
from sync.simulator.network import Network, Path
from sync.simulator.node import Node, NodeConfig
from sync.simulator.queue import EventQueue
from sync.spec import Initialiser, Optimiser, TableSpec

SPEC = TableSpec("rows", 2, Initialiser.uniform(0.1), Optimiser("sgd", 0.1))


class Links:
    """Two places a second apart, and when what was sent came."""

    def __init__(self) -> None:
        self.queue = EventQueue()
        self.network = Network(self.queue, random.Random(0))
        self.network.connect("a", "b", Path(1.0))
        self.came_s: list[float] = []

    def send(self, nbytes: int, sender: str = "a0", receiver: str = "b0") -> None:
        ends = (sender[0], sender), (receiver[0], receiver)
        self.network.send(*ends, nbytes, lambda: self.came_s.append(self.queue.now_s))

    def run(self) -> list[float]:
        self.queue.run(1_000.0)
        return self.came_s


def test_a_downlink_takes_one_message_after_the_other() -> None:
    links = Links()
    links.network.limit("b", 0.0, 100.0)
    links.send(200)
    links.send(300)
    assert links.run() == pytest.approx([3.0, 6.0])


def test_what_comes_in_is_taken_while_it_is_sent() -> None:
    links = Links()
    links.network.limit("a", 100.0)
    links.network.limit("b", 0.0, 200.0)
    links.send(200)
    # The uplink is the slower one: the downlink adds nothing.
    assert links.run() == pytest.approx([3.0])


def test_a_slow_downlink_holds_up_only_its_own_place() -> None:
    links = Links()
    links.network.connect("a", "c", Path(1.0))
    links.network.limit("b", 0.0, 1.0)
    links.send(100, receiver="b0")
    links.send(100, receiver="c0")
    assert links.run() == pytest.approx([1.0, 101.0])


def test_what_is_still_far_away_holds_up_nothing() -> None:
    links = Links()
    links.network.connect("c", "b", Path(10.0))
    links.network.limit("b", 0.0, 100.0)
    links.network.limit("b0", 0.0, 100.0)
    links.send(100, sender="c0")
    links.send(100)
    links.send(100, sender="b1")
    # From next door, from a second away, from ten seconds away.
    assert links.run() == pytest.approx([1.0, 2.0, 11.0])


def test_nodes_of_a_place_have_links_of_their_own() -> None:
    links = Links()
    links.network.limit("a0", 100.0)
    links.network.limit("a1", 0.0, 50.0)
    links.send(100, "a0", "a1")
    links.send(100, "a2", "a3")
    assert links.run() == pytest.approx([0.0, 3.0])


def _node(name: str, links: Links, config: NodeConfig) -> Node:
    clock = MachineClock(links.queue)
    node = Node(name, name[0], links.queue, links.network, clock, random.Random(0), config)
    node.start({("m", 0): Shard(0, (SPEC,), ord(name[0]), HybridClock(clock), model="m")})
    return node


def test_a_node_that_polls_asks_no_more_often_than_that() -> None:
    links = Links()
    node, source = (
        _node(name, links, NodeConfig(wait_s=0.0, patience_s=9.0, poll_s=5.0)) for name in ("a0", "b0")
    )
    node.follow([source])
    batches: list[float] = []
    node.on_taken = lambda name, batch, taken: batches.append(links.queue.now_s)
    links.queue.run(21.0)
    assert batches == pytest.approx([2.0, 7.0, 12.0, 17.0])


def test_messages_weigh_what_they_are_said_to() -> None:
    links = Links()

    def weigh(message: Pull | Batch) -> int:
        return 10 if isinstance(message, Pull) else 1_000

    config = NodeConfig(wait_s=0.0, patience_s=9.0, poll_s=5.0, weigh=weigh, unit=4.0)
    node, source = (_node(name, links, config) for name in ("a0", "b0"))
    shard = source.shards["m", 0]
    gradients = np.ones((1, 2), np.float32)
    shard.push(Push(Source("log", 0), 0, -1, None, (("rows", np.ones(1, np.uint64), gradients),)))
    node.follow([source])
    links.queue.run(4.0)
    assert links.network.counts.bytes_total == 1_010
    assert node.pullers["b0"].pace.bytes_total == 250
    assert node.shards["m", 0].counts.merged_rows_total == 1
