"""What is asked of the recommender and what it answers, apart from any wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.parameter_server.types import Mark
from services.tokens import Token


@dataclass(frozen=True, slots=True)
class Query:
    """For whom, what may be shown, and until when.

    ``user_id`` None and no ``session`` (ids of items, newest last) means nobody in particular. ``excluded``
    ids are never shown. ``deadline_s`` is a time of the event loop's clock.
    """

    user_id: str | None
    deadline_s: float
    session: tuple[str, ...] = ()
    n: int = 10
    excluded: frozenset[str] = frozenset()
    exclude_seen: bool = True
    categories: tuple[str, ...] = ()
    diversity: float = 0.0
    min_score: float | None = None
    explain: bool = False
    min_freshness: Token | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """One place of a list. ``stages``: each stage's score, where an explanation was asked for."""

    item_id: str
    score: float | None
    source: str
    reasons: tuple[str, ...] = ()
    stages: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class NewestEvent:
    """The newest event of the user that the features contain, and where it lies in the log."""

    event_id: str | None
    accepted_at_ms: int
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Picks:
    """A list, and what it rests on.

    ``as_of``: the newest event of the user's partition that is in all parameters used (None: unknown).
    ``degraded``: something was missing or late, and the list is what could be made without it.
    """

    items: tuple[Pick, ...]
    degraded: bool
    model_version: str | None = None
    as_of: Mark | None = None
    newest: NewestEvent | None = None
    audience: str = "nobody"
    more: bool = False
    explanation: Mapping[str, object] = field(default_factory=dict)


class Recommends(Protocol):
    """Answers queries; whatever it cannot reach, it does without and says ``degraded``."""

    async def recommend(self, query: Query) -> Picks:
        """A list of up to ``query.n``."""
        ...

    async def rank(self, query: Query, item_ids: tuple[str, ...]) -> Picks:
        """``item_ids`` (each once) in order; hidden ones left out, unknown ones last without a score."""
        ...

    async def similar(self, query: Query, item_id: str) -> Picks:
        """Items near ``item_id``. Raises Problem unknown_item."""
        ...
