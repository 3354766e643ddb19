"""A client of secure aggregation: messages in, messages out. It holds its secrets and tells them to nobody.

    ServerCheats   the server broke the protocol, or what reached the client through it was changed; the client has
                   dropped its secrets and says why

What a client gives away is decided here and nowhere else: for each neighbour one share, of the kind that one set of
survivors says, once. Whatever a server asks, in whatever order, it gets no more than that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from federated.secagg import messages as wire
from federated.secagg import roster as common
from federated.secagg.keys import (
    AgreementKey,
    Certificate,
    CertificateRefused,
    KeyRefused,
    SealRefused,
    SignatureRefused,
    SigningKey,
    open_sealed,
    seal,
    verify,
)
from federated.secagg.masks import add_masks
from federated.secagg.messages import Advertisement, RosterEntry
from federated.secagg.roster import Context, Neighbourhood
from federated.secagg.settings import Plan
from federated.secagg.shamir import SHARE_BYTES, ShareRefused, split_many
from federated.secagg.stages import Stage

SECRET_BYTES: Final = 32
Draw = Callable[[int], bytes]


class ServerCheats(RuntimeError):
    """The client stops: its secrets are gone. ``rule`` is stable.

    own_key, roster_size, position, duplicate_name, duplicate_key, changed_leaf, unsigned_key, bad_certificate,
    bad_signature, bad_key, graph, flooded, changed_roster, too_few_sharers, too_few_holders, not_among_sharers,
    wrong_delivery, bad_sealed, changed_survivors, too_few_survivors, not_a_survivor, survivor_never_shared,
    too_few_signatures, foreign_signature, changed_request, out_of_order
    """

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Identity:
    """Against a malicious server: the client's key, and the registrar's word for it.

    All rests on the registrar. A server that is the registrar, too, can certify keys of its own under any name, sit
    between all clients, and so learn every vector: keep the two apart, or give devices a list of keys that somebody
    else vouches for.
    """

    signing: SigningKey = field(repr=False)
    certificate: Certificate


@dataclass(slots=True)
class _Secrets:
    """What must never be told: both keys, the seed of the own mask, the shares held for others."""

    sealing: AgreementKey
    masking: AgreementKey
    seed: bytes
    held: dict[int, bytes] = field(default_factory=dict)
    pairs: dict[int, bytes] = field(default_factory=dict)  # keys of sealed shares, by neighbour


class Client:
    """One client in one iteration.

    ``advertise``, then ``receive`` every message of the server and send back what it gives; when it gives None, the
    neighbours' shares are in and ``mask`` may be called, once. A repeated message gets the same answer.

    ``name`` is the client's id; ``identity`` and ``registrar`` (a public key) are for malicious plans. ``draw`` is the
    operating system's randomness, anything else is for tests. Raises ValueError for a malicious plan without them.
    """

    def __init__(
        self,
        plan: Plan,
        context: Context,
        name: str,
        identity: Identity | None = None,
        registrar: bytes | None = None,
        draw: Draw = os.urandom,
    ) -> None:
        if plan.malicious and (identity is None or registrar is None):
            raise ValueError(
                "against a malicious server a client needs its identity and the registrar's public key"
            )
        self.plan = plan
        self.context = context
        self.name = name
        self._identity, self._registrar, self._draw = identity, registrar, draw
        self._secrets: _Secrets | None = _Secrets(
            AgreementKey(draw(SECRET_BYTES)), AgreementKey(draw(SECRET_BYTES)), draw(SECRET_BYTES)
        )
        self._own = self._advertisement()
        self._due: tuple[type[wire.Message], ...] = (wire.Roster,)
        self._answers: dict[type[wire.Message], tuple[bytes, bytes | None]] = {}
        self._masked = False
        self._clients = self._position = 0
        self._root = self._shared = self._survivors = b""
        self._leaves: tuple[bytes, ...] = ()
        self._entries: dict[int, RosterEntry] = {}
        self._around = Neighbourhood((), ())
        self._sharers: tuple[int, ...] = ()

    @property
    def stage(self) -> Stage:
        """What the client sends next; DONE after the last, FAILED once it has stopped."""
        if self._secrets is None:
            return Stage.DONE if not self._due else Stage.FAILED
        kind = self._due[0]
        if kind is wire.Roster and self.plan.choosing:
            return Stage.CHOOSE
        if kind is wire.Survivors:
            if not self._masked:
                return Stage.MASKED
            return Stage.CONSISTENT if self.plan.malicious else Stage.UNMASK
        return _ANSWERED[kind]

    def close(self) -> None:
        """Drop all secrets: nothing more can be answered."""
        self._secrets = None

    def advertise(self) -> bytes:
        """The first message: the same each time."""
        return self._own.to_bytes()

    def receive(self, message: bytes) -> bytes | None:
        """The answer to ``message``; None when the client is ready to ``mask``. Raises ServerCheats (the client stops),
        MessageRefused for bytes that are no message, and RuntimeError once it has stopped."""
        read = wire.read_message(message)
        kind, digest = type(read), hashlib.blake2b(message, digest_size=32).digest()
        if kind in self._answers:
            before, answer = self._answers[kind]
            if before != digest:
                self._stop("changed_request", f"another {kind.__name__} than before")
            return answer
        secrets = self._alive()
        if kind not in self._due:
            self._stop("out_of_order", f"{kind.__name__} where {self._due_names()} is due")
        answer = self._answer(read, secrets)
        self._answers[kind] = (digest, answer)
        if not self._due and self._masked:
            self.close()
        return answer

    def mask(self, values: npt.NDArray[np.int64], threads: int = 1, about: bytes = b"") -> bytes:
        """``values`` int64 [L] masked: the body of the upload. Once only, since two vectors under one mask give their
        difference away: keep the body until it is counted. Masks cancel among those who say the same ``about``: the
        model that their values came of. Else a server could give all but one a model of which it knows what they will
        send, and read that one's values from the sum. Raises RuntimeError at any other time, ValueError for another
        length and RingRefused for a value that does not fit."""
        secrets, ring = self._alive(), self.plan.ring
        if self._masked or self._due != (wire.Survivors,):
            raise RuntimeError(
                "masked already" if self._masked else "the neighbours' shares have not arrived"
            )
        if values.shape != (self.plan.length,):
            raise ValueError(f"a vector of shape {list(values.shape)}, not [{self.plan.length}]")
        words = ring.of(values)
        seeds = [(secrets.seed, 1)]
        for other in sorted(set(self._around.partners).intersection(self._sharers)):
            entry = self._entries[other]
            agreed = self._agree(secrets.masking, entry, entry.advertisement.masking, "mask", about)
            seeds.append((agreed, 1 if self._position < other else -1))
        add_masks(words, seeds, ring, threads)
        self._masked = True
        return ring.pack(words)

    # One method per message; each ends by saying what is due next.

    def _answer(self, read: wire.Message, secrets: _Secrets) -> bytes | None:
        if isinstance(read, wire.Roster):
            return self._roster(read, secrets)
        if isinstance(read, wire.Neighbours):
            return self._neighbours(read, secrets)
        if isinstance(read, wire.Delivery):
            self._delivery(read, secrets)
            return None
        if isinstance(read, wire.Survivors):
            return self._survived(read, secrets)
        assert isinstance(read, wire.Signatures)
        return self._signatures(read, secrets)

    def _roster(self, read: wire.Roster, secrets: _Secrets) -> bytes:
        plan, clients = self.plan, read.clients
        if not plan.least <= clients <= plan.most:
            self._stop("roster_size", f"{clients} clients, {plan.least} to {plan.most} are planned")
        self._clients, self._position = clients, read.position
        if plan.complete:
            if [entry.position for entry in read.entries] != list(range(clients)) or read.leaves:
                self._stop("roster_size", f"{len(read.entries)} entries of {clients} clients")
            self._leaves = tuple(
                common.leaf(self.context, entry.name, entry.advertisement) for entry in read.entries
            )
        else:
            if len(read.leaves) != clients:
                self._stop("roster_size", f"{len(read.leaves)} leaves of {clients} clients")
            self._leaves = read.leaves
        if len({leaf[: wire.TAG_BYTES] for leaf in self._leaves}) != clients:
            self._stop("duplicate_name", "a client stands twice in the roster")
        if self._leaves[read.position] != common.leaf(self.context, self.name, self._own):
            self._stop("own_key", "the roster has other keys of this client than it advertised")
        self._root = common.root_of(self.context, self._leaves)
        if plan.choosing:
            if read.entries:
                self._stop("graph", "the server chose neighbours")
            self._around = Neighbourhood(self._choose(clients), ())
            self._due = (wire.Neighbours,)
            return wire.Choice(self._around.holders).to_bytes()
        if plan.complete:
            self._around = common.complete(clients, read.position)
            entries = [entry for entry in read.entries if entry.position != read.position]
        else:
            row = common.regular(plan, clients, self._root)[read.position]
            self._around = Neighbourhood(row, row)
            entries = list(read.entries)
        self._take(entries)
        return self._share(secrets)

    def _choose(self, clients: int) -> tuple[int, ...]:
        """Neighbours drawn uniformly by the client, so that nobody can surround it."""
        others = [other for other in range(clients) if other != self._position]
        # Fisher and Yates, by 16 bytes a draw: the bias is below 2**-112.
        for place in range(min(self.plan.degree_of(clients), len(others))):
            swap = place + int.from_bytes(self._draw(16)) % (len(others) - place)
            others[place], others[swap] = others[swap], others[place]
        return tuple(sorted(others[: self.plan.degree_of(clients)]))

    def _neighbours(self, read: wire.Neighbours, secrets: _Secrets) -> bytes:
        if read.clients != self._clients:
            self._stop("changed_roster", f"{read.clients} clients, before {self._clients}")
        most = min(
            self._clients - 1,
            common.CHOSEN_BY_MOST * self.plan.degree_of(self._clients) + common.CHOSEN_SPARE,
        )
        if self._position in read.choosers:
            self._stop("graph", "this client is said to have chosen itself")
        if len(read.choosers) > most:
            self._stop(
                "flooded",
                f"{len(read.choosers)} clients are said to have chosen this one, at most {most} can",
            )
        self._around = Neighbourhood(self._around.holders, read.choosers)
        self._take(read.entries)
        return self._share(secrets)

    def _take(self, entries: Sequence[RosterEntry]) -> None:
        """Check the neighbours' entries: who they should be, that they are the roster's, their signatures."""
        if tuple(entry.position for entry in entries) != self._around.partners:
            self._stop("graph", "the entries are not those of this client's neighbours")
        known: set[bytes] = {self._own.sealing, self._own.masking}
        if len({entry.name for entry in entries} | {self.name}) != len(entries) + 1:
            self._stop("duplicate_name", "two neighbours have one name")
        for entry in entries:
            advertisement = entry.advertisement
            if common.leaf(self.context, entry.name, advertisement) != self._leaves[entry.position]:
                self._stop("changed_leaf", f"{entry.name} is not as the roster was closed")
            pair = {advertisement.sealing, advertisement.masking}
            if len(pair) != 2 or pair & known:
                self._stop("duplicate_key", f"a key of {entry.name} is used twice")
            known |= pair
            if self.plan.malicious:
                self._check_signature(entry)
        self._entries = {entry.position: entry for entry in entries}

    def _check_signature(self, entry: RosterEntry) -> None:
        advertisement, name = entry.advertisement, entry.name
        if not advertisement.signing:
            self._stop("unsigned_key", f"the keys of {name} are not signed")
        assert self._registrar is not None
        try:
            check_advertisement(self.context, self._registrar, name, advertisement)
        except CertificateRefused as error:
            self._stop("bad_certificate", f"{name}: {error}")
        except SignatureRefused as error:
            self._stop("bad_signature", f"the keys of {name}: {error}")

    def _share(self, secrets: _Secrets) -> bytes:
        holders = self._around.holders
        points = [holder + 1 for holder in holders]
        seeds = [secrets.seed, secrets.masking.seed]
        try:
            own, masking = split_many(seeds, self.plan.threshold, points, self._draw)
        except ShareRefused as error:
            self._stop("roster_size", str(error))
        sealed = []
        for holder, one, other in zip(holders, own, masking, strict=True):
            entry = self._entries[holder]
            sealed.append(seal(self._pair(secrets, entry), one + other, self._bound(self.name, entry.name)))
        self._due = (wire.Delivery,)
        return wire.Sharing(
            common.commitment(self.context, self.name, secrets.seed), tuple(sealed)
        ).to_bytes()

    def _delivery(self, read: wire.Delivery, secrets: _Secrets) -> None:
        sharers = wire.positions_of(read.shared, self._clients)
        if len(sharers) < self.plan.least:
            self._stop("too_few_sharers", f"{len(sharers)} shared, {self.plan.least} are needed")
        if self._position not in sharers:
            self._stop("not_among_sharers", "this client's shares are said to be missing")
        # The mask with those who are not said to have shared is left out: a server that names strangers alone would
        # have a vector under the client's own mask, which the true holders open. Of t holders one is honest and holds
        # to a set of survivors, by 2t > k + c.
        holding = len(set(self._around.holders).intersection(sharers))
        if holding < self.plan.threshold:
            self._stop(
                "too_few_holders",
                f"{holding} holders of this client's shares go on, {self.plan.threshold} are needed",
            )
        senders = sorted(set(self._around.origins).intersection(sharers))
        if len(read.sealed) != len(senders):
            self._stop("wrong_delivery", f"{len(read.sealed)} sealed shares of {len(senders)} senders")
        # A neighbour may have sealed rubbish, and nothing is given away by holding less: as many as may work against
        # the others are passed over. More than these the server changed.
        unreadable = []
        for sender, body in zip(senders, read.sealed, strict=True):
            entry = self._entries[sender]
            try:
                shares = open_sealed(self._pair(secrets, entry), body, self._bound(entry.name, self.name))
            except SealRefused:
                unreadable.append(entry.name)
                shares = wire.UNREADABLE * 2
            secrets.held[sender] = shares
        if len(unreadable) > self.plan.colluding:
            names = ", ".join(unreadable[:5])
            self._stop("bad_sealed", f"the shares of {names} were changed, or are not for this client")
        secrets.pairs.clear()
        self._sharers, self._shared = sharers, read.shared
        self._due = (wire.Survivors,)

    def _survived(self, read: wire.Survivors, secrets: _Secrets) -> bytes:
        if not self._masked:
            self._stop("out_of_order", "Survivors before this client's vector was sent")
        survivors = wire.positions_of(read.survivors, self._clients)
        if len(survivors) < self.plan.least:
            self._stop("too_few_survivors", f"{len(survivors)} survivors, {self.plan.least} are needed")
        if not set(survivors) <= set(self._sharers):
            self._stop("survivor_never_shared", "a survivor has not shared its secrets")
        if self._position not in survivors:
            self._stop("not_a_survivor", "asked to unmask a sum that this client is not in")
        self._survivors = read.survivors
        if not self.plan.malicious:
            return self._unmasking(secrets)
        assert self._identity is not None
        self._due = (wire.Signatures,)
        return wire.Consent(self._identity.signing.sign(self._agreement(self.name))).to_bytes()

    def _signatures(self, read: wire.Signatures, secrets: _Secrets) -> bytes:
        survivors = set(wire.positions_of(self._survivors, self._clients))
        holders = set(self._around.holders)
        for position, signature in read.signatures:
            if position not in holders or position not in survivors:
                self._stop("foreign_signature", f"a signature of {position}, who is no surviving holder")
            entry = self._entries[position]
            try:
                verify(entry.advertisement.signing, self._agreement(entry.name), signature)
            except SignatureRefused:
                self._stop("changed_survivors", f"{entry.name} did not sign this set of survivors")
        if len(read.signatures) < self.plan.threshold:
            self._stop(
                "too_few_signatures", f"{len(read.signatures)} signatures, {self.plan.threshold} are needed"
            )
        return self._unmasking(secrets)

    def _unmasking(self, secrets: _Secrets) -> bytes:
        survivors = set(wire.positions_of(self._survivors, self._clients))
        shares = tuple(
            pair[:SHARE_BYTES] if position in survivors else pair[SHARE_BYTES:]
            for position, pair in sorted(secrets.held.items())
        )
        self._due = ()
        return wire.Unmasking(shares).to_bytes()

    # What is bound to what.

    def _advertisement(self) -> Advertisement:
        secrets = self._alive()
        plain = Advertisement(secrets.sealing.public, secrets.masking.public)
        if not self.plan.malicious:
            return plain
        assert self._identity is not None
        certificate, signing = self._identity.certificate, self._identity.signing
        signature = signing.sign(common.advertised(self.context, self.name, plain))
        return Advertisement(
            plain.sealing, plain.masking, certificate.public, certificate.signature, signature
        )

    def _agreement(self, name: str) -> bytes:
        return common.agreed(self.context, name, self._root, self._shared, self._survivors)

    def _bound(self, sender: str, receiver: str) -> bytes:
        return self.context.of("shares", sender, receiver) + self._root

    def _pair(self, secrets: _Secrets, entry: RosterEntry) -> bytes:
        if entry.position not in secrets.pairs:
            secrets.pairs[entry.position] = self._agree(
                secrets.sealing, entry, entry.advertisement.sealing, "seal"
            )
        return secrets.pairs[entry.position]

    def _agree(
        self, own: AgreementKey, entry: RosterEntry, public: bytes, purpose: str, about: bytes = b""
    ) -> bytes:
        try:
            return own.agree(public, self.context.pair(purpose, self.name, entry.name) + about)
        except KeyRefused as error:
            self._stop("bad_key", f"a key of {entry.name}: {error}")

    def _alive(self) -> _Secrets:
        if self._secrets is None:
            raise RuntimeError("the client has stopped; its secrets are gone")
        return self._secrets

    def _due_names(self) -> str:
        return " or ".join(kind.__name__ for kind in self._due) or "nothing"

    def _stop(self, rule: str, detail: str) -> NoReturn:
        self.close()
        raise ServerCheats(rule, detail)


def check_advertisement(context: Context, registrar: bytes, name: str, advertisement: Advertisement) -> None:
    """Whether ``name`` itself advertised these keys in this iteration. Raises CertificateRefused, SignatureRefused."""
    certificate = Certificate(context.job, name, advertisement.signing, advertisement.certificate)
    certificate.check(registrar, context.job, name)
    plain = Advertisement(advertisement.sealing, advertisement.masking)
    verify(advertisement.signing, common.advertised(context, name, plain), advertisement.signature)


_ANSWERED: Final[dict[type[wire.Message], Stage]] = {
    wire.Roster: Stage.SHARE,
    wire.Neighbours: Stage.SHARE,
    wire.Delivery: Stage.MASKED,
    wire.Signatures: Stage.UNMASK,
}
