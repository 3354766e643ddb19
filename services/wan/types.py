"""What a link is told to be, and what it says of itself. Both also travel in control calls (``control.py``).

Exceptions::

    WanError                 what was asked of a link cannot be done; the message says what can
    ├── LinkUnknown          there is no link of that name
    └── AddressUnusable      a link cannot listen where it is told to
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from services.wan.conditions import LinkConditions


class WanError(Exception):
    """A link cannot do what was asked."""


class LinkUnknown(WanError):
    """There is no link of that name."""


class AddressUnusable(WanError):
    """A link cannot listen at its address."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """A link: who connects to ``listen`` (``HOST:PORT``, port 0: any free one) reaches ``target`` (``HOST:PORT``).

    ``forward`` is the way of the connecting side's bytes, ``back`` that of the target's.
    """

    name: str
    target: str
    forward: LinkConditions = LinkConditions()  # noqa: RUF009 - frozen
    back: LinkConditions = LinkConditions()  # noqa: RUF009
    listen: str = "127.0.0.1:0"


class DirectionStatus(msgspec.Struct, frozen=True):
    """One direction. ``bytes_total``: passed on so far; the rest in bytes and connections, now."""

    conditions: str
    bytes_total: int
    queued_bytes: int
    """Under way: waiting for the rate, or for the delay to pass."""
    unread_bytes: int
    """Arrived, and not read by who they are for."""
    bound_bytes: int
    """Bytes under way at most."""
    waiting: int
    """Connections that may not send now, since the link is full."""


class LinkStatus(msgspec.Struct, frozen=True):
    """A link as it stands now."""

    name: str
    address: str
    target: str
    partitioned: bool
    connections: int
    connections_total: int
    resets_total: int
    """Connections that were reset on demand."""
    failed_connects_total: int
    """Connections that were broken since the target could not be reached."""
    forward: DirectionStatus
    back: DirectionStatus
