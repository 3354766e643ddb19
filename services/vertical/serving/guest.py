"""A guest's end of joint inference: asks every host within a deadline, and answers with its own part past it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from federated.psi.ids import IdRule
from federated.vertical.parties import PeerFault
from federated.vertical.tables import Table
from services.rpc.aio import AsyncRpcClient
from services.rpc.calls import Outgoing
from services.rpc.errors import QueueFull, RemoteFailure, RpcError
from services.rpc.security import KeyPair, Security
from services.vertical.network import Peer
from services.vertical.serving.host import METHOD, Ask, Share
from services.vertical.serving.tokens import Naming

Array = npt.NDArray[Any]
LATE: Final = "late"
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_shares = msgspec.msgpack.Decoder(Share)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of N ids. ``found``: bool [N], whether the guest has the row. ``scores``: [N] or [N, C], NaN where it has not.
    ``degraded``: bool [N], scored by the guest's part alone. ``hosts``: what became of each host's question."""

    found: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float64]
    degraded: npt.NDArray[np.bool_]
    hosts: Mapping[str, str]


class ServingGuest:
    """``part`` is the guest's (``GuestPart``), ``table`` its rows; each of ``hosts`` has an address."""

    def __init__(
        self, keys: KeyPair, hosts: Mapping[str, Peer], part: Any, run: str, table: Table, rule: IdRule
    ) -> None:
        self._part, self._run, self._table, self._rule = part, run, table, rule
        self._hosts = dict(hosts)
        self._names = {name: Naming(keys, peer.key, rule) for name, peer in hosts.items()}
        self._rows = {rule.apply(one): row for row, one in enumerate(table.ids)}
        self._clients = {name: AsyncRpcClient(Security(peer.key, keys)) for name, peer in hosts.items()}

    async def answer(self, ids: Sequence[str], deadline_s: float, request_id: str) -> Answer:
        """Scores of ``ids``; the hosts' shares where all came within ``deadline_s``. Raises IdRefused."""
        until_s = time.monotonic() + deadline_s
        places = np.array([self._rows.get(self._rule.apply(one), -1) for one in ids], np.int64)
        found = places >= 0
        known = [one for one, here in zip(ids, found.tolist(), strict=True) if here]
        features = self._table.features[places[found]]
        told = await asyncio.gather(
            *(self._ask(name, known, until_s - time.monotonic(), request_id) for name in self._hosts)
        )
        outcomes = {name: outcome for name, (outcome, _, _) in zip(self._hosts, told, strict=True)}
        shares = {name: (here, share) for name, (_, here, share) in zip(self._hosts, told, strict=True)}
        scores, alone = await asyncio.to_thread(self._combine, features, shares, outcomes)
        whole = np.full((len(ids), *scores.shape[1:]), np.nan)
        whole[found] = scores
        degraded = np.zeros(len(ids), np.bool_)
        degraded[found] = alone
        return Answer(found, whole, degraded, outcomes)

    async def _ask(
        self, name: str, ids: Sequence[str], timeout_s: float, request_id: str
    ) -> tuple[str, Array, Array]:
        """Outcome, which rows are there [n], their share."""
        nothing = np.zeros(len(ids), np.bool_), np.empty(0)
        address = self._hosts[name].address
        if not ids or address is None or timeout_s <= 0:
            return ("not asked" if not ids else LATE), *nothing
        body = _encoder.encode(Ask(self._run, request_id))
        try:
            reply = await self._clients[name].call(
                address, Outgoing(METHOD, body, (self._names[name].array(ids),)), timeout_s
            )
            if _shares.decode(reply.body).run != self._run:
                return "another-model", *nothing
            here, share = reply.arrays
            if here.shape != (len(ids),) or here.dtype != np.bool_ or len(share) != int(here.sum()):
                raise ValueError("a share of another form")
            if share.dtype.kind == "f" and not np.isfinite(share).all():
                raise ValueError("a share that is not finite")
        except RemoteFailure as error:
            return error.code[:32], *nothing
        except RpcError as error:
            _log.warning("%s: %s", name, error)
            if isinstance(error, QueueFull):
                # What waits for one that died is late already; the next request starts afresh.
                self._clients[name].forget(address)
            return LATE, *nothing
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError) as error:
            _log.warning("%s answered what is no share: %s", name, error)
            return "malformed", *nothing
        return "answered", here, share

    def _combine(
        self,
        features: npt.NDArray[np.float64],
        shares: Mapping[str, tuple[Array, Array]],
        outcomes: dict[str, str],
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Scores [n] or [n, C] and which are of the guest alone [n]."""
        together = np.ones(len(features), np.bool_)
        for here, _ in shares.values():
            together &= here
        scores: npt.NDArray[np.float64] = np.array(self._part.alone(features), np.float64)
        if together.any():
            partials = {name: share[together[here]] for name, (here, share) in shares.items()}
            try:
                scores[together] = self._part.combine(features[together], partials)
            except PeerFault as fault:
                _log.warning("%s", fault)
                outcomes[fault.peer] = "malformed"
                together[:] = False
                scores = np.array(self._part.alone(features), np.float64)
        return scores, ~together

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
