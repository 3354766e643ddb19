"""What a processor counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class ProcessorMetrics:
    """Counters of one processor in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "headwater_processor"
        self.events = Counter(f"{prefix}_events", "Records read from the events log.", registry=self.registry)
        self.samples = Counter(f"{prefix}_samples", "Samples sent to training.", registry=self.registry)
        self.duplicates = Counter(
            f"{prefix}_duplicates", "Events whose event_id was taken before.", registry=self.registry
        )
        self.rejected = Counter(
            f"{prefix}_rejected", "Records that cannot be used, by reason.", ["code"], registry=self.registry
        )
        self.failures = Counter(
            f"{prefix}_failures",
            "Batches given up and read again, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.batch_seconds = Histogram(
            f"{prefix}_batch_seconds",
            "Time from reading a batch to its commit.",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
            registry=self.registry,
        )
        self.age_seconds = Gauge(
            f"{prefix}_age_seconds",
            "Age of the oldest event of the last batch at its commit, since acceptance.",
            registry=self.registry,
        )
        self.items = Gauge(f"{prefix}_items", "Items in memory.", registry=self.registry)
