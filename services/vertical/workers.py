"""A role's long work on several cores: processes that begin when they are first needed."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from federated.vertical.parties import Alone, Workers


def _end_with_parent() -> None:
    """Let this process end when its party's does, however that dies: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


class Processes:
    """``count`` processes of our own; functions must be importable, arguments and results are pickled between them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def map(self, function: Callable[[Any], Any], chunks: Iterable[Any]) -> Sequence[Any]:
        """The results in the chunks' order. At most twice as many chunks as processes are under way."""
        if self._pool is None:
            # Not forked: this process has threads that hold locks and sockets.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, mp_context=context, initializer=_end_with_parent)
        found: list[Any] = []
        waiting: deque[Future[Any]] = deque()
        for chunk in chunks:
            waiting.append(self._pool.submit(function, chunk))
            if len(waiting) >= 2 * self._count:
                found.append(waiting.popleft().result())
        found.extend(one.result() for one in waiting)
        return found

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    """Workers on ``count`` cores: this thread where that is 1."""
    if count == 1:
        yield Alone()
        return
    processes = Processes(count)
    try:
        yield processes
    finally:
        processes.close()
