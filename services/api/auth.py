"""API keys: who may do what.

A key is random text; only ``scope:sha256`` of it is kept. Scopes contain one another: admin > write > read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from typing import Final

from starlette.types import Scope

from services.api.problems import Problem

RANK: Final = {"read": 0, "write": 1, "admin": 2}
READS: Final = frozenset({"/v1/recommendations", "/v1/rankings"})
"""Paths whose POST asks a question and changes nothing."""

Headers = Iterable[tuple[bytes, bytes]]


class Keys:
    """The keys that the settings name. Without any, everything is allowed (loopback addresses only)."""

    def __init__(self, stored: Iterable[str]) -> None:
        parts = (entry.split(":", 1) for entry in stored)
        self._hashes = tuple((RANK[scope], digest.encode()) for scope, digest in parts)

    def __repr__(self) -> str:
        return f"Keys({len(self._hashes)} keys)"

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._hashes

    def check(self, headers: Headers, scope: str) -> None:
        """Raises Problem key_missing, key_unknown or scope_missing unless a given key grants ``scope``."""
        if not self._hashes:
            return
        ranks = [self._rank(key) for key in presented(headers)]
        if not ranks:
            raise Problem("key_missing", "Send it as Authorization: Bearer KEY, or as X-API-Key: KEY.")
        if max(ranks) < 0:
            raise Problem("key_unknown")
        if max(ranks) < RANK[scope]:
            raise Problem("scope_missing", f"It takes a key of scope {scope}.")

    def admit(self, scope: Scope) -> None:
        """Check the key of a request to the API. Raises Problem."""
        needed = scope_of(scope["method"], scope["path"])
        if needed is not None:
            self.check(scope["headers"], needed)

    def _rank(self, key: bytes) -> int:
        """The highest rank of ``key``, -1 if unknown. Looks at every stored key, whichever matches."""
        digest = hashlib.sha256(key).hexdigest().encode()
        rank = -1
        for stored_rank, stored in self._hashes:
            if hmac.compare_digest(digest, stored):
                rank = max(rank, stored_rank)
        return rank


def presented(headers: Headers) -> Iterator[bytes]:
    """The keys that a request's headers (lower-case names) carry."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            yield value[7:].strip()


def scope_of(method: str, path: str) -> str | None:
    """The scope that a request takes: None where no key is needed (health, metrics, the OpenAPI document)."""
    if not path.startswith("/v1/"):
        return None
    return "read" if method in ("GET", "HEAD") or path in READS else "write"
