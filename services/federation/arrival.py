"""When a push has come to a region: its parameter servers say so, and then a list that the region's API serves changes.

``parameters``: every shard there names the push in its watermarks. ``list``: from then on, the items most like a given
one, with their scores, are no longer as they were before the push: the index has been encoded anew. Where something
else taught the same model in between, the change may be its; ``Teacher.others`` tells whether anything did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from models.parameters import RETRIEVAL
from services.parameter_server.client import ParameterClient
from services.parameter_server.types import Keys, ParametersUnavailable
from sync.pushes import Source

PAUSE_S: Final = 0.005
Shown = tuple[tuple[str, float | None], ...]
"""A list: item ids and scores, best first."""


@dataclass(frozen=True, slots=True)
class Watched:
    """One region. ``reached(number)``: whether its parameter servers have a push (None: they cannot be asked from
    here); ``similar(item)``: the list of its API (None: it is not known)."""

    name: str
    reached: Callable[[int], bool] | None
    similar: Callable[[str], Shown] | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """After how long a push was in a region's ``parameters`` and in its ``list`` (ms; None: not in time; a stage that
    could not be asked is missing), and the list then."""

    after_ms: dict[str, float | None]
    shown: Shown = ()


def reached_by(client: ParameterClient, model: str, source: Source, keys: Keys) -> Callable[[int], bool]:
    """Asks the leaders of a region whether all its shards have a push of ``source``; ``keys`` are any rows. A region
    whose servers are away does not have it yet."""

    def reached(number: int) -> bool:
        try:
            marks = client.pull(model, {RETRIEVAL: keys}, followers=False, unasked=False).watermarks
        except ParametersUnavailable:
            return False
        mark = marks.get((source.log, source.partition))
        return mark is not None and mark.offset >= number

    return reached


def lists_before(regions: list[Watched], item: str) -> dict[str, Shown]:
    """The lists of all regions whose API is known."""
    return {region.name: region.similar(item) for region in regions if region.similar is not None}


def await_arrival(
    regions: list[Watched],
    number: int,
    sent_at_ms: float,
    item: str,
    before: Mapping[str, Shown],
    timeout_s: float,
    now_ms: Callable[[], float] = lambda: time.time() * 1e3,
) -> dict[str, Arrival]:
    """Watch all regions at once until push ``number``, sent at ``sent_at_ms``, is everywhere, at most ``timeout_s``
    each. Raises what asking raises."""

    def watch(region: Watched) -> Arrival:
        deadline_ms = now_ms() + timeout_s * 1e3
        shown: Shown = ()
        after_ms: dict[str, float | None] = {}
        if region.reached is not None:
            after_ms["parameters"] = None
        if region.similar is not None:
            after_ms["list"] = None
        while None in after_ms.values() and now_ms() < deadline_ms:
            stage = next(stage for stage, ms in after_ms.items() if ms is None)
            if stage == "parameters":
                assert region.reached is not None
                there = region.reached(number)
            else:
                assert region.similar is not None
                shown = region.similar(item)
                there = differs(shown, before[region.name])
            if there:
                after_ms[stage] = now_ms() - sent_at_ms
            else:
                time.sleep(PAUSE_S)
        return Arrival(after_ms, shown)

    with ThreadPoolExecutor(max(1, len(regions))) as pool:
        return dict(zip([one.name for one in regions], pool.map(watch, regions), strict=True))


def differs(one: Shown, other: Shown) -> bool:
    """Whether two lists differ by more than the rounding of a score."""
    if [item for item, _ in one] != [item for item, _ in other]:
        return True
    scores = [np.array([score or 0.0 for _, score in shown]) for shown in (one, other)]
    return bool(np.abs(scores[0] - scores[1]).max(initial=0.0) > 1e-6)
