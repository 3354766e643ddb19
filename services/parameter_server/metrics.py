"""The server's counters in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.parameter_server.host import Host
from services.parameter_server.parking import Parking
from services.parameter_server.saver import Saver
from services.parameter_server.steps import StepService
from services.rpc.server import RpcServer

_PREFIX = "headwater_parameters"


@dataclass(frozen=True, slots=True, eq=False)
class ServerMetrics(Collector):
    """Reads what the server counts anyway, when asked."""

    host: Host
    rpc: RpcServer
    saver: Saver
    parking: Parking
    steps: StepService

    def collect(self) -> Iterator[Metric]:
        """All metrics now."""
        yield from self._shards()
        for name, value in asdict(self.rpc.counts).items():
            yield _counter(f"messages_{name}", "Messages by what became of them.", value)
        for name, value in asdict(self.rpc.connections).items():
            yield _counter(f"connections_{name}", "Connections by what became of them.", value)
        yield _counter("snapshots_total", "Snapshots written.", self.saver.counts.snapshots_total)
        yield _counter("snapshot_failures_total", "Snapshots not written.", self.saver.counts.failures_total)
        yield _counter("snapshot_bytes_total", "Bytes of snapshots written.", self.saver.counts.bytes_total)
        yield _counter("polls_refused_total", "Long polls without room.", self.parking.rejected_total)
        yield _gauge("polls_parked", "Long polls that wait now.", len(self.parking.polls))
        yield _gauge(
            "newest_accepted_timestamp_seconds",
            "When the newest event among all pushes was accepted.",
            self.host.newest_accepted_at_ms / 1_000,
        )
        yield from self.steps.collect()

    def _shards(self) -> Iterator[Metric]:
        pushes = CounterMetricFamily(
            f"{_PREFIX}_pushes", "Pushes by model, shard and outcome.", labels=("model", "shard", "status")
        )
        rows = CounterMetricFamily(
            f"{_PREFIX}_rows", "Rows by model, shard and what was done.", labels=("model", "shard", "what")
        )
        held_rows = GaugeMetricFamily(
            f"{_PREFIX}_table_rows", "Rows stored.", labels=("model", "shard", "table")
        )
        for model, held in self.host.all_held():
            shard, counts = str(held.shard.shard_id), held.shard.counts
            for status in ("applied", "duplicate", "gap", "refused"):
                pushes.add_metric((model, shard, status), float(getattr(counts, f"{status}_total")))
            pushes.add_metric((model, shard, "stale"), float(held.stale_total))
            for what in ("pulled", "pushed", "inserted"):
                rows.add_metric((model, shard, what), float(getattr(counts, f"{what}_rows_total")))
            for spec in held.shard.specs:
                held_rows.add_metric((model, shard, spec.name), float(len(held.shard.table(spec.name))))
        yield from (pushes, rows, held_rows)


def exposition(metrics: ServerMetrics) -> str:
    """``metrics`` in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry).decode()


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)
