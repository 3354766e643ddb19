"""Keeps the items in step with the feature store and the parameter servers: three loops on the API's loop.

One reads changed items, one follows the parameters' change streams, one encodes what either of them touched.
Encoding gathers for a few milliseconds first, so that a burst of changes costs one pass; it runs in slices,
so that a request never waits for more than one of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

from featurestore.online import EntityKey
from models.parameters import RANKING, RETRIEVAL
from services.api.problems import Problem
from services.api.serving.freshness import Freshness
from services.api.serving.items import ItemState
from services.api.store import AsyncStore
from services.catalogue import ENTITY
from services.parameter_server.client import AsyncParameterClient
from services.parameter_server.types import ParameterError, ShardChanges, Watermarks

POLL_S: Final = 0.05
"""How often the store is asked for changed items."""
LINGER_S: Final = 0.003
"""How long changes gather before they are encoded."""
RETRY_S: Final = 0.5
PAGE: Final = 4_096
SLICE: Final = 128
"""Items decoded or encoded in one go: some milliseconds of work."""
REST: Final = 2.0
"""A loop rests this many times as long as it worked: requests come first when changes come without end. What counts is
this thread's processor time: a busy machine makes work longer as it is, and resting for it would not make it less busy.
"""

log = logging.getLogger(__name__)


class Follower:
    """Runs the loops; ``run`` ends only by cancellation."""

    def __init__(
        self,
        items: ItemState,
        freshness: Freshness,
        store: AsyncStore,
        parameters: AsyncParameterClient,
        model_name: str,
        clock_ms: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        worked_s: Callable[[], float] = time.thread_time,
        arrived: Freshness | None = None,
    ) -> None:
        """``freshness``: of what is encoded; ``arrived``: of what has come here, encoded or not."""
        self._arrived = arrived
        self._items = items
        self._freshness = freshness
        self._store = store
        self._parameters = parameters
        self._model_name = model_name
        self._clock_ms = clock_ms
        self._sleep = sleep
        self._worked_s = worked_s
        self._changed = asyncio.Event()
        self._reached: dict[int, tuple[int, Watermarks]] = {}
        self._generation: int | None = None
        self.catalogue_loaded = False

    async def run(self) -> None:
        """All loops, until cancelled; a loop that fails starts again after a pause."""
        async with asyncio.TaskGroup() as group:
            for loop in (self._follow_store, self._follow_parameters, self._encode):
                group.create_task(self._again(loop))

    async def _again(self, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except (ParameterError, Problem) as error:
                log.warning("%s: %s", loop.__name__, error)
            except Exception:
                # A mistake in one change must not leave the API blind to all that follow.
                log.exception("%s failed and starts again", loop.__name__)
            await self._sleep(RETRY_S)

    async def _follow_store(self) -> None:
        cursor = 0
        store = self._store.blocking
        while True:
            before_s = self._worked_s()
            ids, cursor = await self._store.call(partial(store.changes, ENTITY, cursor, PAGE))
            for start in range(0, len(ids), SLICE):
                some = ids[start : start + SLICE]
                cells = await self._store.read([EntityKey(ENTITY, one) for one in some])
                self._items.apply_cells(some, cells, self._clock_ms())
                self._changed.set()
            if len(ids) < PAGE:
                self.catalogue_loaded = True
                await self._sleep(self._pause_s(POLL_S, before_s))

    async def _follow_parameters(self) -> None:
        async with aclosing(self._parameters.follow(self._model_name, (RETRIEVAL, RANKING))) as stream:
            async for changes in stream:
                for table, (keys, rows) in changes.parts.items():
                    self._items.apply_rows(table, keys, rows)
                await self._follow_generation(changes)
                if changes.complete:
                    self._reached[changes.shard] = (changes.shards, changes.watermarks)
                    if self._arrived is not None:
                        self._arrived.advance(changes.shard, changes.shards, changes.watermarks)
                self._changed.set()

    async def _follow_generation(self, changes: ShardChanges) -> None:
        if changes.generation is None or changes.generation == self._generation:
            return
        dense = await self._parameters.dense(self._model_name)
        self._generation = dense.generation
        self._items.begin(dense)

    async def _encode(self) -> None:
        pause_s = LINGER_S
        while True:
            if not self._items.building:
                await self._changed.wait()
            await self._sleep(pause_s)
            before_s = self._worked_s()
            self._changed.clear()
            try:
                await self._fetch_unknown()
            except ParameterError:
                self._changed.set()  # what was not encoded now still has to be
                raise
            reached, self._reached = self._reached, {}
            while self._items.encode_served(SLICE, self._clock_ms()):
                await self._sleep(0)
            for shard, (shards, marks) in reached.items():
                self._freshness.advance(shard, shards, marks)
            # A slice a round: a large new generation must not hold up what is served.
            self._items.build_next(SLICE, self._clock_ms())
            pause_s = self._pause_s(LINGER_S, before_s)

    def _pause_s(self, least_s: float, before_s: float) -> float:
        """Long enough that a loop takes a share of the processor at most, however much there is to do."""
        return max(least_s, REST * (self._worked_s() - before_s))

    async def _fetch_unknown(self) -> None:
        """Rows that no change stream brought: of keys that the catalogue has only just come to know."""
        keys = self._items.rows.unknown()
        if len(keys):
            # The index claims what the leaders' change streams claim, so these rows may not be older.
            pulled = await self._parameters.pull(
                self._model_name, {RETRIEVAL: keys, RANKING: keys}, followers=False, unasked=False
            )
            self._items.rows.fill(keys, pulled.rows)
