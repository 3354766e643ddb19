"""An emulated link between real sockets. Durations are only ever bounded from below: nothing arrives too early."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import pytest
from support.wan import (
    NONE,
    PATIENCE_S,
    PAYLOAD,
    ROUGH,
    break_off,
    connect,
    exactly,
    listening,
    silent_for,
    to_the_end,
    until,
)

from services.wan.conditions import parse_conditions
from services.wan.emulator import Emulator, emulated
from services.wan.link import MAX_CONNECTIONS
from services.wan.types import AddressUnusable, LinkPlan, LinkUnknown


def swallow(connection: socket.socket) -> None:
    while connection.recv(2**16):
        pass


@pytest.mark.parametrize("text", ROUGH)
def test_bytes_pass_unchanged_both_ways_at_once(text: str) -> None:
    payload = PAYLOAD if "queue" not in text else PAYLOAD[:300_000]
    with listening() as server, emulated(server.address, parse_conditions(text)) as link:
        with connect(link.address) as client:
            sender = threading.Thread(target=client.sendall, args=(payload,))
            sender.start()
            assert exactly(client, len(payload)) == payload
            sender.join()
        until(lambda: link.status().connections == 0)
        status = link.status()
        assert status.forward.bytes_total == status.back.bytes_total == len(payload)
        assert (status.forward.queued_bytes, status.back.unread_bytes) == (0, 0)
        assert (status.connections_total, status.failed_connects_total, status.resets_total) == (1, 0, 0)


class TestDelay:
    def test_each_way_is_never_shorter_than_its_delay(self) -> None:
        came: list[float] = []
        left: list[float] = []

        def answer(connection: socket.socket) -> None:
            while connection.recv(1):
                came.append(time.monotonic())
                left.append(time.monotonic())
                connection.sendall(b"y")

        conditions, back = parse_conditions("delay=40ms"), parse_conditions("delay=15ms,jitter=5ms")
        with (
            listening(answer) as server,
            emulated(server.address, conditions, back) as link,
            connect(link.address) as client,
        ):
            for number in range(10):
                asked = time.monotonic()
                client.sendall(b"x")
                assert client.recv(1) == b"y"
                assert came[number] - asked >= 0.04
                assert time.monotonic() - left[number] >= 0.015

    def test_a_new_connection_costs_a_round_trip_first(self) -> None:
        conditions, back = parse_conditions("delay=40ms"), parse_conditions("delay=20ms")
        with listening() as server, emulated(server.address, conditions, back) as link:
            started = time.monotonic()
            with connect(link.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
            assert time.monotonic() - started >= 2 * (0.04 + 0.02)

    def test_a_server_may_speak_first(self) -> None:
        def greet(connection: socket.socket) -> None:
            connection.sendall(b"hello")

        with (
            listening(greet) as server,
            emulated(server.address, parse_conditions("delay=10ms")) as link,
            connect(link.address) as client,
        ):
            assert to_the_end(client) == b"hello"


class TestRate:
    def test_one_connection_takes_its_time(self) -> None:
        size = 500_000
        with (
            listening() as server,
            emulated(server.address, parse_conditions("rate=20mbit"), NONE) as link,
            connect(link.address) as client,
        ):
            started = time.monotonic()
            client.sendall(PAYLOAD[:size])
            client.shutdown(socket.SHUT_WR)
            assert to_the_end(client) == PAYLOAD[:size]
            assert time.monotonic() - started >= 8 * size / 20e6

    def test_all_connections_share_it(self) -> None:
        size, count = 100_000, 5
        with listening() as server, emulated(server.address, parse_conditions("rate=20mbit"), NONE) as link:
            started = time.monotonic()
            ends: list[bytes] = []

            def transfer() -> None:
                with connect(link.address) as client:
                    client.sendall(PAYLOAD[:size])
                    client.shutdown(socket.SHUT_WR)
                    ends.append(to_the_end(client))

            threads = [threading.Thread(target=transfer) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert ends == [PAYLOAD[:size]] * count
            assert time.monotonic() - started >= 8 * size * count / 20e6

    def test_the_directions_do_not_share_it(self) -> None:
        with (
            listening() as server,
            emulated(server.address, parse_conditions("rate=10mbit")) as link,
            connect(link.address) as client,
        ):
            client.sendall(PAYLOAD[:100_000])
            assert exactly(client, 100_000) == PAYLOAD[:100_000]
            status = link.status()
            assert status.forward.bytes_total == status.back.bytes_total == 100_000

    def test_senders_that_keep_it_full_get_fair_shares(self) -> None:
        count = 4
        passed = [0] * count

        def tally(connection: socket.socket) -> None:
            number = connection.recv(1)[0]
            while part := connection.recv(2**16):
                passed[number] += len(part)

        conditions = parse_conditions("rate=20mbit,queue=32KiB")
        with listening(tally) as server, emulated(server.address, conditions, NONE) as link:
            clients = [connect(link.address) for _ in range(count)]

            def send(number: int) -> None:
                # The link ends before all of it has passed.
                with clients[number] as client, suppress(ConnectionError):
                    client.sendall(bytes([number]) + bytes(2**26))

            threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
            for thread in threads:
                thread.start()
            until(lambda: min(passed) > 0)
            first = list(passed)
            until(lambda: sum(passed) - sum(first) > 1_000_000)
            gained = [now - before for now, before in zip(passed, first, strict=True)]
            link.reset()
            for thread in threads:
                thread.join()
        assert min(gained) > 0.7 * sum(gained) / count, gained


class TestBounds:
    def test_a_sender_has_to_wait_before_a_full_link(self) -> None:
        conditions = parse_conditions("rate=8kbit,queue=64KiB")
        with listening(swallow) as server, emulated(server.address, conditions, NONE) as link:
            client = connect(link.address)
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.sendall(bytes(2**26))
            until(lambda: link.status().forward.waiting == 1)
            status = link.status().forward
            assert status.queued_bytes <= status.bound_bytes == 64 * 1_024
            assert status.queued_bytes > status.bound_bytes // 2
            break_off(client)

    def test_a_receiver_that_does_not_read_holds_up_nobody_else(self) -> None:
        go_on = threading.Event()

        def some_read(connection: socket.socket) -> None:
            if exactly(connection, 1) == b"s":
                go_on.wait(PATIENCE_S)
            while part := connection.recv(2**16):
                connection.sendall(part[-1:])

        conditions = parse_conditions("delay=1ms,queue=128KiB")
        with listening(some_read) as server, emulated(server.address, conditions, NONE) as link:
            slow, quick = connect(link.address), connect(link.address)
            slow.settimeout(0.5)
            with pytest.raises(TimeoutError):
                slow.sendall(b"s" + bytes(2**26))
            until(lambda: link.status().forward.unread_bytes > 0)
            status = link.status().forward
            assert status.unread_bytes + status.queued_bytes <= status.bound_bytes
            quick.sendall(b"q")
            for _ in range(20):
                quick.sendall(b"x")
                assert exactly(quick, 1) == b"x"
            go_on.set()
            # It goes on as soon as it is read again.
            slow.settimeout(PATIENCE_S)
            slow.sendall(b"end")
            slow.shutdown(socket.SHUT_WR)
            assert to_the_end(slow)[-1:] == b"d"
            slow.close()
            quick.close()

    def test_connections_beyond_the_most_wait_their_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.wan.link.MAX_CONNECTIONS", 3)
        assert MAX_CONNECTIONS > 3
        with listening() as server, emulated(server.address) as link:
            clients = [connect(link.address) for _ in range(5)]
            for client in clients:
                client.sendall(b"x")
            assert [exactly(client, 1) for client in clients[:3]] == [b"x"] * 3
            assert silent_for(clients[3], 0.1)
            assert link.status().connections == 3
            clients[0].close()
            assert exactly(clients[3], 1) == b"x"
            for client in clients[1:]:
                client.close()
            until(lambda: link.status().connections_total == 5)


class TestChange:
    def test_a_slow_link_that_becomes_fast_lets_go_of_what_it_holds(self) -> None:
        conditions = parse_conditions("rate=8kbit")
        with (
            listening() as server,
            emulated(server.address, conditions, NONE) as link,
            connect(link.address) as client,
        ):
            # Two minutes' worth.
            client.sendall(PAYLOAD[:120_000])
            until(lambda: link.status().forward.queued_bytes > 100_000)
            link.set(parse_conditions("rate=100mbit"))
            assert exactly(client, 120_000) == PAYLOAD[:120_000]
            assert link.status().forward.conditions == "rate=100mbit"

    def test_one_direction_alone(self) -> None:
        with listening() as server, emulated(server.address) as link:
            link.set(back=parse_conditions("delay=50ms"))
            status = link.status()
            assert (status.forward.conditions, status.back.conditions) == ("", "delay=50ms")
            with connect(link.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
                started = time.monotonic()
                client.sendall(b"y")
                assert client.recv(1) == b"y"
                assert time.monotonic() - started >= 0.05

    def test_while_cut(self) -> None:
        with (
            listening() as server,
            emulated(server.address, parse_conditions("delay=10s")) as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            link.partition()
            link.set(NONE)
            link.heal()
            link.reset()
            with connect(link.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"


def test_two_hundred_connections_at_once() -> None:
    async def one(address: str, number: int) -> bytes:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = PAYLOAD[number : number + 20_000]
        writer.write(sent)
        received = await reader.readexactly(len(sent))
        writer.close()
        await writer.wait_closed()
        assert received == sent
        return received

    async def all_of_them(address: str) -> int:
        async with asyncio.timeout(60):
            return len(await asyncio.gather(*(one(address, number) for number in range(200))))

    with (
        listening() as server,
        emulated(server.address, parse_conditions("delay=10ms,jitter=5ms,rate=200mbit")) as link,
    ):
        assert asyncio.run(all_of_them(link.address)) == 200
        until(lambda: link.status().connections == 0)
        assert link.status().back.bytes_total == 200 * 20_000


class TestEmulator:
    def test_many_links_each_by_its_name(self) -> None:
        with listening() as server:
            plans = [
                LinkPlan("a", server.address),
                LinkPlan("b", server.address, back=parse_conditions("rate=1mbit")),
            ]
            with Emulator(plans) as emulator:
                assert [status.name for status in emulator.status()] == ["a", "b"]
                emulator.link("b").partition()
                assert [status.partitioned for status in emulator.status()] == [False, True]
                with connect(emulator.link("a").address) as client:
                    client.sendall(b"x")
                    assert client.recv(1) == b"x"
                with pytest.raises(LinkUnknown, match="there is no link 'c': a, b"):
                    emulator.link("c")

    def test_an_address_in_use(self) -> None:
        with (
            listening() as server,
            pytest.raises(AddressUnusable, match="cannot listen"),
            emulated(server.address, listen=server.address),
        ):
            raise AssertionError

    @pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
    def test_ipv6(self) -> None:
        with listening() as server, emulated(server.address, listen="[::1]:0") as link:
            assert link.address.startswith("[::1]:")
            with connect(link.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"

    def test_a_target_by_name(self) -> None:
        with (
            listening() as server,
            emulated(f"localhost:{server.port}") as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            assert client.recv(1) == b"x"

    def test_what_goes_wrong_in_the_loop_is_told(self) -> None:
        def wrong(_link: object) -> None:
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)

        def run(target: str) -> None:
            with Emulator([LinkPlan("a", target)]) as emulator:
                emulator.do("a", wrong)
                until(lambda: emulator.failure is not None)

        with pytest.raises(ZeroDivisionError):
            run("127.0.0.1:9")
