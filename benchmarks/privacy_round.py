"""An iteration of secure aggregation of which this process knows every secret: one client and the servers' work are
real, what the other clients say is made without its costs.

So a complete graph of 500 clients is measured without computing 250,000 agreements first. Vectors are of one block
here: what long ones cost is measured by itself and multiplied (``privacy_secagg``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

import numpy as np

from federated.secagg import messages as wire
from federated.secagg.client import SECRET_BYTES, Client
from federated.secagg.keys import AgreementKey, open_sealed, seal
from federated.secagg.roster import Context, commitment
from federated.secagg.server import Board, Unmasking, check_advertising
from federated.secagg.settings import Plan
from federated.secagg.shamir import SHARE_BYTES, split_many
from federated.secagg.stages import Stage

CONTEXT: Final = Context("benchmark", 1)
P = ParamSpec("P")
T = TypeVar("T")


class Watch:
    """Adds up the seconds of what goes through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        since = time.perf_counter()
        found = work(*args, **kwargs)
        self.seconds += time.perf_counter() - since
        return found


@dataclass(frozen=True, slots=True)
class ClientCost:
    """Of a client whose vector is ``body`` bytes of ``up``."""

    seconds: float
    up: int
    down: int
    body: int


@dataclass(frozen=True, slots=True)
class ServerCost:
    """``found`` are the masks that servers have to expand, and how many agreements that took."""

    seconds: float
    found: Unmasking


class Iteration:
    """The largest iteration of a semi-honest plan. The client at position 0 is real, and did its part in ``client``,
    with everybody surviving."""

    def __init__(self, plan: Plan) -> None:
        if plan.malicious:
            raise ValueError("the clients made up here sign nothing")
        self.plan, self._everybody = plan, range(plan.most)
        names = [f"client-{position:05d}" for position in self._everybody]
        self._seeds = [os.urandom(SECRET_BYTES) for _ in names]
        self._sealing = [AgreementKey() for _ in names]
        self._masking = [AgreementKey() for _ in names]
        client, watch = Client(plan, CONTEXT, names[0]), Watch()
        first = watch(client.advertise)
        self._advertised = [
            first,
            *(
                wire.Advertisement(sealing.public, masking.public).to_bytes()
                for sealing, masking in zip(self._sealing[1:], self._masking[1:], strict=True)
            ),
        ]
        self._entries = tuple(
            wire.RosterEntry(position, name, wire.read_as(wire.Advertisement, body))
            for position, (name, body) in enumerate(zip(names, self._advertised, strict=True))
        )
        board = self._board()
        self._shares = {sender: self._split(board, sender) for sender in self._everybody[1:]}
        roster = board.roster(0)
        shared = _some(watch(client.receive, roster))
        self._shares[0] = self._opened(board, shared)
        self._sharings = {0: shared, **{s: self._sharing(board, s) for s in self._everybody[1:]}}
        self._close_sharing(board)
        delivery = board.delivery(0)
        watch(client.receive, delivery)
        body = watch(client.mask, np.zeros(plan.length, np.int64))
        board.survivors = board.shared
        survived = board.survived()
        unmasking = _some(watch(client.receive, survived))
        up = sum(map(len, (first, shared, body, unmasking)))
        self.client = ClientCost(watch.seconds, up, len(roster) + len(delivery) + len(survived), len(body))

    def servers(self, dropped: int) -> ServerCost:
        """All that servers do but for adding vectors and masks up and for keeping what they are sent, when the last
        ``dropped`` clients vanish after they shared."""
        watch = Watch()
        for entry, body in zip(self._entries, self._advertised, strict=True):
            watch(check_advertising, self.plan, CONTEXT, None, entry.name, body)
        board = watch(self._board)
        for position in self._everybody:
            watch(board.roster, position)
        for sender, body in self._sharings.items():
            watch(board.check, Stage.SHARE, sender, body)
        self._close_sharing(board)
        for position in self._everybody:
            watch(board.delivery, position)
        survivors = self._everybody[: len(self._everybody) - dropped]
        board.survivors = wire.bitmap(survivors, self.plan.most)
        unmaskings = {holder: self._unmasking(board, holder, survivors) for holder in survivors}
        for holder, body in unmaskings.items():
            watch(board.survived)
            watch(board.check, Stage.UNMASK, holder, body)
        found = watch(board.masks, unmaskings)
        return ServerCost(watch.seconds, found)

    def _board(self) -> Board:
        return Board(self.plan, CONTEXT, self._entries)

    def _close_sharing(self, board: Board) -> None:
        board.sharings, board.shared = self._sharings, wire.bitmap(self._everybody, self.plan.most)

    # What the made-up clients say.

    def _split(self, board: Board, sender: int) -> dict[int, tuple[bytes, bytes]]:
        """The shares of both secrets of ``sender``, by holder."""
        holders = board.around[sender].holders
        secrets = [self._seeds[sender], self._masking[sender].seed]
        own, masking = split_many(secrets, self.plan.threshold, [holder + 1 for holder in holders])
        return dict(zip(holders, zip(own, masking, strict=True), strict=True))

    def _sharing(self, board: Board, sender: int) -> bytes:
        """Sealed in truth for the real client alone: servers open nothing."""
        sealed = tuple(
            self._sealed(board, sender) if holder == 0 else bytes(wire.SEALED_BYTES)
            for holder in board.around[sender].holders
        )
        return wire.Sharing(
            commitment(CONTEXT, self._entries[sender].name, self._seeds[sender]), sealed
        ).to_bytes()

    def _sealed(self, board: Board, sender: int) -> bytes:
        one, other = self._entries[sender].name, self._entries[0].name
        return seal(
            self._pair(sender),
            b"".join(self._shares[sender][0]),
            CONTEXT.of("shares", one, other) + board.root,
        )

    def _opened(self, board: Board, body: bytes) -> dict[int, tuple[bytes, bytes]]:
        """The real client's shares, as its holders read them."""
        opened = {}
        sealed = wire.read_as(wire.Sharing, body).sealed
        for holder, one in zip(board.around[0].holders, sealed, strict=True):
            bound = CONTEXT.of("shares", self._entries[0].name, self._entries[holder].name) + board.root
            plain = open_sealed(self._pair(holder), one, bound)
            opened[holder] = (plain[:SHARE_BYTES], plain[SHARE_BYTES:])
        return opened

    def _pair(self, position: int) -> bytes:
        entry, real = self._entries[position], self._entries[0]
        context = CONTEXT.pair("seal", entry.name, real.name)
        return self._sealing[position].agree(real.advertisement.sealing, context)

    def _unmasking(self, board: Board, holder: int, survivors: range) -> bytes:
        shares = tuple(
            self._shares[sender][holder][sender not in survivors] for sender in board.around[holder].origins
        )
        return wire.Unmasking(shares).to_bytes()


def _some(body: bytes | None) -> bytes:
    assert body is not None
    return body
