"""Which replica of each shard to read from. No I/O; time and randomness are passed in."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

from services.coordination.shardmap import ShardMap
from services.settings.model import ParameterSettings

Reads = Literal["leader", "any"]
AVOID_S: Final = 2.0
"""For this long no server is asked that did not answer, or holds no whole copy, where another can be."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a client reads rows: from whom, and how many ``cached_rows`` of each table it keeps (0: none), which it uses
    without asking for ``cache_age_s`` (0: never)."""

    reads: Reads = "leader"
    cached_rows: int = 0
    cache_age_s: float = 0.0

    @staticmethod
    def of(settings: ParameterSettings) -> Reading:
        """As the settings say."""
        return Reading(settings.reads, settings.cached_rows, settings.cache_age)


FROM_LEADERS: Final = Reading()


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to ask, by shard. ``spared``: the servers that need not answer, as others hold all that they are asked
    for."""

    servers: tuple[str, ...]
    spared: frozenset[str]


class Readers:
    """Spreads reads over the replicas of each shard, but for those that failed lately. Any thread may use it."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        shuffle: Callable[[list[str]], None] = random.shuffle,
    ) -> None:
        self._monotonic, self._shuffle = monotonic, shuffle
        self._avoided: dict[str, float] = {}

    def avoid(self, server: str) -> None:
        """``server`` did not answer, or could not."""
        now = self._monotonic()
        # Names come from shard maps, and the expired ones go: there are never more than servers.
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        self._avoided[server] = now + AVOID_S

    def choose(self, shards: ShardMap, there: Collection[str]) -> Choice:
        """A replica of each shard, among those that are ``there``; its leader where there is none.

        The first in a random order of the servers: so each replica of a shard is as likely as the others, and few
        servers are asked at once.
        """
        now = self._monotonic()
        order = list({name for place in shards.places for name in place.replicas})
        self._shuffle(order)
        rank = {name: at for at, name in enumerate(order)}
        servers = []
        needed = set()
        for place in shards.places:
            able = [name for name in place.replicas if name in there and self._avoided.get(name, 0.0) <= now]
            chosen = min(able, key=rank.__getitem__, default=place.leader)
            servers.append(chosen)
            if len(able) < 2:
                needed.add(chosen)
        return Choice(tuple(servers), frozenset(servers) - needed)
