"""Durations (seconds) and sizes (bytes) as people write them: ``"30s"``, ``"250ms"``, ``"2GiB"``."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

_DURATION: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_SIZE: Final = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def _quantity(text: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a number and a unit ({', '.join(units)}), such as {example!r}")
    return float(match[1]) * units[match[2]]


def parse_duration(value: object) -> object:
    """Seconds of ``"250ms"``, ``"30s"``, ``"7d"``; numbers pass as seconds. Raises ValueError."""
    return _quantity(value, _DURATION, "30s") if isinstance(value, str) else value


def parse_size(value: object) -> object:
    """Bytes of ``"64MiB"``, ``"2GB"``; numbers pass as bytes. Raises ValueError."""
    return int(_quantity(value, _SIZE, "64MiB")) if isinstance(value, str) else value


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, allow_inf_nan=False)]
DurationOrNone = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, allow_inf_nan=False)]
"""A duration that may be 0."""
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
SizeOrNone = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""A size that may be 0."""
