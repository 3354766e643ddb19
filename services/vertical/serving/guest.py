"""A guest's end of joint inference: asks every host within a deadline, and answers with its own part past it.

What becomes of a question to a host (``OUTCOMES``): ``answered``; ``late``; ``away`` (not heard for seconds, so not
waited for); ``not-asked`` (no row to ask for, or another host is away, without whom its share is of no use);
``malformed`` (its answer is no share of this request); ``unusable`` (shares that together give no finite score);
``another-model``; ``too-many``; ``busy``; ``refused`` (any other failure).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

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
from services.vertical.serving.host import HELLO, METHOD, Ask, Hello, Share
from services.vertical.serving.parts import Loaded, Parts
from services.vertical.serving.reach import AWAY_S, LOOK_S, Reach
from services.vertical.serving.tokens import Naming, value_of

Array = npt.NDArray[Any]
T = TypeVar("T")
OUTCOMES: Final = (
    "answered", "late", "away", "not-asked", "malformed", "unusable", "another-model", "too-many", "busy", "refused",
)  # fmt: skip
NOT_THERE: Final = "not-there"
"""Why a row was scored by the guest alone though every host answered: a host does not know the id."""
_OF_CODES: Final = {"late": "late", "another-model": "another-model", "too-many": "too-many", "busy": "busy"}
INLINE: Final = 512
"""Ids that are named on the event loop; more are named in a thread, so that others' deadlines are kept."""
MOST_RUN: Final = 256
NONCE_BYTES: Final = 16
_UNDECODABLE: Final = (
    msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError, IndexError, OverflowError,
)  # fmt: skip
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_shares = msgspec.msgpack.Decoder(Share)
_hellos = msgspec.msgpack.Decoder(Hello)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of N ids. ``found``: bool [N], whether the guest has the row. ``scores``: [N] or [N, C], NaN where it has not.
    ``degraded``: bool [N], scored by the guest's part alone. ``hosts``: what became of each host's question.
    ``missing``: of each host that answered, bool [N], the rows that it has not. ``run``: whose model answered."""

    found: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float64]
    degraded: npt.NDArray[np.bool_]
    hosts: Mapping[str, str]
    missing: Mapping[str, npt.NDArray[np.bool_]]
    run: str


class Observed(Protocol):
    """Is told how long a host took, and what became of the question."""

    def __call__(self, host: str, outcome: str, seconds: float) -> None: ...


@dataclass(slots=True)
class _Host:
    """What the guest has of one host."""

    address: str
    naming: Naming
    client: AsyncRpcClient
    reach: Reach


@dataclass(frozen=True, slots=True)
class _Told:
    """A host's answer for n rows. ``here``: bool [n]; ``share``: [rows that are here, ...]."""

    outcome: str
    here: npt.NDArray[np.bool_]
    share: Array = field(default_factory=lambda: np.empty(0))


class ServingGuest:
    """``parts`` are the guest's (``GuestPart``), ``table`` its rows; each of ``hosts`` has an address.

    ``longest_s``: how long an answer may take at most; a host is not called away before.
    """

    def __init__(
        self,
        keys: KeyPair,
        hosts: Mapping[str, Peer],
        parts: Parts,
        table: Table,
        rule: IdRule,
        *,
        longest_s: float = 0.0,
        observe: Observed = lambda host, outcome, seconds: None,
    ) -> None:
        self._parts, self._table, self._observe = parts, table, observe
        self._rows = {value_of(one, rule): row for row, one in enumerate(table.ids)}
        self._hosts: dict[str, _Host] = {}
        for name, peer in hosts.items():
            assert peer.address is not None
            client = AsyncRpcClient(Security(peer.key, keys))
            reach = Reach(max(AWAY_S, longest_s))
            self._hosts[name] = _Host(peer.address, Naming(keys, peer.key, rule), client, reach)

    @property
    def reach(self) -> Mapping[str, Reach]:
        """What is known of each host."""
        return {name: host.reach for name, host in self._hosts.items()}

    @property
    def loaded(self) -> Loaded:
        """The part that answers now: of the newest run that all hosts have, as far as they told."""
        told = (host.reach.runs for host in self._hosts.values())
        return self._parts.common(runs for runs in told if runs is not None)

    async def watch(self) -> None:
        """Ask every host again and again how it is, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._hosts:
                group.create_task(self._watch(name), name=f"watch-{name}")

    async def _watch(self, name: str) -> None:
        while True:
            began_s = time.monotonic()
            await self.look(name)
            await asyncio.sleep(max(0.0, began_s + LOOK_S - time.monotonic()))

    async def look(self, name: str) -> None:
        """Ask one host how it is."""
        host = self._hosts[name]
        was_away = host.reach.away
        try:
            reply = await host.client.call(host.address, Outgoing(HELLO, b""), LOOK_S)
            host.reach.told(tuple(run[:MOST_RUN] for run in _hellos.decode(reply.body).runs[:8]))
        except RemoteFailure as error:
            host.reach.refused(error.code[:32])
        except RpcError as error:
            host.reach.missed()
            if host.reach.away:
                if not was_away:
                    _log.warning("%s is away: %s", name, error)
                # What waits there for one that is gone would be answered, and counted, when nobody wants it any more.
                host.client.forget(host.address)
        except _UNDECODABLE:
            host.reach.refused("malformed")
        if was_away and not host.reach.away:
            _log.info("%s is heard", name)

    async def answer(self, values: Sequence[bytes], deadline_s: float, request_id: str) -> Answer:
        """Scores of ids in their normalised form; with the hosts' shares where all came within ``deadline_s``."""
        until_s = time.monotonic() + deadline_s
        loaded = self.loaded
        places = np.array([self._rows.get(one, -1) for one in values], np.int64)
        found = places >= 0
        known = [one for one, here in zip(values, found.tolist(), strict=True) if here]
        features = self._table.features[places[found]]
        asked = await asyncio.gather(
            *(self._ask(name, known, until_s, loaded.run, request_id) for name in self._hosts)
        )
        told = dict(zip(self._hosts, asked, strict=True))
        outcomes = {name: one.outcome for name, one in told.items()}
        scores, alone = await asyncio.to_thread(_combine, loaded.part, features, told, outcomes)
        whole = np.full((len(values), *scores.shape[1:]), np.nan)
        whole[found] = scores
        degraded = np.zeros(len(values), np.bool_)
        degraded[found] = alone
        missing: dict[str, npt.NDArray[np.bool_]] = {}
        for name, one in told.items():
            if outcomes[name] == "answered":
                missing[name] = np.zeros(len(values), np.bool_)
                missing[name][found] = ~one.here
        return Answer(found, whole, degraded, outcomes, missing, loaded.run)

    async def _ask(
        self, name: str, values: Sequence[bytes], until_s: float, run: str, request_id: str
    ) -> _Told:
        host, nothing = self._hosts[name], np.zeros(len(values), np.bool_)
        if values and host.reach.away:
            self._observe(name, "away", 0.0)
            return _Told("away", nothing)
        if not values or any(other.reach.away for other in self._hosts.values()):
            return _Told("not-asked", nothing)
        began_s = time.monotonic()
        told = await self._question(name, host, values, until_s, run, request_id)
        self._observe(name, told.outcome, time.monotonic() - began_s)
        return told

    async def _question(
        self, name: str, host: _Host, values: Sequence[bytes], until_s: float, run: str, request_id: str
    ) -> _Told:
        nothing = np.zeros(len(values), np.bool_)
        ask = Ask(run, request_id, secrets.token_bytes(NONCE_BYTES))
        names = await off_loop(len(values), lambda: host.naming.array(values))
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return _Told("late", nothing)
        try:
            reply = await host.client.call(
                host.address, Outgoing(METHOD, _encoder.encode(ask), (names,)), left_s
            )
            host.reach.heard()
            share = _shares.decode(reply.body)
            if share.run != run:
                return _Told("another-model", nothing)
            return _checked(reply.arrays, len(values), share.nonce == ask.nonce)
        except RemoteFailure as error:
            host.reach.heard()
            _log.warning("%s refuses: %r", name, str(error)[:200])
            return _Told(_OF_CODES.get(error.code, "refused"), nothing)
        except RpcError as error:
            _log.warning("%s: %s", name, error)
            if isinstance(error, QueueFull):
                # What waits for one that died is late already; the next request starts afresh.
                host.client.forget(host.address)
            return _Told("late", nothing)
        except _UNDECODABLE as error:
            _log.warning("%s answered what is no share: %r", name, str(error)[:200])
            return _Told("malformed", nothing)

    def close(self) -> None:
        """Close all connections."""
        for host in self._hosts.values():
            host.client.close()


async def off_loop(count: int, work: Callable[[], T]) -> T:
    """What ``work`` on ``count`` ids gives: made here where they are few, else in a thread."""
    return work() if count <= INLINE else await asyncio.to_thread(work)


def _checked(arrays: tuple[Array, ...], count: int, same: bool) -> _Told:
    """The arrays of a share of ``count`` rows. Raises ValueError for what no honest host sends."""
    here, share = arrays
    if not same:
        raise ValueError("the share of another request")
    if here.shape != (count,) or here.dtype != np.bool_ or share.ndim < 1 or len(share) != int(here.sum()):
        raise ValueError("a share of another form")
    if share.dtype.kind == "f" and not np.isfinite(share).all():
        raise ValueError("a share that is not finite")
    return _Told("answered", here, share)


def _combine(
    part: Any, features: npt.NDArray[np.float64], told: Mapping[str, _Told], outcomes: dict[str, str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Scores [n] or [n, C] and which are of the guest alone [n]. ``outcomes`` changes where a share is not used."""
    together = np.ones(len(features), np.bool_)
    for one in told.values():
        together &= one.here
    scores: npt.NDArray[np.float64] = np.array(part.alone(features), np.float64)
    if not together.any():
        return scores, ~together
    partials = {name: one.share[together[one.here]] for name, one in told.items()}
    try:
        joint = np.asarray(part.combine(features[together], partials), np.float64)
        if np.isfinite(joint).all():
            scores[together] = joint
            return scores, ~together
        _log.warning("the shares of %s give scores that are not finite", ", ".join(partials))
        outcomes |= dict.fromkeys(partials, "unusable")
    except PeerFault as fault:
        _log.warning("%s", fault)
        outcomes[fault.peer] = "malformed"
    return scores, np.ones(len(features), np.bool_)
