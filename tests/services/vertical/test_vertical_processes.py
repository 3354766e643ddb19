"""Parties as processes over ZeroMQ: killed and restarted ones, strangers, other jobs, peers that tamper."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Failure, Reply
from services.rpc.security import KeyPair, Security
from services.vertical.channel import UNIT_BYTES
from services.vertical.config import PartyConfig, load_party
from services.vertical.keys import load_party_keys
from services.vertical.network import METHOD
from services.vertical.party import prepare, run_party
from services.vertical.session import Frame, Session
from services.vertical.store import StateDamaged
from tests.support.vertical import ROWS, PartyProcess, party_files

ROLES = {"bank": "guest", "post": "host", "shop": "host"}
TOTAL = ROWS * (2.0 + 3.0)
"""What the hosts' sums of one turn add up to."""


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


@contextmanager
def processes(files: Mapping[str, Path]) -> Iterator[dict[str, PartyProcess]]:
    running = {name: PartyProcess(file) for name, file in files.items()}
    try:
        yield running
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()


def test_parties_without_addresses_take_part(tmp_path: Path) -> None:
    """post is called by nobody: it collects what others have for it."""
    files = party_files(tmp_path, ROLES, listening=("bank", "shop"), options={"turns": 3})
    with processes(files) as running:
        reports = {name: one.until("report")["report"] for name, one in running.items()}
    assert {report["figures"]["total"] for report in reports.values()} == {3 * TOTAL}
    assert {report["attempts"] for report in reports.values()} == {1}
    got = {(one["from"], one["kind"]): one for one in reports["bank"]["received"]}
    assert got["shop", "sum"]["messages"] == 3
    assert got["shop", "sum"]["learns"] == "the sum of all of a host's features"


@pytest.mark.parametrize("victim", ROLES)
def test_a_run_goes_on_after_any_party_was_killed(tmp_path: Path, victim: str) -> None:
    files = party_files(tmp_path, ROLES, listening=("bank", "post"), options={"turns": 8, "pause_s": 0.15})
    with processes(files) as running:
        while running["bank"].until("done")["done"] < 3:
            pass
        running[victim].kill()
        time.sleep(0.3)
        running[victim] = PartyProcess(files[victim])
        reports = {name: one.until("report")["report"] for name, one in running.items()}
    assert {report["figures"]["total"] for report in reports.values()} == {8 * TOTAL}
    survivor = next(name for name in ROLES if name != victim)
    assert reports[survivor]["attempts"] == 2
    # From a checkpoint, not from the beginning: at the survivor some turns were done twice, not all.
    turns = next(one for one in reports[survivor]["sent"] if one["kind"] in ("sum", "total"))["messages"]
    assert turns < 8 + 3
    # The one that was killed tells of what it sent before, too.
    sent = next(one for one in reports[victim]["sent"] if one["kind"] in ("sum", "total"))
    assert 8 <= sent["messages"] < 8 + 3
    assert reports[victim]["attempts"] == 2


def test_a_dead_peer_is_named_and_given_up(tmp_path: Path) -> None:
    files = party_files(
        tmp_path, ROLES, listening=("bank", "post"), options={"turns": 500, "pause_s": 0.1}, wait="8s"
    )
    with processes(files) as running:
        running["bank"].until("done")
        running["shop"].kill()
        began_s = time.monotonic()
        told = running["post"].until("error")["error"]
        assert time.monotonic() - began_s < 40
        assert "shop" in told
        assert "shop has not been heard for 1 s; waiting 8 s for it" in running["bank"].errors.read_text()


def test_another_job_is_named_at_both_ends(tmp_path: Path) -> None:
    roles = {"bank": "guest", "shop": "host"}
    files = party_files(tmp_path, roles, listening=("bank",), options={"turns": 3})
    files["shop"].write_text(files["shop"].read_text().replace("turns = 3", "turns = 4"))
    with processes(files) as running:
        assert "job.options.turns is 3 here, 4 there" in running["bank"].until("error")["error"]
        assert "job.options.turns is 4 here, 3 there" in running["shop"].until("error")["error"]


def test_a_role_that_fails_ends_the_others_without_its_values(tmp_path: Path) -> None:
    roles = {"bank": "guest", "shop": "host"}
    files = party_files(tmp_path, roles, listening=("bank",), options={"turns": 3, "fails_at": 1})
    with processes(files) as running:
        assert "the guest's role fails" in running["bank"].until("error")["error"]
        assert (
            running["shop"].until("error")["error"] == "PeerAborted: bank: gave up: it failed with ValueError"
        )


def test_a_party_that_comes_back_after_the_end_has_its_result(tmp_path: Path) -> None:
    roles = {"bank": "guest", "shop": "host"}
    files = party_files(tmp_path, roles, listening=("bank",), options={"turns": 2})
    for _ in range(2):
        with processes(files) as running:
            reports = [one.until("report")["report"] for one in running.values()]
        assert [report["figures"]["total"] for report in reports] == [2 * ROWS * 2.0] * 2
    # Another table: positions of rows would mean other people.
    rows = files["shop"].with_name("rows.csv")
    rows.write_text(rows.read_text().replace(",2\n", ",3\n"))
    prepared = prepare(load_party(files["shop"]))
    with pytest.raises(StateDamaged, match="--fresh begins the job anew"):
        run_party(prepared)
    with processes({"bank": files["bank"]}) as running:
        assert run_party(prepared, fresh=True)["figures"]["total"] == 2 * ROWS * 3.0
        assert running["bank"].until("report")["report"]["figures"]["total"] == 2 * ROWS * 3.0


class Impostor:
    """Speaks the wire itself, with whatever keys."""

    def __init__(self, config: PartyConfig, keys: KeyPair, to: str, me: str = "shop") -> None:
        self.to = to
        peer = config.peers[to]
        assert peer.address is not None
        self.address = peer.address
        self.client = RpcClient(Security(bytes.fromhex(peer.key), keys))
        self.session = Session([to], config.agreed(), me=me)

    def ask(self, frame: Frame, data: tuple[bytes, ...] = (), timeout_s: float = 5.0) -> Frame | None:
        arrays = tuple(np.frombuffer(one, np.uint8) for one in data)
        call = Outgoing(METHOD, msgspec.msgpack.encode(frame), arrays)
        reply = self.client.exchange({self.address: call}, timeout_s).get(self.address)
        assert not isinstance(reply, Failure)
        if reply is None:
            return None
        assert isinstance(reply, Reply)
        answer = msgspec.msgpack.decode(reply.body, type=Frame)
        self.session.hear(self.to, answer, [array.tobytes() for array in reply.arrays], 0.0)
        return answer

    def begin(self) -> None:
        for _ in range(200):
            frame, _, _ = self.session.frame(self.to, units=False)
            if self.ask(frame) is not None and self.session.agreed() is not None:
                return
            time.sleep(0.02)
        raise AssertionError("no attempt began")


@contextmanager
def against(tmp_path: Path, **options: Any) -> Iterator[tuple[PartyProcess, Impostor]]:
    files = party_files(
        tmp_path, {"bank": "guest", "shop": "host"}, listening=("bank",), options={"turns": 3}
    )
    config = load_party(files["shop"])
    with processes({"bank": files["bank"]}) as running:
        impostor = Impostor(config, options.get("keys") or load_party_keys(config.party.keys), "bank")
        try:
            yield running["bank"], impostor
        finally:
            impostor.client.close()


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    with against(tmp_path, keys=KeyPair.generate()) as (bank, stranger):
        bank.until("listening")
        frame, _, _ = stranger.session.frame("bank", units=False)
        assert stranger.ask(frame, timeout_s=1.0) is None
        assert "has the unknown public key" in bank.errors.read_text()


@pytest.mark.parametrize(
    ("units", "rule"),
    [
        ([((1, "digest", False), b"a"), ((1, "digest", False), b"b")], "replay"),
        ([((2, "sum", True), b"a")], "gap"),
        ([((1, "rows", True), b"a")], "kind"),
        ([((1, "sum", True), b"\x01\x02")], "malformed"),
        ([((1, "sum", True), bytes(UNIT_BYTES + 1))], "malformed"),
        ([((1, "sum", True), b"a"), ((2, "sum", True), b"b")][:1], "malformed"),
    ],
)
def test_a_peer_that_tampers_is_named(tmp_path: Path, units: list[Any], rule: str) -> None:
    with against(tmp_path) as (bank, impostor):
        bank.until("listening")
        impostor.begin()
        frame, _, _ = impostor.session.frame("bank", units=False)
        told = tuple(unit for unit, _ in units)
        frame = msgspec.structs.replace(frame, units=told)
        for _ in range(50):
            answer = impostor.ask(frame, tuple(data for _, data in units))
            assert answer is not None
            if answer.status.phase == "failed":
                # It stays until the others heard so: now it knows.
                impostor.ask(impostor.session.frame("bank", units=False)[0])
                break
            time.sleep(0.05)
        error = bank.until("error")["error"]
        assert error.startswith(f"PeerFault: shop: {rule}")
