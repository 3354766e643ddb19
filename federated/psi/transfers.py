"""Intersection by oblivious transfers (KKRT 2016): the fastest where bytes are cheap; no exponentiation for an id.

    1. Both place ids by three public hashes; the asker keeps each in one bin (cuckoo hashing).
    2. An oblivious pseudo-random function for each bin (``oblivious``): the asker learns F of its own ids.
    3. The owner sends F of its ids for each of the three hashes, every set in rising order. The asker compares each of
       its values with the set of the hash by which that id was placed.
    4. Where the owner learns too, the asker sends hashes of the common ids, which both have. (Positions in those sets
       would tell by which hash an id was placed, which depends on the asker's other ids.)

The owner sees base transfers and columns masked by a pseudo-random generator; the asker sees values that are random
where it has not the id. Semi-honest. A run is not resumed within: it takes seconds and begins anew.
Vector oblivious linear evaluation (Rindal and Raghuraman 2022) would save four of five bytes, but needs codes for
learning parity with noise and a solver for key-value stores in compiled code; the exponent-free work here is NumPy's,
hashlib's and AES's.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from federated.psi.cuckoo import HASHES, bins_for, build, places
from federated.psi.hashing import Rows, Tags, as_rows, keys_of, matches, repeats, system
from federated.psi.members import Arrange
from federated.psi.oblivious import CODE_BYTES, codes, evaluate, outputs, own
from federated.psi.signatures import asks
from federated.psi.terms import (
    Found,
    Session,
    Terms,
    chunks,
    confirm,
    found_ids,
    found_nothing,
    greet,
    numbered,
    receive_numbered,
    rows_of,
    tell_common,
    told_common,
)
from federated.vertical.parties import Draw, Effect, Incoming, PeerFault, Role, Send


def transfers(peer: str, arrange: Arrange, terms: Terms, *, first: bool, draw: Draw = system) -> Role[Found]:
    """One side: the asker where it learns the result (the first party where both do), else the owner.

    All ids are in memory. Raises PeerFault; TableFull with probability 2**-40; ValueError for a count alone.
    """
    role = _asker if asks(first, terms) else _owner
    return (yield from role(peer, arrange, terms, first, draw))


def _asker(
    peer: str, arrange: Arrange, terms: Terms, first: bool, draw: Draw
) -> Generator[Effect, Incoming | None, Found]:
    members = arrange(draw(32))
    session = yield from greet(first, peer, "ot", terms, len(members), draw)
    ids = [one for part in members.chunks(terms.chunk) for one in part]
    bins = bins_for(len(ids))
    where = places(ids, session.key, bins)
    table = build(where, bins, np.random.default_rng(np.frombuffer(draw(32), "<u8")))
    chosen = np.frombuffer(draw(bins * CODE_BYTES), np.uint8).reshape(bins, CODE_BYTES).copy()
    for number in range(HASHES):
        mine = np.flatnonzero(table.by == number)
        chosen[table.at[mine]] = codes(session.key, [ids[at] for at in mine.tolist()], number)
    t = yield from evaluate(peer, session.key, chosen, draw)
    values = outputs(session.key, table.at, t[table.at], session.tag)
    common: list[Rows] = []
    for number in range(HASHES):
        theirs = yield from _received(peer, session, terms, number)
        mine = np.flatnonzero(table.by == number)
        common.append(mine[matches(values[mine], theirs)])
    found = found_ids(members, np.sort(np.concatenate(common)), session)
    if terms.learns == "both":
        yield from tell_common(peer, session, found)
        yield from confirm(peer, session, found)
    return found


def _owner(
    peer: str, arrange: Arrange, terms: Terms, first: bool, draw: Draw
) -> Generator[Effect, Incoming | None, Found]:
    members = arrange(draw(32))
    session = yield from greet(first, peer, "ot", terms, len(members), draw)
    ids = [one for part in members.chunks(terms.chunk) for one in part]
    bins = bins_for(session.theirs)
    where = places(ids, session.key, bins)
    owner = yield from own(peer, session.key, bins, draw)
    for number in range(HASHES):
        values = owner.values(ids, where[:, number], number, session.tag)
        # Rising order: nothing is left of the order of the ids.
        ordered = np.sort(keys_of(values)).tobytes() if len(ids) else b""
        size = terms.chunk * session.tag
        for at in range(chunks(len(ids), terms.chunk)):
            yield Send(peer, f"psi.values.{number}", numbered(at, ordered[at * size : (at + 1) * size]))
    if terms.learns != "both":
        return found_nothing(session)
    found = yield from told_common(peer, session, members, ids)
    yield from confirm(peer, session, found)
    return found


def _received(
    peer: str, session: Session, terms: Terms, number: int
) -> Generator[Effect, Incoming | None, Tags]:
    """The owner's values under one hash. Raises PeerFault where one is repeated."""
    parts: list[bytes] = []
    for at in range(chunks(session.theirs, terms.chunk)):
        rows = rows_of(session.theirs, terms.chunk, at)
        parts.append((yield from receive_numbered(peer, f"psi.values.{number}", at, rows, session.tag)))
    values = as_rows(b"".join(parts), session.tag)
    if repeats(values):
        raise PeerFault(peer, "repeated", "sent a value more than once")
    return values
