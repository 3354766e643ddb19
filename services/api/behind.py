"""How far this region's parameters are behind those of the regions that write them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from services.api.health import Dependency
from services.coordination.contract import CoordinationError
from services.parameter_server.client.syncs import RegionSync
from services.parameter_server.syncing.contests import contest
from services.parameter_server.syncing.status import StatusReply

EVERY_S: Final = 1.0
"""How often the parameter servers are asked: no more often does an idle source say that it has nothing new."""
ANSWER_S: Final = 1.0
LEVEL_S: Final = 2.5
"""A region of which no more is known than this long ago is level: so often its source, and its servers, say so."""

log = logging.getLogger(__name__)


class Behind:
    """Since when each shard of ``model`` that another region writes is not level with it, as ``region`` knows.

    What was level once falls behind while nobody says more of it: its leader may have changed, or be gone. A shard
    that no server ever saw level counts from when it was first heard of, which is the least that can be said.
    ``max_behind_s``: how far behind is too far (0: nothing is).
    """

    def __init__(
        self, model: str, region: str, max_behind_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._model, self._region, self._max_behind_s, self._clock_s = model, region, max_behind_s, clock_s
        self._level_s: dict[int, float] = {}
        """By shard: when it was level the last time, at the earliest when it was first heard of."""
        self._never: set[int] = set()
        self._sources: tuple[str, ...] = ()
        self._told = False
        self._contest = ""
        """Why what other regions learn does not come at all, if it does not."""

    @property
    def behind_s(self) -> float | None:
        """Seconds since the shard furthest behind was level; None where this region writes all itself."""
        if not self._level_s:
            return None
        return max(0.0, self._clock_s() - min(self._level_s.values()))

    def outdated(self) -> bool:
        """Whether this region is further behind than it may be."""
        behind_s = self.behind_s
        return bool(self._max_behind_s) and behind_s is not None and behind_s > self._max_behind_s

    def hear(self, servers: Collection[StatusReply]) -> None:
        """Take in what the region's parameter servers say."""
        now_s = self._clock_s()
        if servers:
            upstreams = (one for server in servers for one in server.upstreams if one.contested)
            self._contest = next((contest(one.contested, self._region, one.region) for one in upstreams), "")
        for server in servers:
            for shard in server.written:
                self._level_s.pop(shard, None)
                self._never.discard(shard)
            if server.followed:
                named = {one.region for one in server.upstreams if one.region and one.wanted}
                self._sources = tuple(sorted(named)) or self._sources
            for one in server.followed:
                if one.model == self._model:
                    self._hear_shard(one.shard, one.behind_s, now_s)
        self._tell()

    def _hear_shard(self, shard: int, behind_s: float | None, now_s: float) -> None:
        if behind_s is None:
            if shard not in self._level_s:
                self._level_s[shard] = now_s
                self._never.add(shard)
            return
        level_s = now_s - behind_s
        if shard in self._never:
            self._never.remove(shard)
            self._level_s[shard] = level_s
        # A new leader may not know of a time when the one before was level.
        self._level_s[shard] = max(level_s, self._level_s.get(shard, level_s))

    def judge(self, reached: Dependency) -> Dependency:
        """The parameter servers' health: ``reached``, and how far behind they are where they answer."""
        behind_s = self.behind_s
        if reached.ok and self._contest:
            return Dependency(False, self._contest)
        if behind_s is None or not reached.ok:
            return reached
        if self.outdated():
            return Dependency(False, self._cause(behind_s))
        level = behind_s < LEVEL_S and not self._never
        return Dependency(True, f"{reached.detail}, {'level' if level else self._amount(behind_s)}")

    def _amount(self, behind_s: float) -> str:
        return f"{'at least ' if self._never else ''}{behind_s:.0f} s behind"

    def _cause(self, behind_s: float) -> str:
        sources = ", ".join(self._sources) or "its upstreams"
        return (
            f"region {self._region}: {self._amount(behind_s)} (sync.max_behind is {self._max_behind_s:g} s):"
            f" look at the link from {sources} with `headwater sync status`"
        )

    def _tell(self) -> None:
        """Log that the region is too far behind, and that it no longer is, once each."""
        outdated, behind_s = self.outdated(), self.behind_s
        if outdated and not self._told and behind_s is not None:
            log.warning("%s", self._cause(behind_s))
        elif self._told and not outdated:
            log.info("region %s has caught up", self._region)
        self._told = outdated


async def watch(behind: Behind, ask: Callable[[], Awaitable[RegionSync]], every_s: float = EVERY_S) -> None:
    """Keep ``behind`` told of what ``ask`` finds, until cancelled."""
    while True:
        try:
            found = await ask()
        except CoordinationError as error:
            # The check of coordination says so, too; meanwhile the region falls behind.
            log.debug("the parameter servers cannot be found: %s", error)
            behind.hear(())
        else:
            behind.hear(found.servers.values())
        await asyncio.sleep(every_s)
