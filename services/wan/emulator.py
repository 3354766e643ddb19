"""Links in a thread of their own, told what to do from any other: for a process of links, for tests and benchmarks.

with emulated("127.0.0.1:7000", parse_conditions("delay=80ms,rate=100mbit")) as link:
    client = connect(link.address)
    link.partition()
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from services.wan.conditions import LinkConditions
from services.wan.link import Link
from services.wan.types import LinkPlan, LinkStatus, LinkUnknown

T = TypeVar("T")
_ANSWER_S: Final = 10.0
_log = logging.getLogger(__name__)


class Emulator:
    """Runs ``plans`` from entering until leaving the block. Thread-safe inside it.

    Entering raises AddressUnusable. Leaving raises what went wrong in the loop, if anything did. The same seed draws
    the same jitter.
    """

    def __init__(self, plans: Iterable[LinkPlan], seed: int = 0) -> None:
        self._plans, self._seed = tuple(plans), seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._links: dict[str, Link] = {}
        self.failure: BaseException | None = None
        """What nobody expected in the loop; the links may be in any state."""

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._await(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self.failure is not None and error is None:
            raise self.failure

    def status(self) -> tuple[LinkStatus, ...]:
        """All links as they stand now, in the order of their plans."""
        return self._do(lambda: tuple(link.status() for link in self._links.values()))

    def link(self, name: str) -> LinkHandle:
        """One link. Raises LinkUnknown."""
        self._find(name)
        return LinkHandle(self, name)

    def do(self, name: str, what: Callable[[Link], T]) -> T:
        """What ``what`` says of, or does with, a link, in the loop's thread. Raises LinkUnknown."""
        link = self._find(name)
        return self._do(lambda: what(link))

    def _find(self, name: str) -> Link:
        link = self._links.get(name)
        if link is None:
            known = ", ".join(self._links) or "there is none"
            raise LinkUnknown(f"there is no link {name!r}: {known}")
        return link

    def _do(self, what: Callable[[], T]) -> T:
        async def call() -> T:
            return what()

        return self._await(call())

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_ANSWER_S)

    async def _open(self) -> None:
        for number, plan in enumerate(self._plans):
            link = Link(plan, seed=self._seed * len(self._plans) + number)
            link.open()
            self._links[plan.name] = link

    async def _close(self) -> None:
        for link in self._links.values():
            await link.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._note)
        self._loop.run_forever()

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if self.failure is None:
            self.failure = context.get("exception") or RuntimeError(context["message"])

    def _stop(self) -> None:
        try:
            self._await(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class LinkHandle:
    """One link of a running emulator, from any thread."""

    def __init__(self, emulator: Emulator, name: str) -> None:
        self._emulator, self.name = emulator, name
        self.address: str = emulator.do(name, lambda link: link.address)
        """Where it listens, ``HOST:PORT``."""

    def set(
        self,
        conditions: LinkConditions | None = None,
        *,
        forward: LinkConditions | None = None,
        back: LinkConditions | None = None,
    ) -> None:
        """New ``conditions`` for both directions, or for one."""
        self._emulator.do(self.name, lambda link: link.set(forward or conditions, back or conditions))

    def partition(self) -> None:
        """Let nothing pass until ``heal``: connections stay open, new ones hang."""
        self._emulator.do(self.name, Link.partition)

    def heal(self) -> None:
        """End the partition."""
        self._emulator.do(self.name, Link.heal)

    def reset(self) -> int:
        """Break every connection; how many there were."""
        return self._emulator.do(self.name, Link.reset)

    def status(self) -> LinkStatus:
        """What it is and has done."""
        return self._emulator.do(self.name, Link.status)


@contextmanager
def emulated(
    target: str,
    conditions: LinkConditions = LinkConditions(),  # noqa: B008 - frozen
    back: LinkConditions | None = None,
    *,
    listen: str = "127.0.0.1:0",
    seed: int = 0,
) -> Iterator[LinkHandle]:
    """A link to ``target`` (``HOST:PORT``) within the block; ``back`` is like ``conditions`` unless given."""
    plan = LinkPlan("link", target, conditions, conditions if back is None else back, listen)
    with Emulator([plan], seed) as emulator:
        yield emulator.link(plan.name)
