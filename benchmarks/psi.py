"""``psi``: seconds, bytes and memory of private set intersection, beside openmined-psi's.

Each part runs in a process of its own, with two worker processes that are there before the clock starts. Both parties
are on this machine, so that two workers do the work of both: over a network each party has cores of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from benchmarks import psi_openmined
from benchmarks.federated import alone
from benchmarks.psi_sets import make_pair, make_three
from benchmarks.psi_work import Protocol, Run, intersect, intersect_several
from benchmarks.report import Row, at_most
from benchmarks.samples import best_s
from benchmarks.turns import Figures, faced, in_turn
from federated.psi.group import hash_and_raise, raise_all, scalar
from federated.psi.hashing import system
from federated.psi.power import way
from federated.psi.terms import Wants
from federated.vertical.parties import Alone, Workers
from services.processes import limit_threads
from services.vertical.workers import Processes

CORES: Final = 2
RSA_AIM_S: Final = 90.0
ECDH_AIM: Final = 2.0
"""Times openmined-psi's one thread, in the same run."""
_SAMPLE: Final = 500


@dataclass(frozen=True, slots=True)
class Sizes:
    """Ids of each set, half of them in both. ``whole_rsa``: the size that the aim is for. ``large``: of a run of ECDH
    of its own (0: none). ``small``: of the first set, of the unbalanced mode, against ``ids``. ``three``: of each of
    three parties."""

    rsa: int = 100_000
    ids: int = 100_000
    large: int = 1_000_000
    small: int = 1_000
    three: int = 100_000
    rounds: int = 3
    rsa_aim: float | None = RSA_AIM_S


WHOLE: Final = Sizes()
QUICK: Final = Sizes(rsa=3_000, ids=10_000, large=0, small=200, three=2_000, rounds=1, rsa_aim=None)


def run(quick: bool, console: Console) -> list[Row]:
    """All rows of a plan, the quick one or the whole."""
    # Children inherit it; this process has loaded its libraries.
    limit_threads(os.environ)
    plan = QUICK if quick else WHOLE
    rows: list[Row] = []
    parts: list[tuple[str, Callable[[Sizes], list[Row]]]] = [
        ("operations of the group", operations),
        (f"ECDH, {plan.ids:,} ids, and openmined-psi", measure_ecdh),
        ("oblivious transfers and the unbalanced mode", measure_others),
        (f"counts alone, and three parties of {plan.three:,} ids", measure_more),
        (f"RSA, {plan.rsa:,} ids", measure_rsa),
    ]
    if plan.large:
        parts.append((f"ECDH, {plan.large:,} ids", measure_large))
    for what, measure in parts:
        console.print(f"psi: {what}")
        rows += alone(measure, plan)
    return rows


def intersected(protocol: Protocol, first: int, second: int) -> Run:
    """One intersection of sets that share half of the smaller, on warm workers."""
    pair = make_pair(first, second, min(first, second) // 2)
    with _warm() as workers:
        return intersect(protocol, pair, workers)


def intersected_three(wants: Wants, size: int) -> Run:
    """The same for three sets, two fifths of each in all of them."""
    common = 2 * size // 5
    with _warm() as workers:
        return intersect_several(make_three(size, common), common, workers, wants)


@contextmanager
def _warm() -> Iterator[Workers]:
    workers = Processes(CORES)
    try:
        # Each loads its libraries now, and not within what is measured.
        workers.map(hash_some, range(4 * CORES))
        yield workers
    finally:
        workers.close()


def hash_some(number: int) -> bytes:
    """A little work that loads the group."""
    return hash_and_raise([str(number).encode()] * 200, b"warm", scalar(system), Alone())


def operations(sizes: Sizes) -> list[Row]:
    """Microseconds of the group's operations on one core."""
    secret, alone_here = scalar(system), Alone()
    ids = [f"customer-{number:08d}@example.org".encode() for number in range(_SAMPLE)]
    elements = hash_and_raise(ids, b"bench", secret, alone_here)
    works = {
        "hash an id and multiply": lambda: hash_and_raise(ids, b"bench", secret, alone_here),
        "check and multiply an element": lambda: raise_all(elements, secret, alone_here),
    }
    found = in_turn([_microseconds(work) for work in works.values()], max(3, sizes.rounds), warm=False)
    return [
        Row(f"ristretto255: {name}", "us", one.median, spread=one.spread, note="one core")
        for name, one in zip(works, found, strict=True)
    ]


def _microseconds(work: Callable[[], object]) -> Callable[[], float]:
    return lambda: 1e6 * best_s(work) / _SAMPLE


def measure_ecdh(sizes: Sizes) -> list[Row]:
    """Beside openmined-psi, in turn."""
    count, common = sizes.ids, sizes.ids // 2
    runs: list[Run] = []
    theirs: list[psi_openmined.Intersected] = []

    def ours() -> float:
        runs.append(intersected("ecdh", count, count))
        return runs[-1].seconds

    with ExitStack() as stack:
        blocks = [ours]
        if psi_openmined.available():
            peer = stack.enter_context(psi_openmined.openmined())

            def other() -> float:
                theirs.append(peer(count, count, common))
                return theirs[-1].seconds

            blocks.append(other)
        found = in_turn(blocks, sizes.rounds, warm=False)
    there = len(found) > 1
    note = f"{CORES} processes" if there else psi_openmined.INSTALL
    work = f"ECDH, {_by(count, count)}"
    rows = [
        faced(
            work,
            "s",
            found[0],
            found[1] if there else None,
            psi_openmined.NAME,
            aim=ECDH_AIM,
            less_is_better=True,
            note=note,
        )
    ]
    # Each id is masked by both.
    each = 4 * count
    rows.append(
        faced(
            f"{work}: a core's time for an operation",
            "us",
            Figures(tuple(1e6 * CORES * one / each for one in found[0].values)),
            Figures(tuple(1e6 * one / each for one in found[1].values)) if there else None,
            psi_openmined.NAME,
            less_is_better=True,
            note="4 multiplications for each pair of ids; everything else is in it",
        )
    )
    bytes_row = Row(
        f"{work}: bytes",
        "MB",
        runs[0].bytes / 1e6,
        peer_name=psi_openmined.NAME,
        note=f"{_each(runs[0], count, count)}; both sides learn the ids, of the peer one",
    )
    if theirs:
        peer_mb = theirs[0].bytes / 1e6
        bytes_row = replace(bytes_row, peer=peer_mb, ratio=peer_mb / bytes_row.ours)
    return [*rows, bytes_row]


def measure_others(sizes: Sizes) -> list[Row]:
    """Oblivious transfers, and a small set against a large one."""
    count, small = sizes.ids, sizes.small
    runs = [intersected("ot", count, count) for _ in range(sizes.rounds)]
    seconds = Figures(tuple(one.seconds for one in runs))
    work = f"oblivious transfers (KKRT), {_by(count, count)}"
    rows = [
        Row(work, "s", seconds.median, spread=seconds.spread, note="one thread"),
        _bytes(work, runs[0], count, count),
    ]
    runs = [intersected("unbalanced", small, count) for _ in range(sizes.rounds)]
    online = Figures(tuple(one.seconds - one.before for one in runs))
    before = Figures(tuple(one.before for one in runs))
    work = f"unbalanced, {_by(small, count)}"
    return [
        *rows,
        Row(f"{work}: a run", "s", online.median, spread=online.spread, note=f"{CORES} processes"),
        Row(
            f"{work}: the large side's work before",
            "s",
            before.median,
            spread=before.spread,
            note="once for many runs",
        ),
        _bytes(
            work, runs[0], small, count, "most of it the filter, which the small side keeps for later runs"
        ),
    ]


def measure_more(sizes: Sizes) -> list[Row]:
    """A count alone, of two and of three parties, and the ids that three have in common. One run each."""
    count, three = sizes.ids, sizes.three
    two = intersected("count", count, count)
    ids, alone_there = intersected_three("ids", three), intersected_three("count", three)
    works = {
        f"ECDH, the count alone, {_by(count, count)}": (two, 2 * count),
        f"three parties, {three:,} ids each": (ids, 3 * three),
        f"three parties, the count alone, {three:,} ids each": (alone_there, 3 * three),
    }
    rows: list[Row] = []
    for work, (run, total) in works.items():
        rows += [
            Row(work, "s", run.seconds, note=f"{CORES} processes for all parties; one run"),
            Row(f"{work}: bytes", "MB", run.bytes / 1e6, note=_shared(run, total)),
        ]
    return rows


def measure_rsa(sizes: Sizes) -> list[Row]:
    """Blind signatures of 2048 bits."""
    count = sizes.rsa
    found = intersected("rsa", count, count)
    work = f"RSA-2048, {_by(count, count)}"
    met = None if sizes.rsa_aim is None else at_most(sizes.rsa_aim, found.seconds)
    return [
        Row(
            work,
            "s",
            found.seconds,
            sizes.rsa_aim,
            met,
            note=f"{CORES} processes, key and its proof included; signatures by {way()}; one run",
        ),
        _bytes(work, found, count, count),
    ]


def measure_large(sizes: Sizes) -> list[Row]:
    """Whether a large intersection completes, and what it takes."""
    count = sizes.large
    found = intersected("ecdh", count, count)
    work = f"ECDH, {_by(count, count)}"
    return [
        Row(
            work, "s", found.seconds, met=True, note=f"completes: {count // 2:,} common ids, checked; one run"
        ),
        Row(
            f"{work}: memory",
            "MB",
            found.peak / 1e6,
            note=f"both parties in one process, its checkpoints kept in memory, and {CORES} workers",
        ),
        _bytes(work, found, count, count),
    ]


def _bytes(work: str, run: Run, first: int, second: int, more: str = "") -> Row:
    note = _each(run, first, second)
    return Row(f"{work}: bytes", "MB", run.bytes / 1e6, note=f"{note}; {more}" if more else note)


def _each(run: Run, first: int, second: int) -> str:
    return _shared(run, first + second)


def _shared(run: Run, ids: int) -> str:
    sent = ", ".join(f"{name} sends {size / 1e6:,.3g} MB" for name, size in sorted(run.sent.items()))
    return f"{run.bytes / ids:,.0f} bytes an id; {sent}; {run.turns} turns"


def _by(first: int, second: int) -> str:
    return f"{first:,} x {second:,}"
