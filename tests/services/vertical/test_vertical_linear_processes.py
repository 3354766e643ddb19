"""A joint regression between processes, any of which is killed on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.twin import train_plain
from federated.vertical.tables import Table, write_csv
from tests.support.vertical import PartyProcess, party_files, reports_after_kill

pytestmark = pytest.mark.slow

ROLES = {"bank": "guest", "shop": "host", "keeper": "coordinator"}
ROWS, EPOCHS = 120, 15


def files_of(folder: Path) -> tuple[dict[str, Path], Table, Table]:
    """The parties' files for one job, and the tables in them."""
    options = {"surrogate": "taylor", "epochs": EPOCHS, "batch": 40, "tolerance": 0.0}
    files = party_files(folder, ROLES, listening=("bank", "keeper"), options=options)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2, ROWS, 3))
    labels = (features.sum(axis=(0, 2)) + rng.logistic(size=ROWS) > 0).astype(float)
    ids = tuple(str(row) for row in range(ROWS))
    guest, host = Table(ids, features[0], ("a", "b", "c"), labels), Table(ids, features[1], ("d", "e", "f"))
    write_csv(guest, folder / "bank" / "rows.csv")
    write_csv(host, folder / "shop" / "rows.csv")
    for file in files.values():
        file.write_text(file.read_text().replace('what = "sums"', 'what = "linear"'))
    keeper = files["keeper"]
    keeper.write_text(keeper.read_text().replace('[data]\npath = "rows.csv"\n', ""))
    return files, guest, host


@pytest.mark.parametrize("victim", ROLES)
def test_a_killed_party_comes_back_and_the_weights_are_those_in_the_clear(
    tmp_path: Path, victim: str
) -> None:
    files, guest, host = files_of(tmp_path)

    def begun(running: Mapping[str, PartyProcess]) -> None:
        # Three batches an epoch: the fifth has begun.
        while running["keeper"].until("done")["done"] < 13:
            pass

    reports = reports_after_kill(files, victim, begun)
    survivor = next(name for name in ROLES if name != victim)
    assert reports[survivor]["attempts"] == 2
    options = LinearOptions(surrogate="taylor", epochs=EPOCHS, batch=40, tolerance=0.0)
    plain = train_plain(guest, [host], options, 0)
    for report in reports.values():
        assert report["figures"]["epochs"] == EPOCHS
        assert report["figures"]["loss"] == pytest.approx(plain.losses[-1], abs=2e-3)
    # From a checkpoint, not from the beginning: fewer batches than two whole runs would have.
    masked = [
        one for one in reports["keeper"]["received"] if one["kind"] == "masked" and one["from"] != victim
    ]
    assert all(one["messages"] < 3 * (EPOCHS + 3) for one in masked)


@pytest.mark.parametrize("victim", ["shop", "keeper"])
def test_an_alignment_goes_on_after_any_party_was_killed(tmp_path: Path, victim: str) -> None:
    """Of 120 chunks of one id each some 60 are done: the keeper, who takes no part in them, has their checkpoints."""
    files, _, _ = files_of(tmp_path)
    for file in files.values():
        aligned = (
            file.read_text().replace('align = "none"', 'align = "psi"').replace("epochs = 15", "epochs = 2")
        )
        file.write_text(f"{aligned}[job.psi]\nchunk = 1\n")

    def begun(running: Mapping[str, PartyProcess]) -> None:
        while (line := running["bank"].until("done"))["done"] < ROWS // 2:
            assert line["what"] == "chunks of ids"

    reports = reports_after_kill(files, victim, begun)
    assert reports["bank"]["attempts"] == 2
    sent = {one["kind"]: one["messages"] for one in reports["bank"]["sent"] if one["to"] == "shop"}
    assert sent["psi.hello"] == 1
    assert sent["psi.masked"] < ROWS + ROWS // 2
    assert {report["figures"]["epochs"] for report in reports.values()} == {2}
