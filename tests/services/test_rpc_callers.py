"""What a server knows of a caller, and how another thread ends its wait."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing

import pytest

from services.rpc import KeyPair, Outgoing, RpcClient, RpcServer, Security

SERVER, ALICE, BOB = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()


@pytest.mark.parametrize("secure", [True, False])
def test_a_call_says_which_key_its_caller_proved(secure: bool) -> None:
    allowed = frozenset({ALICE.public, BOB.public})
    told: dict[bytes, str] = {}
    stop = threading.Event()
    with closing(
        RpcServer("127.0.0.1:0", Security(SERVER.public, SERVER, SERVER, allowed) if secure else None)
    ) as server:

        def serve() -> None:
            while not stop.is_set():
                server.wait(0.05)
                while (call := server.take()) is not None:
                    told[call.request.body] = call.key
                    server.answer(call, b"")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            for name, keys in ((b"alice", ALICE), (b"bob", BOB)):
                with closing(RpcClient(Security(SERVER.public, keys) if secure else None)) as client:
                    asked = Outgoing("who", name)
                    assert client.exchange({f"127.0.0.1:{server.port}": asked}, 5.0)
        finally:
            stop.set()
            thread.join()
    expected = (
        {b"alice": ALICE.public.hex(), b"bob": BOB.public.hex()} if secure else {b"alice": "", b"bob": ""}
    )
    assert told == expected


def test_a_descriptor_that_is_watched_ends_a_wait() -> None:
    woken, waker = os.pipe()
    try:
        with closing(RpcServer("127.0.0.1:0")) as server:
            server.watch(woken)
            timer = threading.Timer(0.05, os.write, (waker, b"\0"))
            timer.start()
            began_s = time.monotonic()
            server.wait(20.0)
            assert time.monotonic() - began_s < 10.0
            timer.join()
    finally:
        os.close(woken)
        os.close(waker)
