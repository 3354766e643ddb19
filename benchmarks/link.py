"""``link``: what an emulated link costs by itself, and how well it keeps its delay and its rate.

The link, its target and the client are a process each, as they are when a supervisor runs links. The peer is the same
client connected to the target directly, over the loopback.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
from rich.console import Console

from benchmarks.report import Row
from benchmarks.turns import Figures, faced, in_turn
from services.settings.checks import parse_address
from services.wan.conditions import parse_conditions
from services.wan.emulator import Emulator
from services.wan.types import LinkPlan

PEER: Final = "loopback without a link"
DELAY_S, RATE_BITS_S = 0.04, 100e6
LINKS: Final = {
    "plain": "",
    "delayed": "delay=40ms",
    "limited": "rate=100mbit",
    "far": "delay=40ms,rate=1gbit",
}
RATE_AIM: Final = 0.02
_MESSAGE: Final = 100
_COUNT: Final = struct.Struct("<Q")


def run(quick: bool, console: Console) -> list[Row]:
    """Measure; ``quick`` moves less."""
    rounds, trips, size = (3, 300, 50_000_000) if quick else (7, 2_000, 400_000_000)
    with _ends() as (direct, links):
        return list(_measure(direct, links, rounds, trips, size, console))


def _measure(
    direct: str, links: dict[str, str], rounds: int, trips: int, size: int, console: Console
) -> Iterator[Row]:
    plain = links["plain"]
    console.print("link: round trips")
    ours, peer = in_turn([_tripping(plain, trips), _tripping(direct, trips)], rounds)
    work = f"round trip of {_MESSAGE} bytes, no conditions, p50"
    yield faced(work, "ms", ours, peer, PEER, less_is_better=True)
    console.print("link: throughput")
    ours, peer = in_turn([_moving(plain, size), _moving(direct, size)], rounds)
    yield faced(f"one connection, {size / 1e6:g} MB, no conditions", "MB/s", ours, peer, PEER)
    (far,) = in_turn([_moving(links["far"], size // 2)], rounds, warm=False)
    yield _row("one connection through 40 ms and 1 Gbit/s, connecting included", "MB/s", far)
    console.print("link: what it promises")
    late = [_trips(links["delayed"], max(trips // 20, 20)) - 2e3 * DELAY_S for _ in range(rounds)]
    figures = Figures(tuple(float(np.median(one)) for one in late))
    worst = float(np.percentile(np.concatenate(late), 99))
    yield _row("round trip beyond 2 x 40 ms of delay, p50", "ms", figures, note=f"p99 {worst:.2f} ms")
    moved = int(RATE_BITS_S / 8)
    (kept,) = in_turn([_moving(links["limited"], moved)], rounds, warm=False)
    share = Figures(tuple(8e6 * value / RATE_BITS_S for value in kept.values))
    row = _row("share of 100 Mbit/s that passes in a second", "of the rate", share)
    met = all(abs(value - 1) <= RATE_AIM for value in share.values)
    yield Row(row.work, row.unit, row.ours, 1.0, met, row.spread, note=f"the aim is within {RATE_AIM:.0%}")


def _row(work: str, unit: str, figures: Figures, note: str = "") -> Row:
    return Row(work, unit, figures.median, spread=figures.spread, note=note)


def _tripping(address: str, count: int) -> Callable[[], float]:
    return lambda: float(np.median(_trips(address, count)))


def _trips(address: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Round trips [count], in ms, over one connection that is up already."""
    taken = np.zeros(count)
    with _connected(address, b"e") as connection:
        for number in range(-5, count):
            started_s = time.perf_counter()
            connection.sendall(bytes(_MESSAGE))
            _exactly(connection, _MESSAGE)
            if number >= 0:
                taken[number] = 1e3 * (time.perf_counter() - started_s)
    return taken


def _moving(address: str, size: int) -> Callable[[], float]:
    """MB/s of ``size`` bytes to the target, from connecting until it says that it has them all."""

    def move() -> float:
        started_s = time.perf_counter()
        with _connected(address, b"s") as connection:
            part = bytes(2**20)
            for sent in range(0, size, len(part)):
                connection.sendall(part[: size - sent])
            connection.shutdown(socket.SHUT_WR)
            (came,) = _COUNT.unpack(_exactly(connection, _COUNT.size))
        if came != size:
            raise RuntimeError(f"{came} of {size} bytes came")
        return size / (time.perf_counter() - started_s) / 1e6

    return move


@contextmanager
def _connected(address: str, what: bytes) -> Iterator[socket.socket]:
    where = parse_address(address)
    with socket.create_connection((where.host, where.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(what)
        yield connection


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = connection.recv(size)
        if not part:
            raise ConnectionError("the other end closed early")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


@contextmanager
def _ends() -> Iterator[tuple[str, dict[str, str]]]:
    """A target and links to it, in processes of their own: the target's address, and those of ``LINKS``."""
    context = multiprocessing.get_context("spawn")
    (near, far), (near_links, far_links) = context.Pipe(), context.Pipe()
    target = context.Process(target=_serve, args=(far,), daemon=True)
    target.start()
    direct = str(near.recv())
    emulator = context.Process(target=_emulate, args=(far_links, direct), daemon=True)
    emulator.start()
    try:
        links: dict[str, str] = near_links.recv()
        yield direct, links
    finally:
        for pipe, process in ((near_links, emulator), (near, target)):
            pipe.send("end")
            process.join()


def _emulate(pipe: Connection, target: str) -> None:
    conditions = {name: parse_conditions(text) for name, text in LINKS.items()}
    with Emulator(LinkPlan(name, target, each, each) for name, each in conditions.items()) as emulator:
        pipe.send({link.name: link.address for link in emulator.status()})
        pipe.recv()


def _serve(pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(f"127.0.0.1:{listener.getsockname()[1]}")
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        pipe.recv()


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        echoes, count, buffer = connection.recv(1) == b"e", 0, bytearray(2**20)
        while got := connection.recv_into(buffer):
            count += got
            if echoes:
                connection.sendall(memoryview(buffer)[:got])
        if not echoes:
            connection.sendall(_COUNT.pack(count))
