"""PSI as a kind of joint job: an intersection alone, or what aligns the rows of the other kinds."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, get_args

from federated.psi import unbalanced
from federated.psi.ecdh import ecdh
from federated.psi.filters import LEAST_BITS as LEAST_FILTER_BITS
from federated.psi.filters import MOST_BITS as MOST_FILTER_BITS
from federated.psi.hashing import MOST_IDS
from federated.psi.ids import Case, IdRule, Ids, normalise
from federated.psi.members import Arrange, MemoryMembers
from federated.psi.own import Own
from federated.psi.power import way
from federated.psi.rsa import LEAST_BITS, MOST_BITS
from federated.psi.several import MOST_PARTIES, several
from federated.psi.signatures import asker, asks, signer
from federated.psi.terms import Found, Learns, Terms
from federated.psi.transfers import transfers
from federated.vertical.kinds import Count, Kind, Setup
from federated.vertical.parties import Effect, Incoming, Log, Make, PartResult, Role

Protocol = Literal["auto", "ecdh", "rsa", "ot", "unbalanced", "several"]
ON_DISK: Final = ("ecdh", "rsa")
"""Protocols whose sets and tags may lie on disk."""
_LEARNS: Final[Mapping[str, Learns]] = {"both": "both", "guest": "first", "host": "second"}


@dataclass(frozen=True, slots=True)
class PsiOptions:
    """``protocol``: auto is ecdh for two parties, several for more. ``learns``: both (or all), guest, or host.

    ``wants``: the ids, or their count alone. ``case``: keep, or fold where case means nothing in ids. ``chunk``: ids
    in a message. ``most``: ids that are accepted of a peer. ``bits``: of the key of RSA. ``filter_bits``: a stranger
    passes the filter of the unbalanced mode with probability 2**-bits.
    """

    protocol: Protocol = "auto"
    learns: Literal["both", "guest", "host"] = "both"
    wants: Literal["ids", "count"] = "ids"
    case: Case = "keep"
    chunk: int = 8_192
    most: int = MOST_IDS
    bits: int = LEAST_BITS
    filter_bits: int = unbalanced.BITS

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise ValueError(f"protocol is one of {', '.join(get_args(Protocol))}, not {self.protocol!r}")
        if self.learns not in _LEARNS:
            raise ValueError(f"learns is one of {', '.join(_LEARNS)}, not {self.learns!r}")
        if not LEAST_BITS <= self.bits <= MOST_BITS:
            raise ValueError(f"bits of RSA are {LEAST_BITS} to {MOST_BITS}, not {self.bits}")
        if not LEAST_FILTER_BITS <= self.filter_bits <= MOST_FILTER_BITS:
            raise ValueError(
                f"filter_bits are {LEAST_FILTER_BITS} to {MOST_FILTER_BITS}, not {self.filter_bits}"
            )
        self.terms()

    def terms(self) -> Terms:
        """What the protocols agree on. Raises ValueError."""
        rule = IdRule(self.case)
        return Terms(_LEARNS[self.learns], self.wants, rule, self.chunk, self.most)


def make(options: PsiOptions, setup: Setup, own: Own | None = None) -> Make:
    """The function that makes this party's role. The guest is the first party, and the leader of several.

    ``own``: what this party alone brings.

    Raises ValueError for options that the number of parties or the protocol does not allow; IdsRefused.
    """
    own = Own() if own is None else own
    if setup.table is None and own.spool is None:
        raise ValueError(f"{setup.me} has no table: there is nothing to intersect")
    guest, hosts = setup.one("guest"), setup.named("host")
    parties = (guest, *hosts)
    protocol = options.protocol
    if protocol == "auto":
        protocol = "ecdh" if len(hosts) == 1 else "several"
    if (protocol == "several") != (len(parties) > 2):
        raise ValueError(
            f"{len(parties)} parties: {'several' if len(parties) > 2 else 'not several'} it must be"
        )
    if own.on_disk and protocol not in ON_DISK:
        raise ValueError(f"{protocol} holds its set in memory; {' and '.join(ON_DISK)} may have it on disk")
    terms = replace(options.terms(), budget=own.budget)
    if options.wants == "count" and protocol not in ("ecdh", "several"):
        raise ValueError(f"{protocol} gives ids, not a count alone; ecdh does, and several for more parties")
    if options.learns == "host" and protocol == "several":
        raise ValueError("several parties: the guest learns the result, or all do")
    ids = None if own.spool is not None or setup.table is None else normalise(setup.table.ids, terms.rule)
    peer = hosts[0] if setup.me == guest else guest
    first = setup.me == guest

    def role(state: bytes | None) -> Role[PartResult]:
        if ids is not None and ids.complaint:
            yield Log(ids.complaint)
        found = yield from _found(protocol, options, terms, setup, own, ids, parties, peer, first, state)
        signs = protocol == "rsa" and not asks(first, terms)
        return _result(protocol, ids, found, {"signed by": way()} if signs else {})

    return role


def _found(
    protocol: str,
    options: PsiOptions,
    terms: Terms,
    setup: Setup,
    own: Own,
    ids: Ids | None,
    parties: tuple[str, ...],
    peer: str,
    first: bool,
    state: bytes | None,
) -> Generator[Effect, Incoming | None, Found]:
    arrange: Arrange
    if ids is not None:
        arrange = partial(MemoryMembers, ids)
    else:
        assert own.spool is not None
        arrange = partial(own.spool, terms.rule)
    workers = setup.workers
    folder = None if own.folder is None else own.folder(state is None)
    if protocol == "ecdh":
        return (
            yield from ecdh(peer, arrange, terms, first=first, workers=workers, folder=folder, state=state)
        )
    if protocol == "several":
        return (yield from several(setup.me, parties, arrange, terms, workers=workers, state=state))
    if protocol == "ot":
        return (yield from transfers(peer, arrange, terms, first=first, state=state))
    if protocol == "rsa":
        bits = options.bits
        if asks(first, terms):
            found = asker(
                peer,
                arrange,
                terms,
                first=first,
                least_bits=bits,
                workers=workers,
                folder=folder,
                state=state,
            )
        else:
            # What goes on from a checkpoint goes on with the key that is in it.
            found = signer(
                peer,
                arrange,
                terms,
                own.signing_key(bits) if state is None else None,
                first=first,
                bits=bits,
                cache=own.cache,
                workers=workers,
                folder=folder,
                state=state,
            )
        return (yield from found)
    assert ids is not None
    if asks(first, terms):
        result, made = yield from unbalanced.asker(
            peer,
            arrange,
            terms,
            first=first,
            held=own.filter_of(peer),
            least_bits=options.filter_bits,
            workers=workers,
            state=state,
        )
        own.keep_filter(peer, made)
        return result
    bits = options.filter_bits
    found = unbalanced.owner(
        peer,
        ids,
        own.prepared(ids, bits),
        terms,
        first=first,
        bits=bits,
        ready=own.keep_prepared,
        workers=workers,
        state=state,
    )
    return (yield from found)


def _result(protocol: str, ids: Ids | None, found: Found, more: Mapping[str, str]) -> PartResult:
    figures: dict[str, float | int | str] = {
        "protocol": protocol,
        "ids": found.mine,
        "ids of the other": found.theirs,
        **more,
    }
    if ids is not None:
        figures |= {"rows without an id": ids.empty.count, "rows of an id before": ids.repeated.count}
    if found.count is not None:
        figures["common"] = found.count
    return PartResult(figures, rows=found.rows)


_UNIFORM: Final = "elements that look uniform to who does not know the exponent; their number"
SEEN: Final[Mapping[str, str]] = {
    "psi.hello": "how many ids the sender has, and what it wants",
    "psi.masked": _UNIFORM,
    "psi.tags": "hashes of its own ids, masked by both; by themselves they tell nothing",
    "psi.sorted": "the same in rising order, so that it cannot tell which of its ids they are",
    "psi.result": "a uniform element, from which who has the same intersection finds a key",
    "psi.agreed": "whether the sender has the same intersection",
    "psi.key": "the public key of the run",
    "psi.blinded": "numbers uniform modulo n; how many",
    "psi.signed": "the function of its own ids",
    "psi.common": "which of its own ids are common",
    "psi.ot.choices": "base transfers: uniform elements",
    "psi.ot.reply": "base transfers: uniform elements",
    "psi.ot.columns": "bits masked by a pseudo-random generator",
    **{f"psi.values.{number}": "random values but for common ids" for number in range(3)},
    "psi.prepare": "whether the sender prepares its set within the run",
    "psi.filter.offer": "a digest of the filter",
    "psi.filter.want": "whether the sender has it from before",
    "psi.filter.piece": "values of a function that only the sender can evaluate",
    "psi.ask": _UNIFORM,
    "psi.answer": "the function of its own ids",
    "psi.values": "values of the function: which of its own ids are common, and what passed the filter by chance",
    "psi.held": "which of the values that it named are held",
    "psi.pair": "a key that two parties share",
    "psi.count": "how many ids are common",
    "psi.store": "random values but for ids that all parties have",
}

KIND: Final = Kind(
    "psi",
    "the ids that the parties have in common, and nothing of the others",
    {"guest": Count(1, 1), "host": Count(1, MOST_PARTIES - 1)},
    PsiOptions,
    make,
    SEEN,
    aligned=False,
)
