"""Real devices teach a real stack: parameter servers, federation servers as processes, devices as bare processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.federation import ask, model, ready, server_settings, servers, wait_for
from support.local_parameters import LocalParameters
from support.parameters import make_settings, threads
from support.service_process import ROOT, eventually

from featurestore.encoder import Encoder
from featurestore.online import Cell, EntityKey
from federated.job import FederatedJob, load_job
from federated.weights import Array
from models.parameters import RETRIEVAL
from models.training import RecommenderModel
from services.backends import open_coordination, open_store
from services.catalogue import Catalogue
from services.cli.items import with_items
from services.federation.registry import Registry
from services.federation.stores import open_round_store
from services.modelling import build_model, open_schema
from services.parameter_server.client import ParameterClient
from services.settings.model import Settings
from services.tables import declare
from sync.pushes import Source

ITEMS, DEVICES, WEIGHT, RATE = 24, 6, 30.0, 0.5
NOW_MS = 1_700_000_000_000
IDS = [f"film-{n}" for n in range(ITEMS)]


class SmallStack:
    """Two parameter servers and a feature store with items; what serves and trains is not needed here."""

    def __init__(self, folder: Path) -> None:
        self.settings: Settings = make_settings(folder, 2, 3)
        self.schema = open_schema(self.settings)
        self.model: RecommenderModel = build_model(self.schema, self.settings.model)
        with closing(open_store(self.settings)) as store:
            store.write({
                EntityKey("item", name): {"categories": Cell(["Drama", "War"][n % 2 :], NOW_MS)}
                for n, name in enumerate(IDS)
            })  # fmt: skip
        self.catalogue = Catalogue(Encoder(self.schema))
        with closing(open_store(self.settings)) as store:
            self.catalogue.refresh(store, NOW_MS)

    @contextmanager
    def running(self) -> Iterator[ParameterClient]:
        with (
            threads(self.settings),
            closing(open_coordination(self.settings)) as coordination,
            closing(ParameterClient(coordination)) as client,
        ):
            declare(client, self.model.needs, self.settings.model, self.schema.fingerprint)
            yield client

    def begin(self, iterations: int) -> tuple[FederatedJob, Array]:
        """A job into this stack, begun; gives the weights that it begins with, too."""
        rounds = {
            "start_fl_job_threshold": DEVICES, "update_model_ratio": 1, "fl_iteration_num": iterations,
            "come_back_min_s": 0.05, "come_back_max_s": 0.2, "aggregation_lease_s": 2.0,
        }  # fmt: skip
        told = load_job({
            "job": {"name": "films"}, "rounds": rounds, "model": {"name": "items"},
            "training": {"steps": 1, "rate": RATE}, "into": {"model": "main", "weight": WEIGHT},
        })  # fmt: skip
        made, first = with_items(told, self.settings, None)
        assert first is not None
        with closing(open_round_store(server_settings(self.settings.data.dir, 0))) as store:
            assert Registry(store).create(made, first)[1]
        return made, first

    def rows(self, client: ParameterClient) -> tuple[Array, Array]:
        """The embedding rows [U, d] of all items, and the dense weights."""
        keys = self.model.item_keys(self._encoded())[RETRIEVAL]
        return client.pull("main", {RETRIEVAL: keys}).rows[RETRIEVAL], client.dense("main").values

    def taught(self, changes: Sequence[Array]) -> Array:
        """The rows of a stack in this process after each change was pushed once."""
        alone, encoded = LocalParameters(self.model.needs), self._encoded()
        keys = self.model.item_keys(encoded)[RETRIEVAL]
        own = np.searchsorted(keys, self.model.item_own_keys(encoded))
        for number, change in enumerate(changes, 1):
            rows = alone.pull("main", {RETRIEVAL: keys}).rows
            at_vectors = -np.float32(WEIGHT / RATE) * change.reshape(ITEMS, -1)
            gradients = self.model.item_row_gradients(encoded, rows, alone.dense("main").values, at_vectors)
            before = {shard: of.applied for shard, of in alone.applied("main", Source("x", 0)).items()}
            parts = {RETRIEVAL: (keys[own], gradients[own])}
            alone.push("main", Source("x", 0), number, before, NOW_MS, None, parts)
        return alone.pull("main", {RETRIEVAL: keys}).rows[RETRIEVAL]

    def _encoded(self) -> Any:
        return self.catalogue.encoded(np.arange(ITEMS), NOW_MS)


def run_devices(folder: Path, urls: Sequence[str]) -> None:
    """As processes with NumPy: each knows four of the even items, or of the odd ones."""
    places = [word for url in urls for word in ("--server", url)]
    running = []
    for client in range(DEVICES):
        known = np.random.default_rng(client).choice(np.arange(client % 2, ITEMS, 2), 4, replace=False)
        data = folder / f"{client}.txt"
        data.write_text("\n".join(IDS[item] for item in known))
        command = [
            sys.executable, "-m", "federated.client", *places, "--job", "films", "--client", str(client),
            "--data", str(data), "--state", str(folder / f"state-{client}"), "--budget-seconds", "60",
        ]  # fmt: skip
        running.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    for process in running:
        output, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        assert json.loads(output)["ended"] == "finished"


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
    return text


def pushes(url: str) -> list[dict[str, Any] | None]:
    """Of each iteration, the push that brought it to the stack."""
    return [row.get("pushed") for row in ask(url, "GET", "/v1/fl/jobs/films/rounds")["rounds"]]


def test_what_real_devices_learn_reaches_the_parameter_servers_once(tmp_path: Path) -> None:
    stack = SmallStack(tmp_path)
    with stack.running() as client, servers(tmp_path, 2) as federation:
        made, first = stack.begin(iterations=2)
        before, dense = stack.rows(client)
        encoded = stack.catalogue.encoded(np.arange(ITEMS), NOW_MS)
        served = stack.model.encode_items(encoded, {RETRIEVAL: before}, dense)
        np.testing.assert_array_equal(first.reshape(served.shape), served)
        urls = [url for _, url in federation]
        eventually(
            lambda: any(row["job"] == "films" for row in ask(urls[1], "GET", "/v1/fl/jobs")["jobs"]), 20.0
        )
        run_devices(tmp_path, urls)
        assert wait_for(urls[1], "films", phase="finished")["version"] == 2
        eventually(lambda: all(pushes(urls[0])), 30.0)
        states = [first, *(model(urls[0], "films", version, made) for version in (1, 2))]
        # Where a server was slow, both versions went as one.
        ends = sorted({push["version"] for push in pushes(urls[0]) if push is not None})
        steps = [states[end] - states[since] for since, end in zip([0, *ends], ends, strict=False)]
        after, dense_after = stack.rows(client)
        np.testing.assert_array_equal(after, stack.taught(steps))
        np.testing.assert_array_equal(dense_after, dense)
        assert (np.abs(after - before).max(axis=1) > 0).sum() == ITEMS
        assert any('pushes_total{job="films",outcome="applied"}' in metrics(url) for url in urls)
        eventually(lambda: all('unpushed_versions{job="films"} 0.0' in metrics(url) for url in urls), 10.0)


def test_rounds_do_not_wait_for_a_stack_that_is_away_and_a_killed_servers_version_arrives(
    tmp_path: Path,
) -> None:
    stack = SmallStack(tmp_path)
    with stack.running() as client:
        made, first = stack.begin(iterations=1)
        before, _ = stack.rows(client)
    with servers(tmp_path, 2) as federation:
        (killed, killed_url), (_, url) = federation
        for place in (killed_url, url):
            eventually(lambda place=place: any(ask(place, "GET", "/v1/fl/jobs")["jobs"]), 20.0)
        run_devices(tmp_path, [killed_url])
        assert wait_for(url, "films", phase="finished")["valid"] == 1
        assert pushes(url) == [None]
        change = model(url, "films", 1, made) - first
        killed.kill()
        with stack.running() as client:
            np.testing.assert_array_equal(stack.rows(client)[0], before)
            eventually(lambda: all(pushes(url)), 60.0)
            after, _ = stack.rows(client)
            np.testing.assert_array_equal(after, stack.taught([change]))
            killed.start()
            ready(killed_url)
            eventually(lambda: all(pushes(killed_url)), 20.0)
            time.sleep(1.0)  # for whatever it might push again
            np.testing.assert_array_equal(stack.rows(client)[0], after)
