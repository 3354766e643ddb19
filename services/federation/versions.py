"""The model's versions in the store, and the bodies in which clients download them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from federated.compression import DownloadChain, Held, difference, receive, snap
from federated.device import Instructions
from federated.rounds import Keys, Store
from federated.strategies import ServerState
from federated.weights import Array
from services.federation.hosted import HostedJob

KEPT = 8
"""Earlier versions that a server remembers; a client that holds an older one downloads the whole model."""


class VersionGone(LookupError):
    """The store no longer holds that version's model."""


@dataclass(frozen=True, slots=True)
class Download:
    """``model`` is a download of compression, or float32 without a grid; ``vectors`` travel with it."""

    version: int
    model: bytes
    instructions: Instructions
    vectors: Mapping[str, Array]


def publish(
    store: Store, job: HostedJob, version: int, attempt: int, state: ServerState, previous: int
) -> None:
    """Store ``state`` and its model as what ``attempt`` made of ``version``. ``previous`` is the attempt that made the
    version before it: grids go on from there."""
    key = job.keys.state(version, attempt)
    store.put_blob(key, state.to_bytes())
    if job.grid is not None:
        before = _held(store, job, version - 1, previous) if version else None
        store.put_blob(
            _model_key(job.keys, version, attempt),
            difference(job.grid, snap(job.grid, state.weights, version, before), None),
        )


def load_state(store: Store, job: HostedJob, version: int, attempt: int) -> ServerState:
    """Raises VersionGone, StateRefused and StoreUnavailable."""
    body = store.get_blob(job.keys.state(version, attempt))
    if body is None:
        raise VersionGone(f"version {version} of {job.name} is not in the store")
    return ServerState.from_bytes(body, job.layout)


class Versions:
    """What this server hands out. Safe under threads."""

    def __init__(self, store: Store, job: HostedJob) -> None:
        self._store = store
        self._job = job
        self._lock = threading.Lock()
        self._chain: DownloadChain | None = None
        self._newest: tuple[int, int, Instructions, dict[str, Array], bytes] | None = None

    def download(self, version: int, attempt: int, base: int | None) -> Download:
        """The newest model, ``version`` as ``attempt`` made it, for a client that holds version ``base``. Raises
        VersionGone when it is no longer the newest that the store holds."""
        with self._lock:
            if self._newest is None or self._newest[:2] != (version, attempt):
                self._load(version, attempt)
            assert self._newest is not None
            _, _, instructions, vectors, whole = self._newest
            model = whole if self._chain is None else self._chain.body_for(base)
            return Download(version, model, instructions, vectors)

    def _load(self, version: int, attempt: int) -> None:
        state = load_state(self._store, self._job, version, attempt)
        instructions = self._job.strategy.instructions(state)
        vectors = {name: state.vectors[name].astype(np.float32) for name in instructions.vectors}
        grid = self._job.grid
        if grid is None:
            whole = state.weights.astype("<f4", copy=False).tobytes()
        else:
            held, whole = _held(self._store, self._job, version, attempt), b""
            if self._chain is None or held.version < self._chain.newest.version:
                self._chain = DownloadChain(grid, held, KEPT)
            elif held.version > self._chain.newest.version:
                self._chain.adopt(held)
        self._newest = (version, attempt, instructions, vectors, whole)


def _model_key(keys: Keys, version: int, attempt: int) -> str:
    return f"{keys.state(version, attempt)}/model"


def _held(store: Store, job: HostedJob, version: int, attempt: int) -> Held:
    assert job.grid is not None
    body = store.get_blob(_model_key(job.keys, version, attempt))
    if body is None:
        raise VersionGone(f"version {version} of {job.name} is not in the store")
    return receive(job.grid, body)
