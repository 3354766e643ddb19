"""Requests of one job gather here: those that wait share the next transaction (group commit)."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from federated.rounds import Desk, Reply, Request
from federated.rounds.desk import MOST_REQUESTS
from services.api.problems import Problem


@dataclass
class Counted:
    """Transactions and the requests in them, for the metrics."""

    transactions: int = 0
    requests: int = 0


class Clerk:
    """Asks ``desk`` in ``pool``, one transaction at a time. At most ``most_waiting`` requests wait; ``draws`` gives as
    many numbers in [0, 1) as asked for."""

    def __init__(
        self,
        desk: Desk,
        pool: Executor,
        clock: Callable[[], float],
        most_waiting: int,
        draws: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        self._desk = desk
        self._pool = pool
        self._clock = clock
        self._most = most_waiting
        self._draws = draws or (lambda count: [random.random() for _ in range(count)])
        self._waiting: deque[tuple[Request, asyncio.Future[Reply]]] = deque()
        self._working: asyncio.Task[None] | None = None
        self.counted = Counted()

    async def ask(self, request: Request) -> Reply:
        """The reply to ``request``. Raises Problem overloaded, JobUnknown and StoreUnavailable."""
        if len(self._waiting) >= self._most:
            raise Problem("overloaded", "Too many requests wait for the store.", retry_after_s=1.0)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._work(), name="clerk")
        # A client that gave up has its request served all the same: it may have been part of a transaction already.
        return await answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_REQUESTS))]
                await self._serve(batch)
        finally:
            self._working = None

    async def _serve(self, batch: Sequence[tuple[Request, asyncio.Future[Reply]]]) -> None:
        requests = [request for request, _ in batch]
        loop = asyncio.get_running_loop()
        try:
            replies = await loop.run_in_executor(
                self._pool, self._desk.handle, requests, self._clock(), self._draws(len(requests))
            )
        except Exception as error:
            # Each of those who wait is told; what it means is decided where their requests are answered.
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        self.counted.transactions += 1
        self.counted.requests += len(batch)
        for (_, answer), reply in zip(batch, replies, strict=True):
            if not answer.done():
                answer.set_result(reply)
