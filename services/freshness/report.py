"""What a measurement comes to: a row per kind, region and stage. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from services.freshness.book import HOME
from services.freshness.measure import Measured
from services.freshness.stages import CLOCK, MEANING, REGIONAL, Kind, Stage
from services.freshness.statistics import Quantiles, quantiles

SLO_MS: Final = 1_000.0
"""What is aimed at: new parameters in every region within a second."""
COUNTED_FROM: Final = "when the probe was due to be sent, on the measuring client's clock"
_CURVE: Final = np.concatenate([np.arange(100), [99.5, 99.9, 100]])


class Row(msgspec.Struct, frozen=True):
    """One stage. ``region`` null: stages before the regions' own. ``missing``: probes of which this stage's time is
    not known. ``curve_ms``: the percentiles 0 to 99, 99.5, 99.9 and 100."""

    kind: Kind
    region: str | None
    stage: Stage
    sent: int
    missing: int
    ms: Quantiles | None
    curve_ms: list[float]


class Report(msgspec.Struct, frozen=True):
    """The whole measurement."""

    home: str
    regions: list[str]
    rate: float
    seconds: float
    started_at_ms: int
    took_s: float
    slo_ms: float
    counted_from: str
    clocks: dict[Stage, str]
    meaning: dict[Stage, str]
    failed: int
    problems: list[str]
    rows: list[Row]

    def row(self, kind: Kind, region: str | None, stage: Stage) -> Row | None:
        """The row of one stage."""
        return next((r for r in self.rows if (r.kind, r.region, r.stage) == (kind, region, stage)), None)


def report(measured: Measured) -> Report:
    """``measured`` in figures."""
    book = measured.book
    rows = [row for kind in measured.plan.kinds for row in _rows(measured, kind)]
    return Report(
        measured.home,
        list(book.regions),
        measured.plan.rate,
        measured.plan.seconds,
        measured.started_at_ms,
        round(measured.took_s, 3),
        SLO_MS,
        COUNTED_FROM,
        dict(CLOCK),
        dict(MEANING),
        book.failed,
        list(measured.problems),
        rows,
    )


def _rows(measured: Measured, kind: Kind) -> Iterator[Row]:
    sent = len(measured.book.ids(kind))
    if not sent:
        return
    found = measured.book.after_ms(kind)
    for region, stages in found.items():
        for stage, samples in stages.items():
            curve = np.percentile(samples, _CURVE).round(3).tolist() if samples else []
            name = None if region == HOME else region
            yield Row(kind, name, stage, sent, sent - len(samples), quantiles(samples), curve)


def percentiles() -> Sequence[float]:
    """Those that ``curve_ms`` lists."""
    found: list[float] = _CURVE.tolist()
    return found


def table(of: Report) -> list[tuple[str, ...]]:
    """The rows for people: what, where, n, missing, p50, p95, p99, max."""
    shown = []
    for row in of.rows:
        ms = row.ms
        found = (None,) * 4 if ms is None else (ms.p50_ms, ms.p95_ms, ms.p99_ms, ms.max_ms)
        figures = ("" if value is None else f"{value:,.1f}" for value in found)
        where = row.region if row.stage in REGIONAL and row.region else of.home
        shown.append(
            (row.kind, where, row.stage, f"{row.sent - row.missing:,}", f"{row.missing:,}", *figures)
        )
    return shown


COLUMNS: Final = ("probe", "region", "stage", "n", "missing", "p50 ms", "p95 ms", "p99 ms", "max ms")
