"""How both clients read rows: from whom, and through which cache. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from services.parameter_server.client import operations
from services.parameter_server.client.caching import open_cache
from services.parameter_server.client.directory import Directory
from services.parameter_server.client.hotkeys import HotCounts
from services.parameter_server.client.operations import Operation
from services.parameter_server.client.readers import Readers, Reading
from services.parameter_server.client.routing import Route
from services.parameter_server.types import Keys, Pulled


class Pulls:
    """Plans the pulls of one client. Any thread may use it."""

    def __init__(
        self, directory: Directory, reading: Reading, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.readers = Readers(monotonic)
        self._directory = directory
        self._reads_any = reading.reads == "any"
        self._cache = open_cache(reading, monotonic)

    @property
    def counts(self) -> HotCounts:
        """What the client's cache of rows did so far."""
        return HotCounts() if self._cache is None else self._cache.counts

    def plan(
        self, keys: Mapping[str, Keys], followers: bool | None, unasked: bool
    ) -> Callable[[Route], Operation[Pulled]]:
        """What to ask of a route for ``keys [N]`` per table; ``followers`` and ``unasked`` as the clients have them."""
        anyone = self._reads_any if followers is None else followers

        def of(route: Route) -> Operation[Pulled]:
            choice = self.readers.choose(route.map, self._directory.registered()) if anyone else None
            return operations.pull(route, keys, choice, self._cache, unasked=unasked)

        return of
