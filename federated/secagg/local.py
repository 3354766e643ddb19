"""Clients and servers of one iteration in one process: for the simulator, benchmarks and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from federated.rounds.store import MemoryStore, Store
from federated.secagg.client import Client, Draw, Identity, ServerCheats
from federated.secagg.desk import SecAggDesk
from federated.secagg.keys import Registrar, SigningKey
from federated.secagg.roster import Context
from federated.secagg.server import SumLost
from federated.secagg.session import Refused, Session, Waiting
from federated.secagg.settings import Plan
from federated.secagg.stages import Stage

Integers = npt.NDArray[np.int64]
T = TypeVar("T")
_CONTEXT: Final = Context("local", 1)


@dataclass
class Transcript:
    """What was said and what it cost. ``up`` and ``down``: bytes by stage, of all clients together; ``client_s`` and
    ``server_s``: seconds of each client and of the servers together. ``messages``: what servers saw, if kept."""

    up: dict[Stage, int] = field(default_factory=dict)
    down: dict[Stage, int] = field(default_factory=dict)
    client_s: dict[str, float] = field(default_factory=dict)
    server_s: float = 0.0
    expansions: int = 0
    agreements: int = 0
    messages: list[tuple[str, Stage, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``total`` int64 [L] of the ``survivors``; None with the ``reason`` when the iteration failed. ``stopped``: which
    clients refused to go on, and why; ``liars`` and ``unread`` as in ``Revealed``."""

    total: Integers | None
    survivors: tuple[str, ...]
    reason: str
    stopped: dict[str, str]
    liars: tuple[str, ...]
    unread: tuple[str, ...]
    transcript: Transcript


def enrol(job: str, names: Mapping[str, object], registrar: Registrar | None = None) -> dict[str, Identity]:
    """An identity per client, all certified by ``registrar`` (a new one without)."""
    who = registrar or Registrar()
    identities = {}
    for name in names:
        key = SigningKey()
        identities[name] = Identity(key, who.certify(job, name, key.public))
    return identities


@dataclass
class Local:
    """One iteration, stage by stage. ``dropouts``: the first stage that a client does not answer any more. ``touch``
    may replace what a server sends: (client, stage to answer, message) -> message; ``twist`` what a client sends. For
    malicious plans clients need ``identities`` and the ``registrar``'s public key; without, new ones are made."""

    plan: Plan
    inputs: Mapping[str, Integers]
    dropouts: Mapping[str, Stage] = field(default_factory=dict)
    context: Context = _CONTEXT
    identities: Mapping[str, Identity] = field(default_factory=dict)
    registrar: bytes | None = None
    threads: int = 1
    keep_messages: bool = False
    draws: Mapping[str, Draw] = field(default_factory=dict)
    touch: Callable[[str, Stage, bytes], bytes] | None = None
    twist: Callable[[str, Stage, bytes], bytes] | None = None
    store: Store = field(default_factory=MemoryStore)

    def __post_init__(self) -> None:
        if self.plan.malicious and not self.identities:
            registrar = Registrar()
            self.registrar = registrar.public
            self.identities = enrol(self.context.job, self.inputs, registrar)
        self.transcript = Transcript()
        self.stopped: dict[str, str] = {}
        self.refused: dict[str, Refused] = {}
        self._now = 0.0
        self.session = Session(self.plan, own_uploads=True)
        self.clients = dict[str, Client]()

    def desk(self) -> SecAggDesk:
        """A server: a new one each time, so nothing but the store is shared between stages."""
        return SecAggDesk(self.store, self.session, self.context, self.registrar)

    def run(self) -> Outcome:
        """All stages, then the sum."""
        self.desk().create(self._now, len(self.inputs))
        for name in self.inputs:
            self._timed(name, partial(self._begin, name))
        for stage in self.plan.stages:
            if self.desk().header().stage is Stage.FAILED:
                break
            self.answer(stage)
        return self.close()

    def answer(self, stage: Stage) -> None:
        """Every client that is still there answers ``stage``, then its window ends."""
        desk, answers = self.desk(), dict[str, bytes]()
        for name in self.inputs:
            if self.dropouts.get(name, Stage.DONE) <= stage or name in self.stopped or name in self.refused:
                continue
            answer = self._answer_of(desk, name, stage)
            if answer is not None:
                answers[name] = answer
        for name, answer in answers.items():
            body = answer if self.twist is None else self.twist(name, stage, answer)
            _add(self.transcript.up, stage, len(body))
            if self.keep_messages:
                self.transcript.messages.append((name, stage, body))
            since = time.perf_counter()
            reply = desk.receive(name, stage, body, self._now)
            self.transcript.server_s += time.perf_counter() - since
            if isinstance(reply, Refused):
                self.refused[name] = reply
        if desk.header().stage is stage:  # somebody is missing: the window ends
            self._now += 2 * self.plan.stage_window_s
            desk.tick(self._now)

    def close(self) -> Outcome:
        """Add the survivors' words up and take the masks off."""
        desk, ring = self.desk(), self.plan.ring
        header = desk.header()
        if header.stage is not Stage.REVEAL:
            return Outcome(None, (), header.reason, self.stopped, (), (), self.transcript)
        since = time.perf_counter()
        survivors = desk.survivors()
        total = ring.zeros(self.plan.length)
        for name in survivors:
            ring.add_into(total, ring.unpack(desk.masked(name), self.plan.length))
        try:
            revealed = desk.reveal(total, self.threads)
        except SumLost as error:
            desk.fail(str(error), self._now)
            return Outcome(None, survivors, str(error), self.stopped, (), (), self.transcript)
        desk.finish(self._now)
        self.transcript.server_s += time.perf_counter() - since
        self.transcript.expansions = revealed.expansions
        self.transcript.agreements = revealed.agreements
        return Outcome(
            ring.signed(revealed.words), survivors, "", self.stopped, revealed.liars, revealed.unread,
            self.transcript,
        )  # fmt: skip

    def _begin(self, name: str) -> None:
        more = {"draw": self.draws[name]} if name in self.draws else {}
        self.clients[name] = Client(
            self.plan, self.context, name, self.identities.get(name), self.registrar, **more
        )

    def _answer_of(self, desk: SecAggDesk, name: str, stage: Stage) -> bytes | None:
        client = self.clients[name]
        if stage is Stage.ADVERTISE:
            return self._timed(name, client.advertise)
        since = time.perf_counter()
        message = desk.download(name, stage, self._now)
        self.transcript.server_s += time.perf_counter() - since
        if isinstance(message, (Refused, Waiting)):
            return None
        if self.touch is not None:
            message = self.touch(name, stage, message)
        _add(self.transcript.down, stage, len(message))
        received = message
        try:
            answer = self._timed(name, lambda: client.receive(received))
            if stage is Stage.MASKED:
                answer = self._timed(name, lambda: client.mask(self.inputs[name], self.threads))
        except ServerCheats as cheat:
            self.stopped[name] = cheat.rule
            return None
        return answer

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        since = time.perf_counter()
        try:
            return work()
        finally:
            spent = time.perf_counter() - since
            self.transcript.client_s[name] = self.transcript.client_s.get(name, 0.0) + spent


def run(
    plan: Plan,
    inputs: Mapping[str, Integers],
    dropouts: Mapping[str, Stage] | None = None,
    *,
    context: Context = _CONTEXT,
    threads: int = 1,
) -> Outcome:
    """One iteration over ``inputs`` (int64 [L] by client); ``dropouts``: the first stage a client leaves unanswered."""
    return Local(plan, inputs, dropouts or {}, context, threads=threads).run()


def _add(counts: dict[Stage, int], stage: Stage, size: int) -> None:
    counts[stage] = counts.get(stage, 0) + size
