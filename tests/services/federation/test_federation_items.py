"""Jobs of items at the command line: which items they have, and what a device knows of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federated.job import FederatedJob, load_job
from federated.simulator.engines import make_engine
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.items import own_rows, with_items
from services.datasets.federations.liked import likes_of, read_liked
from services.datasets.folder import read_folder
from services.modelling import open_schema
from services.settings.model import DataSettings, Settings

LIKES = [("ann", "a"), ("ann", "b"), ("ann", "c"), ("bob", "b"), ("cid", "c"), ("cid", "a")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three people, in the order of their likes; bob likes one thing alone, and what ann skipped counts for nothing."""
    rows = [f"{user},{item},like,{1_700_000_000_000 + n}" for n, (user, item) in enumerate(LIKES)]
    rows.append("ann,d,skip,1700000000999")
    made = tmp_path / "people"
    made.mkdir()
    (made / "events.csv").write_text("\n".join(["user_id,item_id,action,timestamp_ms", *rows]))
    return made


def items_job(**tables: Any) -> FederatedJob:
    return load_job({"rounds": {"start_fl_job_threshold": 2}, "model": {"name": "items", "dim": 4}, **tables})


def test_likes_are_numbered_as_the_job_has_them_and_the_last_is_held_back(folder: Path) -> None:
    data, _ = read_folder(folder, open_schema(Settings()))
    users = {name: number for number, name in enumerate(data.users.ids)}
    likes = likes_of(data, ["c", "b", "unheard of", "a"])
    assert likes.training.of(users["ann"]).tolist() == [1, 3]
    assert likes.held_out[users["ann"]] == 0
    assert likes.training.of(users["bob"]).tolist() == [1]
    assert likes.held_out[users["bob"]] == -1
    assert likes.held_out[users["cid"]] == 3


def test_the_simulators_clients_have_a_row_to_train_on_and_are_judged_by_the_last_like(folder: Path) -> None:
    data, _ = read_folder(folder, open_schema(Settings()))
    federation = read_liked(data).federation(None, 0, None)
    assert federation.clients == 3
    assert federation.features == federation.classes == len(data.items)
    assert federation.ids is not None
    ann = federation.client(federation.ids.index("ann"))
    number_of = {name: number for number, name in enumerate(data.items.ids)}
    assert sorted(np.flatnonzero(ann.inputs[0])) == sorted([number_of["a"], number_of["b"]])
    np.testing.assert_array_equal(ann.held_inputs, ann.inputs)
    assert ann.held_labels.tolist() == [number_of["c"]]
    assert len(federation.client(federation.ids.index("bob")).held_labels) == 0
    model = items_job().make_model(federation.features, federation.classes)
    assert make_engine("auto", model).name == "numpy"


def test_without_a_stack_a_job_has_its_data_sets_items_and_a_device_its_users_likes(folder: Path) -> None:
    job, first = with_items(items_job(data={"name": str(folder)}), Settings(), None)
    assert first is None
    assert sorted(job.data.items) == ["a", "b", "c", "d"]
    inputs, _ = own_rows(job, "0", None, Settings())
    assert [job.data.items[item] for item in np.flatnonzero(inputs[0])] in (["a", "b"], ["b", "a"])
    with pytest.raises(CommandFailed, match="below 3"):
        own_rows(job, "3", None, Settings())


def test_a_job_that_is_begun_keeps_its_items_whatever_there_is_now(folder: Path) -> None:
    there = items_job(data={"name": str(folder), "items": ["x", "y"]}, into={"model": "main"})
    job, first = with_items(items_job(data={"name": str(folder)}, into={"model": "main"}), Settings(), there)
    assert (job, first) == (there, None)


def test_where_there_is_nothing_to_go_into_is_told(tmp_path: Path) -> None:
    settings = Settings(data=DataSettings(dir=tmp_path))
    with pytest.raises(CommandFailed, match="nothing runs") as told:
        with_items(items_job(into={"model": "main"}), settings, None)
    assert told.value.code == Exit.NOT_RUNNING
    with pytest.raises(CommandFailed, match="the stack serves 'main'"):
        with_items(items_job(into={"model": "other"}), settings, None)
