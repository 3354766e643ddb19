"""API keys: made here, shown once, kept only as hashes."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from services.settings.checks import SCOPES

PREFIX: Final = "hw"
_BYTES: Final = 32


def new_key(scope: str) -> tuple[str, str]:
    """A new key for ``scope`` and its hashed setting ``scope:sha256-hex``. Raises ValueError.

    The key has 256 random bits, so one plain hash is enough: there is nothing to guess.
    """
    if scope not in SCOPES:
        raise ValueError(f"{scope!r} is not a scope: {', '.join(SCOPES)}")
    key = f"{PREFIX}_{scope}_{secrets.token_urlsafe(_BYTES)}"
    return key, f"{scope}:{hash_key(key)}"


def hash_key(key: str) -> str:
    """The hash of ``key`` that the settings keep (64 hexadecimal digits)."""
    return hashlib.sha256(key.encode()).hexdigest()
