"""The pieces of a server by themselves: parts, bounds, group commit, the registry, and sums that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.federation import job

from federated.rounds import (
    Accepted,
    Admitted,
    Desk,
    MemoryStore,
    PollRequest,
    Standing,
    StartRequest,
    StoreUnavailable,
    UploadRequest,
)
from federated.sums import SumMismatch
from federated.wire import digest_of
from services.api.problems import Problem
from services.federation.aggregation import Aggregator
from services.federation.attempts import Attempts
from services.federation.batches import decode_batch, encode_batch
from services.federation.clerk import Clerk
from services.federation.hosted import HostedJob
from services.federation.parts import OffsetMismatch, Parts
from services.federation.registry import JobConflict, Member, Registry
from services.federation.versions import load_state

NOW = 1_000.0


def hosted(store: MemoryStore, **sections: Any) -> HostedJob:
    return Registry(store).create(job(clients=2, iterations=2, **sections))[0]


def test_parts_go_on_where_they_were_and_a_repeat_changes_nothing() -> None:
    store = MemoryStore()
    keys = hosted(store).keys
    parts = Parts(store, keys, 1, "a/b", b"d" * 16)
    assert parts.add(0, b"abc", 10) == 3
    assert parts.add(0, b"abc", 10) == 3
    with pytest.raises(OffsetMismatch) as wrong:
        parts.add(5, b"x", 10)
    assert wrong.value.there == 3
    assert Parts(store, keys, 1, "a/b", b"d" * 16).add(3, b"defg", 10) == 7  # at another server
    with pytest.raises(ValueError, match="at most 10"):
        parts.add(7, b"hijk", 10)
    assert parts.body() == b"abcdefg"
    assert Parts(store, keys, 1, "a", b"d" * 16).there() == 0
    parts.drop()
    assert parts.there() == 0


def test_attempts_are_bounded_by_client_and_iteration() -> None:
    attempts = Attempts(2)
    assert [attempts.allow(1, "a", bytes([n])) for n in (1, 2, 1, 3)] == [True, True, True, False]
    assert attempts.allow(1, "b", b"3")
    assert attempts.allow(2, "a", b"3")
    for iteration in range(3, 200):
        attempts.allow(iteration, "a", b"1")
    assert len(attempts) == 64


class Slow(MemoryStore):
    """Counts transactions, each of which takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions = 0
        self.broken = False

    def transact(self, keys: Sequence[str], step: Any) -> Any:
        if self.broken:
            raise StoreUnavailable("no store")
        self.transactions += 1
        return super().transact(keys, step)


def test_requests_that_wait_share_a_transaction() -> None:
    store = Slow()
    made = hosted(store)

    async def ask_many() -> tuple[list[object], Clerk]:
        with ThreadPoolExecutor(2) as pool:
            clerk = Clerk(Desk(store, made.rounds), pool, lambda: NOW, 100)
            replies = await asyncio.gather(*(clerk.ask(PollRequest(str(n))) for n in range(100)))
            return list(replies), clerk

    before = store.transactions
    replies, clerk = asyncio.run(ask_many())
    assert all(isinstance(reply, Standing) for reply in replies)
    assert (clerk.counted.requests, clerk.counted.transactions) == (100, 1)
    assert store.transactions - before <= 2


def test_more_than_may_wait_are_told_so_and_a_lost_store_reaches_everybody() -> None:
    store = Slow()
    made = hosted(store)

    async def ask_many() -> list[BaseException | object]:
        with ThreadPoolExecutor(1) as pool:
            clerk = Clerk(Desk(store, made.rounds), pool, lambda: NOW, 3)
            store.broken = True
            return await asyncio.gather(
                *(clerk.ask(PollRequest(str(n))) for n in range(5)), return_exceptions=True
            )

    replies = asyncio.run(ask_many())
    assert [type(reply) for reply in replies] == [StoreUnavailable] * 3 + [Problem] * 2


class Dies(MemoryStore):
    """A store whose process dies at the n-th change."""

    def __init__(self, changes: int) -> None:
        super().__init__()
        self.left = changes

    def transact(self, keys: Sequence[str], step: Any) -> Any:
        self._live()
        return super().transact(keys, step)

    def put_blob(self, key: str, body: bytes) -> None:
        self._live()
        super().put_blob(key, body)

    def _live(self) -> None:
        if self.left == 0:
            raise SystemError("killed")
        self.left -= 1


@pytest.mark.parametrize("changes", range(6))
def test_a_job_that_was_half_created_is_created_whole(changes: int) -> None:
    store = Dies(changes)
    with pytest.raises(SystemError):
        Registry(store).create(job(compression={"download_bits": 8}))
    store.left = 1_000
    first, _ = Registry(store).create(job(compression={"download_bits": 8}))
    assert Registry(store).names() == ["job"]
    again = Registry(store).job("job")
    assert again.key == first.key
    np.testing.assert_array_equal(load_state(store, again, 0, 0).weights, again.first_state().weights)


def test_a_name_stands_for_one_definition() -> None:
    store = MemoryStore()
    hosted(store)
    with pytest.raises(JobConflict, match="another definition"):
        Registry(store).create(job(clients=3))
    Registry(store).drop("job")
    assert Registry(store).names() == []
    assert store.records().keys() == {".federation/jobs"}
    assert list(store.blobs("")) == []


def test_silent_members_are_struck_off() -> None:
    registry = Registry(MemoryStore())
    for name, seen in (("old", 0.0), ("new", 9.0)):
        registry.beat(Member(name, "server", "http://x", 1, 0.0, seen, 1.0))
    assert [member.name for member in registry.members(9.0)] == ["new"]
    registry.leave("new")
    assert registry.members(9.0) == []


def upload(store: MemoryStore, made: HostedJob, desk: Desk, *clients: str) -> None:
    payload = np.full(made.layout.size, 0.5, "<f4").tobytes()
    for client in clients:
        (reply,) = desk.handle([StartRequest(client)], NOW, [0.0])
        assert isinstance(reply, Admitted)
    for client in clients:
        digest = digest_of(payload)
        store.put_blob(made.keys.body(1, client, digest), payload)
        ticket = made.rounds.tickets.issue(client, 1)
        (reply,) = desk.handle([UploadRequest(client, 1, ticket, digest, 5, 3, 0.5)], NOW, [0.0])
        assert isinstance(reply, Accepted)


def test_a_missing_body_voids_the_iteration_and_is_not_a_smaller_sum() -> None:
    store = MemoryStore()
    made = hosted(store, rounds={"aggregation_attempts": 3})
    desk = Desk(store, made.rounds)
    upload(store, made, desk, "a", "b")
    store.delete(made.keys.iteration(1) + "body/")
    worker = Aggregator(store, made, desk, "server", lambda: NOW)
    assert [worker.step() for _ in range(4)] == [True, True, True, False]
    header = desk.header()
    assert (header.iteration, header.valid, header.invalid, worker.done.failures) == (2, 0, 1, 3)


def test_a_strategy_that_fails_voids_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    made = hosted(store, rounds={"aggregation_attempts": 2})
    desk = Desk(store, made.rounds)
    upload(store, made, desk, "a", "b")

    def apply(self: object, state: object, total: object) -> Mapping[str, object]:
        raise OverflowError("too large")

    monkeypatch.setattr(type(made.strategy), "apply", apply)
    worker = Aggregator(store, made, desk, "server", lambda: NOW)
    assert [worker.step() for _ in range(4)] == [True, True, True, False]
    assert desk.header().invalid == 1


def test_a_sum_of_an_edge_is_what_it_says_or_refused() -> None:
    made = hosted(MemoryStore())
    total = made.empty_sum()
    payload = np.full(made.layout.size, 0.5, "<f4").tobytes()
    total.add(made.contribution(payload, 1, 5, 3, 0.5))
    ticket = made.rounds.tickets.issue("a", 1)
    member = UploadRequest("a", 1, ticket, bytes(16), 5, 3, 0.5)
    body = encode_batch([member], total)
    batch = decode_batch(body, made)
    assert (batch.clients, batch.total.to_bytes()) == (("a",), total.to_bytes())
    lies = [
        encode_batch([member, UploadRequest("b", 1, ticket, bytes(16), 5, 3, 0.5)], total),
        encode_batch([UploadRequest("a", 1, ticket, bytes(16), 50, 3, 0.5)], total),
        encode_batch([member, member], total),
        body[:-1], body[:3], b"", b"\xff" * 100,
    ]  # fmt: skip
    for lie in lies:
        with pytest.raises(SumMismatch):
            decode_batch(lie, made)


def test_under_a_mechanism_no_claim_of_examples_voids_an_edges_sum() -> None:
    made = hosted(MemoryStore(), privacy={"mechanism": "central_gaussian"})
    total, members = made.empty_sum(), []
    payload = np.full(made.layout.size, 0.5, "<f4").tobytes()
    for client, claimed in (("a", 1), ("b", 5_000)):
        total.add(made.contribution(payload, 1, claimed, 1, 0.0))
        ticket = made.rounds.tickets.issue(client, 1)
        members.append(UploadRequest(client, 1, ticket, bytes(16), claimed, 1, 0.0))
    assert decode_batch(encode_batch(members, total), made).total.scalars["examples"] == 2
    with pytest.raises(SumMismatch):
        decode_batch(encode_batch(members[:1], total), made)
