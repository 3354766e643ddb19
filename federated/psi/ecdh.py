"""Intersection by Diffie and Hellman: both mask with an exponent of their own, and masks commute.

    1. I send H(x)^a of my ids, the peer H(y)^b of its, both in a secret order.
    2. Each raises the other's elements once more. Who learns the result is sent the tags of its own, in its order,
       and compares them with those it made of the peer's.

After Huberman, Franklin and Hogg (1999), secure against parties that follow the protocol (semi-honest), under
decisional Diffie-Hellman in the random oracle model. What a party sees of ids that are not common is uniform elements.
A count alone (``wants="count"``): the tags come sorted, so that nobody knows which of its own they belong to
(Agrawal, Evfimievski and Srikant 2003).

Work goes chunk by chunk with a checkpoint every few, which holds the secret exponent: keep it as safe as the ids.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final

from federated.psi.agreement import confirm
from federated.psi.group import (
    ELEMENT_BYTES,
    SCALAR_BYTES,
    ElementRefused,
    check_scalar,
    hash_and_raise,
    raise_all,
    scalar,
)
from federated.psi.hashing import Tags, as_rows, split, system, tags
from federated.psi.members import Arrange, Folder, MemoryFolder
from federated.psi.pool import TagPool, common, expect
from federated.psi.resume import FOLDER, Begun, begin, charge_again, due
from federated.psi.terms import (
    Found,
    Terms,
    chunks,
    found_ids,
    found_nothing,
    numbered,
    receive_numbered,
    rows_of,
)
from federated.vertical.parties import (
    Alone,
    Checkpoint,
    Draw,
    Effect,
    Incoming,
    PeerFault,
    Progress,
    Role,
    Send,
    Workers,
)
from federated.vertical.wire import Bytes, Expected, Value

_HASH: Final = b"ecdh"
_STATE: Final[Mapping[str, Expected]] = {"secret": Bytes(SCALAR_BYTES, SCALAR_BYTES), "folder": FOLDER}


def ecdh(
    peer: str,
    arrange: Arrange,
    terms: Terms,
    *,
    first: bool,
    draw: Draw = system,
    workers: Workers | None = None,
    folder: Folder | None = None,
    state: bytes | None = None,
) -> Role[Found]:
    """One side. ``first``: whether this is the first of the two parties. ``folder``: where tags are kept.

    ``state`` of a checkpoint goes on from there, with the same ids and the same folder. Raises PeerFault for what no
    honest peer sends; ValueError for ids that changed.
    """
    folder = MemoryFolder() if folder is None else folder
    workers = Alone() if workers is None else workers
    begun = yield from begin(first, peer, "ecdh", terms, arrange, draw, state, _STATE)
    if begun.anew:
        secret = scalar(draw)
    else:
        secret = check_scalar(begun.held["secret"])
        folder.back_to(begun.held["folder"])
        charge_again(first, peer, terms, begun.session.theirs - begun.done * terms.chunk)
    run = _Run(peer, begun, terms, first, draw, secret, workers, folder)
    yield from run.rounds(begun.done)
    return (yield from run.result())


class _Run:
    def __init__(
        self,
        peer: str,
        begun: Begun,
        terms: Terms,
        first: bool,
        draw: Draw,
        secret: bytes,
        workers: Workers,
        folder: Folder,
    ) -> None:
        self.peer, self.begun, self.terms = peer, begun, terms
        self.first, self.draw = first, draw
        self.members, self.session = begun.members, begun.session
        self.secret, self.workers, self.folder = secret, workers, folder
        self.i_learn, self.peer_learns = terms.i_learn(first), terms.i_learn(not first)
        expected = max(self.session.mine, self.session.theirs)
        expect(folder, self.session.tag, self.session.mine + self.session.theirs)
        self.mine = TagPool(folder, "mine", self.session.tag, expected)
        self.theirs = TagPool(folder, "theirs", self.session.tag, expected)

    def rounds(self, start: int) -> Generator[Effect, Incoming | None, None]:
        size, session = self.terms.chunk, self.session
        total = max(chunks(session.mine, size), chunks(session.theirs, size))
        own = self.members.chunks(size, start)
        for number in range(start, total):
            yield from self.round(number, next(own, []))
            yield Progress(number + 1, total, "chunks of ids")
            if due(number + 1, total):
                secrets: dict[str, Value] = {"secret": self.secret, "folder": self.folder.mark()}
                yield Checkpoint(number + 1, self.begun.state(number + 1, secrets))

    def round(self, number: int, ids: list[bytes]) -> Generator[Effect, Incoming | None, None]:
        """Chunk ``number`` of both: my ids (none beyond my last chunk) and the peer's."""
        peer, size, session = self.peer, self.terms.chunk, self.session
        theirs = rows_of(session.theirs, size, number)
        if ids:
            masked = hash_and_raise(ids, _HASH, self.secret, self.workers)
            yield Send(peer, "psi.masked", numbered(number, masked))
        if theirs:
            got = yield from receive_numbered(peer, "psi.masked", number, theirs, ELEMENT_BYTES)
            twice = self.tagged(got)
            self.theirs.add(twice, number * size)
            if self.peer_learns and self.terms.wants == "ids":
                yield Send(peer, "psi.tags", numbered(number, twice.tobytes()))
        if ids and self.i_learn and self.terms.wants == "ids":
            back = yield from receive_numbered(peer, "psi.tags", number, len(ids), session.tag)
            self.mine.add(as_rows(back, session.tag), number * size)

    def tagged(self, masked: bytes) -> Tags:
        try:
            twice = raise_all(masked, self.secret, self.workers)
        except ElementRefused as why:
            raise PeerFault(self.peer, "element", str(why)) from None
        return tags("psi-ecdh", self.session.key, split(twice, ELEMENT_BYTES), self.session.tag)

    def result(self) -> Generator[Effect, Incoming | None, Found]:
        if self.theirs.repeats():
            raise PeerFault(self.peer, "repeated", "sent an element more than once")
        if self.terms.wants == "count":
            yield from self.exchange_sorted()
        found = found_nothing(self.session)
        if self.i_learn:
            if self.mine.repeats():
                raise PeerFault(self.peer, "repeated", "sent a tag more than once")
            positions = common(self.mine, self.theirs)
            if self.terms.wants == "ids":
                found = found_ids(self.members, positions, self.session)
            else:
                found = Found(len(positions), None, None, self.session.mine, self.session.theirs)
        if self.i_learn and self.peer_learns:
            yield from confirm(self.peer, self.session, found, first=self.first, draw=self.draw)
        return found

    def exchange_sorted(self) -> Generator[Effect, Incoming | None, None]:
        """The peer's tags go back to it in rising order; mine come so."""
        size, session = self.terms.chunk, self.session
        sending = self.theirs.sorted_chunks(size)
        for number in range(max(chunks(session.mine, size), chunks(session.theirs, size))):
            part = next(sending, b"")
            if part and self.peer_learns:
                yield Send(self.peer, "psi.sorted", numbered(number, part))
            rows = rows_of(session.mine, size, number)
            if rows and self.i_learn:
                back = yield from receive_numbered(self.peer, "psi.sorted", number, rows, session.tag)
                self.mine.add(as_rows(back, session.tag), number * size)
