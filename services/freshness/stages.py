"""The stages that an update passes on its way into a region's recommendations, and whose clock times each.

A stage *has* a probe once everything up to the probe's position (log, partition, offset) went through it: that
is decided by watermarks alone, never by comparing clocks. A clock only says when that was found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

Kind = Literal["event", "update"]
"""A marked event goes through the log like a client's; a marked update is pushed to the parameter servers."""
Stage = Literal["accepted", "processed", "trained", "applied", "parameters", "recommendations"]

STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
REGIONAL: Final[frozenset[Stage]] = frozenset({"parameters", "recommendations"})
"""Stages that every region passes on its own."""
OF_KIND: Final[Mapping[Kind, tuple[Stage, ...]]] = MappingProxyType(
    {"event": STAGES, "update": ("applied", "parameters")}
)

MEANING: Final[Mapping[Stage, str]] = MappingProxyType(
    {
        "accepted": "durable in the event log",
        "processed": "its features and its sample are durable",
        "trained": "its gradient is computed",
        "applied": "every shard's leader in the home region has acknowledged it",
        "parameters": "a read of this region's parameters contains it",
        "recommendations": "this region's item index contains it",
    }
)
CLOCK: Final[Mapping[Stage, str]] = MappingProxyType(
    {
        "accepted": "the measuring client's",
        "processed": "the processor's",
        "trained": "the trainer's",
        "applied": "the trainer's",
        "parameters": "the measuring client's",
        "recommendations": "the measuring client's",
    }
)
"""Of the figures of events that ``headwater freshness`` prints (those of updates are the client's throughout). All
count from when the probe was due to be sent, on the client's clock; where a stage's clock is another machine's, the
difference of the two is in its figure."""
