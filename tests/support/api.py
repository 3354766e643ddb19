"""An API in this process, over a real SQLite feature store; asked as by HTTP, without a socket.

The event log and the parameter servers are stand-ins in memory, so that a test can make them full, slow or
absent at will.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from featurestore.encoder import Encoder
from featurestore.online import Cell, EntityKey
from featurestore.schema import default_schema
from featurestore.sqlite import SqliteStore
from models.parameters import RETRIEVAL
from models.training import RecommenderModel
from services.api.app import assemble
from services.api.behind import Behind
from services.api.context import Api
from services.api.ingest import Ingest
from services.api.metrics import ApiMetrics
from services.api.serving.choose import Chooser
from services.api.serving.follow import Follower
from services.api.serving.freshness import Freshness
from services.api.serving.items import ItemState
from services.api.serving.probing import Probing
from services.api.serving.recommender import Recommender
from services.api.store import AsyncStore
from services.catalogue import FIRST_SEEN, Catalogue, key_function
from services.freshness.stamps import Stamp, encode_stamp
from services.freshness.updates import Update
from services.messagelog.contract import Message, Record
from services.modelling import build_model
from services.parameter_server.types import (
    DenseSnapshot,
    Mark,
    ParametersUnavailable,
    Pulled,
    ShardChanges,
)
from services.processor.users import SEEN, STATE, UserState, encode_state
from services.settings.model import Settings
from services.topics import PROBES

T = TypeVar("T")
LOG = "log-1"
NOW_MS = 1_700_000_000_000


class MemoryProducer:
    """A log of lists. ``gate`` closed: appends hang; ``failure``: they raise it."""

    def __init__(self) -> None:
        self.partitions: dict[int, list[Message]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.groups: list[int] = []

    def append(self, messages: Sequence[Message]) -> list[int]:
        self.gate.wait(10)
        if self.failure is not None:
            raise self.failure
        self.groups.append(len(messages))
        offsets = []
        for message in messages:
            records = self.partitions.setdefault(message.partition, [])
            records.append(message)
            offsets.append(len(records) - 1)
        return offsets

    def close(self) -> None:
        self.gate.set()

    @property
    def messages(self) -> list[Message]:
        return [message for records in self.partitions.values() for message in records]


class MemoryParameters:
    """Parameter servers of one shard in memory: a row is drawn from its key until it is set."""

    def __init__(self, model: RecommenderModel) -> None:
        self.model = model
        self.rows: dict[tuple[str, int], np.ndarray[Any, np.dtype[np.float32]]] = {}
        self.watermarks: dict[tuple[str, int], Mark] = {}
        self.generation = 1
        self.available = True
        self.delay_s = 0.0
        self.asked: dict[str, object] = {}
        """How the newest pull was to be answered, beside its keys."""
        self._dims = {table.name: table.dim for table in model.needs.tables}
        self._feed: asyncio.Queue[ShardChanges] = asyncio.Queue()
        self._dense = model.needs.dense.initial(np.random.default_rng(3))

    def row(self, table: str, key: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        if (table, key) in self.rows:
            return self.rows[table, key]
        return np.random.default_rng(key % 2**32).normal(0, 0.1, self._dims[table]).astype(np.float32)

    async def pull(self, model: str, keys: Mapping[str, Any], **asked: object) -> Pulled:
        self.asked = asked
        await asyncio.sleep(self.delay_s)
        self._check()
        rows = {
            table: np.array([self.row(table, int(key)) for key in of], np.float32).reshape(
                -1, self._dims[table]
            )
            for table, of in keys.items()
        }
        return Pulled(rows, dict(self.watermarks))

    async def dense(self, model: str, published: bool = True, table: str = "dense") -> DenseSnapshot:
        self._check()
        return DenseSnapshot(self.generation, self._dense, dict(self.watermarks))

    async def follow(self, model: str, tables: Sequence[str]) -> AsyncGenerator[ShardChanges]:
        yield self.changes({}, restarted=True)
        while True:
            yield await self._feed.get()

    def changes(self, parts: Mapping[str, Any], *, restarted: bool = False) -> ShardChanges:
        return ShardChanges(0, 1, 1, dict(parts), dict(self.watermarks), True, restarted, self.generation)

    def emit(self, parts: Mapping[str, Any] | None = None) -> None:
        self._feed.put_nowait(self.changes(parts or {}))

    def _check(self) -> None:
        if not self.available:
            raise ParametersUnavailable("pull", ("server-0",), 0.1)

    async def close(self) -> None:
        self.available = False


class MemoryProbes:
    """What probes need of log and parameter servers: stamps in a list, marked updates of one shard."""

    def __init__(self) -> None:
        self.stamped: list[Stamp] = []
        self.failure: Exception | None = None
        self.reads = 0
        self.pushed: list[Update] = []
        self.visible: asyncio.Queue[ShardChanges] = asyncio.Queue()
        self.followed = 0

    def stamps(self, offset: int, most: int) -> list[Record]:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        return [
            Record(PROBES, 0, n, b"", encode_stamp(stamp), 0)
            for n, stamp in enumerate(self.stamped[offset : offset + most], offset)
        ]

    def stamps_end(self) -> int:
        return len(self.stamped)

    async def updates(self) -> AsyncGenerator[ShardChanges]:
        self.followed += 1
        while True:
            yield await self.visible.get()

    def push(self, count: int) -> list[Update]:
        if self.failure is not None:
            raise self.failure
        first = len(self.pushed)
        self.pushed += [Update(3, 100 + first + n, NOW_MS, NOW_MS + 2.5) for n in range(count)]
        return self.pushed[first:]

    def close(self) -> None:
        pass


@dataclass
class Harness:
    """The API under test and all that stands around it."""

    api: Api
    store: SqliteStore
    producer: MemoryProducer
    parameters: MemoryParameters
    follower: Follower
    items: ItemState
    freshness: Freshness
    loop: asyncio.AbstractEventLoop
    client: httpx.AsyncClient
    probing: Probing
    probes: MemoryProbes
    behind: Behind
    clock: list[int] = field(default_factory=lambda: [NOW_MS])

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
        """The result of ``work``, run on the API's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.run(self.client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def recommend(self, **wish: Any) -> dict[str, Any]:
        reply = self.post("/v1/recommendations", json=wish)
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    def on_loop(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, called on the API's loop: state there belongs to it."""

        async def call() -> T:
            return work()

        return self.run(call())

    def until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until ``holds()``, asked on the API's loop."""

        async def wait() -> None:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    await asyncio.sleep(0.005)

        self.run(wait(), timeout_s + 5)

    def write_items(self, items: Mapping[str, Mapping[str, Any]], event_time_ms: int = NOW_MS) -> None:
        """Store items as the processor would, and wait until the API has them."""
        rows = {
            EntityKey("item", item): {
                FIRST_SEEN: Cell(event_time_ms - 10**9, event_time_ms),
                **{name: Cell(value, event_time_ms) for name, value in attributes.items()},
            }
            for item, attributes in items.items()
        }
        self.store.write(rows)
        self.until(lambda: all(self._has(item, of) for item, of in items.items()))

    def _has(self, item: str, attributes: Mapping[str, Any]) -> bool:
        row = self.items.catalogue.row(item)
        if row is None:
            return False
        hidden = attributes.get("hidden") is True or attributes.get("deleted") is True
        generation = self.items.current
        encoded = generation is not None and row < len(generation.index) and bool(generation.encoded[row])
        return bool(self.items.catalogue.hidden[row]) == hidden and encoded

    def write_user(
        self,
        user: str,
        *,
        seen: Sequence[str] = (),
        offset: int = 0,
        accepted_at_ms: int = NOW_MS,
        **more: Any,
    ) -> None:
        """Store a user as the processor would."""
        keys = key_function(Encoder(self.api.schema), "item_id")(list(seen))
        partition = self.freshness.partition(user)
        state = UserState(
            partition=partition, offset=offset, accepted_at_ms=accepted_at_ms, event_id=f"event-{offset}"
        )
        cells = {SEEN: keys.astype("<u8").tobytes(), STATE: encode_state(state), **more}
        self.store.write({EntityKey("user", user): {n: Cell(v, NOW_MS) for n, v in cells.items()}})

    def advance(self, partition: int, offset: int, accepted_at_ms: int = NOW_MS) -> None:
        """Let the parameters have applied a partition up to ``offset``."""

        def move() -> None:
            self.parameters.watermarks[LOG, partition] = Mark(offset, accepted_at_ms)
            self.parameters.emit()

        self.on_loop(move)


def quick_settings(**api: Any) -> Settings:
    """Settings of a small and patient API."""
    return Settings.model_validate({"api": {"deadline": 5.0, **api}, "log": {"partitions": 2}})


@contextmanager
def running_api(
    directory: Path, settings: Settings | None = None, *, parameters_available: bool = True
) -> Iterator[Harness]:
    """A running API over a feature store in ``directory``, following items and parameters."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        harness, close = asyncio.run_coroutine_threadsafe(
            _start(directory, settings or quick_settings(), loop, parameters_available), loop
        ).result(60)
        try:
            yield harness
        finally:
            asyncio.run_coroutine_threadsafe(close(), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _start(
    directory: Path, settings: Settings, loop: asyncio.AbstractEventLoop, parameters_available: bool
) -> tuple[Harness, Callable[[], Coroutine[Any, Any, None]]]:
    schema = default_schema()
    clock = [NOW_MS]
    store = SqliteStore(directory / "features.db", max_claims=1_000)
    producer = MemoryProducer()
    partitions = settings.log.partitions
    ingest = Ingest(lambda: producer, partitions, settings.api.queue)
    ingest.start()
    wrapped = AsyncStore(lambda: store, direct=True)
    api = Api(settings, schema, ingest, wrapped, ApiMetrics(), LOG, clock_ms=lambda: clock[0])
    encoder = Encoder(schema)
    model = build_model(schema, settings.model)
    items = ItemState(Catalogue(encoder), model)
    probes = MemoryProbes()
    probing = Probing(
        LOG, partitions, "here", append=ingest.append, backends=probes, now_ms=lambda: float(clock[0])
    )
    freshness = probing.recommendations
    parameters = MemoryParameters(model)
    parameters.available = parameters_available
    follower = Follower(
        items, freshness, wrapped, parameters, "main", api.clock_ms, arrived=probing.parameters
    )
    chooser = Chooser(items, settings.recommendation)
    behind = Behind("main", settings.region.name, settings.sync.max_behind, lambda: clock[0] / 1e3)
    recommender = Recommender(
        encoder, items, chooser, freshness, wrapped, parameters, "main", api.clock_ms, behind.outdated
    )
    app = assemble(api, recommender, {}, probing, lambda: behind.behind_s)
    following = asyncio.create_task(follower.run())
    transport = httpx.ASGITransport(app.asgi)
    client = httpx.AsyncClient(transport=transport, base_url="http://test")
    harness = Harness(
        api, store, producer, parameters, follower, items, freshness, loop, client, probing, probes, behind, clock
    )  # fmt: skip

    async def close() -> None:
        await client.aclose()
        following.cancel()
        await asyncio.wait([following])
        await probing.close()
        producer.gate.set()
        await ingest.close()
        wrapped.close()

    return harness, close


__all__ = ["LOG", "NOW_MS", "RETRIEVAL", "Harness", "quick_settings", "running_api"]
