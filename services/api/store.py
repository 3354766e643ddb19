"""The online store for the event loop: its blocking calls run on a few threads of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Final, TypeVar

from featurestore.online import Cell, EntityKey, OnlineStore, StoreError
from services.api.problems import Problem

T = TypeVar("T")
Row = dict[str, Cell]

THREADS: Final = 4
FEW: Final = 4
"""Keys of a read that may be made on the loop."""
MAX_WAITING: Final = 1_024
"""Calls under way or waiting at most; a store that hangs must not collect requests without end."""

log = logging.getLogger(__name__)


class AsyncStore:
    """Calls the store that ``open_store`` opens off the loop. Every method raises Problem unavailable (or
    overloaded) where the store cannot answer.

    ``direct``: reads of a few keys are made on the loop. That suits a store in local files, which answers
    them in less time than it takes to hand them to a thread and whose readers never wait for a writer.
    """

    def __init__(self, open_store: Callable[[], OnlineStore], *, direct: bool = False) -> None:
        self._open = open_store
        self._direct = direct
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._waiting = 0

    @cached_property
    def blocking(self) -> OnlineStore:
        """The store itself, opened when first wanted."""
        return self._open()

    async def read(self, keys: Sequence[EntityKey], fields: Sequence[str] | None = None) -> list[Row]:
        """As ``OnlineStore.read``."""
        if self._direct and len(keys) <= FEW:
            with _problems():
                return self.blocking.read(keys, fields)
        return await self.call(lambda: self.blocking.read(keys, fields))

    async def scan(self, entity: str, after: str, limit: int) -> list[str]:
        """As ``OnlineStore.scan``."""
        return await self.call(lambda: self.blocking.scan(entity, after, limit))

    async def call(self, function: Callable[[], T]) -> T:
        """What ``function`` returns, called on one of the threads."""
        if self._waiting >= MAX_WAITING:
            raise Problem("overloaded", "The feature store is too busy.", retry_after_s=1)
        self._waiting += 1
        try:
            with _problems():
                return await asyncio.get_running_loop().run_in_executor(self._pool, function)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads once their calls are done, then the store."""
        self._pool.shutdown(wait=True)
        if "blocking" in self.__dict__:
            self.blocking.close()


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        log.warning("the feature store failed: %s", error)
        raise Problem("unavailable", "The feature store cannot be reached.", retry_after_s=1) from error
