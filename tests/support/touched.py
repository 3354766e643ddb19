"""Devices whose requests and answers a test looks at, changes, or ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from support.federation import Fleet, Started

from federated.client_http import Answer, Call, HttpTransport
from federated.client_steps import Budget


class Died(Exception):
    """The device's process has ended."""


class Hooked(HttpTransport):
    """Calls ``before`` with each request and ``after`` with each answer."""

    before: Callable[[Call], None] = staticmethod(lambda call: None)
    after: Callable[[Call, Answer], Answer] = staticmethod(lambda call, answer: answer)

    def send(self, call: Call) -> Answer:
        self.before(call)
        return self.after(call, super().send(call))


@dataclass
class Touched(Fleet):
    """Devices whose requests are looked at: ``before`` and ``after`` get the client, too."""

    before: Callable[[str, Call], None] = lambda client, call: None
    after: Callable[[str, Call, Answer], Answer] = lambda client, call, answer: answer
    died: list[str] = field(default_factory=list)

    def transport(self, client: str) -> HttpTransport:
        made = Hooked(self.servers, self.tokens.get(client, ""), first=int(client), timeout_s=10.0)
        made.before = lambda call: self.before(client, call)
        made.after = lambda call, answer: self.after(client, call, answer)
        return made

    def _run(self, client: str, budget: Budget | None, started: Started) -> None:
        try:
            super()._run(client, budget, started)
        except Died:
            started.errors.clear()
            self.died.append(client)
