"""How parties end, and what they find when they are started again: alone, interrupted, turned away."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.rpc.errors import KeysError
from services.vertical import network, runner
from services.vertical.config import load_party
from services.vertical.keys import make_party_keys
from services.vertical.party import MODEL, REPORT, prepare, read_part, run_party
from services.vertical.runner import PeerGone
from services.vertical.store import StateFolder
from tests.support.vertical import ROOT, ROWS, PartyProcess, party_files

ROLES = {"bank": "guest", "shop": "host"}


@pytest.fixture(autouse=True)
def _sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


def together(*files: Path) -> list[dict[str, Any] | Exception]:
    """The reports of parties that run in threads of this process."""
    found: list[dict[str, Any] | Exception] = [{} for _ in files]

    def run(place: int) -> None:
        try:
            found[place] = run_party(prepare(load_party(files[place])))
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(files))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def job(folder: Path, wait: str = "20s") -> tuple[Path, Path]:
    files = party_files(
        folder, ROLES, listening=("bank",), options={"turns": 2}, dead_after="500ms", wait=wait
    )
    return files["bank"], files["shop"]


def state_of(file: Path) -> Path:
    return next((file.parent / "state").iterdir())


def test_the_same_command_after_the_end_of_all_gives_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, shop = job(tmp_path)
    first = together(bank, shop)[0]
    assert isinstance(first, dict), first
    part = read_part(state_of(bank) / MODEL)
    # As if it had been killed between its result and its files.
    (state_of(bank) / MODEL).unlink()
    (state_of(bank) / REPORT).unlink()
    monkeypatch.setattr(runner, "RETURN_S", 0.5)
    began_s = time.monotonic()
    again = together(bank)[0]
    assert isinstance(again, dict), again
    assert time.monotonic() - began_s < 10
    assert again["figures"] == first["figures"]
    assert again["attempts"] == first["attempts"]
    assert read_part(state_of(bank) / MODEL) == part
    # Who comes back without anything finds the other one there, and all begin anew.
    for one in state_of(shop).iterdir():
        one.unlink()
    monkeypatch.setattr(runner, "RETURN_S", 10.0)
    anew = together(bank, shop)
    for one in anew:
        assert isinstance(one, dict), one
        assert one["figures"]["total"] == 2 * ROWS * 2.0
        assert one["figures"]["run"] != first["figures"]["run"]
    assert read_part(state_of(bank) / MODEL).run == read_part(state_of(shop) / MODEL).run != part.run


def test_nothing_of_a_run_stays_that_only_a_restart_would_need(tmp_path: Path) -> None:
    bank, shop = job(tmp_path)
    together(bank, shop)
    for file in (bank, shop):
        assert (state_of(file) / "settled").exists()
        assert not list(state_of(file).glob("*checkpoint-*"))


def test_a_folder_that_came_back_from_a_backup_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints have labels that the other one's have, too, and are of another run."""
    # As if both were killed before they noted that all have their results: checkpoints stay until then.
    monkeypatch.setattr(StateFolder, "settle", lambda store, run: None)
    bank, shop = job(tmp_path)
    together(bank, shop)
    shutil.move(bank.parent / "state", tmp_path / "backup")
    together(bank, shop)
    shutil.rmtree(bank.parent / "state")
    shutil.move(tmp_path / "backup", bank.parent / "state")
    held = {int(one.name.split("-")[1]) for one in state_of(bank).glob("checkpoint-*")}
    assert held & {int(one.name.split("-")[1]) for one in state_of(shop).glob("checkpoint-*")}
    found = together(bank, shop)
    sent = []
    for one in found:
        assert isinstance(one, dict), one
        assert one["figures"]["total"] == 2 * ROWS * 2.0
        sent.append(next(row for row in one["sent"] if row["kind"] in ("sum", "total"))["messages"])
    # All of it was done again, at the bank for the second time, at the shop for the third.
    assert sent == [4, 6]


def test_a_result_that_others_may_lack_is_written_and_they_are_waited_for(tmp_path: Path) -> None:
    bank, shop = job(tmp_path, wait="500ms")
    together(bank, shop)
    (state_of(bank) / "settled").unlink()
    (state_of(bank) / MODEL).unlink()
    error = together(bank)[0]
    assert isinstance(error, PeerGone)
    assert re.fullmatch(
        r"shop: did not come: not heard for 1 s; the result of this party is kept", str(error)
    )
    assert read_part(state_of(bank) / MODEL).run


def test_a_key_that_is_not_the_peers_is_named_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "ANSWER_S", 0.5)
    bank, shop = job(tmp_path, wait="2s")
    stranger = make_party_keys(tmp_path / "stranger").public.hex()
    public = load_party(bank).peers["shop"].key
    bank.write_text(bank.read_text().replace(public, stranger))
    told = together(bank, shop)
    assert f"this party turned somebody away: 127.0.0.1 has the unknown public key {public}" in str(told[0])
    assert "says: the server does not know this client's key" in str(told[1])
    own = load_party(shop).peers["bank"].key
    bank.write_text(bank.read_text().replace(stranger, own))
    with pytest.raises(
        KeysError, match=r"peers\.shop\.key is this party's own; ask shop for its party\.public"
    ):
        prepare(load_party(bank))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_party_that_is_told_to_end_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    bank, _ = job(tmp_path)
    # Tests that a shell started in the background ignore Ctrl-C, and so would the party.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        party = PartyProcess(bank)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        party.until("listening")
        party.process.send_signal(number)
        told = party.until("error")["error"]
        assert told == "Interrupted: start it again, and all go on from their last common checkpoint"
        assert party.process.wait(10) == 130
        assert "Traceback" not in party.errors.read_text()
    finally:
        party.kill()


_WORKS = """
import os, time
from services.vertical.workers import Processes
if __name__ == "__main__":
    processes = Processes(1)
    processes.map(os.getpgid, [0])
    print(*processes._pool._processes, flush=True)
    time.sleep(60)
"""


def test_workers_end_with_a_party_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "works.py"
    file.write_text(_WORKS)
    party = subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert party.stdout is not None
    worker = int(party.stdout.readline())
    party.kill()
    party.wait()
    party.stdout.close()
    until_s = time.monotonic() + 10
    while Path(f"/proc/{worker}/stat").exists():
        # It is nobody's child now, and may stay as a name alone.
        if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        assert time.monotonic() < until_s
        time.sleep(0.05)
