"""How the supervisor learns that a child is ready: from its entry in coordination and from the API itself."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.processes import SERVICES
from services.settings.checks import parse_address

if TYPE_CHECKING:
    from services.coordination.contract import Coordination
    from services.coordination.membership import Member


@dataclass(frozen=True, slots=True)
class Presence:
    """What is known of one registered process."""

    pid: int
    address: str
    ready: bool


class Probe(Protocol):
    """Says which processes are there, by name."""

    def __call__(self) -> Mapping[str, Presence]: ...


class MembershipProbe:
    """Reads the coordination store of each region, and asks an API that calls itself ready for ``/health/ready``."""

    def __init__(self, *stores: Coordination) -> None:
        self._stores = stores

    def __call__(self) -> Mapping[str, Presence]:
        from services.coordination.membership import members

        found: dict[str, Presence] = {}
        for store in self._stores:
            for service in SERVICES:
                for member in members(store, service):
                    found[member.name] = Presence(member.pid, member.address, _is_ready(service, member))
        return found


def _is_ready(service: str, member: Member) -> bool:
    return member.ready and (service != "api" or answers(member.address, "/health/ready"))


def answers(address: str, path: str, timeout_s: float = 2.0) -> bool:
    """Whether ``GET path`` at ``HOST:PORT`` (or a URL of it) is answered with 200."""
    try:
        where = parse_address(address.removeprefix("http://").rstrip("/"))
        with closing(http.client.HTTPConnection(where.host, where.port, timeout=timeout_s)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status == http.client.OK
    except (OSError, ValueError, http.client.HTTPException):
        return False
