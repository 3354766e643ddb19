"""Who asks, as the audit log names them: by the key that let them in, and by no other that they also sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from services.api.auth import Headers, Keys, presented

OPEN: Final = "anybody on this machine"


class Callers:
    """The clients of one endpoint. ``stored``: ``scope:sha256`` of each key; without any, all that reach it may ask."""

    def __init__(self, stored: Iterable[str]) -> None:
        kept = tuple(stored)
        self._keys = Keys(kept)
        self._digests = frozenset(entry.split(":", 1)[1] for entry in kept)

    def check(self, headers: Headers) -> None:
        """Raises Problem unless a key was sent that may ask."""
        self._keys.check(headers, "read")

    def name(self, headers: Headers) -> str:
        """Who was let in: the beginning of the known key's digest, as the settings have it; never the key."""
        digests = (hashlib.sha256(key).hexdigest() for key in presented(headers))
        known = next((digest for digest in digests if digest in self._digests), None)
        return OPEN if known is None else f"key {known[:12]}"
