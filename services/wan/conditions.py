"""What one direction of a link is like, and the text of it: ``delay=80ms,rate=100mbit,jitter=5ms``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

MIN_DELAY_S: Final = 1e-6
MAX_DELAY_S: Final = 60.0
MIN_RATE_BITS_S: Final = 1_000.0
MAX_RATE_BITS_S: Final = 1e12
LEAST_QUEUE_BYTES: Final = 256 * 2**10
MIN_QUEUE_BYTES: Final = 4 * 2**10
MAX_QUEUE_BYTES: Final = 2**30
UNLIMITED_QUEUE_BYTES: Final = 32 * 2**20
"""The bound of a delayed link without a rate: there is no bandwidth to multiply the delay with."""
_TICK_S: Final = 0.01
"""Timers ring up to a millisecond late, and later in a busy process: a queue holds at least twice what passes in
this time, so that lateness does not lower the rate."""

_SEGMENT_BYTES: Final = 1_448
_READ_BYTES: Final = 64 * 2**10
_READ_S: Final = 0.002

_DURATION: Final = {"ms": Decimal("0.001"), "s": Decimal(1)}
_RATE: Final = {"kbit": Decimal(10**3), "mbit": Decimal(10**6), "gbit": Decimal(10**9)}
_SIZE: Final = {
    "KiB": Decimal(2**10), "MiB": Decimal(2**20), "GiB": Decimal(2**30),
    "kB": Decimal(10**3), "MB": Decimal(10**6), "B": Decimal(1),
}  # fmt: skip
_KEYS: Final[Mapping[str, tuple[str, Mapping[str, Decimal], str]]] = {
    "delay": ("delay_s", _DURATION, "80ms"),
    "jitter": ("jitter_s", _DURATION, "5ms"),
    "rate": ("rate_bits_s", _RATE, "100mbit"),
    "queue": ("queue_bytes", _SIZE, "512KiB"),
}
_QUANTITY: Final = re.compile(r"(\d{1,18}(?:\.\d{1,30})?)([A-Za-z]+)", re.ASCII)
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
FORM: Final = "KEY=VALUE separated by commas, such as delay=80ms,rate=100mbit,jitter=5ms"


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """One direction of a link.

    ``delay_s`` is the one-way delay, to which up to ``jitter_s`` is added, evenly drawn. ``rate_bits_s`` is shared
    by all connections (0: no limit). ``queue_bytes`` bounds what is under way (0: twice what the link holds, rate
    times delay, at least 256 KiB). Raises ValueError for what no link could be.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bits_s: float = 0.0
    queue_bytes: int = 0

    bound_bytes: int = field(init=False, compare=False, repr=False)
    """Bytes under way at most: senders have to wait beyond it, as before the full buffer of a router."""
    quantum_bytes: int = field(init=False, compare=False, repr=False)
    """Bytes taken in at once at most: what passes in 2 ms, from one segment to 64 KiB. Finer is smoother and dearer."""
    headroom_bytes: int = field(init=False, compare=False, repr=False)
    """Up to so many bytes under way another quantum fits in."""

    def __post_init__(self) -> None:
        if self.delay_s:
            _within("delay", self.delay_s, MIN_DELAY_S, MAX_DELAY_S, "s")
        if self.jitter_s:
            _within("jitter", self.jitter_s, MIN_DELAY_S, MAX_DELAY_S, "s")
        if self.rate_bits_s:
            _within("rate", self.rate_bits_s, MIN_RATE_BITS_S, MAX_RATE_BITS_S, "bit/s")
        if self.queue_bytes:
            _within("queue", self.queue_bytes, MIN_QUEUE_BYTES, MAX_QUEUE_BYTES, "bytes")
        bytes_s = self.rate_bits_s / 8
        delay_s = self.delay_s + self.jitter_s
        if self.queue_bytes:
            bound = self.queue_bytes
        elif delay_s and not bytes_s:
            bound = UNLIMITED_QUEUE_BYTES
        else:
            held = 2 * bytes_s * max(delay_s, _TICK_S)
            bound = int(min(max(held, LEAST_QUEUE_BYTES), MAX_QUEUE_BYTES))
        passing = int(min(max(bytes_s * _READ_S, _SEGMENT_BYTES), _READ_BYTES)) if bytes_s else _READ_BYTES
        # Frozen: derived once, since they are asked for at every read.
        object.__setattr__(self, "bound_bytes", bound)
        object.__setattr__(self, "quantum_bytes", min(passing, bound))
        object.__setattr__(self, "headroom_bytes", bound - self.quantum_bytes)

    def __str__(self) -> str:
        """The text that reads back as the same conditions; an empty one for a link without limits."""
        parts = []
        for key, (name, units, _) in _KEYS.items():
            value = getattr(self, name)
            if value:
                parts.append(f"{key}={_written(value, units)}")
        return ",".join(parts)


def parse_conditions(text: str) -> LinkConditions:
    """Read ``delay=80ms,rate=100mbit``; what is not named is without delay or limit. Raises ValueError."""
    found: dict[str, Decimal] = {}
    for part in text.split(",") if text.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"{part.strip()!r} is not {FORM}")
        if key not in _KEYS:
            raise ValueError(f"{key!r} is not a condition of a link: {', '.join(_KEYS)}")
        if key in found:
            raise ValueError(f"{key} stands there twice")
        found[key] = _quantity(key, value)
    delay_s, jitter_s, rate_bits_s = (float(found.get(key, 0)) for key in ("delay", "jitter", "rate"))
    return LinkConditions(delay_s, jitter_s, rate_bits_s, int(found.get("queue", 0)))


def parse_named(text: str) -> tuple[str, LinkConditions]:
    """Read ``eu:delay=80ms,rate=100mbit``: whose link it is, and its conditions. Raises ValueError."""
    name, colon, conditions = text.partition(":")
    if not colon or not is_link_name(name.strip()):
        raise ValueError(f"{text!r} is not NAME:CONDITIONS, such as eu:delay=80ms,rate=100mbit")
    return name.strip(), parse_conditions(conditions)


def is_link_name(text: str) -> bool:
    """Whether ``text`` may name a link: lower-case letters, digits, ``-`` and ``_``, 32 at most."""
    return _NAME.fullmatch(text) is not None


def _within(key: str, value: float, least: float, most: float, unit: str) -> None:
    if not least <= value <= most:
        raise ValueError(f"{key} = {value:g} {unit} is not between {least:g} and {most:g} {unit}")


def _quantity(key: str, text: str) -> Decimal:
    """``text`` in the base unit, exactly: binary floats would not read back as what was written."""
    _, units, example = _KEYS[key]
    if text == "0":
        return Decimal(0)
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(
            f"{key}={text!r} is not a number and a unit ({', '.join(units)}), such as {key}={example}"
        )
    return Decimal(match[1]) * units[match[2]]


def _written(value: float, units: Mapping[str, Decimal]) -> str:
    """``value`` in the unit that takes the fewest characters, the first of equals."""
    exact = Decimal(repr(value))
    texts = [f"{format((exact / factor).normalize(), 'f')}{unit}" for unit, factor in units.items()]
    return min(
        (text for text in texts if (m := _QUANTITY.fullmatch(text)) and Decimal(m[1]) * units[m[2]] == exact),
        key=len,
    )
