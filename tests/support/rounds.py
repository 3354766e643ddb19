"""Shared by the tests of rounds: a desk on a memory store, and clients that know their tickets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from federated.rounds import (
    Accepted,
    Admitted,
    Closed,
    Desk,
    MemoryStore,
    Reply,
    Rounds,
    RoundSettings,
    StartRequest,
    Store,
    Tickets,
    UploadRequest,
)
from federated.selection import Everyone, Selection

KEY = b"k" * 32
DRAW = 0.5


def rounds(selection: Selection | None = None, **settings: Any) -> Rounds:
    return Rounds(RoundSettings(**settings), Tickets("job", KEY), selection or Everyone())


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class Bench:
    """One job on a memory store; requests one by one."""

    rounds: Rounds
    store: Store = field(default_factory=MemoryStore)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.desk = Desk(self.store, self.rounds)
        self.desk.create()

    @classmethod
    def of(cls, selection: Selection | None = None, **settings: Any) -> Bench:
        return cls(rounds(selection, **settings))

    def start(self, client: str, now: float | None = None, draw: float = DRAW) -> Reply:
        return self.desk.handle([StartRequest(client)], self._at(now), [draw])[0]

    def upload_request(self, client: str, iteration: int, body: str = "", **changed: Any) -> UploadRequest:
        values = {
            "client": client, "iteration": iteration, "ticket": self.rounds.tickets.issue(client, iteration),
            "digest": digest(body or client), "examples": 20, "steps": 10, "loss": 0.5,
        }  # fmt: skip
        return UploadRequest(**(values | changed))

    def upload(self, client: str, iteration: int, now: float | None = None, **changed: Any) -> Reply:
        return self.desk.handle([self.upload_request(client, iteration, **changed)], self._at(now), [DRAW])[0]

    def _at(self, now: float | None) -> float:
        return self.now if now is None else now

    def admit(self, *clients: str) -> None:
        for client in clients:
            assert isinstance(self.start(client), Admitted), client

    def accept(self, *clients: str) -> None:
        iteration = self.desk.header().iteration
        for client in clients:
            assert isinstance(self.upload(client, iteration), Accepted), client

    def aggregate(self, now: float | None = None, server: str = "server") -> int:
        """Do all tasks there are; gives how many counted."""
        counted = 0
        while (task := self.desk.claim(server, self._at(now))) is not None:
            counted += self.desk.deliver(task, self._at(now))
        return counted

    def log(self) -> list[Closed]:
        return list(self.desk.log())
