"""What a measuring client saw: probes and their positions, and when each region's stages covered them.

Pure: times come in (seconds on the client's monotonic clock, and the wall clock for what other processes
stamped). Every figure counts from when a probe was *due*, so that a server that stalls is not flattered by
probes which it kept from being sent (coordinated omission).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from services.freshness.reached import Reached
from services.freshness.stages import OF_KIND, REGIONAL, Kind, Stage
from services.tokens import Token, encode_token

HOME = ""
"""Where stages before the regions' are kept."""


@dataclass(slots=True)
class Sent:
    """A probe on its way. ``due_s``: when it was to be sent; ``due_ms``: the same on the wall clock."""

    id: str
    kind: Kind
    due_s: float
    due_ms: float
    token: Token | None = None
    after_ms: dict[Stage, float] = field(default_factory=dict)
    """Stages that every probe passes once, by how long after it was due."""


@dataclass(slots=True)
class _Watch:
    """One stage of one region: its moves, and the probes that were accepted and not yet seen there."""

    moves: dict[tuple[int, int], Reached] = field(default_factory=dict)
    waiting: deque[Sent] = field(default_factory=deque)

    def covers(self, token: Token) -> bool:
        return all(
            (token.log, partition) in self.moves and self.moves[token.log, partition].offset >= offset
            for partition, offset in token.positions
        )

    def when_s(self, sent: Sent) -> float | None:
        """When everything that the probe's token names had been seen."""
        assert sent.token is not None
        found = []
        for partition, offset in sent.token.positions:
            moves = self.moves.get((sent.token.log, partition))
            at_s = None if moves is None else moves.when(offset, sent.due_s)
            if at_s is None:
                return None
            found.append(at_s)
        return max(found)


class Book:
    """Keeps all of it for one measurement, which bounds it: rate times seconds probes, known beforehand."""

    def __init__(self, regions: Iterable[str], moves: int) -> None:
        """``moves``: how many each watermark may make without one being forgotten."""
        self.regions = tuple(regions)
        self._moves = moves
        self._sent: dict[str, Sent] = {}
        self._watches = {
            (region, kind, stage): _Watch()
            for region in self.regions
            for kind, stages in OF_KIND.items()
            for stage in stages
            if stage in REGIONAL
        }
        self.failed = 0

    def send(self, sent: Sent) -> None:
        """A probe is on its way."""
        self._sent[sent.id] = sent

    def accept(self, probe_id: str, token: Token, stage: Stage, at_s: float) -> None:
        """``stage`` (the first of its kind) has the probe, and its position is known."""
        sent = self._sent[probe_id]
        sent.token = token
        sent.after_ms[stage] = (at_s - sent.due_s) * 1e3
        for region in self.regions:
            for of in OF_KIND[sent.kind]:
                if of in REGIONAL:
                    self._watches[region, sent.kind, of].waiting.append(sent)

    def fail(self, probe_id: str) -> None:
        """The probe was refused, or its answer never came."""
        del self._sent[probe_id]
        self.failed += 1

    def see(self, region: str, kind: Kind, stages: Mapping[Stage, Token], at_s: float) -> None:
        """A region said how far its stages are."""
        for stage, token in stages.items():
            watch = self._watches[region, kind, stage]
            for partition, offset in token.positions:
                key = token.log, partition
                if key not in watch.moves:
                    watch.moves[key] = Reached(most=self._moves)
                watch.moves[key].move(offset, at_s)

    def oldest(self, region: str, kind: Kind, stage: Stage) -> str | None:
        """The token of the oldest accepted probe that a region's stage was not seen to have; None: it has all."""
        watch = self._watches[region, kind, stage]
        while watch.waiting:
            token = watch.waiting[0].token
            assert token is not None
            if not watch.covers(token):
                return encode_token(token)
            watch.waiting.popleft()
        return None

    def stamp(self, probe_id: str, stage: Stage, at_ms: float) -> None:
        """What another process said of when ``stage`` had a probe (Unix ms, its clock)."""
        sent = self._sent.get(probe_id)
        if sent is not None and stage in OF_KIND[sent.kind]:
            sent.after_ms.setdefault(stage, at_ms - sent.due_ms)

    @property
    def unseen(self) -> int:
        """Accepted probes that some stage of some region was not seen to have."""
        return sum(
            self.oldest(region, kind, stage) is not None and len(watch.waiting)
            for (region, kind, stage), watch in self._watches.items()
        )

    def unstamped(self, kind: Kind) -> int:
        """Probes of one kind of which the time of some stage before the regions' is not known."""
        stages = [stage for stage in OF_KIND[kind] if stage not in REGIONAL]
        return sum(
            sent.kind == kind and any(stage not in sent.after_ms for stage in stages)
            for sent in self._sent.values()
        )

    def ids(self, kind: Kind) -> list[str]:
        """The probes of one kind."""
        return [sent.id for sent in self._sent.values() if sent.kind == kind]

    def after_ms(self, kind: Kind) -> dict[str, dict[Stage, list[float]]]:
        """By region (HOME for what comes before the regions) and stage: how long after they were due probes were
        seen there."""
        found: dict[str, dict[Stage, list[float]]] = {HOME: {}}
        probes = [sent for sent in self._sent.values() if sent.kind == kind]
        for stage in OF_KIND[kind]:
            if stage not in REGIONAL:
                found[HOME][stage] = [sent.after_ms[stage] for sent in probes if stage in sent.after_ms]
                continue
            for region in self.regions:
                watch = self._watches[region, kind, stage]
                seen = ((sent, watch.when_s(sent)) for sent in probes if sent.token is not None)
                found.setdefault(region, {})[stage] = [
                    (at_s - sent.due_s) * 1e3 for sent, at_s in seen if at_s is not None
                ]
        return found
