"""What all parameter servers of a region say of their part between regions, as a tool or an API asks them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from services.coordination.contract import Coordination
from services.coordination.membership import members
from services.parameter_server.client.directory import SERVICE
from services.parameter_server.messages import pack, unpack
from services.parameter_server.syncing.status import STATUS, StatusReply, StatusRequest
from services.rpc.aio import AsyncRpcClient
from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Failure, Reply
from services.rpc.errors import NoAnswer, QueueFull, RemoteFailure

ANSWER_S = 2.0
"""How long a server may take to answer."""
_ASKED: Final = Outgoing(STATUS, pack(StatusRequest()))


@dataclass(frozen=True, slots=True)
class RegionSync:
    """One region. ``servers``: by name, what those said that answered; ``silent``: the others."""

    servers: dict[str, StatusReply]
    silent: tuple[str, ...]


def ask_region(store: Coordination, rpc: RpcClient, answer_s: float = ANSWER_S) -> RegionSync:
    """Ask every server that is registered in ``store``. Raises CoordinationError."""
    there = _addresses(store)
    answers = rpc.exchange(dict.fromkeys(there, _ASKED), answer_s) if there else {}
    for address in there:
        if answers.get(address) is None:
            rpc.forget(address)
    return _read(there, answers)


async def ask_region_aio(store: Coordination, rpc: AsyncRpcClient, answer_s: float = ANSWER_S) -> RegionSync:
    """``ask_region`` from an event loop, which it does not block."""
    there = await asyncio.to_thread(_addresses, store)

    async def ask(address: str) -> Reply | None:
        try:
            return await rpc.call(address, _ASKED, answer_s)
        except RemoteFailure:
            return None
        except (NoAnswer, QueueFull):
            rpc.forget(address)
            return None

    answers = await asyncio.gather(*(ask(address) for address in there))
    return _read(there, dict(zip(there, answers, strict=True)))


def _addresses(store: Coordination) -> dict[str, str]:
    return {member.address: member.name for member in members(store, SERVICE)}


def _read(there: Mapping[str, str], answers: Mapping[str, Reply | Failure | None]) -> RegionSync:
    servers = {}
    for address, name in there.items():
        answer = answers.get(address)
        if isinstance(answer, Reply):
            try:
                servers[name] = unpack(answer.body, StatusReply)
            except msgspec.DecodeError:
                continue
    silent = tuple(sorted(set(there.values()) - servers.keys()))
    return RegionSync(dict(sorted(servers.items())), silent)
