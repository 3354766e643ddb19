"""What regions tell each other, in figures: of this server as a source, and of each address that it follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.parameter_server.syncing.service import Syncing
from services.parameter_server.syncing.status import standing_of

_PREFIX: Final = "headwater_sync"


def sync_metrics(syncing: Syncing) -> Iterator[Metric]:
    """All metrics now."""
    yield from _source(syncing)
    yield from _upstreams(syncing)
    yield _counter(
        "models_learned_total", "Models that another region declared.", syncing.models_learned_total
    )
    yield _counter("pushes_forwarded_total", "Calls forwarded to the regions that write the shards.",
                   syncing.forwarding.counts.forwarded_total)  # fmt: skip
    yield _counter("pushes_not_forwarded_total", "Forwarded calls that failed.",
                   syncing.forwarding.counts.failed_total)  # fmt: skip
    yield _counter("slow_reads_total", "Reads that waited longer than the target.", syncing.brake.slow_total)
    yield _gauge("brake", "Share of the usual taking over that is left to readers now.", syncing.brake_level)
    yield _counter("graves_forgotten_total", "Deletions forgotten, as every region has them.",
                   syncing.upkeep.graves_total)  # fmt: skip
    verdict = syncing.clock_verdict
    yield _gauge("clock_off", "1 while this clock is too far off those of other regions.", float(verdict.off))
    if verdict.ahead_s is not None:
        yield _gauge("clock_ahead_seconds", "This clock before the median of the others.", verdict.ahead_s)


def _source(syncing: Syncing) -> Iterator[Metric]:
    source = syncing.source
    counts = source.feeds.counts
    found = CounterMetricFamily(
        f"{_PREFIX}_exchanges_total", "Exchanges by how their rows were found.", labels=("how",)
    )
    for how, total in counts.found.items():
        found.add_metric((how,), float(total))
    yield found
    yield _gauge("pullers", "Servers of other regions that pull now.", len(source.peers))
    yield _counter("fed_batches_total", "Batches sent to other regions.", counts.batches_total)
    yield _counter("fed_rows_total", "Rows and deletions sent to other regions.", counts.rows_total)
    yield _counter("fed_bytes_total", "Bytes sent to other regions.", source.counts.bytes_total)
    yield _counter("urgent_rows_total", "Rows that overtook others.", counts.urgent_rows_total)
    yield _counter("replacements_total", "Full replacements begun.", counts.replacements_total)
    yield _counter("pullers_forgotten_total", "Pullers that were gone and made room for others.",
                   counts.forgotten_total)  # fmt: skip
    yield _counter("pullers_turned_away_total", "Streams that did not begin, as too many servers pull.",
                   counts.turned_away_total)  # fmt: skip
    yield _counter("pulls_refused_total", "Pulls that made no sense.", source.counts.refused_total)
    yield _counter("batches_late_total", "Batches nobody waited for.", source.counts.late_total)


def _upstreams(syncing: Syncing) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"{_PREFIX}_upstream_{name}", text, labels=("upstream",))
        for name, text in (
            ("served_shards", "Shards that the source feeds."),
            ("behind_seconds", "Since the shards it feeds were level, the one furthest behind."),
            ("behind_changes", "Changes that the source has still to tell."),
            ("round_trip_seconds", "The least lately."),
            ("clock_ahead_seconds", "The source's clock before this one."),
        )
    }
    counters = {
        name: CounterMetricFamily(f"{_PREFIX}_upstream_{name}", text, labels=("upstream",))
        for name, text in (
            ("bytes_total", "Bytes that came."),
            ("batches_total", "Batches taken over."),
            ("rows_total", "Rows and deletions that were new."),
            ("faults_total", "Times that a stream ended."),
            ("damaged_total", "Batches that were not well formed."),
            ("ahead_total", "Batches from a future beyond sync.max_clock_skew."),
        )
    }
    for upstream in syncing.upstreams:
        now, labels = standing_of(syncing, upstream), (upstream.address,)
        gauges["served_shards"].add_metric(labels, float(now.served))
        if now.behind_s is not None:
            gauges["behind_seconds"].add_metric(labels, now.behind_s)
        gauges["behind_changes"].add_metric(labels, float(now.behind_changes))
        gauges["round_trip_seconds"].add_metric(labels, now.round_trip_s)
        gauges["clock_ahead_seconds"].add_metric(labels, now.clock_ahead_s)
        for name, total in (
            ("bytes_total", now.bytes_total),
            ("batches_total", now.batches_total),
            ("rows_total", now.rows_total),
            ("faults_total", now.faults_total),
            ("damaged_total", now.damaged_total),
            ("ahead_total", now.ahead_total),
        ):
            counters[name].add_metric(labels, float(total))
    yield from gauges.values()
    yield from counters.values()


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)
