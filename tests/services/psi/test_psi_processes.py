"""Intersections between real processes: one of them is killed, and the run goes on from a checkpoint."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.psi.kept import FileCache, KeptFolder
from services.vertical.config import load_party
from tests.support.vertical import PartyProcess, party_files, reports_after_kill

ROLES = {"bank": "guest", "shop": "host"}
ROWS = 360


def files_of(folder: Path, **options: Any) -> dict[str, Path]:
    """Two parties that intersect; the shop's file has its rows backwards, and lacks a third of them."""
    files = party_files(folder, ROLES, listening=("bank",), options=options, rows=ROWS)
    for file in files.values():
        file.write_text(file.read_text().replace('what = "sums"', 'what = "psi"'))
    table = folder / "shop" / "rows.csv"
    header, *lines = table.read_text().splitlines()
    table.write_text(
        "\n".join([header, *(line for line in lines[::-1] if int(line.split(",")[0]) % 3)]) + "\n"
    )
    return files


def joint_ids(file: Path) -> list[str]:
    """What a party wrote down as the joint rows."""
    (rows,) = file.parent.glob("state/*/rows.csv")
    with rows.open(newline="") as lines:
        return [line["id"] for line in csv.DictReader(lines)]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["ecdh", "rsa"])
@pytest.mark.parametrize("victim", list(ROLES))
def test_goes_on_after_a_party_was_killed(tmp_path: Path, protocol: str, victim: str) -> None:
    files = files_of(tmp_path, protocol=protocol, chunk=15)

    def begun(running: Mapping[str, PartyProcess]) -> None:
        while running["bank"].until("done")["done"] < 8:
            pass

    reports = reports_after_kill(files, victim, begun)
    common = sorted(str(row) for row in range(ROWS) if row % 3)
    assert [joint_ids(file) for file in files.values()] == [common, common]
    assert {report["figures"]["common"] for report in reports.values()} == {len(common)}
    survivor = next(name for name in ROLES if name != victim)
    assert reports[survivor]["attempts"] == 2
    # From a checkpoint, not from the beginning: the terms travelled once, and few chunks were sent twice.
    kinds = {one["kind"]: one["messages"] for one in reports[survivor]["sent"]}
    assert kinds["psi.hello"] == 1
    assert kinds.get("psi.masked", 0) < 24 + 6


def with_own(files: Mapping[str, Path], **most: int) -> None:
    """Folders of its own for each party; at the shop the bank may ask ``most`` ids."""
    for name, file in files.items():
        lines = ["[psi]", 'keep = "kept"', 'disk = "large"']
        lines += [f"most_ids_of_a_peer = {most[name]}"] if name in most else []
        file.write_text(file.read_text() + "\n".join(lines) + "\n")


def asked(file: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads(KeptFolder(file.with_name("kept")).read("asked") or b"{}")
    return found


def test_own_folders_outlive_a_signer_that_was_killed(tmp_path: Path) -> None:
    """The signer is killed in the middle: its key, its signatures, what it was asked and its sets on disk remain."""
    files = files_of(tmp_path, protocol="rsa", chunk=15)
    with_own(files, shop=2 * ROWS)
    running = {name: PartyProcess(file) for name, file in files.items()}
    kept, large = (files["shop"].with_name(name) for name in ("kept", "large"))
    bank = load_party(files["shop"]).peers["bank"].key
    try:
        while running["bank"].until("done")["done"] < 8:
            pass
        running["shop"].kill()
        key, signed = (kept / "signer-2048").read_bytes(), (kept / "signatures").read_bytes()
        assert asked(files["shop"]) == {bank: ROWS}
        (left,) = large.iterdir()
        assert {one.name for one in left.iterdir()} == {"ids", "lock", "tags"}
        running["shop"] = PartyProcess(files["shop"])
        reports = {name: one.until("report")["report"] for name, one in running.items()}
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()
    common = sorted(str(row) for row in range(ROWS) if row % 3)
    assert [joint_ids(file) for file in files.values()] == [common, common]
    assert reports["bank"]["attempts"] == 2
    assert (kept / "signer-2048").read_bytes() == key
    whole = (kept / "signatures").read_bytes()
    assert whole.startswith(signed)
    assert len(FileCache(kept)) == len(common)
    # It went on from a checkpoint: of what the bank asked, a part was asked twice.
    assert ROWS < asked(files["shop"])[bank] <= 2 * ROWS - 4 * 15
    assert [list(file.with_name("large").iterdir()) for file in files.values()] == [[], []]


@pytest.mark.slow
def test_a_killed_run_gives_no_budget_back(tmp_path: Path) -> None:
    """The shop is killed as soon as it noted what the bank asks, before there is a checkpoint."""
    files = files_of(tmp_path, protocol="rsa", chunk=ROWS)
    with_own(files, shop=2 * ROWS - 1)
    running = {name: PartyProcess(file) for name, file in files.items()}
    try:
        while not asked(files["shop"]):
            assert running["shop"].process.poll() is None, running["shop"].errors.read_text()
            time.sleep(0.002)
        running["shop"].kill()
        running["shop"] = PartyProcess(files["shop"])
        error = running["shop"].until("error")["error"]
        told = running["bank"].until("error")["error"]
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()
    assert error == f"PeerFault: bank: limit: asks {ROWS} more; {ROWS - 1} of {2 * ROWS - 1} are left"
    assert told == "PeerAborted: shop: gave up: bank broke the rule 'limit'"
    assert list(asked(files["shop"]).values()) == [ROWS]


def test_two_processes(tmp_path: Path) -> None:
    files = files_of(tmp_path, protocol="ot")
    running = {name: PartyProcess(file) for name, file in files.items()}
    try:
        reports = {name: one.until("report")["report"] for name, one in running.items()}
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()
    assert (
        joint_ids(files["bank"])
        == joint_ids(files["shop"])
        == sorted(str(row) for row in range(ROWS) if row % 3)
    )
    learnt = {one["learns"] for report in reports.values() for one in report["received"]}
    assert "not described by its kind of job" not in learnt
