"""How far something that follows all shards (the item index) has come in the event log, and waiting for it to
come further.

A shard's watermark counts only once what came with it is in the index. The index contains an event when
every shard's part of it is in, so its watermark is the least over the shards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from services.api.problems import Problem
from services.messagelog.contract import partition_of
from services.parameter_server.types import Mark, Watermarks
from services.tokens import Token, log_fingerprint

Position = tuple[str, int]
MAX_WAITING: Final = 1_000
NOWHERE: Final = Mark(-1, 0)


class Freshness:
    """Watermarks of the index by shard; belongs to one event loop."""

    def __init__(
        self,
        incarnation: str,
        partitions: int,
        moved: Callable[[Mapping[int, Mark]], None] | None = None,
    ) -> None:
        """``moved`` is told the marks, by partition, whenever a shard's have come further."""
        self._observe = moved
        self._partitions = partitions
        self._incarnation = incarnation
        self._log = log_fingerprint(incarnation)
        self._shards: dict[int, Watermarks] = {}
        self._expected = 0
        self._least: Mapping[int, Mark] = {}
        self._moved = asyncio.Event()
        self._waiting = 0

    def advance(self, shard: int, shards: int, marks: Watermarks) -> None:
        """Everything up to ``marks`` of one of ``shards`` shards is in the index."""
        self._shards = {n: of for n, of in self._shards.items() if n < shards} | {shard: marks}
        self._expected = shards
        self._least = self._compute()
        if self._observe is not None:
            self._observe(self._least)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _compute(self) -> Mapping[int, Mark]:
        if len(self._shards) < self._expected:
            return {}
        partitions = {p for marks in self._shards.values() for log, p in marks if log == self._incarnation}
        return {
            p: min(marks.get((self._incarnation, p), NOWHERE) for marks in self._shards.values())
            for p in partitions
        }

    @property
    def log(self) -> int:
        """The fingerprint by which tokens name the log."""
        return self._log

    @property
    def marks(self) -> Mapping[int, Mark]:
        """How far the index has come, by partition of the events log."""
        return self._least

    def with_pulled(self, pulled: Watermarks) -> dict[int, Mark]:
        """By partition, how far both the index and rows pulled at ``pulled`` have come."""
        return {p: min(mark, pulled.get((self._incarnation, p), NOWHERE)) for p, mark in self._least.items()}

    def partition(self, user_id: str) -> int:
        """The partition that the events of ``user_id`` are in."""
        return partition_of(user_id.encode(), self._partitions)

    def names(self, token: Token) -> bool:
        """Whether ``token`` speaks of this events log."""
        return token.log == self._log

    def covers(self, token: Token) -> bool:
        """Whether everything that ``token`` names is in the index."""
        return all(self._least.get(p, NOWHERE).offset >= offset for p, offset in token.positions)

    async def reached(self, token: Token, timeout_s: float) -> bool:
        """Wait until the index covers ``token``, at most ``timeout_s``; tells whether it does. Raises Problem
        overloaded where too many wait already."""
        if self.covers(token):
            return True
        if self._waiting >= MAX_WAITING:
            raise Problem("overloaded", "Too many requests wait for fresh parameters.", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while not self.covers(token):
                    await self._moved.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
        return True
