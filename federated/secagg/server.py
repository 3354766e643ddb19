"""What servers make of the clients' messages: what each client is to get, and the sum without its masks.

    ClientRefused   a client's message breaks the protocol; it does not count, the others go on
    SumLost         too few shares, or a client that shared wrong ones: the masks of this sum cannot be taken off

A ``Board`` holds what the closed stages gathered. It is a pure function of that, so every server builds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from federated.secagg import messages as wire
from federated.secagg import roster as common
from federated.secagg.client import check_advertisement
from federated.secagg.decoding import decode
from federated.secagg.keys import AgreementKey, KeyRefused, verify
from federated.secagg.masks import add_masks
from federated.secagg.messages import MessageRefused, RosterEntry
from federated.secagg.ring import Words
from federated.secagg.roster import Context, Neighbourhood
from federated.secagg.settings import Plan
from federated.secagg.shamir import PRIME, SHARE_BYTES, Reconstructor, ShareRefused
from federated.secagg.stages import Stage

_SEALED_AT: Final = 1 + wire.COMMITMENT_BYTES + 2
_SHARES_AT: Final = 1 + 2
_MOST_TRIES: Final = 20
"""Sets of shares that are tried when some are wrong, before they are decoded."""

M = TypeVar("M", bound=wire.Message)
_Test = Callable[[bytes], bool]


class ClientRefused(ValueError):
    """``rule`` is stable: malformed, signed, bad_certificate, bad_signature, bad_key, choice, holders, shares."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class SumLost(RuntimeError):
    """The sum cannot be revealed."""


@dataclass(frozen=True, slots=True)
class Revealed:
    """The sum's ``words`` [L], and what it took. ``liars`` gave wrong shares; ``unread``: the shares that these dealt
    could not be opened by somebody, one of whom is at fault."""

    words: Words
    expansions: int
    agreements: int
    liars: tuple[str, ...]
    unread: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unmasking:
    """The masks to add to a sum, (seed, sign) each, and the rest of ``Revealed``."""

    seeds: tuple[tuple[bytes, int], ...] = field(repr=False)
    agreements: int
    liars: tuple[str, ...]
    unread: tuple[str, ...]


def check_advertising(
    plan: Plan, context: Context, registrar: bytes | None, name: str, body: bytes
) -> wire.Advertisement:
    """The keys in ``body``. Without ``registrar`` certificates are left to the clients. Raises ClientRefused."""
    read = _read(wire.Advertisement, body)
    if bool(read.signing) is not plan.malicious:
        raise ClientRefused("signed", "signed keys are for malicious plans, and needed there")
    if read.sealing == read.masking:
        raise ClientRefused("bad_key", "one key for both purposes")
    probe = AgreementKey(bytes(range(32)))
    try:
        for public in (read.sealing, read.masking):
            probe.agree(public, b"probe")
    except KeyRefused as error:
        raise ClientRefused("bad_key", str(error)) from None
    if plan.malicious and registrar is not None:
        try:
            check_advertisement(context, registrar, name, read)
        except KeyRefused as error:
            raise ClientRefused("bad_signature", str(error)) from None
    return read


@dataclass
class Board:
    """One iteration on one server: filled stage by stage, each once it is closed.

    ``entries``: the roster; ``around``: everybody's neighbours, by position; ``sharings``: bodies by position.
    """

    plan: Plan
    context: Context
    entries: tuple[RosterEntry, ...]
    around: Mapping[int, Neighbourhood] = field(default_factory=dict)
    shared: bytes = b""
    survivors: bytes = b""
    sharings: Mapping[int, bytes] = field(default_factory=dict)
    _whole: bytes = field(default=b"", repr=False)
    _places: dict[int, dict[int, int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.leaves = tuple(
            common.leaf(self.context, entry.name, entry.advertisement) for entry in self.entries
        )
        self.root = common.root_of(self.context, self.leaves)
        if not self.plan.choosing:
            self.around = self._drawn()

    @property
    def clients(self) -> int:
        """n."""
        return len(self.entries)

    def choose(self, choices: Mapping[int, bytes]) -> None:
        """CHOOSE is over: what the clients chose, by position."""
        self.around = common.chosen(
            {position: _read(wire.Choice, body).holders for position, body in choices.items()}, self.clients
        )

    # What a client's message must be.

    def check(self, stage: Stage, position: int, body: bytes) -> None:
        """Raises ClientRefused unless ``body`` may be what the client at ``position`` answers to ``stage``."""
        if stage is Stage.CHOOSE:
            holders, due = _read(wire.Choice, body).holders, self.plan.degree_of(self.clients)
            if len(holders) != due or position in holders or holders[-1] >= self.clients:
                raise ClientRefused("choice", f"{len(holders)} neighbours, {due} others are to be chosen")
        elif stage is Stage.SHARE:
            found, due = len(_read(wire.Sharing, body).sealed), len(self.around[position].holders)
            if found != due:
                raise ClientRefused("holders", f"shares for {found} holders, there are {due}")
        elif stage is Stage.CONSISTENT:
            entry = self.entries[position]
            signed = common.agreed(self.context, entry.name, self.root, self.shared, self.survivors)
            try:
                verify(entry.advertisement.signing, signed, _read(wire.Consent, body).signature)
            except KeyRefused as error:
                raise ClientRefused("bad_signature", str(error)) from None
        elif stage is Stage.UNMASK:
            shares, due = _read(wire.Unmasking, body).shares, len(self._senders(position))
            if len(shares) != due:
                raise ClientRefused("shares", f"{len(shares)} shares, {due} were given to this client")
            if any(int.from_bytes(share) >= PRIME and share != wire.UNREADABLE for share in shares):
                raise ClientRefused("shares", "a share is no number below the prime")
        else:
            raise ValueError(f"{stage.name} is not checked here")

    # What a client gets.

    def roster(self, position: int) -> bytes:
        """The first thing that the client at ``position`` gets."""
        if self.plan.complete:
            if not self._whole:
                self._whole = wire.Roster(self.clients, 0, (), self.entries).to_bytes()
            return wire.Roster.moved(self._whole, position)
        partners = () if self.plan.choosing else self.around[position].partners
        entries = tuple(self.entries[other] for other in partners)
        return wire.Roster(self.clients, position, self.leaves, entries).to_bytes()

    def neighbours(self, position: int) -> bytes:
        """Whom a client chose and who chose it."""
        around = self.around[position]
        entries = tuple(self.entries[other] for other in around.partners)
        return wire.Neighbours(self.clients, around.origins, entries).to_bytes()

    def delivery(self, position: int) -> bytes:
        """Who shared, and what they sealed for the client at ``position``."""
        sealed = []
        for sender in self._senders(position):
            at = _SEALED_AT + wire.SEALED_BYTES * self._place(sender, position)
            sealed.append(self.sharings[sender][at : at + wire.SEALED_BYTES])
        return wire.Delivery(self.shared, tuple(sealed)).to_bytes()

    def survived(self) -> bytes:
        """Whose vectors are in the sum: the same for everybody."""
        return wire.Survivors(self.survivors).to_bytes()

    def signatures(self, position: int, consents: Mapping[int, bytes]) -> bytes:
        """What the holders of the client at ``position`` signed; ``consents`` by position."""
        found = tuple(
            (holder, _read(wire.Consent, consents[holder]).signature)
            for holder in self.around[position].holders
            if holder in consents
        )
        return wire.Signatures(found).to_bytes()

    def enough(self, answered: bytes) -> bool:
        """Whether the shares of those who answered UNMASK (a bitmap) give every secret, with one to spare for each
        holder that may lie; of secrets with fewer holders left, whether these have all answered."""
        came = np.zeros(self.clients, np.bool_)
        came[list(wire.positions_of(answered, self.clients))] = True
        wanted, all_came = self.plan.threshold + self.plan.colluding, int(came.sum())
        if self.plan.complete:
            return all_came - 1 >= min(wanted, wire.size_of(self.survivors) - 1)
        have, left = came[self._holders].sum(1), self._surviving[self._holders].sum(1)
        return bool((have >= np.minimum(wanted, left)).all())

    @cached_property
    def _holders(self) -> npt.NDArray[np.int64]:
        """Who holds the shares of each client that shared: positions [sharers, k]."""
        shared = wire.positions_of(self.shared, self.clients)
        return np.array([self.around[position].holders for position in shared], np.int64)

    @cached_property
    def _surviving(self) -> npt.NDArray[np.bool_]:
        found = np.zeros(self.clients, np.bool_)
        found[list(wire.positions_of(self.survivors, self.clients))] = True
        return found

    # The sum.

    def unmask(
        self, total: Words, unmaskings: Mapping[int, bytes], threads: int = 1, about: bytes = b""
    ) -> Revealed:
        """``total`` (the survivors' masked words [L] added up; not changed) without its masks; ``unmaskings`` by
        position, ``about`` as in ``Client.mask``. Raises SumLost."""
        found = self.masks(unmaskings, about)
        words = total.copy()
        add_masks(words, found.seeds, self.plan.ring, threads)
        reduced = self.plan.ring.reduced(words)
        return Revealed(reduced, len(found.seeds), found.agreements, found.liars, found.unread)

    def masks(
        self, unmaskings: Mapping[int, bytes], about: bytes = b"", hold: Callable[[], None] = lambda: None
    ) -> Unmasking:
        """The masks whose sum, added to that of the survivors' vectors, leaves their values: several servers may each
        add a part of them. ``about`` as in ``Client.mask``. ``hold`` is called for every client: many dropouts cost
        many agreements. Raises SumLost, and what ``hold`` raises."""
        survivors = set(wire.positions_of(self.survivors, self.clients))
        shares = self._shares(unmaskings)
        secrets, liars = self._secrets(shares, sorted(unmaskings), survivors, hold)
        seeds: list[tuple[bytes, int]] = []
        agreements = 0
        for position, secret in secrets.items():
            if position in survivors:
                seeds.append((secret, -1))
                continue
            hold()
            key, entry = AgreementKey(secret), self.entries[position]
            for other in self.around[position].partners:
                if other not in survivors:
                    continue
                peer = self.entries[other]
                agreed = key.agree(
                    peer.advertisement.masking, self.context.pair("mask", entry.name, peer.name) + about
                )
                seeds.append((agreed, -1 if other < position else 1))
                agreements += 1
        unread = {p for p, held in shares.items() if wire.UNREADABLE in held.values()}
        return Unmasking(tuple(seeds), agreements, self._names(liars), self._names(unread))

    def _names(self, positions: set[int]) -> tuple[str, ...]:
        return tuple(self.entries[position].name for position in sorted(positions))

    def _shares(self, unmaskings: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        """The shares of each client that shared, by holder."""
        shares: dict[int, dict[int, bytes]] = {p: {} for p in wire.positions_of(self.shared, self.clients)}
        for holder in sorted(unmaskings):
            body = unmaskings[holder]
            for at, sender in zip(
                range(_SHARES_AT, len(body), SHARE_BYTES), self._senders(holder), strict=True
            ):
                shares[sender][holder] = body[at : at + SHARE_BYTES]
        return shares

    def _secrets(
        self,
        shares: Mapping[int, Mapping[int, bytes]],
        everybody: list[int],
        survivors: set[int],
        hold: Callable[[], None],
    ) -> tuple[dict[int, bytes], set[int]]:
        """The secret of each client that shared: of a survivor its seed, of another its masking key. Also who gave
        wrong shares."""
        threshold = self.plan.threshold
        usual = [tuple(everybody[:threshold]), tuple(everybody[-threshold:])]
        known = dict[tuple[int, ...], Reconstructor]()
        secrets, liars = dict[int, bytes](), set[int]()
        for position, held in shares.items():
            hold()
            readable = {holder: share for holder, share in held.items() if share != wire.UNREADABLE}
            right = self._test(position, position in survivors)
            found = _recover(readable, threshold, right, usual, known, liars)
            if found is None:
                raise SumLost(
                    f"{len(readable)} shares of {self.entries[position].name}'s secret came back of "
                    f"{len(self.around[position].holders)}, and no {threshold} of them give it"
                )
            secrets[position] = found
        return secrets, liars

    def _test(self, position: int, survived: bool) -> _Test:
        entry = self.entries[position]
        if survived:
            said = self.sharings[position][1 : 1 + wire.COMMITMENT_BYTES]
            return lambda secret: common.commitment(self.context, entry.name, secret) == said
        return lambda secret: AgreementKey(secret).public == entry.advertisement.masking

    def _senders(self, position: int) -> tuple[int, ...]:
        """Who gave shares to the client at ``position``, ascending."""
        shared = wire.positions_of(self.shared, self.clients)
        if self.plan.complete:
            return tuple(other for other in shared if other != position)
        return tuple(sorted(set(self.around[position].origins).intersection(shared)))

    def _place(self, sender: int, receiver: int) -> int:
        """Where the receiver's share stands in the sender's."""
        if self.plan.complete:
            return receiver - (receiver > sender)
        if sender not in self._places:
            self._places[sender] = {holder: place for place, holder in enumerate(self.around[sender].holders)}
        return self._places[sender][receiver]

    def _drawn(self) -> dict[int, Neighbourhood]:
        if self.plan.complete:
            return {position: common.complete(self.clients, position) for position in range(self.clients)}
        rows = common.regular(self.plan, self.clients, self.root)
        return {position: Neighbourhood(row, row) for position, row in enumerate(rows)}


def _recover(
    shares: Mapping[int, bytes],
    threshold: int,
    right: _Test,
    usual: Sequence[tuple[int, ...]],
    known: dict[tuple[int, ...], Reconstructor],
    liars: set[int],
) -> bytes | None:
    """The secret that passes ``right``, from ``threshold`` of the ``shares`` by position. Whoever's share turns out
    wrong joins ``liars``. None when there are too few, or no set of them that is tried gives it."""
    honest = [holder for holder in shares if holder not in liars]
    if len(honest) < threshold:
        return None
    # Sets that serve many secrets come first: their coefficients are known.
    first = next((points for points in usual if all(point in shares for point in points)), None)
    if first is None or liars.intersection(first):
        first = tuple(honest[:threshold])
    secret = _secret(first, shares, right, known)
    if secret is not None:
        return secret
    draws = np.random.default_rng(0)  # any sets do; the same ones on every server
    good = None
    for _ in range(_MOST_TRIES):
        points = tuple(sorted(draws.choice(honest, threshold, replace=False).tolist()))
        secret = _secret(points, shares, right, {})
        if secret is not None:
            good = points
            break
    if good is None or secret is None:
        return _decoded(honest, threshold, shares, right, liars)
    for holder in set(honest).difference(good):
        if _secret((*good[1:], holder), shares, right, {}) is None:
            liars.add(holder)
    return secret


def _decoded(
    honest: Sequence[int], threshold: int, shares: Mapping[int, bytes], right: _Test, liars: set[int]
) -> bytes | None:
    """Where so many shares are wrong that hardly a set is free of them: dearer, and sure up to half of those that could
    be missing."""
    found = decode({holder + 1: shares[holder] for holder in honest}, threshold)
    if found is None or not right(found[0]):
        return None
    liars.update(point - 1 for point in found[1])
    return found[0]


def _secret(
    points: tuple[int, ...],
    shares: Mapping[int, bytes],
    right: _Test,
    known: dict[tuple[int, ...], Reconstructor],
) -> bytes | None:
    if points not in known:
        known[points] = Reconstructor([point + 1 for point in points])
    try:
        secret = known[points].secret([shares[point] for point in points])
    except ShareRefused:
        return None
    return secret if right(secret) else None


def _read(kind: type[M], body: bytes) -> M:
    try:
        return wire.read_as(kind, body)
    except MessageRefused as error:
        raise ClientRefused("malformed", str(error)) from None
