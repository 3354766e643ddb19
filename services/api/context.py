"""What the API's endpoints share: made once at the start, given to every router."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.requests import Request

from featurestore.schema import Schema
from services.api.bodies import read_body
from services.api.ingest import Ingest, Position
from services.api.metrics import ApiMetrics
from services.api.store import AsyncStore
from services.api.validation import EventRules
from services.settings.model import Settings
from services.tokens import Token, encode_token, log_fingerprint


def wall_clock_ms() -> int:
    """Unix time in ms."""
    return time.time_ns() // 1_000_000


@dataclass
class EventIds:
    """Ids for events that came without one: unique over restarts and instances, cheap to make."""

    prefix: str = field(default_factory=lambda: secrets.token_hex(8))
    _count: Iterable[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._next = iter(self._count).__next__

    def make(self) -> str:
        """The next one."""
        return f"{self.prefix}-{self._next()}"


@dataclass(frozen=True)
class Api:
    """The parts that endpoints work with. ``incarnation`` is the events log's."""

    settings: Settings
    schema: Schema
    ingest: Ingest
    store: AsyncStore
    metrics: ApiMetrics
    incarnation: str
    clock_ms: Callable[[], int] = wall_clock_ms
    event_ids: EventIds = field(default_factory=EventIds)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_log", log_fingerprint(self.incarnation))
        object.__setattr__(
            self, "rules", EventRules(self.schema, round(self.settings.api.max_clock_ahead * 1_000))
        )

    rules: EventRules = field(init=False)
    _log: int = field(init=False)

    async def body(self, request: Request) -> bytes:
        """The request's body, within the limit. Raises Problem body_too_large."""
        return await read_body(request, self.settings.api.max_body)

    def token(self, positions: Iterable[Position]) -> str:
        """The freshness token of accepted events (at least one)."""
        last: dict[int, int] = {}
        for position in positions:
            last[position.partition] = max(position.offset, last.get(position.partition, -1))
        return encode_token(Token(self._log, tuple(sorted(last.items()))))
