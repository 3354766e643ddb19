"""Joint inference against parties that break the protocol: a host, a guest, and hosts that are slow or killed."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from federated.psi.ids import IdRule
from federated.vertical.tables import Table
from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Failure, Reply
from services.rpc.security import KeyPair, Security
from services.rpc.server import Call, RpcServer
from services.vertical.network import Peer
from services.vertical.party import Prepared
from services.vertical.serving import app
from services.vertical.serving.audit import entries
from services.vertical.serving.guest import OUTCOMES, Answer, ServingGuest
from services.vertical.serving.host import HELLO, METHOD, Ask, Hello, Share
from services.vertical.serving.opening import AUDIT
from services.vertical.serving.parts import Loaded, Parts
from services.vertical.serving.reach import Reach
from services.vertical.serving.tokens import Naming
from tests.support.vertical import ROOT
from tests.support.vertical_serving import ask, audit, serving, trained, until
from tests.support.vertical_sums import SumsPart

packed = msgspec.msgpack.encode
Array = npt.NDArray[Any]


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


Replies = Callable[[RpcServer, Call], None]


@contextmanager
def hostile_host(
    prepared: dict[str, Prepared], replies: Replies, *, hello: bytes | None = None
) -> Iterator[None]:
    """A host with the shop's keys and address that answers questions with ``replies``, and HELLO with ``hello``."""
    shop, bank = prepared["shop"], prepared["bank"]
    assert shop.config.party.listen is not None
    security = Security(shop.keys.public, shop.keys, shop.keys, frozenset({bank.keys.public}))
    server, stop = RpcServer(shop.config.party.listen, security), threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.wait(0.02)
            while (call := server.take()) is not None:
                if call.request.method == HELLO:
                    server.answer(call, packed(Hello(("r1",))) if hello is None else hello)
                else:
                    replies(server, call)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        server.close()


def answers(make: Callable[[Ask, int], tuple[bytes, tuple[Array, ...]]]) -> Replies:
    """Replies that ``make`` makes of the question and its number of rows."""

    def replies(server: RpcServer, call: Call) -> None:
        question = msgspec.msgpack.decode(call.request.body, type=Ask)
        server.answer(call, *make(question, len(call.request.arrays[0])))

    return replies


def good(question: Ask, rows: int) -> tuple[bytes, tuple[Array, ...]]:
    return packed(Share(question.run, question.nonce)), (np.ones(rows, np.bool_), np.full(rows, 2.0))


def shaped(*arrays: Array) -> Callable[[Ask, int], tuple[bytes, tuple[Array, ...]]]:
    return lambda question, rows: (packed(Share(question.run, question.nonce)), arrays)


HERE = np.ones(2, np.bool_)


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        (lambda question, rows: (b"\xff" * 20, ()), "malformed"),
        (lambda question, rows: (b"", (HERE, np.ones(2))), "malformed"),
        (lambda question, rows: (packed(Share("r2", question.nonce)), (HERE, np.ones(2))), "another-model"),
        (lambda question, rows: (packed(Share("r1", b"another")), (HERE, np.ones(2))), "malformed"),
        (lambda question, rows: (packed(Share("r1")), (HERE, np.ones(2))), "malformed"),
        (shaped(), "malformed"),
        (shaped(HERE), "malformed"),
        (shaped(HERE, np.ones(2), np.ones(2)), "malformed"),
        (shaped(np.ones(3, np.bool_), np.ones(3)), "malformed"),
        (shaped(np.ones(2), np.ones(2)), "malformed"),
        (shaped(np.array([True, False]), np.ones(2)), "malformed"),
        (shaped(HERE, np.ones(())), "malformed"),
        (shaped(HERE, np.array([1.0, np.inf])), "malformed"),
        (shaped(HERE, np.ones((2, 100_000))), "malformed"),
    ],
)
def test_a_hostile_hosts_share_is_not_used(tmp_path: Path, make: Any, outcome: str) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    with hostile_host(parties, answers(make)), serving(parties["bank"]) as url:
        found = ask(url, "5", "6")
    assert found["hosts"] == {"shop": outcome}
    assert [row["score"] for row in found["predictions"]] == [1.0, 1.0]
    assert all(row["degraded"] for row in found["predictions"])


def test_a_share_of_an_earlier_question_or_one_twice_is_not_taken(tmp_path: Path) -> None:
    parties, kept = trained(tmp_path, serve='deadline = "10s"\n'), []

    def replies(server: RpcServer, call: Call) -> None:
        question = msgspec.msgpack.decode(call.request.body, type=Ask)
        kept.append(question)
        body, arrays = good(kept[0], len(call.request.arrays[0]))
        server.answer(call, body, arrays)
        server.answer(call, body, arrays)

    with hostile_host(parties, replies), serving(parties["bank"]) as url:
        assert ask(url, "5")["hosts"] == {"shop": "answered"}
        assert ask(url, "5")["hosts"] == {"shop": "malformed"}
    assert len({question.nonce for question in kept}) == 2


def test_an_answer_that_comes_too_late_is_not_the_next_ones(tmp_path: Path) -> None:
    parties, waiting = trained(tmp_path, serve='deadline = "10s"\n'), []

    def replies(server: RpcServer, call: Call) -> None:
        question = msgspec.msgpack.decode(call.request.body, type=Ask)
        waiting.append((call, question))
        for late, asked in waiting if len(waiting) > 1 else ():
            value = 100.0 if late is not call else 2.0
            server.answer(late, packed(Share("r1", asked.nonce)), (np.ones(1, np.bool_), np.array([value])))

    with hostile_host(parties, replies), serving(parties["bank"]) as url:
        assert ask(url, "5", deadline_ms=100)["hosts"] == {"shop": "late"}
        assert ask(url, "5")["predictions"][0]["score"] == 3.0


def test_codes_that_a_host_makes_up_are_counted_as_one(tmp_path: Path) -> None:
    parties, number = trained(tmp_path, serve='deadline = "10s"\n'), iter(range(1_000))
    with (
        hostile_host(parties, lambda server, call: server.fail(call, f"x{next(number)}\n", "y" * 1_000)),
        serving(parties["bank"]) as url,
    ):
        outcomes = {ask(url, "5")["hosts"]["shop"] for _ in range(10)}
        metrics = httpx.get(f"{url}/metrics").text
    assert outcomes == {"refused"} < set(OUTCOMES)
    assert 'headwater_vertical_host_answers_total{host="shop",outcome="refused"} 10.0' in metrics


def test_a_host_that_answers_nonsense_about_itself_is_told_as_such(tmp_path: Path) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    with hostile_host(parties, answers(good), hello=b"\xc1"), serving(parties["bank"]) as url:
        until(lambda: httpx.get(f"{url}/health/ready").status_code == 200)
        ready = httpx.get(f"{url}/health/ready").json()
        assert ask(url, "5")["predictions"][0]["score"] == 3.0
    assert ready["dependencies"]["shop"] == {"ok": False, "detail": "refuses: malformed"}


def test_shares_whose_scores_are_not_finite_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def combine(self: SumsPart, rows: Array, partials: Any) -> Array:
        with np.errstate(over="ignore"):
            total: Array = partials["shop"] * 10
        return total

    monkeypatch.setattr(SumsPart, "combine", combine)
    parties = trained(tmp_path, serve='deadline = "10s"\n')
    huge = shaped(np.ones(1, np.bool_), np.array([1e308]))
    with hostile_host(parties, answers(huge)), serving(parties["bank"]) as url:
        found = ask(url, "5")
    assert (found["hosts"], found["predictions"][0]["score"]) == ({"shop": "unusable"}, 1.0)


def test_a_host_that_never_answers_keeps_nobody_waiting_and_fills_nothing(tmp_path: Path) -> None:
    parties = trained(tmp_path)
    with hostile_host(parties, lambda server, call: None), serving(parties["bank"]) as url:
        ask(url, "5", deadline_ms=20)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        with ThreadPoolExecutor(40) as pool:
            found = list(pool.map(lambda _: ask(url, "5", deadline_ms=200), range(120)))
        assert {one["hosts"]["shop"] for one in found} == {"late"}
        assert min(one["took_ms"] for one in found) >= 200
        assert max(one["took_ms"] for one in found) < 5_000  # nobody waits for more than its own deadline
        until(lambda: len(os.listdir("/proc/self/fd")) <= files + 5)
        assert threading.active_count() <= threads + 8  # the event loop's pool, which is bounded


def test_bodies_that_do_not_come_hold_up_so_many_and_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(app, "BODY_S", 1.0)
    parties = trained(tmp_path)

    def post(ids: str) -> httpx.Response:
        return httpx.post(f"{url}/v1/predictions", json={"ids": [ids], "deadline_ms": 1}, timeout=30)

    with hostile_host(parties, lambda server, call: None), serving(parties["bank"]) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b'POST /v1/predictions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"ids"')
            until(lambda: "under_way 1.0" in httpx.get(f"{url}/metrics").text)
            refused = post("5")
            told = slow.makefile("rb").read(200)
            assert post("5").status_code == 200
    assert (refused.status_code, refused.json()["code"], refused.headers["retry-after"]) == (
        429,
        "overloaded",
        "1",
    )
    assert told.startswith(b"HTTP/1.1 408 ")


def ask_host(client: RpcClient, address: str, method: str, body: bytes, *arrays: Array) -> Reply | Failure:
    """What a host answers a raw call."""
    (answer,) = client.exchange({address: Outgoing(method, body, arrays)}, 10.0).values()
    assert isinstance(answer, Reply | Failure), answer
    return answer


def test_a_hostile_guest_gets_nothing_and_the_host_answers_on(tmp_path: Path) -> None:
    parties = trained(tmp_path, host="most_ids = 4\nmost_rows_a_minute = 8\n")
    shop, bank = parties["shop"], parties["bank"]
    address = str(shop.config.party.listen)
    naming = Naming(bank.keys, shop.keys.public, IdRule())
    one = packed(Ask("r1", "id\n{}", b"n"))
    with serving(shop):
        client = RpcClient(Security(shop.keys.public, bank.keys))
        try:
            for method, body, arrays, code in (
                ("other", one, (naming.array([b"5"]),), "unknown"),
                (METHOD, b"\xc1", (naming.array([b"5"]),), "malformed"),
                (METHOD, b"\x93" * 100_000, (naming.array([b"5"]),), "malformed"),
                (METHOD, one, (), "malformed"),
                (METHOD, one, (np.zeros((0, 16), np.uint8),), "malformed"),
                (METHOD, one, (np.zeros((1, 15), np.uint8),), "malformed"),
                (METHOD, one, (np.zeros((1, 16), np.float64),), "malformed"),
                (METHOD, one, (np.zeros(16, np.uint8),), "malformed"),
                (METHOD, packed(Ask("r1", "", b"x" * 33)), (naming.array([b"5"]),), "malformed"),
                (METHOD, packed(Ask("r2", "")), (naming.array([b"5"]),), "another-model"),
                (METHOD, one, (np.zeros((10**6, 16), np.uint8),), "too-many"),
            ):
                answer = ask_host(client, address, method, body, *arrays)
                assert isinstance(answer, Failure)
                assert answer.code == code
            # Ids of nobody: the host says so, and counts them as it does the others.
            strangers = ask_host(client, address, METHOD, one, naming.array([b"77", b"78", b"0", b"5"]))
            assert isinstance(strangers, Reply)
            assert strangers.arrays[0].tolist() == [False, False, False, True]
            assert isinstance(ask_host(client, address, METHOD, one, naming.array([b"5", b"6"] * 2)), Reply)
            over = ask_host(client, address, METHOD, one, naming.array([b"5"]))
            assert isinstance(over, Failure)
            assert over.code == "too-many"
        finally:
            client.close()
        stranger = RpcClient(Security(shop.keys.public, KeyPair.generate()))
        try:
            found = stranger.exchange({address: Outgoing(METHOD, one, (naming.array([b"5"]),))}, 0.5)
            assert not found
        finally:
            stranger.close()
    lines = audit(shop)
    outcomes = [line["outcome"] for line in lines]
    assert outcomes == ["malformed"] * 8 + ["another-model", "too-many", "answered", "answered", "too-many"]
    assert [line.get("here") for line in lines if line["outcome"] == "answered"] == [1, 4]
    assert {line["who"] for line in lines} == {"bank"}


def test_a_host_is_away_only_when_it_was_asked_in_vain() -> None:
    now = [0.0]
    reach = Reach(2.5, lambda: now[0])
    assert (reach.away, reach.trouble("r1")) == (False, "not asked yet")
    reach.missed()
    now[0] = 0.1
    assert reach.away
    reach.told(("r1",))
    assert (reach.away, reach.trouble("r1")) == (False, "")
    assert "another model" in reach.trouble("r2")
    now[0] = 2.0
    reach.missed()
    assert not reach.away
    reach.heard()
    now[0] = 4.0
    assert not reach.away
    now[0] = 5.0
    assert (reach.away, reach.trouble("r1")) == (True, "not heard for 3 s")
    reach.refused("busy")
    assert reach.trouble("r1") == "refuses: busy"


def test_nobody_is_asked_in_vain_while_another_host_is_away() -> None:
    keys, table = KeyPair.generate(), Table(("5",), np.ones((1, 1)), ("x",))
    hosts = {name: Peer(KeyPair.generate().public, "127.0.0.1:1") for name in ("shop", "post")}

    async def answer() -> Answer:
        guest = ServingGuest(keys, hosts, Parts(Loaded("r1", SumsPart())), table, IdRule())
        try:
            guest.reach["shop"].missed()
            return await guest.answer([b"5"], 10.0, "request")
        finally:
            guest.close()

    found = asyncio.run(answer())
    assert (found.hosts, found.missing) == ({"shop": "away", "post": "not-asked"}, {})
    assert (found.degraded.tolist(), found.scores.tolist()) == ([True], [1.0])


class HostProcess:
    """The shop's process of joint inference."""

    def __init__(self, file: Path) -> None:
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        words = ("--config", str(file), "fl", "vertical", "serve")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.app", *words],
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        assert self.process.stderr is not None
        assert "answers at" in self.process.stderr.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


def test_a_host_killed_in_the_middle_is_back_without_its_guests_doing(tmp_path: Path) -> None:
    parties = trained(tmp_path, serve='deadline = "10s"\n', host='audit_bytes = "65536B"\n')
    file, replies, stop = tmp_path / "shop" / "party.toml", [], threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            replies.append(ask(url, "5", "6", "7", deadline_ms=500))

    with serving(parties["bank"]) as url:
        host = HostProcess(file)
        asking = [threading.Thread(target=ask_on) for _ in range(3)]
        try:
            until(lambda: not ask(url, "5")["degraded"])
            for thread in asking:
                thread.start()
            until(lambda: len(replies) > 320)
            host.kill()
            count = len(replies)
            until(lambda: any(one["hosts"]["shop"] == "away" for one in replies[count:]))
            host = HostProcess(file)
            until(lambda: not ask(url, "5")["degraded"])
        finally:
            stop.set()
            for thread in asking:
                thread.join()
            host.kill()
    # The host's log was turned over on the way. Whatever was answered jointly stands in both logs, whole.
    log = parties["shop"].config.party.state / AUDIT
    assert all(line["outcome"] == "answered" for line in entries(log))
    there = {line["request_id"] for line in entries(log)}
    joint = [one["request_id"] for one in replies if not one["degraded"]]
    assert set(joint[-50:]) <= there
    assert {one["request_id"] for one in replies} <= {line["request_id"] for line in audit(parties["bank"])}
