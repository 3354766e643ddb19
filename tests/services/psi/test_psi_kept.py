"""What runs of an intersection leave to the next: signatures, and how much each peer asked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federated.psi.kind import PsiOptions, make
from federated.psi.limits import Ledger
from federated.psi.own import Own
from federated.vertical.kinds import Setup
from federated.vertical.parties import Outcome, PartResult, PeerFault, run_local
from federated.vertical.tables import Table
from services.psi.budget import FileBudget
from services.psi.disk import DiskFolder
from services.psi.kept import FileCache, KeptFolder
from services.vertical.store import StateDamaged, StateNotKept
from tests.support.vertical import ROOT

KEYS = {"bank": "aa" * 32, "post": "bb" * 32}


def places(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


class TestFileCache:
    def test_what_was_put_is_there_in_the_next_process(self, tmp_path: Path) -> None:
        FileCache(tmp_path / "new").put(places(1, 2), hashes(1, 2))
        FileCache(tmp_path / "new").put(places(3), hashes(3))
        assert FileCache(tmp_path / "new").get(places(1, 4, 3)) == [hashes(1)[0], None, hashes(3)[0]]
        assert (tmp_path / "new" / "signatures").stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize("cut", [1, 47, 49, 83])
    def test_a_batch_that_was_written_in_part_is_dropped(self, tmp_path: Path, cut: int) -> None:
        FileCache(tmp_path).put(places(1), hashes(1))
        FileCache(tmp_path).put(places(2), hashes(2))
        file = tmp_path / "signatures"
        os.truncate(file, file.stat().st_size - cut)
        again = FileCache(tmp_path)
        assert again.get(places(1, 2)) == [hashes(1)[0], None]
        again.put(places(2), hashes(2))
        assert FileCache(tmp_path).get(places(1, 2)) == hashes(1, 2)

    def test_a_changed_byte_is_no_signature(self, tmp_path: Path) -> None:
        FileCache(tmp_path).put(places(1), hashes(1))
        file = tmp_path / "signatures"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        assert FileCache(tmp_path).get(places(1)) == [None]

    def test_the_oldest_go_and_the_file_does_not_grow_without_end(self, tmp_path: Path) -> None:
        for number in range(10):
            FileCache(tmp_path, most=3).put(places(number), hashes(number))
        assert FileCache(tmp_path, most=3).get(places(6, 7, 8, 9)) == [None, *hashes(7, 8, 9)]
        assert (tmp_path / "signatures").stat().st_size < 5 * 84


class TestFileBudget:
    def test_counts_by_the_peers_key_over_all_runs(self, tmp_path: Path) -> None:
        FileBudget(tmp_path / "new", 10, KEYS).spend("bank", 7)
        renamed = FileBudget(tmp_path / "new", 10, {"bank-2": KEYS["bank"], "post": KEYS["post"]})
        assert renamed.left() == {"bank-2": 3, "post": 10}
        with pytest.raises(PeerFault, match="asks 4 more; 3 of 10 are left"):
            renamed.spend("bank-2", 4)
        assert renamed.left() == {"bank-2": 3, "post": 10}

    def test_a_process_that_is_killed_has_spent(self, tmp_path: Path) -> None:
        program = (
            "import os, signal, sys; from pathlib import Path; from services.psi.budget import FileBudget\n"
            f"FileBudget(Path(sys.argv[1]), 10, {KEYS!r}).spend('bank', 6)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
        assert done.returncode == -9
        assert FileBudget(tmp_path, 10, KEYS).left()["bank"] == 4

    def test_it_is_on_disk_before_it_is_spent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        FileBudget(tmp_path, 10, KEYS).spend("bank", 1)
        assert len(synced) == 2  # the file, and the folder's entry

    def test_without_room_nothing_is_answered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        budget = FileBudget(tmp_path, 10, KEYS)
        budget.spend("bank", 1)

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(StateNotKept, match="No space left"):
                budget.spend("bank", 2)
        assert budget.left()["bank"] == 9

    def test_two_who_spend_at_once_do_not_exceed_it(self, tmp_path: Path) -> None:
        refused: list[str] = []

        def spends() -> None:
            budget = FileBudget(tmp_path, 20, KEYS)
            for _ in range(15):
                try:
                    budget.spend("bank", 1)
                except PeerFault as fault:
                    refused.append(fault.rule)

        threads = [threading.Thread(target=spends) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused == ["limit"] * 10
        assert FileBudget(tmp_path, 20, KEYS).left()["bank"] == 0

    @pytest.mark.parametrize("name", ["asked", "signer-2048"])
    def test_a_damaged_count_is_not_a_whole_budget(self, tmp_path: Path, name: str) -> None:
        budget = FileBudget(tmp_path, 10, KEYS)
        budget.spend("bank", 9)
        KeptFolder(tmp_path).write(name, b"{}")
        body = (tmp_path / name).read_bytes()
        (tmp_path / "asked").write_bytes(body if name != "asked" else body[:-1] + b"!")
        with pytest.raises(StateDamaged, match="not known what peers asked"):
            budget.spend("bank", 1)


def test_what_is_kept_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KeptFolder(tmp_path / "keep").write("signer-2048", b"secret")
        FileCache(tmp_path / "keep").put(places(1), hashes(1))
        FileBudget(tmp_path / "keep", 10, KEYS).spend("bank", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "keep").stat().st_mode & 0o777 == 0o700
    rights = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "keep").iterdir()}
    assert {name: rights[name] for name in ("signer-2048", "signatures", "asked")} == dict.fromkeys(
        ("signer-2048", "signatures", "asked"), 0o600
    )
    assert set(rights) == {
        "signer-2048",
        "signatures",
        "asked",
        "asked.lock",
    }  # nothing half written beside them


def test_what_is_kept_spares_the_next_unbalanced_run(tmp_path: Path) -> None:
    """The owner's set is prepared once, and its filter travels once; another set is prepared anew, and travels."""
    parties = {"bank": "guest", "shop": "host"}
    owns = {name: Own(kept=KeptFolder(tmp_path / name)) for name in parties}

    def run(large: range) -> Outcome[PartResult]:
        ids = {"bank": range(5, 12), "shop": large}
        roles = {}
        for name, numbers in ids.items():
            table = Table(tuple(map(str, numbers)), np.zeros((len(numbers), 0)), (), None)
            roles[name] = make(PsiOptions("unbalanced"), Setup(name, parties, table, 0), owns[name])(None)
        outcome = run_local(roles)
        common = sorted(str(one) for one in {*ids["bank"]} & {*large})
        for name, numbers in ids.items():
            rows = outcome.results[name].rows
            assert rows is not None
            assert [str(numbers[row]) for row in rows.tolist()] == common
        return outcome

    def filters(outcome: Outcome[PartResult]) -> int:
        return len(outcome.transcript.of(kind="psi.filter.piece"))

    assert filters(run(range(50))) == 1
    prepared = (tmp_path / "shop" / "prepared-30").read_bytes()
    assert filters(run(range(50))) == 0
    assert (tmp_path / "shop" / "prepared-30").read_bytes() == prepared
    assert filters(run(range(8, 60))) == 1
    assert (tmp_path / "shop" / "prepared-30").read_bytes() != prepared


@pytest.mark.parametrize(
    ("learns", "asked"), [("both", ["bank", "shop"]), ("guest", ["shop"]), ("host", ["bank"])]
)
@pytest.mark.parametrize("protocol", ["ecdh", "ot", "unbalanced"])
def test_every_protocol_counts_what_a_peer_learns_from(protocol: Any, learns: Any, asked: list[str]) -> None:
    """``asked``: the parties whose budget is spent: those whose peer learns something."""
    parties = {"bank": "guest", "shop": "host"}
    ledgers = {name: Ledger(100) for name in parties}
    roles = {}
    for name, numbers in (("bank", range(7)), ("shop", range(3, 20))):
        table = Table(tuple(map(str, numbers)), np.zeros((len(numbers), 0)), (), None)
        own = Own(budget=ledgers[name])
        options = PsiOptions(protocol, learns=learns)
        roles[name] = make(options, Setup(name, parties, table, 0), own)(None)
    run_local(roles)
    spent = {"bank": {"shop": 17}, "shop": {"bank": 7}}
    for name, ledger in ledgers.items():
        assert ledger.as_mapping() == (spent[name] if name in asked else {})


def test_what_holds_its_set_in_memory_is_refused_a_disk(tmp_path: Path) -> None:
    table = Table(("1",), np.zeros((1, 0)), (), None)
    setup = Setup("bank", {"bank": "guest", "shop": "host"}, table, 0)
    own = Own(folder=lambda anew: DiskFolder(tmp_path))
    with pytest.raises(ValueError, match="ot holds its set in memory; ecdh and rsa may have it on disk"):
        make(PsiOptions("ot"), setup, own)
