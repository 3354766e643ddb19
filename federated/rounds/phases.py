"""The phases of a job and what leads from one to the next, as one table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Phase(StrEnum):
    """Where a job is."""

    STARTING = "starting"  # clients start; the window opens with the first
    UPDATING = "updating"  # those who started upload
    BUFFERING = "buffering"  # both at once: asynchronous
    AGGREGATING = "aggregating"  # servers sum what was uploaded
    STOPPED = "stopped"
    FINISHED = "finished"


class Event(StrEnum):
    """What happened to an iteration."""

    STARTS_FULL = "starts_full"  # as many started as the iteration takes
    STARTS_ENOUGH = "starts_enough"  # the start window ended with enough of them
    UPLOADS_FULL = "uploads_full"
    UPLOADS_ENOUGH = "uploads_enough"  # the update window ended with enough of them
    TOO_FEW_STARTS = "too_few_starts"  # from here on: the iteration is invalid
    TOO_FEW_UPLOADS = "too_few_uploads"
    GLOBAL_WINDOW = "global_window"
    AGGREGATION_WINDOW = "aggregation_window"
    AGGREGATION_FAILED = "aggregation_failed"
    SECURE_AGGREGATION = "secure_aggregation"  # masks that cannot be taken off
    STOP = "stop"
    AGGREGATED = "aggregated"
    NEXT_SYNCHRONOUS = "next_synchronous"  # what follows the end of an iteration, valid or not
    NEXT_BUFFERED = "next_buffered"
    LAST = "last"
    BUDGET = "budget"  # of privacy: one more release would exceed it


class ImpossibleTransition(RuntimeError):
    """Our own fault: an event that cannot happen in that phase."""


END: Final = None  # of the iteration; NEXT_*, STOP or LAST say what follows

_P, _E = Phase, Event
TRANSITIONS: Final[Mapping[Phase | None, Mapping[Event, Phase | None]]] = MappingProxyType(
    {
        _P.STARTING: {
            _E.STARTS_FULL: _P.UPDATING,
            _E.STARTS_ENOUGH: _P.UPDATING,
            _E.UPLOADS_FULL: _P.AGGREGATING,
            _E.TOO_FEW_STARTS: END,
            _E.GLOBAL_WINDOW: END,
            _E.SECURE_AGGREGATION: END,
            _E.STOP: END,
        },
        _P.UPDATING: {
            _E.UPLOADS_FULL: _P.AGGREGATING,
            _E.UPLOADS_ENOUGH: _P.AGGREGATING,
            _E.TOO_FEW_UPLOADS: END,
            _E.GLOBAL_WINDOW: END,
            _E.SECURE_AGGREGATION: END,
            _E.STOP: END,
        },
        _P.BUFFERING: {
            _E.UPLOADS_FULL: _P.AGGREGATING,
            _E.UPLOADS_ENOUGH: _P.AGGREGATING,
            _E.GLOBAL_WINDOW: END,
            _E.STOP: END,
        },
        _P.AGGREGATING: {
            _E.AGGREGATED: END,
            _E.AGGREGATION_WINDOW: END,
            _E.AGGREGATION_FAILED: END,
            _E.SECURE_AGGREGATION: END,
        },
        END: {
            _E.NEXT_SYNCHRONOUS: _P.STARTING,
            _E.NEXT_BUFFERED: _P.BUFFERING,
            _E.STOP: _P.STOPPED,
            _E.LAST: _P.FINISHED,
            _E.BUDGET: _P.FINISHED,
        },
        _P.STOPPED: {
            _E.NEXT_SYNCHRONOUS: _P.STARTING,
            _E.NEXT_BUFFERED: _P.BUFFERING,
        },
        _P.FINISHED: {},
    }
)


def follow(phase: Phase | None, event: Event) -> Phase | None:
    """The phase after ``event``, None at the end of an iteration. Raises ImpossibleTransition."""
    try:
        return TRANSITIONS[phase][event]
    except KeyError:
        raise ImpossibleTransition(f"{event} in phase {phase}") from None
