"""Regions of real parameter servers that follow each other, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from support.parameters import CHUNKS, wait_ready
from support.service_process import Running
from support.wan import free_port

from services.coordination.shardmap import Place, read_shard_map
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server import ParameterClient, Watermarks
from services.parameter_server.replication.election import Replication
from services.parameter_server.types import Keys, Rows
from services.settings.model import (
    CoordinationSettings,
    DataSettings,
    ParameterSettings,
    RegionSettings,
    Settings,
    SyncSettings,
)

LEASE_S = 1.5
SHARDS = 2


class Region:
    """The parameter servers of one region, each a process; ``sync`` as the settings have it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        number: int,
        sync: SyncSettings | None = None,
        *,
        servers: int = 1,
        shards: int = SHARDS,
        replicas: int = 1,
        replication: Replication = "async",
        generation_s: float = 0.5,
    ) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        self.servers: dict[str, Running] = {}
        self.addresses: dict[str, str] = {}
        self.sync = sync or SyncSettings()
        self._settings = Settings(
            data=DataSettings(dir=self.folder),
            region=RegionSettings(name=name, number=number),
            coordination=CoordinationSettings(lease_ttl=LEASE_S),
            sync=self.sync,
            parameters=ParameterSettings(
                servers=servers,
                shards=shards,
                replicas=replicas,
                replication=replication,
                snapshot_interval=3_600.0,
                generation_interval=generation_s,
            ),
        )
        for server in range(servers):
            self.addresses[f"parameter-server-{server}"] = f"127.0.0.1:{free_port()}"
        self._make()

    def _make(self) -> None:
        for server, address in self.addresses.items():
            parameters = self._settings.parameters.model_copy(update={"listen": address})
            settings = self._settings.model_copy(update={"parameters": parameters})
            self.servers[server] = Running("parameter-server", server, settings)

    def follow(self, upstreams: Sequence[str]) -> None:
        """Whom to follow, from the next start on."""
        self.configure(self._settings.sync.model_copy(update={"upstreams": tuple(upstreams)}))

    def configure(self, sync: SyncSettings) -> None:
        """Other settings, from the next start on."""
        self._settings = self._settings.model_copy(update={"sync": sync})
        self._make()

    def start(self) -> None:
        """Start every server, without waiting."""
        for server in self.servers.values():
            server.start()

    def ready(self) -> None:
        """Wait until all serve."""
        wait_ready(self.folder, len(self.servers))

    def kill(self) -> None:
        """SIGKILL to all that run."""
        for server in self.servers.values():
            if not server.died():
                server.kill()

    def output(self) -> str:
        """The end of every server's log."""
        return "\n".join(
            f"--- {self.name} {name}\n{server.output.read_text()[-3_000:]}"
            for name, server in self.servers.items()
            if server.output.exists()
        )

    def place(self, shard: int) -> Place:
        """Where a shard is."""
        store = SqliteCoordination(self.folder / "coordination.db")
        try:
            found = read_shard_map(store)
        finally:
            store.close()
        assert found is not None
        return found.places[shard]

    @contextmanager
    def client(self, deadline_s: float = 30.0) -> Iterator[ParameterClient]:
        """A client of this region."""
        store = SqliteCoordination(self.folder / "coordination.db")
        client = ParameterClient(store, deadline_s=deadline_s)
        try:
            yield client
        finally:
            client.close()
            store.close()


@contextmanager
def running(*regions: Region, wait: bool = True) -> Iterator[None]:
    """Within the block the regions run. If something goes wrong their logs are shown."""
    try:
        for region in regions:
            region.start()
        if wait:
            for region in regions:
                region.ready()
        yield
    except BaseException:
        for region in regions:
            print(region.output())
        raise
    finally:
        for region in regions:
            region.kill()


KEYS: Keys = np.arange(200, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
Seen = tuple[bytes, tuple[int, bytes, Watermarks], Watermarks]


def seen(client: ParameterClient) -> Seen:
    """What a reader of a region sees: rows, the published dense weights with their number, and watermarks."""
    pulled = client.pull("main", {"items": KEYS})
    dense = client.dense("main")
    return (
        pulled.rows["items"].tobytes(),
        (dense.generation, dense.values.tobytes(), dense.watermarks),
        pulled.watermarks,
    )


def same(one: ParameterClient, other: ParameterClient, timeout_s: float = 20.0) -> float:
    """Wait until readers of both see the same; for how long. Raises AssertionError."""
    began = time.monotonic()
    while True:
        mine, theirs = seen(one), seen(other)
        if mine == theirs:
            return time.monotonic() - began
        assert time.monotonic() < began + timeout_s, [a == b for a, b in zip(mine, theirs, strict=True)]
        time.sleep(0.02)


def gradients(offset: int, keys: int = 40) -> dict[str, tuple[Keys, Rows]]:
    """As ``parameters.recorded``, for the keys above."""
    generator = np.random.default_rng(offset)
    some = generator.choice(KEYS, keys)
    chunks = np.arange(CHUNKS, dtype=np.uint64)
    return {
        "items": (some, generator.normal(size=(keys, 4)).astype(np.float32)),
        "dense": (chunks, generator.normal(size=(CHUNKS, 8)).astype(np.float32)),
    }
