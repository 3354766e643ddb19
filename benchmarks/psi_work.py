"""One intersection, both parties' roles in one process, their long work spread over worker processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from benchmarks.psi_sets import Pair
from federated.psi import unbalanced
from federated.psi.ecdh import ecdh
from federated.psi.ids import Ids, normalise
from federated.psi.members import MemoryMembers
from federated.psi.several import several
from federated.psi.signatures import asker, signer
from federated.psi.terms import Found, Terms, Wants
from federated.psi.transfers import transfers
from federated.vertical.parties import Outcome, Role, Workers, run_local

Protocol = Literal["rsa", "ecdh", "count", "ot", "unbalanced"]
"""``count``: of ecdh."""
FIRST: Final = "first"
SECOND: Final = "second"
RSA_BITS: Final = 2_048


class WrongIntersection(RuntimeError):
    """A party found something else than what both sets share."""


@dataclass(frozen=True, slots=True)
class Run:
    """``seconds`` from texts to rows; ``before`` of them (of the owner's set, unbalanced mode) need no peer and serve
    later runs too. ``sent``: bytes by sender. ``turns``: how often the sender changed, each a journey of the network's
    at least. ``peak``: bytes of memory of this process and its workers, at most."""

    seconds: float
    before: float
    sent: Mapping[str, int]
    turns: int
    peak: int

    @property
    def bytes(self) -> int:
        """Both ways."""
        return sum(self.sent.values())


def intersect(protocol: Protocol, pair: Pair, workers: Workers) -> Run:
    """Run ``protocol``; both learn the result, which is checked. Raises WrongIntersection."""
    terms = Terms(wants="count" if protocol == "count" else "ids")
    began_s = time.perf_counter()
    ids = [normalise(texts, terms.rule) for texts in (pair.first, pair.second)]
    prepared = None
    if protocol == "unbalanced":
        prepared = unbalanced.prepare(ids[1].values, workers=workers)
    before_s = time.perf_counter() - began_s
    outcome = run_local(_roles(protocol, ids, terms, workers, prepared))
    seconds = time.perf_counter() - began_s
    _check(outcome, [pair.first, pair.second], pair.common, terms)
    return _run(outcome, seconds, before_s if prepared is not None else 0.0)


def intersect_several(sets: list[list[str]], common: int, workers: Workers, wants: Wants = "ids") -> Run:
    """The same for three and more, the first of whom leads. Raises WrongIntersection."""
    terms = Terms(wants=wants)
    began_s = time.perf_counter()
    names = [f"party {number}" for number in range(1, len(sets) + 1)]
    roles = {
        name: several(
            name, names, partial(MemoryMembers, normalise(texts, terms.rule)), terms, workers=workers
        )
        for name, texts in zip(names, sets, strict=True)
    }
    outcome = run_local(roles)
    seconds = time.perf_counter() - began_s
    _check(outcome, sets, common, terms)
    return _run(outcome, seconds, 0.0)


def _run(outcome: Outcome[Any], seconds: float, before_s: float) -> Run:
    senders = [one.sender for one in outcome.transcript.messages]
    sent: Counter[str] = Counter()
    for one in outcome.transcript.messages:
        sent[one.sender] += one.size
    turns = sum(one != other for one, other in pairwise(senders))
    return Run(seconds, before_s, sent, turns, peak_bytes())


def _roles(
    protocol: Protocol, ids: list[Ids], terms: Terms, workers: Workers, prepared: unbalanced.Prepared | None
) -> dict[str, Role[Any]]:
    first, second = (partial(MemoryMembers, one) for one in ids)
    if protocol in ("ecdh", "count"):
        return {
            FIRST: ecdh(SECOND, first, terms, first=True, workers=workers),
            SECOND: ecdh(FIRST, second, terms, first=False, workers=workers),
        }
    if protocol == "rsa":
        return {
            FIRST: asker(SECOND, first, terms, first=True, least_bits=RSA_BITS, workers=workers),
            SECOND: signer(FIRST, second, terms, first=False, bits=RSA_BITS, workers=workers),
        }
    if protocol == "ot":
        return {
            FIRST: transfers(SECOND, first, terms, first=True),
            SECOND: transfers(FIRST, second, terms, first=False),
        }
    assert prepared is not None
    return {
        FIRST: unbalanced.asker(SECOND, first, terms, first=True, workers=workers),
        SECOND: unbalanced.owner(FIRST, ids[1], prepared, terms, first=False, workers=workers),
    }


def _check(outcome: Outcome[Any], sets: list[list[str]], common: int, terms: Terms) -> None:
    """All have exactly what is in all sets, in the same order, or how many those are."""
    wanted = sorted(terms.rule.apply(text) for text in set.intersection(*map(set, sets)))
    for name, result in outcome.results.items():
        found: Found = result[0] if isinstance(result, tuple) else result
        ids = wanted if terms.wants == "ids" else None
        if found.ids != ids or found.count != len(wanted) or len(wanted) != common:
            raise WrongIntersection(f"{name} found {found.count} ids, the sets share {common}")


def peak_bytes() -> int:
    """The most memory that this process and each of its children has had, added up."""
    here = psutil.Process()
    return sum(_peak(one.pid) for one in (here, *here.children(recursive=True)))


def _peak(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1_024
    return 0
