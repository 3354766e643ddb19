"""The REST API as the demo and the experiments use it: typed replies, one keep-alive connection."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx
import msgspec


class RestError(Exception):
    """The API answered with a problem, or did not answer; the text says what and where."""


class NewestEvent(msgspec.Struct, frozen=True):
    """The newest event of a user that a reply knows of."""

    event_id: str | None
    accepted_at_ms: int
    token: str


class Recommended(msgspec.Struct, frozen=True):
    """One place of a list."""

    item_id: str
    score: float
    source: str
    reasons: list[str] = []


class Recommendations(msgspec.Struct, frozen=True):
    """A reply of ``POST /v1/recommendations``, as far as it is looked at here."""

    recommendation_id: str
    items: list[Recommended]
    took_ms: float
    degraded: bool
    model_version: str | None = None
    parameters_as_of_ms: int | None = None
    newest_event: NewestEvent | None = None

    @property
    def item_ids(self) -> list[str]:
        """The ids in order."""
        return [item.item_id for item in self.items]


class Accepted(msgspec.Struct, frozen=True):
    """The receipt of one event."""

    event_id: str
    token: str
    accepted_at_ms: int


class _AcceptedBatch(msgspec.Struct, frozen=True):
    results: list[Accepted]


class Rest:
    """A client of one API server; use it as a context manager."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 10.0) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def recommend(self, user_id: str | None, n: int = 10, **options: object) -> Recommendations:
        """A list of ``n`` for ``user_id`` (None: nobody); ``options`` go into the body as they are."""
        body = {"n": n, **({} if user_id is None else {"user_id": user_id}), **options}
        return msgspec.json.decode(self._post("/v1/recommendations", body), type=Recommendations)

    def send(self, events: Sequence[object]) -> list[Accepted]:
        """Post events in one batch and return a receipt for each."""
        body = {"events": [msgspec.to_builtins(event) for event in events]}
        return msgspec.json.decode(self._post("/v1/events:batch", body), type=_AcceptedBatch).results

    def _post(self, path: str, body: object) -> bytes:
        try:
            reply = self._http.post(
                path, content=msgspec.json.encode(body), headers={"Content-Type": "application/json"}
            )
        except httpx.HTTPError as error:
            raise RestError(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if reply.is_error:
            raise RestError(f"{path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.content

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
