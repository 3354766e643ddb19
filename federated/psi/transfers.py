"""Intersection by oblivious transfers (KKRT 2016): the fastest where bytes are cheap; no exponentiation for an id.

    1. Both place ids by three public hashes; the asker keeps each in one bin (cuckoo hashing).
    2. An oblivious pseudo-random function for each bin (``oblivious``): the asker learns F of its own ids.
    3. The owner sends F of its ids for each of the three hashes, every set in rising order. The asker compares each of
       its values with the set of the hash by which that id was placed.
    4. Where the owner learns too, the asker sends hashes of the common ids, which both have. (Positions in those sets
       would tell by which hash an id was placed, which depends on the asker's other ids.)

The owner sees base transfers and columns masked by a pseudo-random generator; the asker sees values that are random
where it has not the id. Semi-honest. Between 2 and 3, where most of the work is done, large sets have a checkpoint; a
small run takes seconds and begins anew.
Vector oblivious linear evaluation (Rindal and Raghuraman 2022) would save four of five bytes, but needs codes for
learning parity with noise and a solver for key-value stores in compiled code; the exponent-free work here is NumPy's,
hashlib's and AES's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.psi.agreement import confirm
from federated.psi.cuckoo import HASHES, bins_for, build, places
from federated.psi.hashing import Rows, Tags, as_rows, keys_of, matches, repeats, system
from federated.psi.members import Arrange
from federated.psi.oblivious import CODE_BYTES, codes, evaluate, outputs, own
from federated.psi.resume import Begun, begin
from federated.psi.signatures import asks
from federated.psi.terms import (
    Found,
    Session,
    Terms,
    chunks,
    found_ids,
    found_nothing,
    numbered,
    receive_numbered,
    rows_of,
    tell_common,
    told_common,
)
from federated.vertical.parties import Checkpoint, Draw, Effect, Incoming, PeerFault, Role, Send
from federated.vertical.wire import Blobs, Bytes, Expected, Value

LARGE: Final = 200_000
"""From so many ids on at either side (a run of about five seconds) there is a checkpoint."""
_MOST_KEPT: Final = 2**30
_ASKER: Final[Mapping[str, Expected]] = {"by": Bytes(_MOST_KEPT), "values": Bytes(_MOST_KEPT)}
_OWNER: Final[Mapping[str, Expected]] = {"sets": Blobs(HASHES, _MOST_KEPT, HASHES)}


def transfers(
    peer: str,
    arrange: Arrange,
    terms: Terms,
    *,
    first: bool,
    draw: Draw = system,
    state: bytes | None = None,
) -> Role[Found]:
    """One side: the asker where it learns the result (the first party where both do), else the owner.

    All ids are in memory. Raises PeerFault; TableFull with probability 2**-40; ValueError for a count alone, and for
    other ids than those of the checkpoint.
    """
    role, fields = (_asker, _ASKER) if asks(first, terms) else (_owner, _OWNER)
    begun = yield from begin(first, peer, "ot", terms, arrange, draw, state, fields)
    ids = [one for part in begun.members.chunks(terms.chunk) for one in part]
    return (yield from role(peer, begun, ids, terms, first, draw))


def _asker(
    peer: str, begun: Begun, ids: list[bytes], terms: Terms, first: bool, draw: Draw
) -> Generator[Effect, Incoming | None, Found]:
    session = begun.session
    if begun.anew:
        by, values = yield from _evaluated(peer, session, ids, draw)
        if _worth_it(session):
            # Not what the transfers stand on: other columns for the same transfers would show which bins are empty.
            kept: dict[str, Value] = {"by": by.astype(np.uint8).tobytes(), "values": values.tobytes()}
            yield Checkpoint(1, begun.state(1, kept))
    else:
        by = np.frombuffer(begun.held["by"], np.uint8)
        values = as_rows(begun.held["values"], session.tag)
    common: list[Rows] = []
    for number in range(HASHES):
        theirs = yield from _received(peer, session, terms, number)
        mine = np.flatnonzero(by == number)
        common.append(mine[matches(values[mine], theirs)])
    found = found_ids(begun.members, np.sort(np.concatenate(common)), session)
    if terms.learns == "both":
        yield from tell_common(peer, session, found)
        yield from confirm(peer, session, found, first=first, draw=draw)
    return found


def _evaluated(
    peer: str, session: Session, ids: list[bytes], draw: Draw
) -> Generator[Effect, Incoming | None, tuple[npt.NDArray[np.integer[Any]], Tags]]:
    """By which hash each id is placed [N], and the function of it there [N, tag]."""
    bins = bins_for(len(ids))
    where = places(ids, session.key, bins)
    table = build(where, bins, np.random.default_rng(np.frombuffer(draw(32), "<u8")))
    chosen = np.frombuffer(draw(bins * CODE_BYTES), np.uint8).reshape(bins, CODE_BYTES).copy()
    for number in range(HASHES):
        mine = np.flatnonzero(table.by == number)
        chosen[table.at[mine]] = codes(session.key, [ids[at] for at in mine.tolist()], number)
    t = yield from evaluate(peer, session.key, chosen, draw)
    return table.by, outputs(session.key, table.at, t[table.at], session.tag)


def _owner(
    peer: str, begun: Begun, ids: list[bytes], terms: Terms, first: bool, draw: Draw
) -> Generator[Effect, Incoming | None, Found]:
    session = begun.session
    if begun.anew:
        sets = yield from _owned(peer, session, ids, draw)
        if _worth_it(session):
            yield Checkpoint(1, begun.state(1, {"sets": sets}))
    else:
        sets = begun.held["sets"]
    size = terms.chunk * session.tag
    for number, values in enumerate(sets):
        for at in range(chunks(len(ids), terms.chunk)):
            yield Send(peer, f"psi.values.{number}", numbered(at, values[at * size : (at + 1) * size]))
    if terms.learns != "both":
        return found_nothing(session)
    found = yield from told_common(peer, session, begun.members, ids)
    yield from confirm(peer, session, found, first=first, draw=draw)
    return found


def _owned(
    peer: str, session: Session, ids: list[bytes], draw: Draw
) -> Generator[Effect, Incoming | None, list[bytes]]:
    """The function of the owner's ids, a set for each hash: in rising order, so that nothing is left of the ids'."""
    bins = bins_for(session.theirs)
    where = places(ids, session.key, bins)
    owner = yield from own(peer, session.key, bins, draw)
    return [
        np.sort(keys_of(owner.values(ids, where[:, number], number, session.tag))).tobytes() if ids else b""
        for number in range(HASHES)
    ]


def _worth_it(session: Session) -> bool:
    """Whether there is a checkpoint, by what both know: not for a run of seconds, nor for what is beyond a message."""
    most = max(session.mine, session.theirs)
    return most >= LARGE and HASHES * session.tag * most <= _MOST_KEPT


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
