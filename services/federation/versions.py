"""The model's versions in the store, and the bodies in which clients download them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from federated.compression import Held, difference, receive, snap
from federated.device import Instructions
from federated.privacy.server import instructions_of
from federated.rounds import Desk, Keys, Store, read
from federated.secagg.updates import start_digest
from federated.strategies import ServerState
from federated.weights import Array
from federated.wire import decode_model, digest_of, encode_model
from services.federation.hosted import HostedJob

KEPT: Final = 8
"""Earlier versions that a server remembers; a client that holds an older one downloads the whole model."""


class VersionGone(LookupError):
    """The store no longer holds that version's model."""


@dataclass(slots=True)
class _Version:
    held: Held | None
    whole: bytes
    instructions: Instructions
    vectors: dict[str, Array]
    differences: dict[int, bytes] = field(default_factory=dict)


def publish(
    store: Store, job: HostedJob, version: int, attempt: int, state: ServerState, previous: int
) -> None:
    """Store ``state`` and its model as what ``attempt`` made of ``version``. ``previous`` is the attempt that made the
    version before it, whose grid this one goes on from."""
    key = job.keys.state(version, attempt)
    if job.grid is not None:
        before = _held(store, job, version - 1, previous) if version else None
        held = snap(job.grid, state.weights, version, before)
        store.put_blob(_model_key(job.keys, version, attempt), difference(job.grid, held, None))
    store.put_blob(key, state.to_bytes())


def first_record(keys: Keys) -> str:
    """Record: the key of the weights that the job began with; empty where its seed drew them."""
    return f"{keys.all}first"


def keep_first(store: Store, keys: Keys, weights: Array) -> str:
    """Keep ``weights`` [D] for a job to begin with, under the key that is returned: their own, so that two who begin
    one job do not overwrite each other's."""
    body = np.asarray(weights, "<f4").tobytes()
    key = f"{keys.all}first/{digest_of(body).hex()}"
    store.put_blob(key, body)
    return key


def first_state(store: Store, job: HostedJob) -> ServerState:
    """The state that ``job`` began with, however many versions ago. Raises VersionGone and StoreUnavailable."""
    record = first_record(job.keys)
    key = read(store, [record])[0]
    if not key:
        return job.first_state()
    body = store.get_blob(key.decode())
    if body is None or len(body) != 4 * job.layout.size:
        raise VersionGone(f"the weights that {job.name} began with are not in the store")
    return job.first_state(np.frombuffer(body, "<f4").astype(np.float32))


def load_state(store: Store, job: HostedJob, version: int, attempt: int) -> ServerState:
    """Raises VersionGone, StateRefused and StoreUnavailable."""
    body = store.get_blob(job.keys.state(version, attempt))
    if body is None:
        raise VersionGone(f"version {version} of {job.name} is not in the store")
    return ServerState.from_bytes(body, job.layout)


class Versions:
    """What this server hands out. Safe under threads."""

    def __init__(self, store: Store, job: HostedJob, desk: Desk) -> None:
        self._store = store
        self._job = job
        self._desk = desk
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Version] = OrderedDict()

    def download(self, version: int, base: int | None) -> tuple[Literal["whole", "difference"], bytes]:
        """``version`` as a ModelFrame, for a client that holds version ``base``, and in which form. Without a grid the
        model is float32, and its digest where the client holds it already. On the wire bases count from 1, 0 is none.
        Raises VersionGone when neither this server nor the store has it any more, and StoreUnavailable."""
        with self._lock:
            if version not in self._kept:
                self._keep(version)
            found = self._kept[version]
            shorter = None if base is None else self._shorter(version, found, base)
        if base is None or shorter is None:
            return "whole", encode_model(version, 0, found.whole, found.instructions, found.vectors)
        return "difference", encode_model(version, base + 1, shorter, found.instructions, found.vectors)

    def start_digest(self, version: int) -> bytes:
        """What devices that were handed ``version`` say that they started from. Raises as ``download``."""
        _, body = self.download(version, None)
        read_, grid = decode_model(body, self._job.layout.size), self._job.grid
        if grid is None:
            weights = np.frombuffer(read_.model, "<f4").astype(np.float32)
        else:
            weights = receive(grid, read_.model).vector(grid)
        return start_digest(weights, read_.instructions, read_.vectors)

    def _shorter(self, version: int, found: _Version, base: int) -> bytes | None:
        """What is shorter than the whole model for a client that holds ``base``, if anything is."""
        grid = self._job.grid
        if grid is None:
            return digest_of(found.whole) if base == version else None
        if base not in self._kept or found.held is None:
            return None
        if base not in found.differences:
            found.differences[base] = difference(grid, found.held, self._kept[base].held)
        body = found.differences[base]
        return body if len(body) < len(found.whole) else None

    def _keep(self, version: int) -> None:
        header = self._desk.header()
        attempt = header.attempt if header.version == version else self._only_attempt(version)
        if attempt is None:
            raise VersionGone(f"version {version} of {self._job.name} has been followed by {header.version}")
        if self._job.grid is not None and version and version - 1 not in self._kept:
            # A server that has just started holds no base for differences; the store still has the last one.
            earlier = self._only_attempt(version - 1)
            if earlier is not None:
                self._kept[version - 1] = self._load(version - 1, earlier)
        self._kept[version] = self._load(version, attempt)
        while len(self._kept) > KEPT + 1:
            self._kept.popitem(last=False)

    def _only_attempt(self, version: int) -> int | None:
        """Which attempt made an earlier version, as far as the store tells: of several none is known to be the one that
        counted."""
        prefix = self._job.keys.states(version)
        attempts = [
            key.removeprefix(prefix) for key in self._store.blobs(prefix) if not key.endswith("/model")
        ]
        return int(attempts[0]) if len(attempts) == 1 else None

    def _load(self, version: int, attempt: int) -> _Version:
        job = self._job
        state = load_state(self._store, job, version, attempt)
        asked = instructions_of(job.strategy, job.protection, state)
        vectors = {name: state.vectors[name].astype(np.float32) for name in asked.vectors}
        if job.grid is None:
            held, whole = None, np.asarray(state.weights, "<f4").tobytes()
        else:
            held = _held(self._store, job, version, attempt)
            whole = difference(job.grid, held, None)
        return _Version(held, whole, asked, vectors)


def _model_key(keys: Keys, version: int, attempt: int) -> str:
    return f"{keys.state(version, attempt)}/model"


def _held(store: Store, job: HostedJob, version: int, attempt: int) -> Held:
    assert job.grid is not None
    body = store.get_blob(_model_key(job.keys, version, attempt))
    if body is None:
        raise VersionGone(f"version {version} of {job.name} is not in the store")
    return receive(job.grid, body)
