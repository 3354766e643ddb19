"""What all parameter servers of a region say of their part between regions, as a tool asks them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.coordination.contract import Coordination
from services.coordination.membership import members
from services.parameter_server.client.directory import SERVICE
from services.parameter_server.messages import pack, unpack
from services.parameter_server.syncing.status import STATUS, StatusReply, StatusRequest
from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Failure

ANSWER_S = 2.0
"""How long a server may take to answer."""


@dataclass(frozen=True, slots=True)
class RegionSync:
    """One region. ``servers``: by name, what those said that answered; ``silent``: the others."""

    servers: dict[str, StatusReply]
    silent: tuple[str, ...]


def ask_region(store: Coordination, rpc: RpcClient, answer_s: float = ANSWER_S) -> RegionSync:
    """Ask every server that is registered in ``store``. Raises CoordinationError."""
    there = {member.address: member.name for member in members(store, SERVICE)}
    outgoing = Outgoing(STATUS, pack(StatusRequest()))
    answers = rpc.exchange(dict.fromkeys(there, outgoing), answer_s) if there else {}
    servers = {}
    for address, name in there.items():
        answer = answers.get(address)
        if answer is None:
            rpc.forget(address)
        elif not isinstance(answer, Failure):
            try:
                servers[name] = unpack(answer.body, StatusReply)
            except msgspec.DecodeError:
                continue
    silent = tuple(sorted(set(there.values()) - servers.keys()))
    return RegionSync(dict(sorted(servers.items())), silent)
