"""Two parties in threads whose network is cut, stands still, or hands on a few bytes at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from federated.vertical.parties import Checkpoint, Make, PartResult, Progress, Role, Send, receive
from services.rpc.security import KeyPair
from services.vertical import network
from services.vertical.network import Network, Peer
from services.vertical.runner import Patience, PeerGone, Runner
from services.vertical.session import Session
from services.vertical.store import StateFolder
from tests.support.vertical import free_ports
from tests.support.wire import Wire

TURNS = 8


def counts(other: str, turned: Callable[[int], None]) -> Make:
    """Each adds up what the other sends, for ``TURNS`` turns."""

    def role(state: bytes | None) -> Role[PartResult]:
        total = 0 if state is None else state[1]
        for turn in range(0 if state is None else state[0] + 1, TURNS):
            yield Send(other, "x", bytes([turn]) * 10_000)
            total += (yield from receive(other, "x"))[0]
            turned(turn)
            yield Progress(turn + 1, TURNS, "turns")
            yield Checkpoint(turn, bytes([turn, total]))
        return PartResult({"total": total})

    return role


def over(
    wire: Wire, port: int, folder: Path, patience: Patience, turned: Callable[[int], None]
) -> dict[str, PartResult | Exception]:
    """What becomes of b, which listens at ``port``, and a, which calls it over ``wire``."""
    keys = {name: KeyPair.generate() for name in "ab"}
    found: dict[str, PartResult | Exception] = {}

    def run(
        me: str, other: str, address: str | None, listen: str | None, watch: Callable[[int], None]
    ) -> None:
        store = StateFolder(folder / me)
        session = Session([other], {}, me=me, labels=store.labels(), runs=store.runs())
        carried = Network(session, me, keys[me], {other: Peer(keys[other].public, address)}, listen)
        try:
            found[me] = Runner(carried, counts(other, watch), store, (other,), me=me, patience=patience).run()
        except Exception as error:
            found[me] = error
        finally:
            carried.close()
            store.close()

    threads = [
        threading.Thread(target=run, args=("a", "b", f"127.0.0.1:{wire.port}", None, turned)),
        threading.Thread(target=run, args=("b", "a", None, f"127.0.0.1:{port}", lambda turn: None)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_network_that_is_cut_and_stands_still_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "ANSWER_S", 0.5)
    port = free_ports(1)[0]
    with Wire(port) as wire:

        def turned(turn: int) -> None:
            if turn in (2, 4):
                (wire.cut if turn == 2 else wire.hold)()
                time.sleep(0.3)
                threading.Timer(0.4, wire.mend).start()
            wire.piece = 37 if turn == 6 else 65_536

        found = over(wire, port, tmp_path, Patience(5.0, 20.0), turned)
    for one in found.values():
        assert isinstance(one, PartResult), one
        assert one.figures["total"] == sum(range(TURNS))


def test_a_network_that_is_cut_for_ever_is_named_at_both_ends_and_all_go_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "ANSWER_S", 0.5)
    port = free_ports(1)[0]
    with Wire(port) as wire:

        def turned(turn: int) -> None:
            if turn == 3:
                wire.hold()

        found = over(wire, port, tmp_path, Patience(0.3, 1.0), turned)
        for name, other in ("ab", "ba"):
            assert isinstance(found[name], PeerGone)
            assert f"{other}: is gone: not heard for " in str(found[name])
        assert f"127.0.0.1:{wire.port} does not answer" in str(found["a"])
        wire.cut()
        wire.mend()
        again: list[int] = []
        found = over(wire, port, tmp_path, Patience(5.0, 20.0), again.append)
    assert again[0] in (3, 4)
    for one in found.values():
        assert isinstance(one, PartResult), one
        assert one.figures["total"] == sum(range(TURNS))
