"""Secure aggregation: seconds and bytes of clients and servers, beside Flower's SecAgg+ and the bare key stream.

Seconds are samples times counts. Ours: everything but long vectors is done in full by one client and the servers of an
iteration (``privacy_round``); a vector's reading, adding and masking are timed by themselves. Flower's: each primitive
is timed, and counted as its mod and workflow call it (``privacy_flower``). Whole iterations of ours, store and all,
stand beside the estimates where they are short.

Both aggregate the same: n clients, k neighbours, threshold t, values of 22 bits and whole weights in sums of 32 bits
(clip 8, weights up to 64 in steps of 2**-12 here; there a factor up to 1 in steps of 2**-22). Dropped clients vanish
after they shared. What differs: Flower's masks come from MT19937 with a seed of 32 bits, into int64; ours from
AES-256 in counter mode under 32 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from rich.console import Console

from benchmarks import privacy_flower
from benchmarks.privacy_flower import Flower
from benchmarks.privacy_round import ClientCost, Iteration, ServerCost
from benchmarks.report import Row
from benchmarks.samples import best_s
from benchmarks.turns import Figures, faced
from federated.privacy.section import SecureAggregationSection
from federated.secagg import local
from federated.secagg.masks import add_masks
from federated.secagg.ring import Ring
from federated.secagg.settings import Plan, make_plan
from federated.secagg.stages import Stage

SERVER_AIM: Final = 5.0
PRG_AIM: Final = 0.5
"""At most twice the seconds of the key stream."""
BARE: Final = "bare AES-256-CTR key stream"
ESTIMATE: Final = "samples times counts"
_SEEDS: Final = 16
_BLOCK_BYTES: Final = 65_536
_SHORT: Final = 8

Protocol = Literal["secagg", "secagg+"]
PROTOCOLS: Final[tuple[Protocol, ...]] = ("secagg", "secagg+")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. ``whole``: clients of whole iterations of the first length; ``compared``: the share of dropped
    clients at which parts are told apart."""

    clients: tuple[int, ...] = (50, 100, 500)
    lengths: tuple[int, ...] = (100_000, 1_000_000)
    dropped: tuple[float, ...] = (0.0, 0.1, 0.3)
    compared: float = 0.1
    whole: tuple[int, ...] = (50, 100)
    rounds: int = 3


@cache
def plan_of(protocol: Protocol, clients: int, length: int, malicious: bool = False) -> Plan:
    """A tenth of the clients may work with the servers, three tenths vanish."""
    section = SecureAggregationSection(protocol=protocol, malicious=malicious, step_bits=12)
    return make_plan(section, clients, length)


# Samples of ours.


@dataclass(frozen=True, slots=True)
class Vectors:
    """Seconds of one vector of a length: ``expand`` a mask onto it, ``take`` it from a body onto a sum, ``send``
    integers as a body; ``stream`` is the bare key stream of a mask."""

    expand: float
    take: float
    send: float
    stream: float


def vectors(ring: Ring, length: int) -> Vectors:
    """Samples of vectors of ``length`` elements."""
    total = ring.zeros(length)
    seeds = [(os.urandom(32), 1) for _ in range(_SEEDS)]
    values = np.random.default_rng(0).integers(-ring.largest, ring.largest, length)
    body = ring.pack(ring.of(values))
    expand = best_s(lambda: add_masks(total, seeds, ring)) / _SEEDS
    take = best_s(lambda: ring.add_into(total, ring.unpack(body, length)))
    send = best_s(lambda: ring.pack(ring.of(values)))
    keys = [seed for seed, _ in seeds]
    return Vectors(expand, take, send, best_s(lambda: key_streams(keys, total.nbytes)) / _SEEDS)


def key_streams(keys: Sequence[bytes], length_bytes: int) -> None:
    """Key stream of every key, in blocks that stay in the cache, kept nowhere: the least that masks could cost."""
    zeros, out = bytes(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)
    for key in keys:
        cipher = Cipher(AES256(key), CTR(bytes(16))).encryptor()
        for at in range(0, length_bytes, _BLOCK_BYTES):
            cipher.update_into(zeros[: length_bytes - at], out)


@dataclass(frozen=True, slots=True)
class Served:
    """Servers' seconds in an iteration: ``protocol`` (messages, shares, agreements), ``masks`` and ``sums`` (bodies
    read and added); ``stream`` is what the bare key stream of the ``expansions`` takes."""

    protocol: float
    masks: float
    sums: float
    stream: float
    expansions: int

    @property
    def seconds(self) -> float:
        """All together."""
        return self.protocol + self.masks + self.sums

    @property
    def long(self) -> float:
        """What grows with the vectors."""
        return self.masks + self.sums


def served(plan: Plan, cost: ServerCost, vectors: Vectors, dropped: int) -> Served:
    """What servers do when ``dropped`` clients vanish."""
    expansions = len(cost.found.seeds)
    left = plan.most - dropped
    return Served(
        cost.seconds,
        expansions * vectors.expand,
        left * vectors.take,
        expansions * vectors.stream,
        expansions,
    )


def client_s(plan: Plan, cost: ClientCost, vectors: Vectors) -> float:
    """One client's part without training and quantising: one mask of its own, one with each neighbour."""
    return cost.seconds + (1 + plan.degree_of(plan.most)) * vectors.expand + vectors.send


# Rows.


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    console = Console(stderr=True)
    rows: list[Row] = []
    with ExitStack() as stack:
        new: Callable[[], Flower] | None = None
        if privacy_flower.available():
            new = stack.enter_context(privacy_flower.flower())
        for protocol in PROTOCOLS:
            for clients in sizes.clients:
                console.print(f"privacy: {protocol}, {clients} clients")
                rows += _case(protocol, clients, sizes, new)
    console.print("privacy: whole iterations of secure aggregation")
    for protocol in PROTOCOLS:
        for clients in sizes.whole:
            rows += _whole(protocol, clients, sizes)
    return rows


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: what servers do, by length and clients dropped; a client by length; and Flower's samples."""

    servers: dict[tuple[int, int], Served]
    client_s: dict[int, float]
    client: ClientCost
    flower: Flower | None


def _turn(plan: Plan, sizes: Sizes, flower: Flower | None, ours_first: bool) -> Turn:
    """Ours, and the peer's before or after."""
    counts = [round(share * plan.most) for share in sizes.dropped]
    if flower is not None and not ours_first:
        _sample(flower, plan, sizes, counts)
    iteration = Iteration(plan)
    costs = {dropped: iteration.servers(dropped) for dropped in counts}
    samples = {length: vectors(plan.ring, length) for length in sizes.lengths}
    if flower is not None and ours_first:
        _sample(flower, plan, sizes, counts)
    return Turn(
        {
            (length, dropped): served(plan, cost, sample, dropped)
            for length, sample in samples.items()
            for dropped, cost in costs.items()
        },
        {length: client_s(plan, iteration.client, sample) for length, sample in samples.items()},
        iteration.client,
        flower,
    )


def _sample(flower: Flower, plan: Plan, sizes: Sizes, counts: Sequence[int]) -> None:
    """All of Flower's samples that the plan needs, at once: it keeps them."""
    neighbours = plan.degree_of(plan.most)
    for length in sizes.lengths:
        flower.client_s(neighbours, plan.threshold, length)
        for dropped in counts:
            flower.server_s(plan.most, neighbours, plan.threshold, dropped, length)


def _case(protocol: Protocol, clients: int, sizes: Sizes, new: Callable[[], Flower] | None) -> Iterator[Row]:
    plan = plan_of(protocol, clients, _SHORT)
    turns = [
        _turn(plan, sizes, None if new is None else new(), number % 2 == 0) for number in range(sizes.rounds)
    ]
    peers = [turn.flower for turn in turns if turn.flower is not None]
    neighbours = plan.degree_of(clients)
    for length in sizes.lengths:
        who = f"{protocol}, {clients} clients, {length:,} values"
        for share in sizes.dropped:
            dropped = round(share * clients)
            yield from _servers(
                f"{who}, {share:.0%} dropped", plan, turns, length, dropped, share == sizes.compared
            )
        yield _faced(
            f"{who}: a client",
            "s",
            [turn.client_s[length] for turn in turns],
            [flower.client_s(neighbours, plan.threshold, length) for flower in peers],
        )
        cost = turns[0].client
        up = cost.up - cost.body + plan.ring.packed_bytes(length)
        sent = [flower.client_bytes(neighbours, length) for flower in peers]
        note = f"down {cost.down:,}, beside the model" + (f"; Flower's down {sent[0][1]:,}" if sent else "")
        yield _faced(f"{who}: a client sends", "bytes", [up], [one for one, _ in sent], note=note)


def _servers(
    who: str, plan: Plan, turns: Sequence[Turn], length: int, dropped: int, apart: bool
) -> Iterator[Row]:
    """The servers' row; ``apart`` also what of it grows with the vectors, and the key stream."""
    ours = [turn.servers[length, dropped] for turn in turns]
    peers = [turn.flower for turn in turns if turn.flower is not None]
    parts = [
        flower.server_parts(plan.most, plan.degree_of(plan.most), plan.threshold, dropped, length)
        for flower in peers
    ]
    one = ours[0]
    note = (
        f"k {plan.degree_of(plan.most)}, t {plan.threshold}; {one.expansions:,} masks {one.masks:.3g} s, sums "
        f"{one.sums:.3g} s, shares and messages {one.protocol:.3g} s"
    )
    if parts:
        note += f"; of Flower's {parts[0].shares:,.3g} s are shares"
    yield _faced(
        f"{who}: servers", "s", [each.seconds for each in ours], [part.seconds for part in parts],
        aim=SERVER_AIM, note=note,
    )  # fmt: skip
    if apart:
        yield _faced(
            f"{who}: masks and sums alone", "s", [each.long for each in ours], [part.long for part in parts]
        )
        yield faced(
            f"{who}: masks against the bare key stream",
            "s",
            Figures(tuple(each.masks for each in ours)),
            Figures(tuple(each.stream for each in ours)),
            BARE,
            aim=PRG_AIM,
            less_is_better=True,
            note=f"the servers' whole work is {one.seconds / one.stream:.1f} times the key stream",
        )


def _faced(
    work: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    aim: float | None = None,
    note: str = "",
) -> Row:
    """A row beside Flower's, or the command that installs it."""
    if not theirs:
        note = f"{note}; {privacy_flower.INSTALL}" if note else privacy_flower.INSTALL
    return faced(
        work,
        unit,
        Figures(tuple(ours)),
        Figures(tuple(theirs)) if theirs else None,
        privacy_flower.NAME,
        aim=aim,
        less_is_better=True,
        note=note,
    )


def _whole(protocol: Protocol, clients: int, sizes: Sizes) -> Iterator[Row]:
    """Whole iterations beside what the samples say, and what a server that may do anything costs."""
    length, dropped = sizes.lengths[0], round(sizes.compared * clients)
    plan = plan_of(protocol, clients, _SHORT)
    runs = [_run(plan_of(protocol, clients, length), dropped) for _ in range(sizes.rounds)]
    iteration, sample = Iteration(plan), vectors(plan.ring, length)
    who = f"{protocol}, {clients} clients, {length:,} values, {sizes.compared:.0%} dropped"
    for name, place, estimate in (
        ("servers, a whole iteration", 0, served(plan, iteration.servers(dropped), sample, dropped).seconds),
        ("a client, in a whole iteration", 1, client_s(plan, iteration.client, sample)),
    ):
        found = Figures(tuple(run[place] for run in runs))
        row = Row(f"{who}: {name}", "s", found.median, spread=found.spread, peer=estimate, peer_name=ESTIMATE)
        off = found.median / estimate - 1.0
        yield replace(
            row,
            ratio=estimate / found.median,
            note=f"{off:+.0%}; the store, in memory, and digests of bodies are in it",
        )
    hard = plan_of(protocol, clients, length, malicious=True)
    strict = [_run(hard, dropped) for _ in range(sizes.rounds)]
    for name, place in (("servers", 0), ("a client", 1)):
        found = Figures(tuple(run[place] for run in strict))
        plain = float(np.median([run[place] for run in runs]))
        yield Row(
            f"{who}, against a malicious server: {name}",
            "s",
            found.median,
            spread=found.spread,
            note=f"k {hard.degree_of(clients)}, t {hard.threshold}; {found.median / plain:.1f} times semi-honest",
        )


def _run(plan: Plan, dropped: int) -> tuple[float, float]:
    """Seconds of servers, and of a client that stayed, in a whole iteration. Raises RuntimeError for a wrong sum."""
    generator = np.random.default_rng(0)
    limit = plan.max_weight * plan.bound
    inputs = {
        f"client-{number:05d}": generator.integers(-limit, limit + 1, plan.length)
        for number in range(plan.most)
    }
    lost = dict.fromkeys(list(inputs)[plan.most - dropped :], Stage.MASKED)
    outcome = local.run(plan, inputs, lost)
    expected = sum(inputs[name] for name in outcome.survivors)
    if (
        outcome.total is None
        or len(outcome.survivors) != plan.most - dropped
        or (outcome.total != expected).any()
    ):
        raise RuntimeError(f"no sum of {plan.most - dropped} clients: {outcome.reason}")
    stayed = [outcome.transcript.client_s[name] for name in outcome.survivors]
    return outcome.transcript.server_s, float(np.median(stayed))
