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
from federated.psi.ids import IdRule, Ids, normalise
from federated.psi.members import MemoryMembers
from federated.psi.signatures import asker, signer
from federated.psi.terms import Found, Terms
from federated.psi.transfers import transfers
from federated.vertical.parties import Outcome, Role, Workers, run_local

Protocol = Literal["rsa", "ecdh", "ot", "unbalanced"]
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
    terms = Terms()
    began_s = time.perf_counter()
    ids = [normalise(texts, terms.rule) for texts in (pair.first, pair.second)]
    prepared = None
    if protocol == "unbalanced":
        prepared = unbalanced.prepare(ids[1].values, workers=workers)
    before_s = time.perf_counter() - began_s
    outcome = run_local(_roles(protocol, ids, terms, workers, prepared))
    seconds = time.perf_counter() - began_s
    _check(outcome, pair, terms.rule)
    senders = [one.sender for one in outcome.transcript.messages]
    sent: Counter[str] = Counter()
    for one in outcome.transcript.messages:
        sent[one.sender] += one.size
    turns = sum(one != other for one, other in pairwise(senders))
    return Run(seconds, before_s if prepared is not None else 0.0, sent, turns, peak_bytes())


def _roles(
    protocol: Protocol, ids: list[Ids], terms: Terms, workers: Workers, prepared: unbalanced.Prepared | None
) -> dict[str, Role[Any]]:
    first, second = (partial(MemoryMembers, one) for one in ids)
    if protocol == "ecdh":
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


def _check(outcome: Outcome[Any], pair: Pair, rule: IdRule) -> None:
    """Both have exactly what is in both sets, in the same order."""
    wanted = sorted(rule.apply(text) for text in set(pair.first) & set(pair.second))
    for name, result in outcome.results.items():
        found: Found = result[0] if isinstance(result, tuple) else result
        if found.ids != wanted or len(wanted) != pair.common:
            raise WrongIntersection(f"{name} found {found.count} ids, both sets share {pair.common}")


def peak_bytes() -> int:
    """The most memory that this process and each of its children has had, added up."""
    here = psutil.Process()
    return sum(_peak(one.pid) for one in (here, *here.children(recursive=True)))


def _peak(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1_024
    return 0
