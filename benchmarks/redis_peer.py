"""Rows of floats kept in Redis by redis-py with hiredis: the peer of pulls and pushes.

The server keeps nothing on disk. Where an optimiser's state is kept, it is the last float of the row's value, so
that one MGET brings both.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import numpy as np
import redis
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.draws import EPSILON, RATE, Floats, Keys
from services.demo.stack import free_port

NAME: Final = "redis-py with hiredis"
INSTALL: Final = "apt-get install redis-server; pip install 'headwater[stack]'"
_READY_S: Final = 20.0


def names(keys: Keys) -> list[bytes]:
    """Redis' name of each key ``[N]``: its eight bytes."""
    raw = keys.tobytes()
    return [raw[at : at + 8] for at in range(0, len(raw), 8)]


def available() -> bool:
    """Whether a server and the fast parser are installed."""
    return HIREDIS_AVAILABLE and shutil.which("redis-server") is not None


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """The port of a Redis server of our own; it is killed at the end. Raises TimeoutError."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no", "--databases", "64"], stdout=log, stderr=log
        )
    try:
        _wait_ready(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise TimeoutError("redis-server does not answer") from error
                time.sleep(0.02)


class RedisRows:
    """Rows ``[width]`` float32 in one database. Every call is one round trip to the server, or a pipeline."""

    def __init__(self, port: int, database: int, width: int) -> None:
        self._client = redis.Redis(port=port, db=database)
        self._width = width

    def put(self, names: Sequence[bytes], rows: Floats) -> None:
        """Store ``rows`` ``[N, width]`` by MSET."""
        self._client.mset(dict(zip(names, self._cut(rows), strict=True)))

    def get(self, names: Sequence[bytes]) -> Floats:
        """The rows ``[N, width]`` of names that are stored, read-only, by MGET."""
        found = cast("list[bytes]", self._client.mget(names))
        return np.frombuffer(b"".join(found), np.float32).reshape(len(names), self._width)

    def step(self, names: Sequence[bytes], gradients: Floats, *, pipelined: bool) -> None:
        """One step of row-wise Adagrad with ``gradients`` ``[N, width - 1]``; written back by SETs in a pipeline,
        or else by MSET."""
        rows = adagrad(self.get(names), gradients)
        if not pipelined:
            self.put(names, rows)
            return
        with self._client.pipeline(transaction=False) as pipe:
            for name, row in zip(names, self._cut(rows), strict=True):
                pipe.set(name, row)
            pipe.execute()

    def close(self) -> None:
        self._client.close()

    def _cut(self, rows: Floats) -> list[bytes]:
        raw, size = rows.tobytes(), 4 * self._width
        return [raw[at : at + size] for at in range(0, len(raw), size)]


def adagrad(rows: Floats, gradients: Floats) -> Floats:
    """Rows ``[N, d + 1]`` (values, then the state) after a step with ``gradients`` ``[N, d]``: s += mean(g²),
    w -= rate·g / (√s + epsilon)."""
    after = rows.copy()
    after[:, -1] += np.mean(np.square(gradients), axis=1)
    after[:, :-1] -= np.float32(RATE) * gradients / (np.sqrt(after[:, -1:]) + np.float32(EPSILON))
    return after
