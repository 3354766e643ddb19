"""What regions on one machine are given once and keep over restarts: their numbers, and the ports at which others look
for them before they run."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

MAX_NUMBER: Final = 255
_PORTS: Final = range(20_000, 32_000)
"""Below the ports that systems hand out to outgoing connections: such a one could take a server's while it restarts."""
_TRIES: Final = 1_000


class Places(msgspec.Struct, frozen=True):
    """``numbers`` by region, ``ports`` by process (or by link)."""

    numbers: dict[str, int] = {}
    ports: dict[str, int] = {}


def port_is_free(host: str, port: int) -> bool:
    """Whether a process could listen at ``port`` of ``host`` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a former run that linger do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(slots=True)
class PlaceBook:
    """Gives out what is not given yet. ``free(host, port)`` says whether a port could be taken; ``places`` is all that
    was given so far, also to regions that do not run now."""

    places: Places
    free: Callable[[str, int], bool] = port_is_free
    draw: Callable[[int, int], int] = random.randrange
    _now: dict[str, int] = field(default_factory=dict)

    def number(self, region: str, home: int) -> int:
        """The number of ``region``, which no other had, and which is not that of the home region. Raises ValueError
        where there is none left, or where home's is another's."""
        numbers = self.places.numbers
        found = numbers.get(region)
        if found is None:
            found = 1 + max((home, *numbers.values()))
            if found > MAX_NUMBER:
                raise ValueError(f"no number is left for region {region}: they end at {MAX_NUMBER}")
            self.places = Places({**numbers, region: found}, self.places.ports)
        if found == home:
            raise ValueError(f"{home} is the number of region {region}, which has data here")
        return found

    def port(self, name: str, host: str, wished: int = 0) -> int:
        """A port for ``name``: the one that it had, if nobody else has it now; else ``wished`` or, where that is taken,
        one after it (0: any). Raises OSError (EADDRINUSE) where none is free."""
        taken = set(self._now.values())
        for port in self._candidates(name, wished):
            if port not in taken and self.free(host, port):
                self._now[name] = port
                self.places = Places(self.places.numbers, {**self.places.ports, name: port})
                return port
        raise OSError(errno.EADDRINUSE, f"no port for {name} is free at {host}")

    def _candidates(self, name: str, wished: int) -> Iterator[int]:
        kept: Mapping[str, int] = self.places.ports
        if name in kept:
            yield kept[name]
        if wished:
            yield from range(wished, min(wished + _TRIES, 65_536))
        else:
            # Another's kept port is left to it, though it may not run now.
            others = {port for other, port in kept.items() if other != name}
            drawn = (self.draw(_PORTS.start, _PORTS.stop) for _ in range(_TRIES))
            yield from (port for port in drawn if port not in others)
