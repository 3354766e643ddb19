"""The probes that one region knows of, and when each stage had them. No I/O, no clock.

Probes and stamps may come in any order, and late: the moves of every watermark are kept for a while, and a
probe is looked up in them when somebody asks.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from services.freshness.reached import Reached
from services.freshness.stages import OF_KIND, STAGES, Kind, Stage
from services.freshness.stamps import Stamp
from services.freshness.statistics import Quantiles, quantiles
from services.tokens import log_fingerprint

PROBES_KEPT: Final = 20_000
SUMMARISED: Final = 4_096
PARTITIONS_KEPT: Final = 4_096
"""Watermarks (stage, log, partition) followed at most."""


@dataclass(slots=True)
class Probe:
    """One marked event or update: its position, its acceptance, and when stages had it (Unix ms)."""

    id: str
    kind: Kind
    log: int
    partition: int
    offset: int
    accepted_at_ms: float
    reached_ms: dict[Stage, float] = field(default_factory=dict)

    def after_ms(self) -> dict[Stage, float]:
        """By stage, how long after its acceptance it was there."""
        return {
            stage: round(self.reached_ms[stage] - self.accepted_at_ms, 3)
            for stage in STAGES
            if stage in self.reached_ms
        }


class Tracker:
    """Belongs to one thread. Bounded: the oldest probe makes room for the newest."""

    def __init__(self, most: int = PROBES_KEPT) -> None:
        self._most = most
        self._probes: OrderedDict[str, Probe] = OrderedDict()
        self._moves: dict[tuple[Stage, int, int], Reached] = {}

    def __len__(self) -> int:
        return len(self._probes)

    def add(self, probe: Probe) -> None:
        """Follow ``probe`` from now on; one that is known stays as it is."""
        if probe.id in self._probes:
            return
        while len(self._probes) >= self._most:
            self._probes.popitem(last=False)
        self._probes[probe.id] = probe

    def stamp(self, stamp: Stamp) -> None:
        """Take over what a stage said, and the probes that it announces."""
        named = log_fingerprint(stamp.log)
        for one in stamp.probes:
            self.add(Probe(one.id, stamp.kind, named, stamp.partition, one.offset, one.accepted_at_ms))
        # Each batch with a probe is stamped, so the first stamp that covers one is its own.
        self._at(stamp.stage, named, stamp.partition, -math.inf).move(stamp.offset, stamp.at_ms)

    def move(self, stage: Stage, log: int, offsets: Mapping[int, int], at_ms: float, since_ms: float) -> None:
        """This region's ``stage`` has ``log`` up to ``offsets`` (by partition); watching it began at ``since_ms``."""
        for partition, offset in offsets.items():
            self._at(stage, log, partition, since_ms).move(offset, at_ms)

    def _at(self, stage: Stage, log: int, partition: int, since_ms: float) -> Reached:
        key = stage, log, partition
        if key not in self._moves:
            while len(self._moves) >= PARTITIONS_KEPT:
                del self._moves[next(iter(self._moves))]
            self._moves[key] = Reached(since_ms)
        return self._moves[key]

    def find(self, probe_id: str) -> Probe | None:
        """A probe, with all that is known of it by now."""
        probe = self._probes.get(probe_id)
        return None if probe is None else self._looked_up(probe)

    def listed(self, after: str, limit: int) -> list[Probe] | None:
        """Up to ``limit`` probes in the order in which they became known, those after ``after`` ("": from the
        oldest); None where that one is forgotten."""
        if after and after not in self._probes:
            return None
        probes = iter(self._probes.values())
        if after:
            for probe in probes:
                if probe.id == after:
                    break
        return [self._looked_up(probe) for probe in islice(probes, limit)]

    def summary(self, from_ms: float) -> dict[Kind, dict[Stage, Quantiles]]:
        """By kind and stage, how long after acceptance the newest probes accepted since ``from_ms`` were there."""
        samples: dict[Kind, dict[Stage, list[float]]] = {
            kind: {stage: [] for stage in stages if stage != "accepted"} for kind, stages in OF_KIND.items()
        }
        for probe in self._recent(from_ms):
            for stage, after_ms in self._looked_up(probe).after_ms().items():
                samples[probe.kind][stage].append(after_ms)
        return {
            kind: {stage: found for stage, of in stages.items() if (found := quantiles(of)) is not None}
            for kind, stages in samples.items()
        }

    def _recent(self, from_ms: float) -> Iterator[Probe]:
        newest = islice(reversed(self._probes.values()), SUMMARISED)
        return (probe for probe in newest if probe.accepted_at_ms >= from_ms)

    def _looked_up(self, probe: Probe) -> Probe:
        for stage in OF_KIND[probe.kind]:
            moves = self._moves.get((stage, probe.log, probe.partition))
            if moves is None or stage in probe.reached_ms:
                continue
            at_ms = moves.when(probe.offset, probe.accepted_at_ms)
            if at_ms is not None:
                probe.reached_ms[stage] = at_ms
        return probe
