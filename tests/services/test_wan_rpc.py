"""Our own calls and HTTP through an emulated link, unchanged: encrypted ones too, through resets and partitions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
from support.rpc import serving
from support.wan import until

from services.rpc import AsyncRpcClient, KeyPair, NoAnswer, Outgoing, Reply, RpcClient, Security
from services.wan.conditions import parse_conditions
from services.wan.emulator import LinkHandle, emulated

SERVER, CLIENT = KeyPair.generate(), KeyPair.generate()
CURVE = Security(SERVER.public, CLIENT, SERVER, frozenset({CLIENT.public}))
ROWS = np.arange(4_096 * 32, dtype=np.float32).reshape(4_096, 32)
ASK = Outgoing("echo", b"rows", (ROWS,))


def answered(client: RpcClient, address: str, timeout_s: float = 1.0) -> bool:
    """Whether a call is answered with what was asked; a connection that does not answer is given up."""
    answer = client.exchange({address: ASK}, timeout_s).get(address)
    if answer is None:
        client.forget(address)
        return False
    assert isinstance(answer, Reply)
    assert answer.body == b"rows"
    assert (answer.arrays[0] == ROWS).all()
    return True


@pytest.fixture(params=[None, CURVE], ids=["clear", "curve"])
def security(request: pytest.FixtureRequest) -> Security | None:
    found: Security | None = request.param
    return found


@pytest.fixture
def link(security: Security | None) -> Iterator[LinkHandle]:
    """A link to a server that echoes."""
    conditions = parse_conditions("delay=10ms,jitter=2ms,rate=500mbit")
    with serving(security=security) as (_, address), emulated(address, conditions) as found:
        yield found


def test_calls_pass_and_take_a_round_trip(link: LinkHandle, security: Security | None) -> None:
    with closing(RpcClient(security)) as client:
        until(lambda: answered(client, link.address))
        for _ in range(5):
            started = time.monotonic()
            assert answered(client, link.address, 10.0)
            assert time.monotonic() - started >= 0.02
    assert link.status().forward.bytes_total > 6 * ROWS.nbytes


def test_after_a_reset_the_client_connects_anew(link: LinkHandle, security: Security | None) -> None:
    with closing(RpcClient(security)) as client:
        for _ in range(3):
            until(lambda: answered(client, link.address))
            assert link.reset() >= 1
        # A call that was sent into the broken connection is lost; a later one is not.
        until(lambda: answered(client, link.address))
    assert link.status().connections_total >= 4


def test_a_partition_costs_answers_only_while_it_lasts(link: LinkHandle, security: Security | None) -> None:
    with closing(RpcClient(security)) as client:
        until(lambda: answered(client, link.address))
        link.partition()
        assert client.exchange({link.address: ASK}, 0.3) == {}
        link.heal()
        # The same connection goes on: nothing was lost, the late answer is passed over.
        answer = client.exchange({link.address: ASK}, 10.0)[link.address]
        assert isinstance(answer, Reply)
        assert client.counts["late_total"] == 1
        assert link.status().connections_total == 1


def test_asyncio_calls_in_parallel(link: LinkHandle, security: Security | None) -> None:
    async def calls() -> int:
        client = AsyncRpcClient(security)
        try:
            small = Outgoing("echo", b"x")
            await client.call(link.address, small, 10.0)
            answers = await asyncio.gather(*(client.call(link.address, small, 10.0) for _ in range(50)))
            link.partition()
            with pytest.raises(NoAnswer):
                await client.call(link.address, small, 0.2)
            link.heal()
            await client.call(link.address, small, 10.0)
            return sum(answer.body == b"x" for answer in answers)
        finally:
            client.close()

    assert asyncio.run(calls()) == 50


def test_http_with_and_without_keeping_the_connection() -> None:
    class Pages(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.path.encode() * 1_000
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        conditions = parse_conditions("delay=5ms,rate=50mbit")
        with emulated(f"127.0.0.1:{server.server_port}", conditions) as link:
            with httpx.Client(base_url=f"http://{link.address}", timeout=20.0) as client:
                for _ in range(5):
                    started = time.monotonic()
                    assert client.get("/page").text == "/page" * 1_000
                    assert time.monotonic() - started >= 0.01
                assert link.status().connections_total == 1
                link.partition()
                with pytest.raises(httpx.ReadTimeout):
                    client.get("/page", timeout=0.2)
                link.heal()
                assert client.get("/after").text == "/after" * 1_000
            assert httpx.get(f"http://{link.address}/again", timeout=20.0).text == "/again" * 1_000
        server.shutdown()
        thread.join()
