"""Edges: sums instead of updates, and nobody is counted twice, whoever dies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
from support.federation import (
    Fleet,
    ask,
    create,
    free_ports,
    job,
    model,
    ready,
    reference,
    server_settings,
    servers,
    wait_for,
)
from support.service_process import Running, eventually, service

from federated.client_http import Call, HttpTransport
from federated.rounds.messages import StartRequest
from federated.wire import encode_start
from services.federation.store_sqlite import SqliteStore

KEY = "operators-key-of-this-test"
HASHED = "admin:" + hashlib.sha256(KEY.encode()).hexdigest()
CLIENTS = [str(number) for number in range(4)]


@contextmanager
def edge(folder: Path, parent: str, wait_s: float) -> Iterator[tuple[Running, str]]:
    """An edge of ``parent`` with a token, until the end of the block."""
    folder.mkdir()
    token = ask(parent, "POST", "/v1/fl/jobs/job/tokens?edge=north", None, KEY)["token"]
    (folder / "token").write_text(token)
    (port,) = free_ports(1)
    settings = server_settings(
        folder, port, role="edge", parent=parent, token_file=folder / "token", job="job", edge_wait=wait_s
    )
    with service("edge-0", settings, "federation") as running:
        url = f"http://127.0.0.1:{port}"
        ready(url)
        yield running, url


def start_as_zero(url: str, token: str) -> int:
    with HttpTransport([url], token) as transport:
        body = encode_start(StartRequest("0"))
        return transport.send(Call("POST", "/v1/fl/jobs/job/clients/0/start", body)).status


def test_half_of_the_devices_behind_an_edge_give_the_same_bits(tmp_path: Path) -> None:
    made = job(iterations=3, compression={"upload": "quantise:4,deflate"})
    with servers(tmp_path, tokens=True, keys=(HASHED,)) as running:
        url = running[0][1]
        create(url, made, KEY)
        path = "/v1/fl/jobs/job/tokens?client="
        tokens = {client: ask(url, "POST", path + client, None, KEY)["token"] for client in CLIENTS}
        with HttpTransport([url], tokens["0"]) as stranger:  # a device's token does not make an edge
            assert stranger.send(Call("POST", "/v1/fl/jobs/job/sums", b"x")).status == 403
        with edge(tmp_path / "edge", url, 0.2) as (_, near):
            mallory = start_as_zero(near, tokens["1"])
            assert mallory == 403  # the parent sees whose token the edge hands on
            behind = Fleet("job", [near], tmp_path / "devices", tokens).start(["0", "2"])
            done = Fleet("job", [url], tmp_path / "devices", tokens).run(["1", "3"])
            for thread in behind.threads:
                thread.join(30)
            assert {end.why for end in (done | behind.done).values()} == {"finished"}
            assert behind.errors == []
        rounds = ask(url, "GET", "/v1/fl/jobs/job/rounds", None, KEY)["rounds"]
        assert [(row["valid"], row["uploads"]) for row in rounds] == [(True, 4)] * 3
        np.testing.assert_array_equal(
            model(url, "job", 3, made, "0", tokens["0"]), reference(made, CLIENTS, 3)
        )


def test_an_edge_killed_in_mid_round_counts_nobody_twice(tmp_path: Path) -> None:
    """Its devices take their updates to the server; it comes back with the same updates in its store."""
    made = job(iterations=2)
    with servers(tmp_path) as running:
        url = running[0][1]
        create(url, made)
        with edge(tmp_path / "edge", url, 1.0) as (process, near):
            # The round needs four starts: what the first two send is held until then.
            fleet = Fleet("job", [near, url], tmp_path / "devices")
            first = fleet.start(["0", "2"])
            with closing(SqliteStore(tmp_path / "edge" / "federation-edge")) as store:
                eventually(lambda: sum("/held/" in key for key in store.blobs("job/")) == 2)
            process.kill()
            done = fleet.run(["1", "3"])
            for thread in first.threads:
                thread.join(30)
            assert {end.why for end in (done | first.done).values()} == {"finished"}
            process.start()
            ready(near)
            assert "2 updates from before" in process.output.read_text()
        wait_for(url, phase="finished", valid=2)
        assert [row["uploads"] for row in ask(url, "GET", "/v1/fl/jobs/job/rounds")["rounds"]] == [4, 4]
        np.testing.assert_array_equal(model(url, "job", 2, made), reference(made, CLIENTS, 2))
