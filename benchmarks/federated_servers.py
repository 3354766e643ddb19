"""Two servers over one store: uploads a second of a large model, and how long the sum takes after the last one.

Real processes, real HTTP, the store on disk with every acknowledged body synced to it. The load comes from threads of
one more process; the bodies are prepared beforehand, a few different ones in turn: each client's is checked, stored and
summed by itself, whether it is like another's or not.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from rich.console import Console

from benchmarks.report import Row
from federated.client_http import Call, HttpTransport, NetworkLost
from federated.job import FederatedJob, load_job
from federated.payload import encode_update, shared_seed
from federated.rounds import Accepted, Admitted, PollRequest, Standing, StartRequest, UploadRequest
from federated.wire import decode_reply, digest_of, encode_poll, encode_start, encode_upload

T = TypeVar("T")

SERVERS: Final = 2
THREADS: Final = 8
DISTINCT: Final = 4
COMPRESSED: Final = "rotate,random_mask:0.5,quantise:1:drive"
SPARSE: Final = "top_k:0.05,quantise:2:nearest,deflate"
_WIDTH: Final = 13_333  # 64 features, 10 classes: 999,985 weights
_WAIT_S: Final = 300.0
_DISK_SHARE: Final = 4
"""Bodies may take this part of what is free on the disk."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Scheme of the bodies ("": float32) and clients of a round, one after the other; ``width`` of the hidden layer."""

    loads: tuple[tuple[str, int], ...] = ((SPARSE, 1_000), ("", 1_000), (COMPRESSED, 200))
    width: int = _WIDTH


class ServersFailed(RuntimeError):
    """The servers did not come up or refused something; the message says what they said."""


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of all starts, of all uploads, and from the last accepted upload to the new version."""

    starts_s: float
    uploads_s: float
    summed_s: float


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    return list(_measure(sizes, Console(stderr=True)))


def _measure(sizes: Sizes, console: Console) -> Iterator[Row]:
    for number, (scheme, clients) in enumerate(sizes.loads):
        yield from _measured(sizes.width, scheme, clients, number == 0, console)


def _measured(width: int, scheme: str, wanted: int, first: bool, console: Console) -> Iterator[Row]:
    console.print(f"federated: servers, {scheme or 'float32'}")
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name:
        folder = Path(name)
        probe = _job(width, scheme, 1)
        bodies = _bodies(probe)
        largest = max(map(len, bodies))
        clients = min(wanted, int(shutil.disk_usage(folder).free / _DISK_SHARE / largest))
        job = _job(width, scheme, clients)
        with _servers(folder) as urls:
            took = _round(job, urls, clients, bodies)
        size = job.make_model().layout().size
    who = (
        f"{clients:,} clients of {size / 1e6:.2g} million weights on {SERVERS} servers, {scheme or 'float32'}"
    )
    note = f"{largest:,} bytes each, {clients * largest / took.uploads_s / 1e6:,.0f} MB/s"
    if clients < wanted:
        note += f"; the disk has no room for {wanted:,}"
    yield Row(f"uploads: {who}", "uploads/s", clients / took.uploads_s, note=note)
    yield Row(
        f"from the last upload to the new version: {who}",
        "s",
        took.summed_s,
        note=f"{took.uploads_s + took.summed_s:.1f} s from the first upload; groups are summed while others upload",
    )
    if first:
        yield Row(f"starts: {clients:,} clients on {SERVERS} servers", "starts/s", clients / took.starts_s)


def _job(width: int, scheme: str, clients: int) -> FederatedJob:
    windows = (
        "start_fl_job_time_window_s",
        "update_model_time_window_s",
        "global_iteration_time_window_s",
        "aggregation_time_window_s",
    )
    return load_job(
        {
            "job": {"name": "load"},
            "model": {"name": "perceptron", "hidden": [width]},
            "data": {"features": 64, "classes": 10},
            "rounds": {
                "start_fl_job_threshold": clients,
                "update_model_ratio": 1,
                "fl_iteration_num": 2,
                **dict.fromkeys(windows, 3_600.0),
            },
            "compression": {"upload": scheme},
        }
    )


def _bodies(job: FederatedJob) -> list[bytes]:
    """A few updates as they travel."""
    size, scheme = job.make_model().layout().size, job.make_scheme()
    shared = shared_seed(job.job.seed, 1)
    found = []
    for number in range(DISTINCT):
        generator = np.random.default_rng(number)
        # Most weights hardly move, as it is with real updates.
        vector = (1e-3 * generator.normal(size=size) * generator.random(size) ** 2).astype(np.float32)
        found.append(encode_update(scheme, {"difference": vector}, generator, None, shared).body)
    return found


def _round(job: FederatedJob, urls: Sequence[str], clients: int, bodies: Sequence[bytes]) -> Took:
    path = f"/v1/fl/jobs/{job.job.name}"
    with ExitStack() as stack:
        transports = [
            stack.enter_context(HttpTransport(urls, timeout_s=_WAIT_S, first=number))
            for number in range(THREADS)
        ]
        _ask(transports[0], Call("POST", "/v1/fl/jobs", job.to_toml().encode()))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS))

        def start(transport: HttpTransport, client: int) -> bytes:
            call = Call("POST", f"{path}/clients/{client}/start", encode_start(StartRequest(str(client))))
            reply = decode_reply(_ask(transport, call), 0.0)
            if not isinstance(reply, Admitted):
                raise ServersFailed(f"a start is answered by {reply}")
            return reply.ticket

        def upload(transport: HttpTransport, client: int) -> None:
            body = bodies[client % len(bodies)]
            request = UploadRequest(str(client), 1, tickets[client], digest_of(body), 20, 10, 0.5)
            call = Call("POST", f"{path}/clients/{client}/uploads", encode_upload(request, body))
            reply = decode_reply(_ask(transport, call), 0.0)
            if not isinstance(reply, Accepted):
                raise ServersFailed(f"an upload is answered by {reply}")

        began = time.perf_counter()
        tickets = _by_threads(pool, transports, clients, start)
        started = time.perf_counter()
        _by_threads(pool, transports, clients, upload)
        uploaded = time.perf_counter()
        _wait_for_version(transports[0], f"{path}/clients/0/poll", 1)
        return Took(started - began, uploaded - started, time.perf_counter() - uploaded)


def _by_threads(
    pool: ThreadPoolExecutor,
    transports: Sequence[HttpTransport],
    clients: int,
    act: Callable[[HttpTransport, int], T],
) -> list[T]:
    """What ``act`` gives for each client, by its number; each thread has a connection and every so many-th client."""

    def share(number: int) -> list[T]:
        return [act(transports[number], client) for client in range(number, clients, len(transports))]

    parts = list(pool.map(share, range(len(transports))))
    return [parts[client % len(parts)][client // len(parts)] for client in range(clients)]


def _wait_for_version(transport: HttpTransport, path: str, version: int) -> None:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        reply = decode_reply(_ask(transport, Call("POST", path, encode_poll(PollRequest("0", 1)))), 0.0)
        if isinstance(reply, Standing) and reply.version >= version:
            return
        time.sleep(0.01)
    raise ServersFailed(f"no version {version} within {_WAIT_S:g} s")


def _ask(transport: HttpTransport, call: Call) -> bytes:
    answer = transport.send(call)
    if answer.status >= 300:
        raise ServersFailed(f"{call.path}: {answer.status} {answer.body[:500].decode(errors='replace')}")
    return answer.body


@contextmanager
def _servers(folder: Path) -> Iterator[list[str]]:
    """Addresses of servers over a new store in ``folder``; they are killed at the end. Raises ServersFailed."""
    with ExitStack() as stack:
        running = []
        for number in range(SERVERS):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            log = folder / f"server-{number}.log"
            output = stack.enter_context(log.open("wb"))
            command = [sys.executable, "-m", "services.cli.app", f"--set=data.dir={folder}", "fl", "serve"]
            process = subprocess.Popen(
                [
                    *command,
                    "--port",
                    str(port),
                    "--store",
                    f"sqlite:{folder / 'store'}",
                    "--name",
                    f"server-{number}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append((process, f"http://127.0.0.1:{port}", log))
        for process, url, log in running:
            _wait_ready(process, url, log)
        yield [url for _, url, _ in running]


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 60.0
    with HttpTransport([url], timeout_s=5.0) as transport:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if json.loads(transport.send(Call("GET", "/health/ready")).body)["status"] == "ready":
                    return
            except (NetworkLost, ValueError):
                time.sleep(0.05)
    raise ServersFailed(f"{url} is not ready; it said last:\n{log.read_text(errors='replace')[-1_500:]}")
