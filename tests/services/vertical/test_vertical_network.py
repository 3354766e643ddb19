"""Two parties in threads over ZeroMQ: large messages, slow receivers, roles that both wait for room."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from federated.vertical.parties import (
    Checkpoint,
    Make,
    PartResult,
    PeerAborted,
    PeerFault,
    Role,
    Send,
    receive,
)
from services.rpc.security import KeyPair
from services.vertical.channel import UNIT_BYTES, ChannelLimits
from services.vertical.network import Network, Peer
from services.vertical.runner import Patience, PeerGone, Runner
from services.vertical.session import Session
from services.vertical.store import StateDamaged, StateFolder, StateNotKept
from tests.support.vertical import free_ports

NAMES = ("a", "b")


def both(
    folder: Path,
    makes: dict[str, Make],
    limits: ChannelLimits,
    patience: Patience | None = None,
    knowing: str = "",
) -> dict[str, PartResult | Exception]:
    """What becomes of two parties. b listens and a calls; or both listen, and ``knowing`` know the other's address."""
    keys = {name: KeyPair.generate() for name in NAMES}
    addresses = dict(zip(NAMES, (f"127.0.0.1:{port}" for port in free_ports(2)), strict=True))
    found: dict[str, PartResult | Exception] = {}

    def run(me: str, other: str) -> None:
        store = StateFolder(folder / me)
        session = Session([other], {}, me=me, limits=limits, labels=store.labels(), runs=store.runs())
        peers = {other: Peer(keys[other].public, addresses[other] if me in (knowing or "a") else None)}
        network = Network(session, me, keys[me], peers, addresses[me] if knowing or me == "b" else None)
        try:
            found[me] = Runner(network, makes[me], store, (other,), me=me, patience=patience).run()
        except Exception as error:
            found[me] = error
        finally:
            network.close()
            store.close()

    threads = [threading.Thread(target=run, args=pair) for pair in (NAMES, NAMES[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def sends_then_receives(other: str, count: int, size: int) -> Make:
    def role(state: bytes | None) -> Role[PartResult]:
        for place in range(count):
            yield Send(other, "x", bytes([place]) * size)
        got = 0
        for place in range(count):
            body = yield from receive(other, "x")
            assert body == bytes([place]) * size
            got += len(body)
        return PartResult({"bytes": got})

    return role


def asks(other: str, count: int, size: int, first: bool) -> Make:
    def role(state: bytes | None) -> Role[PartResult]:
        for place in range(count):
            if first:
                yield Send(other, "x", bytes([place]) * size)
            body = yield from receive(other, "x")
            if not first:
                yield Send(other, "x", body)
        return PartResult({"last": body[0]})

    return role


def test_messages_larger_than_every_bound_arrive_both_ways(tmp_path: Path) -> None:
    size = 2 * UNIT_BYTES + 1
    limits = ChannelLimits(out_bytes=UNIT_BYTES, in_bytes=UNIT_BYTES)
    found = both(tmp_path, {"a": asks("b", 3, size, True), "b": asks("a", 3, size, False)}, limits)
    for name in NAMES:
        result = found[name]
        assert isinstance(result, PartResult), result
        assert result.figures["last"] == 2


def test_both_may_send_before_they_receive_within_the_bounds(tmp_path: Path) -> None:
    limits = ChannelLimits(out_bytes=10 * 2**20, in_bytes=2**20)
    make: Callable[[str], Make] = lambda other: sends_then_receives(other, 5, 2**21)  # noqa: E731
    found = both(tmp_path, {"a": make("b"), "b": make("a")}, limits)
    assert all(isinstance(one, PartResult) and one.figures["bytes"] == 5 * 2**21 for one in found.values()), (
        found
    )


def test_roles_that_wait_for_room_at_each_other_are_named(tmp_path: Path) -> None:
    limits = ChannelLimits(out_bytes=1_000, in_bytes=1_000)
    make: Callable[[str], Make] = lambda other: sends_then_receives(other, 50, 900)  # noqa: E731
    found = both(tmp_path, {"a": make("b"), "b": make("a")}, limits, Patience(2.0, 0.5))
    assert any(isinstance(one, PeerGone) and "has taken nothing" in str(one) for one in found.values()), found


def test_a_role_that_hangs_is_named_while_its_process_lives(tmp_path: Path) -> None:
    given_up = threading.Event()

    def hangs(state: bytes | None) -> Role[PartResult]:
        yield Send("a", "x", b"1")
        given_up.wait(60)
        yield Send("a", "x", b"2")
        return PartResult()

    def waits(state: bytes | None) -> Role[PartResult]:
        try:
            for _ in range(2):
                yield from receive("b", "x")
        finally:
            given_up.set()
        return PartResult()

    patience = Patience(stuck_after_s=1.0)
    found = both(tmp_path, {"a": waits, "b": hangs}, ChannelLimits(), patience)
    assert isinstance(found["a"], PeerGone)
    assert str(found["a"]).startswith("b: is there, but has done nothing for ")
    assert str(found["a"]).endswith("; 'x' is awaited of b")
    assert isinstance(found["b"], PeerAborted)
    assert found["b"].detail == "b is stuck"


def test_a_disk_without_room_ends_the_run_which_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(other: str) -> Make:
        def role(state: bytes | None) -> Role[PartResult]:
            first = 0 if state is None else state[0] + 1
            for label in range(first, 3):
                yield Send(other, "x", bytes([label]))
                assert (yield from receive(other, "x")) == bytes([label])
                yield Checkpoint(label, bytes([label]))
            return PartResult({"first": first})

        return role

    makes = {"a": counts("b"), "b": counts("a")}
    real = os.fsync

    def full(handle: int) -> None:
        # By the handle: the other party's thread writes at the same time.
        if str(Path(f"/proc/self/fd/{handle}").readlink()).startswith(f"{tmp_path}/a/.checkpoint-2-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        found = both(tmp_path, makes, ChannelLimits())
    assert isinstance(found["a"], StateNotKept)
    assert re.search("checkpoint-2-[0-9a-f]+ cannot be written: No space left on device", str(found["a"]))
    assert isinstance(found["b"], PeerAborted)
    assert found["b"].detail == "it failed with StateNotKept"
    again = both(tmp_path, makes, ChannelLimits())
    assert {name: one.figures["first"] for name, one in again.items() if isinstance(one, PartResult)} == {
        "a": 2,
        "b": 2,
    }


def test_a_checkpoint_that_its_role_cannot_read_is_named_with_the_way_out(tmp_path: Path) -> None:
    def role(state: bytes | None) -> Role[PartResult]:
        raise PeerFault("this checkpoint", "malformed", "5 fields, expected 3")
        yield

    for name in NAMES:
        store = StateFolder(tmp_path / name)
        store.keep(0, b"of an older version")
        store.close()
    found = both(tmp_path, {"a": role, "b": asks("a", 1, 1, False)}, ChannelLimits())
    assert isinstance(found["a"], StateDamaged)
    assert str(found["a"]).startswith("checkpoint 0 cannot be used: this checkpoint: malformed: 5 fields")
    assert str(found["a"]).endswith("--fresh begins the job anew")


@pytest.mark.parametrize("knowing", ["ab", "a", "b"])
def test_two_who_listen_meet_whoever_knows_the_others_address(tmp_path: Path, knowing: str) -> None:
    makes = {"a": asks("b", 3, 10, True), "b": asks("a", 3, 10, False)}
    found = both(tmp_path, makes, ChannelLimits(), knowing=knowing)
    assert all(isinstance(one, PartResult) for one in found.values()), found


def test_a_network_that_fails_ends_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Network, *arguments: object) -> None:
        raise MemoryError("no frame")

    monkeypatch.setattr(Network, "_exchange", fails)
    network = Network(
        Session(["b"], {}, me="a"),
        "a",
        KeyPair.generate(),
        {"b": Peer(KeyPair.generate().public, "127.0.0.1:1")},
        None,
    )
    store = StateFolder(tmp_path)
    runner = Runner(network, asks("b", 1, 1, True), store, ("b",), me="a")
    with pytest.raises(RuntimeError, match="thread of the network failed") as caught:
        runner.run()
    network.close()
    store.close()
    assert isinstance(caught.value.__cause__, MemoryError)
