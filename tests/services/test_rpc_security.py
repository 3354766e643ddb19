"""Keys as values and files, who is let in, and how that changes while a server runs."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import zmq
from support.rpc import serving, until

from services.backends import open_security
from services.rpc import (
    AsyncRpcClient,
    KeyPair,
    KeysError,
    NoAnswer,
    Outgoing,
    Reply,
    RpcClient,
    RpcServer,
    Security,
)
from services.rpc.connections import ConnectionCounts
from services.rpc.gate import judge
from services.rpc.keys import (
    MAX_ALLOWED,
    AllowedFolder,
    allow,
    allowed_keys,
    create_keys,
    ensure_security,
    forbid,
    load_security,
)
from services.settings.load import load_settings
from services.settings.model import RpcSettings, Settings

SERVER, CLIENT, STRANGER = KeyPair.generate(), KeyPair.generate(), KeyPair.generate()
OURS = Security(SERVER.public, CLIENT, SERVER, frozenset({CLIENT.public}))
ASK = Outgoing("echo", b"secret")


@contextmanager
def client_with(security: Security | None) -> Iterator[RpcClient]:
    with closing(RpcClient(security)) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


class TestValues:
    def test_secrets_are_never_shown(self) -> None:
        for text in (repr(OURS), str(OURS), repr(SERVER), f"{OURS}"):
            assert SERVER.secret.hex() not in text
            assert repr(SERVER.secret) not in text
            assert "secret=**********" in text

    def test_halves_of_two_pairs_are_refused(self) -> None:
        with pytest.raises(KeysError, match="belong together"):
            KeyPair(SERVER.public, CLIENT.secret)
        with pytest.raises(KeysError, match="belong together"):
            KeyPair(SERVER.public, SERVER.secret[:31])
        with pytest.raises(KeysError, match="not the one"):
            Security(CLIENT.public, CLIENT, SERVER)

    def test_a_server_needs_its_own_pair(self) -> None:
        with pytest.raises(KeysError, match=r"server\.secret"):
            RpcServer("127.0.0.1:0", Security(SERVER.public, CLIENT))


class TestJudge:
    """ZeroMQ asks this of every handshake."""

    def ask(self, *credentials: bytes, mechanism: bytes = b"CURVE", version: bytes = b"1.0") -> list[bytes]:
        asked = [version, b"7", b"headwater", b"10.0.0.1", b"", mechanism, *credentials]
        return judge(asked, frozenset({CLIENT.public})).frames

    def test_only_a_known_key_gets_in(self) -> None:
        assert self.ask(CLIENT.public)[:3] == [b"1.0", b"7", b"200"]
        assert self.ask(STRANGER.public)[:3] == [b"1.0", b"7", b"400"]

    @pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"", b"curve"])
    def test_other_mechanisms_do_not(self, mechanism: bytes) -> None:
        assert self.ask(CLIENT.public, mechanism=mechanism)[2] == b"400"

    def test_what_is_no_request_does_not(self) -> None:
        assert self.ask()[2] == b"400"
        assert self.ask(CLIENT.public, CLIENT.public)[2] == b"400"
        assert self.ask(CLIENT.public, version=b"2.0")[2] == b"500"
        assert judge([], frozenset()).frames[2] == b"500"


class TestConnections:
    def test_both_clients_reach_a_server_of_the_same_keys(self) -> None:
        async def ask(address: str) -> bytes:
            client = AsyncRpcClient(OURS)
            try:
                return (await client.call(address, ASK, 5.0)).body
            finally:
                client.close()

        with serving(security=OURS) as (server, address), client_with(OURS) as client:
            assert client.exchange({address: ASK}, 5.0)[address] == Reply(1, b"secret")
            assert asyncio.run(ask(address)) == b"secret"
            until(lambda: server.connections.established_total == 2)
            assert server.connections.refused_total == 0

    def test_an_unknown_key_is_refused_counted_and_told(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        strange = Security(SERVER.public, STRANGER)
        with serving(security=OURS) as (server, address):
            with client_with(strange) as client:
                assert client.exchange({address: ASK}, 0.3) == {}
            assert server.connections.refused_total == 1
            assert server.counts.received_total == 0
            with client_with(OURS) as client:
                assert address in client.exchange({address: ASK}, 5.0)
        told = {record.name: record.getMessage() for record in caplog.records}
        assert set(told) == {"services.rpc.gate", "services.rpc.connections"}
        assert STRANGER.public.hex() in told["services.rpc.gate"]
        assert all("headwater keys add" in text for text in told.values())

    def test_an_async_client_that_is_refused_gets_no_answer(self) -> None:
        async def ask(address: str) -> None:
            client = AsyncRpcClient(Security(SERVER.public, STRANGER))
            try:
                with pytest.raises(NoAnswer, match="headwater keys add"):
                    await client.call(address, ASK, 0.2)
            finally:
                client.close()

        with serving(security=OURS) as (server, address):
            asyncio.run(ask(address))
            until(lambda: server.connections.refused_total == 1)

    @pytest.mark.parametrize(
        ("at_server", "at_client"),
        [(OURS, None), (None, OURS), (OURS, Security(STRANGER.public, CLIENT))],
        ids=["only-the-server-has-keys", "only-the-client-has-keys", "another-server-expected"],
    )
    def test_ends_that_do_not_fit_never_talk(
        self, at_server: Security | None, at_client: Security | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        with serving(security=at_server) as (server, address), client_with(at_client) as client:
            assert client.exchange({address: ASK}, 0.3) == {}
            assert server.counts.received_total == 0
            assert server.connections.accepted_total >= 1
            assert server.connections.established_total == 0
        # Whoever notices first tells.
        hints = ("rpc.keys has to be set on both", "server.public files")
        assert any(hint in record.getMessage() for record in caplog.records for hint in hints)

    def test_what_travels_cannot_be_read(self) -> None:
        """A wire tap: the same call is found in the clear without keys, and not with them."""
        assert b"secret" in tapped(None)
        assert b"secret" not in tapped(OURS)

    def test_closing_while_clients_knock_is_clean(self) -> None:
        with client_with(Security(SERVER.public, STRANGER)) as client:
            for _ in range(5):
                server = RpcServer("127.0.0.1:0", OURS)
                client.exchange({f"127.0.0.1:{server.port}": ASK}, 0.0)
                server.wait(0.01)
                server.close()


def tapped(security: Security | None) -> bytes:
    """The bytes between a client and a server, both ways, seen by a proxy in the middle."""
    seen = bytearray()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = context.socket(zmq.STREAM)
    front.setsockopt(zmq.LINGER, 0)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    with serving(security=security) as (_, address), client_with(security) as client:
        import socket
        import threading

        host, _, there = address.rpartition(":")
        back = socket.create_connection((host, int(there)))
        back.settimeout(0.05)
        stop = threading.Event()

        def relay() -> None:
            peer = b""
            while not stop.is_set():
                while front.poll(5):
                    peer, data = front.recv_multipart()
                    seen.extend(data)
                    if data:
                        back.sendall(data)
                try:
                    data = back.recv(65_536)
                except TimeoutError:
                    continue
                seen.extend(data)
                if data and peer:
                    front.send_multipart([peer, data])

        thread = threading.Thread(target=relay)
        thread.start()
        try:
            answer = client.exchange({f"127.0.0.1:{port}": ASK}, 5.0)
            assert list(answer.values()) == [Reply(1, b"secret")]
        finally:
            stop.set()
            thread.join()
            back.close()
    front.close()
    context.term()
    return bytes(seen)


class TestFolder:
    def test_secrets_are_their_owners_alone(self, folder: Path) -> None:
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert {name: mode for name, mode in modes.items() if name.endswith(".secret")} == {
            "server.secret": 0o600,
            "client.secret": 0o600,
        }
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path.name for path in folder.parent.iterdir()] == ["keys"], "nothing temporary is left"

    def test_nothing_is_overwritten(self, folder: Path) -> None:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(KeysError, match="never overwritten"):
            create_keys(folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        assert [path.name for path in folder.parent.iterdir()] == ["keys"]

    def test_a_new_folder_serves_and_calls(self, folder: Path) -> None:
        security = load_security(folder)
        with serving(security=security) as (_, address), client_with(security) as client:
            assert address in client.exchange({address: ASK}, 5.0)

    def test_a_clients_folder_cannot_serve_and_is_let_in_once_added(self, folder: Path) -> None:
        elsewhere = folder.parent / "laptop"
        create_keys(elsewhere, (folder / "server.public").read_text().strip())
        theirs = load_security(elsewhere)
        assert theirs.server is None
        with serving(security=load_security(folder)) as (server, address):
            with client_with(theirs) as client:
                assert client.exchange({address: ASK}, 0.2) == {}
                until(lambda: server.connections.refused_total == 1)
                allow(folder, "laptop", theirs.client.public.hex())
                client.forget(address)
                assert address in client.exchange({address: ASK}, 5.0)
            forbid(folder, "laptop")
            with client_with(theirs) as client:
                assert client.exchange({address: ASK}, 0.2) == {}
            until(lambda: server.connections.refused_total == 2)

    def test_a_secret_open_to_others_is_refused(self, folder: Path) -> None:
        (folder / "server.secret").chmod(0o644)
        with pytest.raises(KeysError, match="chmod 600"):
            load_security(folder)

    @pytest.mark.parametrize(
        ("file", "content", "match"),
        [
            ("server.public", None, "headwater keys create"),
            ("client.secret", None, "cannot be read"),
            ("client.secret", b"\xff\xfe", "does not hold a key"),
            ("client.secret", b"abc", "hexadecimal"),
            ("server.public", b"0" * 10_000, "hexadecimal"),
            ("server.public", b"1" * 64, "belong together"),
            ("allowed/client.public", b"", "hexadecimal"),
            ("allowed", None, "cannot be read"),
        ],
    )
    def test_what_is_wrong_is_named(self, folder: Path, file: str, content: bytes | None, match: str) -> None:
        path = folder / file
        if content is not None:
            path.write_bytes(content)
        elif path.is_dir():
            (path / "client.public").unlink()
            path.rmdir()
        else:
            path.unlink()
        with pytest.raises(KeysError, match=match) as caught:
            load_security(folder)
        assert (folder / "client.public").read_text() not in str(caught.value)

    def test_a_wrong_key_is_not_repeated_in_the_message(self, folder: Path) -> None:
        with pytest.raises(KeysError) as caught:
            allow(folder, "oops", "A" * 64)
        assert "A" * 8 not in str(caught.value)

    @pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a" * 65, "a b", "a\0"])
    def test_names_are_names_of_files(self, folder: Path, name: str) -> None:
        with pytest.raises(KeysError, match="not a name"):
            allow(folder, name, STRANGER.public.hex())
        with pytest.raises(KeysError, match="not a name"):
            forbid(folder, name)

    def test_neither_a_name_nor_a_key_is_added_twice(self, folder: Path) -> None:
        allow(folder, "a", STRANGER.public.hex())
        with pytest.raises(KeysError, match="as a"):
            allow(folder, "b", STRANGER.public.hex())
        with pytest.raises(KeysError, match="exists"):
            allow(folder, "a", KeyPair.generate().public.hex())
        assert set(allowed_keys(folder)) == {"a", "client"}
        forbid(folder, "a")
        with pytest.raises(KeysError, match="does not exist"):
            forbid(folder, "a")

    def test_the_number_of_clients_is_bounded(self, folder: Path) -> None:
        for number in range(MAX_ALLOWED):
            (folder / "allowed" / f"{number}.public").write_text(f"{number:064x}\n")
        with pytest.raises(KeysError, match=str(MAX_ALLOWED)):
            load_security(folder)
        (folder / "allowed" / "0.public").unlink()
        load_security(folder)
        with pytest.raises(KeysError, match="remove one"):
            allow(folder, "one-more", STRANGER.public.hex())


class TestAllowedFolder:
    def test_it_is_not_read_again_while_it_stays(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = AllowedFolder(folder / "allowed", lambda: 1e12)
        assert CLIENT.public not in found
        monkeypatch.setattr("services.rpc.keys._read_allowed", lambda _: pytest.fail("it was read again"))
        assert CLIENT.public not in found

    def test_changes_under_one_time_stamp_are_seen(self, folder: Path) -> None:
        found = AllowedFolder(folder / "allowed")
        before = (folder / "allowed").stat()
        allow(folder, "a", CLIENT.public.hex())
        os.utime(folder / "allowed", ns=(before.st_atime_ns, before.st_mtime_ns))
        assert CLIENT.public in found

    def test_what_cannot_be_read_lets_nobody_in_and_recovers(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = AllowedFolder(folder / "allowed")
        allow(folder, "a", CLIENT.public.hex())
        assert CLIENT.public in found
        (folder / "allowed").rename(folder / "away")
        os.utime(folder)
        assert CLIENT.public not in found
        assert CLIENT.public not in found
        assert sum("no client is let in" in record.getMessage() for record in caplog.records) == 1
        (folder / "away").rename(folder / "allowed")
        assert CLIENT.public in found


def _ensure(folder: str) -> str:
    return ensure_security(Path(folder)).server_public.hex()


class TestSettings:
    def test_processes_that_start_together_agree_on_one_folder(self, tmp_path: Path) -> None:
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            found = pool.map(_ensure, [str(tmp_path / "keys")] * 9, chunksize=1)
        assert len(set(found)) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["keys"]

    def test_without_keys_there_is_no_security(self) -> None:
        assert open_security(Settings()) is None

    def test_a_folder_is_made_only_where_settings_say_so(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        with pytest.raises(KeysError, match="headwater keys create"):
            open_security(Settings(rpc=RpcSettings(keys=keys)))
        assert not keys.exists()
        made = open_security(Settings(rpc=RpcSettings(keys=keys, create_keys=True)))
        again = open_security(Settings(rpc=RpcSettings(keys=keys)))
        assert made is not None
        assert again is not None
        assert made.server_public == again.server_public

    def test_a_folder_that_cannot_be_made_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(KeysError):
            ensure_security(tmp_path / "file" / "keys")


@pytest.mark.parametrize("name", ["parameters.listen", "parameters.advertise"])
class TestOpenAddresses:
    @pytest.mark.parametrize(
        "address", ["0.0.0.0:7400", "[::]:7400", "parameter-server-0:7400", "10.0.0.7:1"]
    )
    def test_they_need_keys_or_an_explicit_word(self, name: str, address: str) -> None:
        from services.settings.problems import SettingsError

        with pytest.raises(SettingsError) as caught:
            load_settings(overrides=[f"{name}={address}"])
        (problem,) = caught.value.problems
        assert problem.name == name
        assert "headwater keys create" in problem.suggestion
        assert "rpc.insecure" in problem.allowed
        for word in ("rpc.keys=/keys", "rpc.insecure=true"):
            load_settings(overrides=[f"{name}={address}", word])

    @pytest.mark.parametrize("address", ["127.0.0.1:7400", "localhost:0", "[::1]:7400"])
    def test_loopback_needs_neither(self, name: str, address: str) -> None:
        load_settings(overrides=[f"{name}={address}"])


def test_counts_of_connections_are_numbers_alone() -> None:
    """Each is a metric, whatever is added to them."""
    assert {type(value) for value in asdict(ConnectionCounts()).values()} == {int}
