"""A bound on what one client may store in one iteration, kept in memory by the cohort, never by the population."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MOST_BODIES: Final = 4
"""Different bodies that a client may bring to one server in one iteration: an honest one brings one."""
_ITERATIONS: Final = 64


class Attempts:
    """Counts the different bodies of each client of the newest iterations. For one thread."""

    def __init__(self, most: int = MOST_BODIES) -> None:
        self._most = most
        self._seen: OrderedDict[int, dict[str, set[bytes]]] = OrderedDict()

    def allow(self, iteration: int, client: str, digest: bytes) -> bool:
        """Whether ``client``, whose ticket was checked, may store this body."""
        if iteration not in self._seen:
            self._seen[iteration] = {}
            while len(self._seen) > _ITERATIONS:
                del self._seen[min(self._seen)]
        seen = self._seen.get(iteration, {}).setdefault(client, set())
        if digest not in seen and len(seen) >= self._most:
            return False
        seen.add(digest)
        return True

    def __len__(self) -> int:
        return sum(len(clients) for clients in self._seen.values())
