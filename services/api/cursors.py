"""Cursors of recommendation lists: the next page holds nothing that an earlier one showed.

A list is made anew for every page, from parameters that move; so what a cursor stands for is the request and
the items shown so far. Cursors are kept here, for a time and up to a number; each stays usable after its page
was fetched, so that a repeated request gets an answer.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import xxhash

from services.api.problems import Problem

T = TypeVar("T")

MAX_SHOWN: Final = 5_000
"""Items over all pages of one list; beyond it there is no further cursor."""
IDS: Final = 20
"""Ids held on average, for each cursor that there may be."""
_RANDOM: Final = 12
_CHECK: Final = 4


@dataclass(frozen=True, slots=True)
class Shown(Generic[T]):
    """A list so far: its request, the items of its last page, and the pages before. ``count`` items were
    shown; ``ids`` are held with those of the request."""

    request: T
    page: tuple[str, ...]
    count: int
    before: Shown[T] | None
    ids: int

    def items(self) -> Iterator[str]:
        """All items shown."""
        at: Shown[T] | None = self
        while at is not None:
            yield from at.page
            at = at.before


class Cursors(Generic[T]):
    """Up to ``most`` cursors, each for ``ttl_s``; the oldest go first. ``clock_s`` is monotonic.

    ``size_of`` says how many ids a request holds. Cursors go also when all together hold more than IDS ids
    for each that there may be: a thousand excluded items in every request must not fill the memory.
    """

    def __init__(
        self, ttl_s: float, most: int, clock_s: Callable[[], float], size_of: Callable[[T], int]
    ) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._size_of = size_of
        self._ids = 0
        self._clock_s = clock_s
        self._lists: OrderedDict[str, tuple[float, Shown[T]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lists)

    def open(self, request: T, page: Sequence[str], before: Shown[T] | None) -> str | None:
        """A cursor to go on after ``page``; None where a list has become too long to go on."""
        count = len(page) + (before.count if before else 0)
        if count > MAX_SHOWN:
            return None
        self._expire()
        shown = Shown(request, tuple(page), count, before, count + self._size_of(request))
        while self._lists and (len(self._lists) >= self._most or self._ids + shown.ids > IDS * self._most):
            self._drop()
        self._ids += shown.ids
        body = secrets.token_bytes(_RANDOM)
        text = base64.urlsafe_b64encode(body + xxhash.xxh32_digest(body)).rstrip(b"=").decode()
        self._lists[text] = (self._clock_s() + self._ttl_s, shown)
        return text

    def find(self, text: str) -> Shown[T]:
        """The list of a cursor. Raises Problem invalid_cursor (never one of ours) or expired_cursor."""
        self._expire()
        entry = self._lists.get(text)
        if entry is not None:
            return entry[1]
        raise Problem.field(
            "expired_cursor" if _genuine(text) else "invalid_cursor", "cursor", "does not name a list"
        )

    def _expire(self) -> None:
        now = self._clock_s()
        while self._lists:
            until, _ = next(iter(self._lists.values()))
            if until > now:
                return
            self._drop()

    def _drop(self) -> None:
        _, (_, shown) = self._lists.popitem(last=False)
        self._ids -= shown.ids


def _genuine(text: str) -> bool:
    """Whether a server of ours made it, before a restart perhaps."""
    if len(text) > 64:
        return False
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return False
    return len(data) == _RANDOM + _CHECK and xxhash.xxh32_digest(data[:-_CHECK]) == data[-_CHECK:]
