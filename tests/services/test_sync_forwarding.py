"""Pushes that another region writes: split, forwarded and answered, with a clock moved by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.parameters import SOURCE
from support.syncing import KEYS, World, asked, pair, request

from services.parameter_server.messages import (
    AppliedReply,
    AppliedRequest,
    Part,
    PublishReply,
    PublishRequest,
    PushRequest,
    PushResponse,
    unpack,
)
from services.parameter_server.syncing.service import SyncConfig
from services.rpc.codec import Failure, Reply, Request
from services.rpc.server import BUSY
from sync.placement import shard_of


def push_of(offset: int, shards: list[int], incarnation: int = 0) -> Request:
    """A push of one row of each shard, as a client of a server that leads ``shards`` sends it."""
    of = shard_of(KEYS, 2)
    keys = np.concatenate([KEYS[of == shard][:3] for shard in shards])
    message = PushRequest(
        "main", 1, SOURCE.log, SOURCE.partition, offset, 5, ("events", 0, offset, 5), shards,
        [offset - 1] * len(shards), [Part("items", shards, [3] * len(shards))], incarnation,
    )  # fmt: skip
    return request("push", message, (keys, np.ones((len(keys), 4), np.float32)))


def test_a_push_is_split_by_who_writes_and_answered_as_the_owners_answer() -> None:
    world = World()
    one, two_ = pair(world)
    for offset in range(3):
        answer = asked(world, one if offset % 2 else two_, push_of(offset, [0, 1]))
        assert isinstance(answer, Reply)
        outcomes = unpack(answer.body, PushResponse).outcomes
        assert [(found.shard, found.status, found.applied) for found in outcomes] == [
            (0, "applied", offset),
            (1, "applied", offset),
        ]
    assert one.rows() == two_.rows()
    again = asked(world, one, push_of(1, [0, 1]))
    assert isinstance(again, Reply)
    assert {found.status for found in unpack(again.body, PushResponse).outcomes} == {"duplicate"}
    applied = asked(
        world, one, request("applied", AppliedRequest("main", 1, SOURCE.log, SOURCE.partition, [0, 1]))
    )
    assert isinstance(applied, Reply)
    assert [found[:2] for found in unpack(applied.body, AppliedReply).shards] == [(0, 2), (1, 2)]
    assert one.syncing.forwarding.counts.forwarded_total == 3
    assert one.host.models["main"].held[1].shard.counts.applied_total == 0


def test_dense_weights_are_published_by_who_writes_them() -> None:
    world = World()
    one, two_ = pair(world)
    dense = one.host.shard_of("dense")
    owner, other = (one, two_) if one.host.writes(dense) else (two_, one)
    asked(world, owner, push_of(0, [0, 1]))
    answer = asked(world, other, request("publish", PublishRequest("main", 1, "dense")))
    assert isinstance(answer, Reply)
    number = unpack(answer.body, PublishReply).generation
    assert number >= 1
    assert other.host.models["main"].held[dense].shard.dense("dense").number == number


def test_whoever_pushes_through_a_region_hears_of_another_process_at_the_owner() -> None:
    world = World()
    one, two_ = pair(world)
    first = asked(world, one, push_of(0, [0, 1]))
    assert isinstance(first, Reply)
    known = unpack(first.body, PushResponse).incarnation
    same = asked(world, one, push_of(1, [0, 1], known))
    assert isinstance(same, Reply)
    assert unpack(same.body, PushResponse).incarnation == known
    two_.host.follow(1)
    two_.host.lead(1, 9)
    world.run(3.0)
    after = asked(world, one, push_of(2, [0, 1], known))
    assert isinstance(after, Reply)
    assert unpack(after.body, PushResponse).incarnation != known
    refused = asked(world, one, push_of(3, [0, 1], known))
    assert isinstance(refused, Failure)
    assert refused.code == "incarnation"


def test_where_a_push_cannot_be_forwarded_it_is_said_why() -> None:
    world = World()
    one, two_ = pair(world)
    two_.host.follow(1)
    world.run(2.0)
    gone = asked(world, one, push_of(0, [0, 1]))
    assert isinstance(gone, Failure)
    assert gone.code == BUSY
    assert "written in two" in gone.message
    assert one.host.models["main"].held[0].shard.applied(SOURCE) == -1
    alone = world.server("alone", 3, SyncConfig(region="alone"), written=frozenset({0}))
    refused = asked(world, alone, push_of(0, [1]))
    assert isinstance(refused, Failure)
    assert refused.code == "refused"
    assert "sync.upstreams is empty" in refused.message


def test_a_push_that_nobody_writes_does_not_go_round_for_ever() -> None:
    world = World()
    one = world.server("one", 1, SyncConfig(region="one", upstreams=("two",)), written=frozenset())
    world.server("two", 2, SyncConfig(region="two", upstreams=("one",)), written=frozenset())
    world.run(3.0)
    refused = asked(world, one, push_of(0, [0, 1]), 0.5)
    assert isinstance(refused, Failure)
    assert refused.code == "refused"
    assert "no region on the way writes" in refused.message


def test_an_owner_that_does_not_answer_is_waited_for_as_long_as_the_caller_waits() -> None:
    world = World()
    one, two_ = pair(world)
    two_.alive = False
    silent = asked(world, one, push_of(0, [1]), 3.0)
    assert isinstance(silent, Failure)
    assert silent.code == BUSY
    assert one.syncing.forwarding.counts.failed_total == 1


@pytest.mark.parametrize("arrays", [(), (KEYS[:3],), (KEYS[:2], np.ones((2, 4), np.float32))])
def test_a_push_that_makes_no_sense_is_not_forwarded(arrays: tuple[np.ndarray, ...]) -> None:
    world = World()
    one, two_ = pair(world)
    served = two_.served
    refused = asked(world, one, replace(push_of(0, [1]), arrays=arrays), 0.01)
    assert isinstance(refused, Failure)
    assert refused.code == "refused"
    assert two_.served <= served + 3
