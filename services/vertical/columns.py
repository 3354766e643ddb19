"""Which of its columns a party learns from: named in its file, or kept by a job of kind ``binning``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from services.vertical.config import ConfigRefused

MOST_BYTES: Final = 2**28


def read_columns(chosen: Path | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The names in ``data.columns``: itself, or those that its file (JSON) has under ``columns``; None for all.

    Raises ConfigRefused.
    """
    if not isinstance(chosen, Path):
        return chosen
    try:
        if chosen.stat().st_size > MOST_BYTES:
            raise ConfigRefused(f"{chosen} has more than {MOST_BYTES} bytes")
        found = json.loads(chosen.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigRefused(f"data.columns: {chosen} cannot be read as JSON: {error}") from error
    names = found.get("columns") if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigRefused(f"data.columns: {chosen} has no list of names under 'columns'")
    return tuple(names)
