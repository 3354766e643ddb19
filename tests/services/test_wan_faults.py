"""What goes wrong on an emulated link: partitions, resets, a side that ends. Durations are only bounded from below."""

from __future__ import annotations

import errno
import socket
import threading
import time

import pytest
from support.wan import (
    NONE,
    PATIENCE_S,
    PAYLOAD,
    ROUGH,
    break_off,
    connect,
    exactly,
    free_port,
    listening,
    silent_for,
    to_the_end,
    until,
)

from services.wan.conditions import parse_conditions
from services.wan.emulator import Emulator, emulated
from services.wan.link import Link
from services.wan.types import LinkPlan


class TestPartition:
    @pytest.mark.parametrize("text", ROUGH)
    def test_nothing_passes_and_nothing_is_lost(self, text: str) -> None:
        conditions = parse_conditions(text)
        size = 200_000
        with (
            listening() as server,
            emulated(server.address, conditions) as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            sender = threading.Thread(target=client.sendall, args=(PAYLOAD[:size],))
            sender.start()
            for _ in range(3):
                link.partition()
                before = link.status()
                time.sleep(0.05)
                after = link.status()
                assert after == before
                assert after.partitioned
                assert after.connections == 1
                link.heal()
            assert exactly(client, size) == PAYLOAD[:size]
            sender.join()

    def test_what_is_sent_meanwhile_arrives_after_it_and_not_before_its_delay(self) -> None:
        with (
            listening() as server,
            emulated(server.address, parse_conditions("delay=30ms"), NONE) as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            link.partition()
            client.sendall(b"y")
            assert silent_for(client, 0.15)
            healed = time.monotonic()
            link.heal()
            assert client.recv(1) == b"y"
            assert time.monotonic() - healed >= 0.03

    def test_what_was_under_way_takes_the_rest_of_its_way(self) -> None:
        with (
            listening() as server,
            emulated(server.address, parse_conditions("delay=200ms"), NONE) as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            sent = time.monotonic()
            client.sendall(b"y")
            until(lambda: link.status().forward.queued_bytes == 1)
            link.partition()
            cut = time.monotonic()
            time.sleep(0.25)
            healed = time.monotonic()
            link.heal()
            assert client.recv(1) == b"y"
            assert time.monotonic() - sent >= 0.2 + (healed - cut)

    def test_new_connections_hang_until_it_ends(self) -> None:
        with listening() as server, emulated(server.address) as link:
            link.partition()
            with connect(link.address) as client:
                client.sendall(b"x")
                assert silent_for(client, 0.15)
                assert server.accepted == []
                link.heal()
                assert client.recv(1) == b"x"

    def test_one_that_was_being_made_hangs_too(self) -> None:
        with (
            listening() as server,
            emulated(server.address, parse_conditions("delay=50ms")) as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            until(lambda: link.status().connections == 1)
            link.partition()
            assert silent_for(client, 0.3)
            link.heal()
            assert client.recv(1) == b"x"

    def test_an_end_is_not_noticed_before_it_ends(self) -> None:
        with (
            listening(lambda connection: connection.sendall(to_the_end(connection))) as server,
            emulated(server.address) as link,
            connect(link.address) as client,
        ):
            client.sendall(b"x")
            until(lambda: link.status().forward.bytes_total == 1)
            link.partition()
            client.shutdown(socket.SHUT_WR)
            assert silent_for(client, 0.15)
            link.heal()
            assert to_the_end(client) == b"x"

    def test_twice_is_once(self) -> None:
        with listening() as server, emulated(server.address) as link:
            link.partition()
            link.partition()
            link.heal()
            link.heal()
            with connect(link.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"


class TestReset:
    def test_both_ends_see_it(self) -> None:
        seen: list[type[Exception]] = []

        def read(connection: socket.socket) -> None:
            try:
                connection.sendall(connection.recv(1))
                connection.recv(1)
            except OSError as error:
                seen.append(type(error))

        with listening(read) as server, emulated(server.address, parse_conditions("delay=2ms")) as link:
            clients = [connect(link.address) for _ in range(3)]
            for client in clients:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
            assert link.reset() == 3
            for client in clients:
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
                client.close()
            until(lambda: seen == [ConnectionResetError] * 3)
            status = link.status()
            assert (status.connections, status.resets_total) == (0, 3)
            with connect(link.address) as again:
                again.sendall(b"x")
                assert again.recv(1) == b"x"

    def test_also_of_those_being_made_and_those_cut(self) -> None:
        with listening() as server, emulated(server.address, parse_conditions("delay=10s")) as link:
            client = connect(link.address)
            until(lambda: link.status().connections == 1)
            link.partition()
            assert link.reset() == 1
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            client.close()
            until(lambda: link.status().connections == 0)

    @pytest.mark.parametrize("text", ["", "delay=5ms,rate=10mbit"])
    def test_one_end_resets_and_the_other_sees_it(self, text: str) -> None:
        seen: list[type[Exception]] = []

        def read(connection: socket.socket) -> None:
            if connection.recv(1) == b"b":
                break_off(connection)
                return
            connection.sendall(b"y")
            try:
                connection.recv(1)
            except OSError as error:
                seen.append(type(error))

        with listening(read) as server, emulated(server.address, parse_conditions(text)) as link:
            client = connect(link.address)
            client.sendall(b"a")
            assert client.recv(1) == b"y"
            break_off(client)
            until(lambda: seen == [ConnectionResetError])
            client = connect(link.address)
            client.sendall(b"b")
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            client.close()
            until(lambda: link.status().connections == 0)

    def test_a_reader_that_goes_away_breaks_its_writer(self) -> None:
        broken = threading.Event()

        def write(connection: socket.socket) -> None:
            try:
                while True:
                    connection.sendall(bytes(2**16))
            except ConnectionError:
                broken.set()

        with listening(write) as server, emulated(server.address, parse_conditions("delay=5ms")) as link:
            client = connect(link.address)
            exactly(client, 2**17)
            client.close()
            assert broken.wait(PATIENCE_S)
            until(lambda: link.status().connections == 0)


class TestEnds:
    @pytest.mark.parametrize("text", ROUGH)
    def test_half_a_connection_may_end_first(self, text: str) -> None:
        size = 100_000
        with (
            listening(lambda connection: connection.sendall(to_the_end(connection)[::-1])) as server,
            emulated(server.address, parse_conditions(text)) as link,
            connect(link.address) as client,
        ):
            client.sendall(PAYLOAD[:size])
            client.shutdown(socket.SHUT_WR)
            assert to_the_end(client) == PAYLOAD[:size][::-1]
            until(lambda: link.status().connections == 0)

    def test_the_server_may_end_first(self) -> None:
        rest: list[bytes] = []

        def end_then_read(connection: socket.socket) -> None:
            connection.shutdown(socket.SHUT_WR)
            rest.append(to_the_end(connection))

        with listening(end_then_read) as server, emulated(server.address) as link:
            with connect(link.address) as client:
                assert to_the_end(client) == b""
                client.sendall(PAYLOAD[:50_000])
            until(lambda: rest == [PAYLOAD[:50_000]])

    def test_where_nobody_listens_the_client_is_reset_and_it_may_come_back(self) -> None:
        port = free_port()
        with emulated(f"127.0.0.1:{port}", parse_conditions("delay=5ms")) as link:
            with connect(link.address) as client, pytest.raises(ConnectionResetError):
                client.recv(1)
            until(lambda: link.status().failed_connects_total == 1)
            with listening(port=port), connect(link.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"

    def test_without_descriptors_it_accepts_as_soon_as_there_are_some(self) -> None:
        class Exhausted:
            """A listener whose first connection finds no descriptor."""

            def __init__(self, real: socket.socket) -> None:
                self._real, self.refused = real, 0

            def accept(self) -> tuple[socket.socket, object]:
                if not self.refused:
                    self.refused += 1
                    raise OSError(errno.EMFILE, "too many open files")
                return self._real.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(self._real, name)

        def exhaust(link: Link) -> Exhausted:
            link._listener = Exhausted(link._listener)
            return link._listener

        with listening() as server, Emulator([LinkPlan("a", server.address)]) as emulator:
            listener = emulator.do("a", exhaust)
            with connect(emulator.link("a").address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
            assert listener.refused == 1

    def test_the_end_of_the_emulator_breaks_what_is_open(self) -> None:
        with listening() as server:
            with emulated(server.address) as link:
                client = connect(link.address)
                client.sendall(b"x")
                assert client.recv(1) == b"x"
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            client.close()
            with pytest.raises(ConnectionRefusedError):
                connect(link.address)
        assert not [thread for thread in threading.enumerate() if thread.name == "links"]
