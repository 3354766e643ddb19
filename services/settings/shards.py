"""Which shards a region writes: ``sync.writes`` as people write it, and as a set of shard numbers."""

from __future__ import annotations

import re
from typing import Final

from services.settings.model import Settings

ALLOWED: Final = 'auto, all, none, or shards such as "0-3,8"'
_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)


def parse_writes(text: str, shards: int) -> frozenset[int] | None:
    """The shards, of ``shards`` in all, that ``text`` names; None for ``auto``. Raises ValueError."""
    words: dict[str, frozenset[int] | None] = {
        "auto": None,
        "all": frozenset(range(shards)),
        "none": frozenset(),
    }
    if text in words:
        return words[text]
    chosen: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a shard nor a range of shards")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"{part.strip()!r} ends before it begins")
        if last >= shards:
            raise ValueError(f"there is no shard {last}: {shards} shards count from 0")
        chosen.update(range(first, last + 1))
    return frozenset(chosen)


def written_shards(settings: Settings) -> frozenset[int]:
    """The shards that this region writes. Raises ValueError where ``sync.writes`` is wrong."""
    shards = settings.parameters.shards
    chosen = parse_writes(settings.sync.writes, shards)
    if chosen is not None:
        return chosen
    return frozenset() if settings.sync.upstreams else frozenset(range(shards))
