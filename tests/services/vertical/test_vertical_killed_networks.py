"""A split network and a transfer between processes, of which the guest or a host is killed on the way.

Initial weights are drawn in secret, so no other run begins where this one did. What an undisturbed run would have come
to is therefore worked out from the checkpoints that lay on both disks when a party was killed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `stack` is not installed")
pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.parties import run_local
from federated.vertical.split.options import SplitOptions
from federated.vertical.tables import Table, write_csv
from federated.vertical.transfer.model import GuestModel, HostModel, load
from federated.vertical.transfer.options import TransferOptions
from models.metrics import auc
from services.vertical.config import load_party
from services.vertical.party import MODEL, prepare, read_part
from services.vertical.store import StateFolder
from tests.support.vertical import PartyProcess, party_files

ROLES = {"bank": "guest", "shop": "host"}


class Job:
    """The parties' files of one job, and the run in which one of them is killed."""

    def __init__(self, folder: Path, what: str, options: Mapping[str, Any], rows: int, test: float) -> None:
        self.files = party_files(folder, ROLES, listening=("bank",), options=options, wait="60s")
        rng = np.random.default_rng(0)
        latent = rng.standard_normal((rows, 3))
        self.labels = (latent.sum(axis=1) + rng.logistic(size=rows) / 2 > 0).astype(np.float64)
        self.ids = tuple(str(row) for row in range(rows))
        for name, file in self.files.items():
            columns = latent @ rng.standard_normal((3, 4)) + 0.3 * rng.standard_normal((rows, 4))
            marks = self.labels if name == "bank" else None
            write_csv(Table(self.ids, columns, ("a", "b", "c", "d"), marks), file.with_name("rows.csv"))
            text = file.read_text().replace('what = "sums"', f'what = "{what}"\ntest = {test}')
            file.write_text(text)
        self.before = folder / "before"

    def killed(self, victim: str, after: int) -> dict[str, dict[str, Any]]:
        """The reports of a run whose ``victim`` is killed when so much of the work is done."""
        running = {name: PartyProcess(file) for name, file in self.files.items()}
        try:
            while (told := running["bank"].until("done"))["done"] < after:
                pass
            assert told["done"] < told["total"] / 2
            running[victim].kill()
            for name, file in self.files.items():
                shutil.copytree(file.parent / "state", self.before / name)
            time.sleep(0.2)
            running[victim] = PartyProcess(self.files[victim])
            found = {name: one.until("report")["report"] for name, one in running.items()}
        finally:
            for one in running.values():
                one.kill() if one.process.poll() is None else one.close()
        survivor = next(name for name in ROLES if name != victim)
        assert found[survivor]["attempts"] == 2
        return found

    def parts(self) -> dict[str, bytes]:
        """The parties' parts of the model that the run left behind."""
        return {
            name: read_part(next((file.parent / "state").glob(f"*/{MODEL}"))).model
            for name, file in self.files.items()
        }

    def undisturbed(self) -> dict[str, bytes]:
        """The parts to which both parties come from the last checkpoint that both had then, without processes."""
        prepared = {name: prepare(load_party(file)) for name, file in self.files.items()}
        stores = {
            name: StateFolder(self.before / name / one.folder.name, f"{one.folder.name}/{name}")
            for name, one in prepared.items()
        }
        try:
            label = max(set(stores["bank"].labels()) & set(stores["shop"].labels()))
            roles = {name: prepared[name].make(store.state(label)) for name, store in stores.items()}
        finally:
            for store in stores.values():
                store.close()
        return {name: result.model for name, result in run_local(roles, label=label).results.items()}


def check_split(tmp_path: Path, victim: str, options: Mapping[str, Any], rows: int, after: int) -> None:
    """The network is to the last bit the one of an undisturbed run."""
    job = Job(tmp_path, "split", options, rows, 0.0)
    reports = job.killed(victim, after)
    assert {report["figures"]["epochs"] for report in reports.values()} == {SplitOptions(**options).epochs}
    assert job.parts() == job.undisturbed()


def check_transfer(tmp_path: Path, victim: str, options: Mapping[str, Any], rows: int, after: int) -> None:
    """Noise is drawn anew: weights are within what it may change."""
    # Little noise, so that what a restart could spoil stands out.
    options = {"noise": 1e-5, **options}
    job = Job(tmp_path, "transfer", options, rows, 0.0)
    reports = job.killed(victim, after)
    given = TransferOptions(**options)
    assert {report["figures"]["steps"] for report in reports.values()} == {given.steps}
    # Two runs' noise, six standard deviations wide; momentum repeats that of each step.
    stated = (
        6 * np.sqrt(2 * given.steps) * given.noise * given.rate / (1 + given.gamma) / (1 - given.momentum)
    )
    undisturbed = job.undisturbed()
    for name, body in job.parts().items():
        mine, other = load(body), load(undisturbed[name])
        assert isinstance(mine, GuestModel | HostModel)
        assert isinstance(other, GuestModel | HostModel)
        assert 0 < np.abs(mine.weights - other.weights).max() < stated
        assert np.abs(mine.weights).max() > 10 * stated


def test_a_split_network_goes_on_where_it_was(tmp_path: Path) -> None:
    check_split(tmp_path, "shop", {"epochs": 40, "batch": 20, "hidden": 8}, 120, 2)


def test_a_transfer_goes_on_where_it_was(tmp_path: Path) -> None:
    check_transfer(tmp_path, "bank", {"steps": 24, "every": 2, "hidden": 4}, 60, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestAtLength:
    @pytest.mark.parametrize("victim", ROLES)
    def test_split(self, tmp_path: Path, victim: str) -> None:
        check_split(tmp_path, victim, {"epochs": 60, "batch": 40}, 400, 5)

    @pytest.mark.parametrize("victim", ROLES)
    def test_transfer(self, tmp_path: Path, victim: str) -> None:
        check_transfer(tmp_path, victim, {"steps": 60, "every": 5}, 300, 12)

    @pytest.mark.parametrize("victim", ROLES)
    def test_split_with_noise_repeats_it(self, tmp_path: Path, victim: str) -> None:
        """The same noise comes again, so that no peer can average it away."""
        job = Job(tmp_path, "split", {"epochs": 60, "batch": 100, "noise": 0.5}, 600, 0.3)
        reports = job.killed(victim, 5)
        assert reports["bank"]["figures"]["test auc"] > 0.7
        assert job.parts() == job.undisturbed()

    def test_transfer_scores_customers_of_the_host_alone(self, tmp_path: Path) -> None:
        job = Job(tmp_path, "transfer", {"every": 5}, 300, 0.0)
        job.killed("shop", 12)
        parts = {name: load(body) for name, body in job.parts().items()}
        guest, host = parts["bank"], parts["shop"]
        assert isinstance(guest, GuestModel)
        assert isinstance(host, HostModel)
        table = prepare(load_party(job.files["shop"])).table
        assert table is not None
        scores = guest.combine(np.zeros((len(table), 4)), {"shop": host.partial(table.features)})
        assert auc(job.labels, scores) > 0.85
