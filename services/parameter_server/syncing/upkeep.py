"""What the owner of shards forgets from time to time, as everybody has it: graves, and writers that are gone.

Whoever turns out not to have had something gets a full replacement; so this is a matter of cost, never of safety.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from services.parameter_server.host import Host
from sync.exchange import Feeds
from sync.shard import Shard

EVERY_S: Final = 30.0
GRAVE_AGE_S: Final = 60.0
"""Younger graves stay: readers of changes who have not seen one that is forgotten read everything again."""
_log = logging.getLogger(__name__)


class Upkeep:
    """``member_timeout_s``: a region that was silent for so long does not count. For as long after the start nothing is
    forgotten: who it is that pulls here is not known before. ``allowed``: whether a shard may take a step now."""

    def __init__(
        self,
        host: Host,
        feeds: Feeds,
        allowed: Callable[[int], bool],
        member_timeout_s: float,
        monotonic: Callable[[], float],
        every_s: float = EVERY_S,
        grave_age_s: float = GRAVE_AGE_S,
    ) -> None:
        self.graves_total = 0
        self.retired_total = 0
        self._host, self._feeds, self._allowed, self._monotonic = host, feeds, allowed, monotonic
        self._every_s, self._grave_age_us = every_s, round(grave_age_s * 1e6)
        self._due_s = monotonic() + member_timeout_s

    def turn(self) -> bool:
        """Do what is due. Whether anything was forgotten."""
        now = self._monotonic()
        if now < self._due_s:
            return False
        self._due_s = now + self._every_s
        forgotten = False
        for name, held in list(self._host.all_held()):
            number = held.shard.shard_id
            if number in self._host.fences and self._host.writes(number) and self._allowed(number):
                forgotten = self._look(name, held.shard, now) or forgotten
        return forgotten

    def _look(self, model: str, shard: Shard, now_s: float) -> bool:
        held = self._feeds.held_by_all((model, shard.shard_id), shard.knowledge, now_s)
        # First, since collect takes no grave as long as an owner of an older fence may come back with writes.
        retired = shard.retire(shard.epoch, held)
        self.retired_total += retired
        if retired:
            _log.info("shard %d of %s: writers before fence %d retired", shard.shard_id, model, shard.epoch)
        before_us = max(shard.clock.physical_us() - self._grave_age_us, 0)
        graves = shard.collect({writer: min(time, before_us) for writer, time in held.items()})
        self.graves_total += graves
        return graves > 0 or retired
