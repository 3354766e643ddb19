"""Where the parameter servers are and what they hold, as coordination says; kept until it proves stale."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Final

import msgspec

from services.coordination.contract import Coordination, CoordinationError
from services.coordination.membership import Member, members
from services.coordination.shardmap import ShardMap, read_shard_map
from services.parameter_server.client.routing import Route
from services.parameter_server.declarations import Declaration, read_declaration
from services.parameter_server.types import ModelUnknown

SERVICE: Final = "parameter-server"
_log = logging.getLogger(__name__)


class MapMissing(CoordinationError):
    """No server has written the shard map yet."""


class Directory:
    """A cache over coordination. What is not cached yet is read, which blocks; any thread may use it."""

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination
        self._map: ShardMap | None = None
        self._members: dict[str, Member] | None = None
        self._declarations: dict[str, Declaration] = {}

    def map(self) -> ShardMap:
        """The shard map. Raises MapMissing, CoordinationError."""
        found = self._map or read_shard_map(self.coordination)
        if found is None:
            raise MapMissing("no parameter server has started yet: there is no shard map")
        self._map = found
        return found

    def servers(self) -> tuple[str, ...]:
        """The servers that lead a shard. Raises MapMissing, CoordinationError."""
        return tuple(sorted(set(self.map().servers)))

    def everyone(self) -> tuple[str, ...]:
        """The servers that lead a shard, and all others that are registered. Raises MapMissing,
        CoordinationError."""
        return tuple(sorted({*self.map().servers, *self.refresh()}))

    def route(self, model: str) -> Route:
        """Where the rows of ``model`` live. Raises ModelUnknown, MapMissing, CoordinationError."""
        found = self._declarations.get(model) or read_declaration(self.coordination, model)
        if found is None:
            raise ModelUnknown(f"model {model} is not declared yet; a trainer does so when it starts")
        self._declarations[model] = found
        return Route(found, self.map())

    def declarations(self) -> list[Declaration]:
        """The models that were asked for so far."""
        return list(self._declarations.values())

    def member(self, server: str) -> Member | None:
        """The registered process of ``server``, as last read; None where there is none."""
        return (self.refresh() if self._members is None else self._members).get(server)

    def registered(self) -> Collection[str]:
        """The names of all servers that are registered, as last read."""
        return self.refresh() if self._members is None else self._members

    def address(self, server: str) -> str:
        """Where ``server`` is reached, or an empty text."""
        found = self.member(server)
        return "" if found is None else found.address

    def refresh(self) -> dict[str, Member]:
        """Read the members anew; if coordination cannot be reached, what was known stays."""
        try:
            self._members = {member.name: member for member in members(self.coordination, SERVICE)}
        except CoordinationError as error:
            _log.warning("coordination cannot be asked now: %s", error)
        return self._members or {}

    def cached(self, model: str | None) -> bool:
        """Whether everything about ``model`` (or beside models) is known, so that nothing blocks."""
        known = model is None or model in self._declarations
        return known and self._map is not None and self._members is not None

    def load(self, model: str | None) -> None:
        """Read what ``cached`` asks for. Raises what ``route`` raises."""
        self.map()
        if model is not None:
            self.route(model)
        if self._members is None:
            self.refresh()

    def map_changed(self) -> bool:
        """Read the map anew: whether it is another than the one that was planned by. What cannot be read has
        not changed."""
        before = self._map
        try:
            now = read_shard_map(self.coordination)
        except CoordinationError as error:
            _log.warning("coordination cannot be asked now: %s", error)
            return False
        if now is None or (before is not None and now.epoch == before.epoch):
            return False
        self._map = now
        return before is not None

    def look_again(self) -> None:
        """Read the members and the map anew; what cannot be read stays."""
        self.refresh()
        self.map_changed()

    def forget_map(self) -> None:
        """Read the shard map anew next time: a server said that a shard is not its own."""
        self._map = None


def same_process(one: Member | None, other: Member | None) -> bool:
    """Whether two looks at a member show one process; readiness aside."""
    if one is None or other is None:
        return one is other
    return msgspec.structs.replace(one, ready=True) == msgspec.structs.replace(other, ready=True)
