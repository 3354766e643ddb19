"""The server's counters in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.parameter_server.acknowledging import Acknowledging
from services.parameter_server.host import Host
from services.parameter_server.parking import Parking
from services.parameter_server.replication.cluster import Cluster
from services.parameter_server.steps import StepService
from services.parameter_server.storage.durability import Durability
from services.parameter_server.syncing.metrics import sync_metrics
from services.parameter_server.syncing.service import Syncing
from services.rpc.server import RpcServer

_PREFIX = "headwater_parameters"


@dataclass(frozen=True, slots=True, eq=False)
class ServerMetrics(Collector):
    """Reads what the server counts anyway, when asked."""

    host: Host
    rpc: RpcServer
    durability: Durability
    parking: Parking
    steps: StepService
    cluster: Cluster
    pushed: Acknowledging
    syncing: Syncing

    def collect(self) -> Iterator[Metric]:
        """All metrics now."""
        yield from self._shards()
        for name, value in asdict(self.rpc.counts).items():
            yield _counter(f"messages_{name}", "Messages by what became of them.", value)
        for name, value in asdict(self.rpc.connections).items():
            yield _counter(f"connections_{name}", "Connections by what became of them.", value)
        yield from self._disk()
        yield _counter("polls_refused_total", "Long polls without room.", self.parking.rejected_total)
        yield _gauge("polls_parked", "Long polls that wait now.", len(self.parking.polls))
        yield _gauge(
            "newest_accepted_timestamp_seconds",
            "When the newest event among all pushes was accepted.",
            self.host.newest_accepted_at_ms / 1_000,
        )
        yield from self.steps.collect()
        yield from sync_metrics(self.syncing)
        yield from self._replication()

    def _replication(self) -> Iterator[Metric]:
        led = GaugeMetricFamily(
            f"{_PREFIX}_led", "1 where this server leads the shard, else 0.", labels=("shard",)
        )
        fence = GaugeMetricFamily(f"{_PREFIX}_fence", "The fencing epoch of its leader.", labels=("shard",))
        behind = GaugeMetricFamily(
            f"{_PREFIX}_follower_steps_behind",
            "Steps that a follower does not hold yet.",
            labels=("shard", "server"),
        )
        for shard, replica in self.cluster.replicas.items():
            led.add_metric((str(shard),), float(replica.leading))
            fence.add_metric((str(shard),), float(replica.place.fence))
            for server, held in replica.followers.held.items() if replica.leading else ():
                behind.add_metric((str(shard), server), float(replica.stream.number - held))
        yield from (led, fence, behind)
        counts = self.cluster.following_counts
        yield _counter("copied_rows_total", "Rows copied from other servers.", counts.copied_rows_total)
        yield _counter(
            "discarded_steps_total",
            "Steps of a deposed leader that were never replicated.",
            counts.discarded_steps_total,
        )
        yield _gauge("pushes_unacknowledged", "Pushes that wait for replicas now.", self.pushed.waiting)
        yield _counter(
            "pushes_disowned_total", "Pushes whose leader was deposed.", self.pushed.disowned_total
        )

    def _disk(self) -> Iterator[Metric]:
        counts, writer = self.durability.counts, self.durability.writer
        written = writer.counts
        yield _counter("snapshots_total", "Snapshots written.", written.snapshots_total)
        yield _counter("snapshot_failures_total", "Snapshots not written.", written.snapshot_failures_total)
        yield _counter("snapshot_bytes_total", "Bytes of snapshots written.", written.snapshot_bytes_total)
        yield _counter("log_steps_total", "Steps written to the log.", written.log_steps_total)
        yield _counter("log_bytes_total", "Bytes written to the log.", written.log_bytes_total)
        yield _counter("log_syncs_total", "Times that a log was synced.", written.syncs_total)
        yield _counter("disk_failures_total", "Writes that failed.", written.failures_total)
        yield _counter("log_given_up_total", "Times that a shard's log was given up.", counts.given_up_total)
        yield _counter("log_dropped_total", "Steps that were not written to a log.", counts.dropped_total)
        yield _counter("pushes_held_back_total", "Pushes that the disk made wait.", counts.held_back_total)
        yield _gauge("log_waiting_bytes", "Steps that are not written yet.", writer.waiting_bytes)
        yield _gauge("disk_failing", "1 while the last write failed.", writer.failing)
        yield _gauge("shards_not_durable", "Shards without a log until a snapshot.", self.durability.given_up)

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
        table_rows = CounterMetricFamily(
            f"{_PREFIX}_table_rows_handled",
            "Rows by table and what was done: pushed, unadmitted (no row yet), expired.",
            labels=("model", "shard", "table", "what"),
        )
        graves = GaugeMetricFamily(
            f"{_PREFIX}_table_graves", "Deleted rows that are remembered.", labels=("model", "shard", "table")
        )
        for model, held in self.host.all_held():
            shard, counts = str(held.shard.shard_id), held.shard.counts
            for status in ("applied", "duplicate", "gap", "refused"):
                pushes.add_metric((model, shard, status), float(getattr(counts, f"{status}_total")))
            pushes.add_metric((model, shard, "stale"), float(held.stale_total))
            for what in ("pulled", "pushed", "inserted", "deleted"):
                rows.add_metric((model, shard, what), float(getattr(counts, f"{what}_rows_total")))
            rows.add_metric((model, shard, "unchanged"), float(held.unchanged_total))
            for spec in held.shard.specs:
                table = held.shard.table(spec.name)
                held_rows.add_metric((model, shard, spec.name), float(len(table)))
                graves.add_metric((model, shard, spec.name), float(len(table.graves)))
                for what in ("pushed", "unadmitted", "expired"):
                    handled = float(getattr(table.counts, f"{what}_rows_total"))
                    table_rows.add_metric((model, shard, spec.name, what), handled)
        yield from (pushes, rows, held_rows, table_rows, graves)


def exposition(metrics: ServerMetrics) -> str:
    """``metrics`` in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry).decode()


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, value=value)
