"""A device's part of secure aggregation in one iteration: the stages between its requests, without I/O.

The secrets of an iteration are in memory only. A device that ends in mid-iteration counts as one that dropped out, and
takes part again from the next iteration on; a masked upload that it had kept may still be handed in. A request that was
lost is sent again with the same bytes, to whichever server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from federated.client_http import Answer, Call
from federated.device import Update
from federated.payload import EncodedUpdate
from federated.secagg.quantise import Integers, Perturb
from federated.secagg.stages import Stage
from federated.secagg.updates import MaskedUpdates

if TYPE_CHECKING:
    from federated.secagg.client import Client, Identity

TICKET = "X-Ticket"
_HEAD_BYTES, _CLIENT_BYTES = (
    64,
    600,
)  # of a message, and in it of each client: a name, keys and signatures, a leaf


class ServerDistrusted(RuntimeError):
    """The server does not keep to the protocol of secure aggregation: this device has stopped, and says why."""


class RoundLost(RuntimeError):
    """Another client, or the server, has spoilt this iteration for this device: it tells nothing more in it, and takes
    part again in the next."""


_SPOILT = frozenset({"bad_sealed", "flooded", "too_few_holders", "too_few_signatures"})
"""Rules that other clients may have broken, or those who dropped out, which cannot be told from the server's doing."""


class Next(Enum):
    """What follows an answer."""

    CALL = "call"  # the next request
    WAIT = "wait"  # the others are not there yet: ask again later
    MASK = "mask"  # it is time to train and to hand in the masked vector
    OVER = "over"  # the device has done its part


@dataclass(frozen=True)
class SecureTerms:
    """What a job says about masks. ``registrar`` is the public key of who certifies signing keys, ``identity`` this
    device's (both None unless the job holds against malicious servers). Whether the others are there is asked about
    every ``pause_s``."""

    masked: MaskedUpdates
    pause_s: float
    identity: Identity | None = None
    registrar: bytes | None = None


class SecureRound:
    """One iteration of one device. ``path`` is that of its requests; ``ticket`` was given for the iteration."""

    def __init__(
        self, client: Client, stages: Sequence[Stage], path: str, iteration: int, ticket: bytes
    ) -> None:
        self.iteration = iteration
        self._client = client
        self._stages = stages
        self._path = f"{path}/secure/{iteration}"
        self._headers = {TICKET: ticket.hex()}
        self._place = 0
        self._delivered = False
        self._answer: bytes | None = client.advertise()  # None: what it answers has to be fetched first

    @property
    def stage(self) -> Stage:
        """The stage that is being answered."""
        return self._stages[self._place]

    def call(self) -> Call:
        """The request that is due: a message to fetch, or the answer to it."""
        path = f"{self._path}/{self.stage.name.lower()}"
        if self._answer is None:
            return Call("GET", path, b"", self._headers)
        return Call("POST", path, self._answer, self._headers)

    def received(self, answer: Answer) -> Next:
        """The request was answered well. Raises ServerDistrusted for what an honest server cannot have sent, RoundLost
        for what another client may have spoilt, and MessageRefused for bytes that are no message."""
        from federated.secagg.client import ServerCheats

        if self._answer is not None:
            return self._forth()
        if answer.status == 204:
            return Next.WAIT
        try:
            self._answer = self._client.receive(answer.body)
        except ServerCheats as error:
            if error.rule in _SPOILT:
                raise RoundLost(str(error)) from error
            raise ServerDistrusted(
                f"the server breaks the protocol of secure aggregation: {error}"
            ) from error
        if self._answer is None:
            self._delivered = True
            return Next.MASK
        return Next.CALL

    @property
    def masking(self) -> bool:
        """Whether the masked vector is what the servers wait for."""
        return self._delivered and self.stage is Stage.MASKED

    def mask(self, values: Integers, about: bytes) -> bytes:
        """The body of the upload for ``values`` int64 [L], learned from what ``about`` is the digest of."""
        return self._client.mask(values, about=about)

    def uploaded(self) -> Next:
        """The masked vector is counted."""
        return self._forth()

    @property
    def most_reply(self) -> int:
        """The longest answer to a request of a stage."""
        return _HEAD_BYTES + self._client.plan.most * _CLIENT_BYTES

    def close(self) -> None:
        """Forget the secrets."""
        self._client.close()

    def _forth(self) -> Next:
        self._answer = None
        self._place += 1
        if self._place < len(self._stages):
            return Next.CALL
        self.close()
        return Next.OVER


def mask_update(
    terms: SecureTerms,
    current: SecureRound,
    update: Update,
    sent: EncodedUpdate,
    about: bytes,
    perturb: Perturb | None = None,
) -> tuple[Update, EncodedUpdate]:
    """``update``, of which servers would read ``sent``, as an upload that tells nothing by itself: how much the device
    learned from, and how well, is in the masked sum alone. ``about``: the ``start_digest`` of what it started from.
    Raises ValuesRefused."""
    ring = terms.masked.ring_update(replace(update, vectors=sent.decoded), current.iteration, perturb)
    told = Update(update.vectors, 1, 1, 0.0)
    return told, EncodedUpdate(current.mask(ring.values, about), ring.read, sent.residuals)


def begin_round(
    terms: SecureTerms, job: str, name: str, path: str, iteration: int, ticket: bytes
) -> SecureRound:
    """A new iteration, with new secrets. Raises ImportError on a device without the package `cryptography`."""
    from federated.secagg.client import Client
    from federated.secagg.roster import Context

    plan = terms.masked.plan
    client = Client(plan, Context(job, iteration), name, terms.identity, terms.registrar)
    return SecureRound(client, plan.stages, path, iteration, ticket)
