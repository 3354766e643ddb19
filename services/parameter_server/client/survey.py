"""All parameter servers at once, as a tool sees them: the map, who is registered, and what each says of itself.

Unlike a client's operations it waits for nobody: a server that is gone is what it is there to show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from services.coordination.contract import Coordination
from services.coordination.membership import Member, members
from services.coordination.shardmap import ShardMap, read_shard_map
from services.parameter_server.client import operations
from services.parameter_server.client.descriptions import ServerDescription
from services.parameter_server.client.directory import SERVICE, MapMissing
from services.parameter_server.messages import HeldShard
from services.rpc.client import RpcClient
from services.rpc.codec import Failure

ANSWER_S = 2.0
"""How long a server may take to describe itself."""


@dataclass(frozen=True, slots=True)
class Survey:
    """``servers``: what those said that answered, by name."""

    map: ShardMap
    members: Mapping[str, Member]
    servers: Mapping[str, ServerDescription]

    @property
    def silent(self) -> tuple[str, ...]:
        """Servers that are registered, or hold a shard by the map, and did not answer."""
        named = {server for place in self.map.places for server in place.replicas}
        return tuple(sorted((named | self.members.keys()) - self.servers.keys()))

    def led(self, shard: int) -> HeldShard | None:
        """The shard as its leader describes it; None where nobody who answers leads it."""
        claims = [
            held
            for server in self.servers.values()
            for held in server.held
            if held.shard == shard and held.leads
        ]
        # One that was deposed and does not know it yet has an older fence.
        return max(claims, key=lambda held: held.fence, default=None)


class Surveyor:
    """Looks at the servers that ``store`` knows."""

    def __init__(self, store: Coordination, rpc: RpcClient, answer_s: float = ANSWER_S) -> None:
        self.store = store
        self._rpc, self._answer_s = rpc, answer_s

    def look(self, names: Collection[str] | None = None) -> Survey:
        """The map, the members, and what the servers ``names`` (all by default) say. Raises MapMissing,
        CoordinationError."""
        found = read_shard_map(self.store)
        if found is None:
            raise MapMissing("no parameter server has started yet: there is no shard map")
        there = {member.name: member for member in members(self.store, SERVICE)}
        asked = {name: one for name, one in there.items() if names is None or name in names}
        return Survey(found, there, self._describe(asked))

    def _describe(self, asked: Mapping[str, Member]) -> dict[str, ServerDescription]:
        addresses = {name: member.address for name, member in asked.items()}
        operation = operations.describe(sorted(asked), addresses.__getitem__)
        requests = {addresses[name]: outgoing for name, outgoing in operation.requests.items()}
        answers = self._rpc.exchange(requests, self._answer_s)
        replies = {}
        for name, address in addresses.items():
            answer = answers.get(address)
            if answer is None:
                self._rpc.forget(address)
            elif not isinstance(answer, Failure):
                replies[name] = answer
        return {said.name: said for said in operation.merge(replies)}
