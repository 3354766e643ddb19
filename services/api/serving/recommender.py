"""From a query to a list: read the person, pull their rows, recall, rank, re-rank; or fall back and say so.

Everything that waits (store, parameter servers, freshness) happens first, each under the request's deadline.
What follows is one stretch without awaits, so a list is made from one generation of dense weights, one state
of the index and one state of the catalogue. What is hidden, expired, seen or excluded is asked of the
catalogue inside that stretch and masks every channel, the padding and the fallback alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from featurestore.encoder import Encoder
from featurestore.online import Cell
from services.api.problems import Problem
from services.api.serving.choose import Chooser, Given
from services.api.serving.freshness import Freshness
from services.api.serving.items import ItemState
from services.api.serving.people import Person, load, person
from services.api.serving.queries import NewestEvent, Pick, Picks, Query
from services.api.store import AsyncStore
from services.catalogue import ITEM_KEYS, key_function
from services.parameter_server.client import AsyncParameterClient
from services.parameter_server.types import Mark, ParameterError, Pulled

T = TypeVar("T")

RESERVE_S: Final = 0.05
"""Kept back from waiting for freshness, so that a list that comes too early is still a proper one."""

log = logging.getLogger(__name__)


class Recommender:
    """Answers queries. Belongs to one event loop. ``outdated``: whether all parameters here are too old, so that
    whatever is made with them is ``degraded``."""

    def __init__(
        self,
        encoder: Encoder,
        items: ItemState,
        chooser: Chooser,
        freshness: Freshness,
        store: AsyncStore,
        parameters: AsyncParameterClient,
        model_name: str,
        clock_ms: Callable[[], int],
        outdated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._encoder = encoder
        self._items = items
        self._chooser = chooser
        self._freshness = freshness
        self._store = store
        self._parameters = parameters
        self._model_name = model_name
        self._clock_ms = clock_ms
        self._outdated = outdated
        self._hash_items = key_function(encoder, ITEM_KEYS)

    async def recommend(self, query: Query) -> Picks:
        """A list for ``query``; never fails for want of a dependency, but says ``degraded``."""
        given = await self._gather(query)
        chosen = self._chooser.recommend(query, given)
        return self._picks(query, given, chosen.picks, chosen.degraded, chosen.more, chosen.explanation)

    async def rank(self, query: Query, item_ids: tuple[str, ...]) -> Picks:
        """``item_ids`` (each once) in order; hidden ones left out, unknown ones last without a score."""
        given = await self._gather(query)
        chosen = self._chooser.rank(query, given, item_ids)
        return self._picks(query, given, chosen.picks, chosen.degraded, False, chosen.explanation)

    async def similar(self, query: Query, item_id: str) -> Picks:
        """Items near ``item_id``. Raises Problem unknown_item."""
        row = self._items.catalogue.row(item_id)
        if row is None:
            raise Problem("unknown_item")
        chosen = self._chooser.similar(query, row, self._clock_ms())
        return Picks(chosen.picks, chosen.degraded or self._outdated(), self.model_version)

    @property
    def model_version(self) -> str | None:
        """The model and dense generation that answers now; None before the first."""
        current = self._items.current
        return None if current is None else f"{self._model_name}-{current.dense.generation}"

    async def _gather(self, query: Query) -> Given:
        """All that has to be waited for."""
        late = False
        if query.min_freshness is not None:
            late = not await self._freshness.reached(query.min_freshness, self._patience_s(query))
        cells = await self._within(query, load(self._store, query.user_id))
        who = self._person(query, cells or {})
        pulled = (
            await self._within(query, self._pull(who, query)) if self._items.current is not None else None
        )
        hurry = asyncio.get_running_loop().time() > query.deadline_s
        missing = late or cells is None or pulled is None
        return Given(who, pulled, missing, hurry, self._clock_ms())

    def _person(self, query: Query, cells: Mapping[str, Cell]) -> Person:
        return person(
            self._encoder,
            query.user_id,
            cells,
            query.session,
            self._hash_items(query.session),
            self._clock_ms(),
        )

    async def _pull(self, who: Person, query: Query) -> Pulled:
        keys = self._items.model.user_keys(who.encoded)
        if query.min_freshness is None:
            return await self._parameters.pull(self._model_name, keys)
        # What the index contains its leaders contain; a follower's row, or a kept one, may be older.
        return await self._parameters.pull(self._model_name, keys, followers=False, unasked=False)

    async def _within(self, query: Query, waiting: Awaitable[T]) -> T | None:
        """What ``waiting`` gives, None where it fails for a known reason or not before the deadline."""
        try:
            async with asyncio.timeout_at(query.deadline_s):
                return await waiting
        except TimeoutError:
            return None
        except (Problem, ParameterError) as error:
            log.warning("a list is made without a dependency: %s", error)
            return None

    def _patience_s(self, query: Query) -> float:
        """How long to wait for freshness: what is left, less the time to make a list without it."""
        left_s = max(query.deadline_s - asyncio.get_running_loop().time(), 0.0)
        return left_s - min(RESERVE_S, left_s / 2)

    def _picks(
        self,
        query: Query,
        given: Given,
        picks: tuple[Pick, ...],
        degraded: bool,
        more: bool,
        explanation: Mapping[str, object],
    ) -> Picks:
        return Picks(
            picks,
            degraded or given.late or self._outdated(),
            self.model_version,
            self._as_of(given),
            _newest(given.person),
            given.person.audience,
            more,
            explanation if query.explain else {},
        )

    def _as_of(self, given: Given) -> Mark | None:
        """How far the parameters used have come on the user's partition; for nobody, the newest event
        over all partitions."""
        if given.pulled is None:
            return None
        marks = self._freshness.with_pulled(given.pulled.watermarks)
        marks = {partition: mark for partition, mark in marks.items() if mark.offset >= 0}
        user_id = given.person.user_id
        if user_id is not None:
            return marks.get(self._freshness.partition(user_id))
        return max(marks.values(), key=lambda mark: mark.accepted_at_ms, default=None)


def _newest(who: Person) -> NewestEvent | None:
    state = who.state
    if state is None or state.offset < 0:
        return None
    return NewestEvent(state.event_id, state.accepted_at_ms, state.partition, state.offset)
