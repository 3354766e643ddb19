"""Answers to pushes that wait until enough replicas hold what they tell of. Bounded; no I/O of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.parameter_server import messages as wire
from services.rpc.codec import Array
from services.rpc.server import BUSY, Call

MAX_WAITING: Final = 4_096


class Answers(Protocol):
    """Sends answers (``RpcServer`` does)."""

    def answer(self, call: Call, body: bytes, arrays: tuple[Array, ...] = ()) -> None: ...

    def fail(self, call: Call, code: str, message: str) -> None: ...


Pending = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: Call
    body: bytes
    arrays: tuple[Array, ...]
    pending: Pending


@dataclass(slots=True)
class Acknowledging:
    """Stands between whoever answers pushes and the socket.

    ``pending(shards)``: what is not acknowledged yet of all that these shards took so far, None: all that are led here;
    ``settled(pending)``: whether it is now, or None where it cannot be any more.
    """

    answers: Answers
    pending: Callable[[Collection[int] | None], Pending]
    settled: Callable[[Pending], bool | None]
    refused_total: int = 0
    disowned_total: int = 0
    """Answers that never came, as another server leads the shard now. Whoever pushed asks there."""
    _waiting: list[_Waiting] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        """Answers that wait now."""
        return len(self._waiting)

    def answer(
        self,
        call: Call,
        body: bytes,
        arrays: tuple[Array, ...] = (),
        shards: Collection[int] | None = None,
    ) -> None:
        """Answer as soon as everything that ``shards`` took so far is acknowledged."""
        pending = self.pending(shards)
        if not pending:
            self.answers.answer(call, body, arrays)
        elif len(self._waiting) >= MAX_WAITING:
            # It was applied; sent again, it will be a duplicate.
            self.refused_total += 1
            self.answers.fail(call, BUSY, f"{MAX_WAITING} pushes wait to be acknowledged by replicas")
        else:
            self._waiting.append(_Waiting(call, body, arrays, pending))

    def fail(self, call: Call, code: str, message: str) -> None:
        """Answer with an error, which waits for nobody."""
        self.answers.fail(call, code, message)

    def release(self, now_s: float) -> None:
        """Answer what can be answered now; forget those whose callers do not wait any more."""
        staying = []
        for one in self._waiting:
            settled = self.settled(one.pending)
            if settled:
                self.answers.answer(one.call, one.body, one.arrays)
            elif settled is None:
                self.disowned_total += 1
                self.answers.fail(one.call, wire.NOT_MINE, "another server leads the shard now; ask there")
            elif one.call.deadline_s > now_s:
                staying.append(one)
        self._waiting = staying
