"""When the API is ready: dependencies reached, items and model loaded, one list made to warm up."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from typing import Final

from services.api.behind import Behind
from services.api.context import Api
from services.api.health import Check, Dependency, HealthRoutes
from services.api.reach import Reach
from services.api.serving.queries import Query
from services.api.serving.stack import Serving
from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Registration
from services.messagelog.contract import LogError, MessageLog, TopicPartition
from services.topics import EVENTS

LOOK_S: Final = 0.1
WARM_UP_S: Final = 10.0

log = logging.getLogger(__name__)


class Readiness:
    """The checks behind ``/health/ready``."""

    def __init__(
        self,
        api: Api,
        serving: Serving,
        events: MessageLog,
        coordination: Coordination,
        reach: Reach,
        behind: Behind,
    ) -> None:
        self._api = api
        self._serving = serving
        self._events = events
        self._coordination = coordination
        self._reach = reach
        self._behind = behind
        self._warm = False

    def checks(self) -> Mapping[str, Check]:
        """By name of the dependency."""
        return {
            "log": self._log,
            "features": self._features,
            "coordination": self._coordinated,
            "parameters": self._parameters,
            "items": self._items,
            "model": self._model,
            "warm_up": self._warmed,
        }

    async def announce(self, registration: Registration) -> None:
        """Warm up when there is something to warm up with, then say ready in the registry."""
        health = HealthRoutes(self.checks(), self._api.metrics, self._api.settings.region.name)
        while not self._warm:
            if (await self._items()).ok and (await self._model()).ok:
                deadline_s = asyncio.get_running_loop().time() + WARM_UP_S
                await self._serving.recommender.recommend(Query(user_id=None, deadline_s=deadline_s))
                self._warm = True
            await asyncio.sleep(LOOK_S)
        while (await health.state()).status != "ready":
            await asyncio.sleep(LOOK_S)
        # What was loaded stays: the collector need not walk a whole catalogue again and again.
        gc.collect()
        gc.freeze()
        try:
            await asyncio.to_thread(registration.update, ready=True)
        except CoordinationError as error:
            log.warning("cannot say that this process is ready: %s", error)
        log.info("ready")

    async def _log(self) -> Dependency:
        try:
            end = await asyncio.to_thread(self._events.end_offset, TopicPartition(EVENTS, 0))
        except LogError as error:
            log.warning("the event log is not well: %s", error)
            return Dependency(False, "the event log cannot be reached")
        return Dependency(True, f"partition 0 ends at {end}")

    async def _features(self) -> Dependency:
        await self._api.store.scan("item", "", 1)
        return Dependency(True, "answers")

    async def _coordinated(self) -> Dependency:
        try:
            await asyncio.to_thread(self._coordination.get, "members/api/")
        except CoordinationError as error:
            log.warning("coordination is not well: %s", error)
            return Dependency(False, "coordination cannot be reached")
        return Dependency(True, "answers")

    async def _parameters(self) -> Dependency:
        return self._behind.judge(await self._reach.check())

    async def _items(self) -> Dependency:
        count = len(self._serving.items.catalogue)
        loaded = self._serving.follower.catalogue_loaded
        return Dependency(loaded, f"{count} items" if loaded else f"loading, {count} items so far")

    async def _model(self) -> Dependency:
        version = self._serving.recommender.model_version
        if version is None:
            return Dependency(False, "no parameter server has given a model yet")
        return Dependency(True, version)

    async def _warmed(self) -> Dependency:
        return Dependency(self._warm, "warmed up" if self._warm else "not warmed up yet")
