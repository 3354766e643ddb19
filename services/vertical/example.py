"""A party's file with all that may be in it, for people to change (``headwater fl vertical example``)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

EXAMPLE: Final = Path(__file__).with_name("example.toml")
