"""What each part of the synchronisation is worth: the published steps one after the other, then ours, and other ways,
all on the same links, the same writes and the same costs, in virtual time.

Everything is fixed before the run and said in the rows: the scale is ``scale.Scale``, the costs are those that
``charges.measure`` finds. What Ekko published (Sima et al., OSDI 2022) is named beside it; its code was not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from rich.console import Console

from benchmarks import baselines
from benchmarks.charges import TRANSPORT_S, Constants
from benchmarks.outcomes import Outcome, Times
from benchmarks.overlays import Way, World
from benchmarks.report import Row
from benchmarks.scale import Plan, Scale, updates_a_second

STEPS: Final = (
    Way("versions by vector, every row scanned", "scan", leaders=False, parked=False),
    Way("+ update cache", "cache", leaders=False, parked=False),
    Way("+ shard version", "token", leaders=False, parked=False),
    Way("+ regional leader", "token", leaders=True, parked=False),
    Way("+ long poll"),
    Way("+ priority", priority_share=0.1),
)
FULL: Final = "full compare"
SCAN, CACHE, TOKEN, LEADER, PARKED = (way.name for way in STEPS[:5])
GAIN_AIM, TWO_PHASE_AIM = 10.0, 10.0
CONGESTED: Final = 8.0
"""By how much every link is slower while priority is compared."""
STALENESS_S: Final = 60.0
KNOWN_S: Final = 800.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Virtual seconds. ``crowded``: of ways that may have more to send than the links carry, and need long until it
    shows how far behind they stay; ``polled``, ``parked``: of others; ``congested``: of links that are too slow.
    ``rounds``: of ways that send everything. ``corners``: other numbers of (copies, shards) to compare at.
    """

    crowded_s: float = 300.0
    polled_s: float = 100.0
    parked_s: float = 25.0
    congested_s: float = 150.0
    rounds: int = 4
    corners: Sequence[tuple[int, int]] = ((4, 8), (4, 512), (4, 4_096))


@dataclass(frozen=True, slots=True)
class Ablation:
    """``rows`` of the benchmark, and what a picture shows: a ``title``, and ``outcomes`` in order."""

    rows: list[Row]
    outcomes: list[Outcome]
    title: str


def run(sizes: Sizes, scale: Scale, console: Console, constants: Constants, seed: int = 0) -> Ablation:
    """All steps and baselines. The same seed and the same constants have the same result."""
    setting = _Setting(sizes, scale, constants, seed, console)
    rows = list(setting.constants_rows())
    rows += setting.steps()
    for copies, shards in sizes.corners:
        other = replace(scale, copies=copies, shards=shards)
        rows += _Setting(sizes, other, constants, seed, console).corner()
    rows += setting.congestion()
    return Ablation(rows, setting.outcomes, setting.label)


class _Setting:
    """One scale, at which ways are compared."""

    def __init__(self, sizes: Sizes, scale: Scale, constants: Constants, seed: int, console: Console) -> None:
        self.sizes, self.scale, self.constants, self.seed, self.console = (
            sizes,
            scale,
            constants,
            seed,
            console,
        )
        self.plan = Plan(scale, max(sizes.crowded_s, sizes.polled_s, sizes.parked_s), seed)
        self.outcomes: list[Outcome] = []
        self.label = f"{scale.regions} x {scale.copies} replicas of {scale.shards} shards"

    def constants_rows(self) -> Iterator[Row]:
        """What was fixed before the run."""
        scale = self.scale
        real = updates_a_second(scale) * scale.each
        note = (
            f"{scale.regions} regions of {scale.copies} replicas; {scale.rows / 1e6:.0f} M rows of {scale.row_bytes} "
            f"bytes ({scale.rows * scale.row_bytes / 1e9:.0f} GB) a region, {scale.changed:.0%} changed an hour, Zipf "
            f"{scale.exponent:g}; one of {scale.columns} equal columns of servers with {scale.shards} shards each is "
            f"simulated, a simulated row stands for {scale.each}; links of {scale.slowest * 8e-6:.0f} Mbit/s to "
            f"{scale.fastest * 8e-9:g} Gbit/s a region, shared, and 10 Gbit/s a server; vectors of {scale.writers} "
            f"entries; update cache of {scale.cached:.1%}; all is written in one region, {scale.pushes_a_second:g} "
            f"pushes a second; who polls does so every {scale.poll_s:g} s (about the published .7 s inside a region)"
        )
        yield Row("simulated: rows written a second", "rows/s", real * scale.columns, note=note)
        yield _calibrated(self.constants)
        yield Row(
            "simulated: a look at all versions of one server", "s", scale.real_rows * self.constants.scanned_row,
            note=f"of a thread: {self.constants.said()}, of which {1e6 * TRANSPORT_S:.0f} us are assumed for a socket",
        )  # fmt: skip

    def steps(self) -> Iterator[Row]:
        """From full compare to all of it, and the baselines; then what was aimed at."""
        found = [self._again(baselines.FullCompare, FULL), *(self._way(way) for way in STEPS)]
        others = self._others()
        self.outcomes = [*found, *others]
        for outcome in self.outcomes:
            yield _row(f"{self.label}: {outcome.name}", outcome)
        yield from self._aims(found, others[1])

    def corner(self) -> Iterator[Row]:
        """The published steps and ours at other numbers of copies and shards."""
        found = [self._way(way) for way in STEPS[:5]]
        for outcome in found:
            yield _row(f"{self.label}: {outcome.name}", outcome)
        yield from self._aims(found, self._two_phase())

    def _aims(self, found: list[Outcome], two_phase: Outcome) -> Iterator[Row]:
        by_name = {outcome.name: outcome.between.mean_s for outcome in found}
        cache, token, leader, parked = (by_name[name] for name in (CACHE, TOKEN, LEADER, PARKED))
        compared = f"; over full compare {by_name[FULL] / cache:,.0f}" if FULL in by_name else ""
        gains = (
            (
                "shard version and regional leader together", cache / leader, GAIN_AIM,
                f"shard version alone {cache / token:.2f}; cache on throughout; published 27.4 -> 6 -> 2.6 s",
            ),
            (
                "the cache's own gain", by_name[SCAN] / cache, None,
                f"over a scan of every row's version{compared}; where links are full they hide it",
            ),
            (
                "long poll over two-phase push", two_phase.between.mean_s / parked, TWO_PHASE_AIM,
                f"two-phase {two_phase.between.mean_s:.2f} s{_late(two_phase.between)}; with a regional leader and "
                f"polls {two_phase.between.mean_s / leader:.1f} (published 7)",
            ),
        )  # fmt: skip
        for work, gain, aim, note in gains:
            met = None if aim is None else gain >= aim
            yield Row(f"{self.label}: {work}", "times faster, mean", gain, aim, met, note=note)

    def congestion(self) -> Iterator[Row]:
        """The same with links that are too slow, with and without priority. Regions have two replicas."""
        scale = replace(self.scale, copies=2)
        seconds = self.sizes.congested_s
        plan = Plan(scale, seconds, self.seed)
        calm, plain, urgent = (
            self._run(way, scale, plan, seconds, slowed)
            for way, slowed in ((STEPS[4], 1.0), (STEPS[4], CONGESTED), (STEPS[5], CONGESTED))
        )
        what = f"links {CONGESTED:g} times slower"
        for outcome, said in ((plain, "no priority"), (urgent, "priority")):
            saved = 1.0 - outcome.wide_bytes_a_second / calm.wide_bytes_a_second
            for rows, times in (("the tenth of most priority", outcome.high), ("the others", outcome.low)):
                yield Row(
                    f"{what}, {said}: {rows}", "s, mean", times.mean_s,
                    note=f"p50 {times.p50_s:.3g} s, p99 {times.p99_s:.3g} s, at most {times.most_s:.3g} s"
                    f"{_late(times)}; {saved:.0%} of the bytes saved, as what changes again meanwhile crosses once",
                )  # fmt: skip
        gain = plain.high.mean_s / urgent.high.mean_s
        yield Row(
            f"{what}: what priority gains for the tenth", "times faster, mean", gain,
            note="published: 92 % of the bandwidth saved under congestion. Here the others fill what is left of the "
            f"link; their exchanges rest for at most {STALENESS_S:g} s, and then cross as fast as the link lets them",
        )  # fmt: skip

    def _others(self) -> list[Outcome]:
        return [
            self._again(baselines.Checkpoint, "checkpoint broadcast"),
            self._two_phase(),
            self._sent(baselines.Chain, "chain replication over regions"),
            self._sent(baselines.Touched, "touched keys every 10 s"),
        ]

    def _two_phase(self) -> Outcome:
        return self._sent(baselines.TwoPhase, "two-phase push from the source")

    def _again(self, kind: type[baselines.FullCompare | baselines.Checkpoint], name: str) -> Outcome:
        self.console.print(f"sync: {self.label}: {name}")
        model = kind(self.scale, self.constants)
        model.start()
        return model.outcome(name, self.sizes.rounds)

    def _sent(
        self, kind: type[baselines.TwoPhase | baselines.Chain | baselines.Touched], name: str
    ) -> Outcome:
        self.console.print(f"sync: {self.label}: {name}")
        model = kind(self.scale, self.plan, self.constants)
        model.start()
        return model.outcome(name, baselines.Span(*_counted(self._crowded_s())))

    def _crowded_s(self) -> float:
        return self.sizes.crowded_s if self.scale.copies > 4 else self.sizes.polled_s

    def _way(self, way: Way) -> Outcome:
        self.console.print(f"sync: {self.label}: {way.name}")
        polled_s = self.sizes.polled_s if way.leaders else self._crowded_s()
        return self._run(way, self.scale, self.plan, self.sizes.parked_s if way.parked else polled_s)

    def _run(self, way: Way, scale: Scale, plan: Plan, seconds: float, slowed: float = 1.0) -> Outcome:
        build = partial(World, scale, way, plan, self.constants, seed=self.seed, slowed=slowed)
        return build(max_staleness_s=STALENESS_S).run(*_counted(seconds))


def _calibrated(constants: Constants) -> Row:
    """A figure that is known: whether the links are as fast as they say."""
    five = Scale(6, 1, 1_000_000_000, 100, columns=1, slowest=625e6, fastest=625e6, each=100_000)
    model = baselines.Checkpoint(five, constants)
    model.start()
    model.outcome("calibration", 2)
    took_s = max(there_s - read_s for rounds in model.rounds.values() for read_s, there_s in rounds[:1])
    met = abs(took_s / KNOWN_S - 1.0) <= 0.01
    return Row(
        "simulated: 100 GB to five centres over one uplink of 5 Gbit/s", "s", took_s, KNOWN_S, met,
        note="published; the aim is within 1 %",
    )  # fmt: skip


def _counted(seconds: float) -> tuple[float, float, float]:
    """From and up to when what is written counts, and until when it may arrive."""
    return 0.4 * seconds, 0.75 * seconds, seconds


def _late(times: Times) -> str:
    late = times.unfinished
    return f" ({late:.1%} not there at the end, counted until then: at least that)" if late else ""


def _row(work: str, outcome: Outcome) -> Row:
    between, inside = outcome.between, outcome.inside
    note = (
        f"between regions p50 {between.p50_s:.3g} s, p99 {between.p99_s:.3g} s{_late(between)}; inside one mean "
        f"{inside.mean_s:.3g} s, p99 {inside.p99_s:.3g} s; {outcome.bytes_an_update:,.0f} bytes between regions an "
        f"update, {outcome.wide_bytes_a_second / 1e6:.2f} MB/s and {outcome.messages_a_second:,.0f} messages/s of a "
        "column"
    )
    return Row(work, "s, mean between regions", between.mean_s, note=note)
