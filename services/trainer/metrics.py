"""What a trainer counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class TrainerMetrics:
    """Counters of one trainer in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "headwater_trainer"
        self.steps = Counter(f"{prefix}_steps", "Micro-batches pushed.", registry=self.registry)
        self.samples = Counter(f"{prefix}_samples", "Samples learned from.", registry=self.registry)
        self.skipped = Counter(
            f"{prefix}_skipped", "Micro-batches that cannot be learned from, by reason.", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            f"{prefix}_refused", "Pushes that a shard refused (NaN, exploded norm).", registry=self.registry
        )
        self.rewinds = Counter(
            f"{prefix}_rewinds",
            "Returns to an earlier offset, since a server lost pushes.",
            registry=self.registry,
        )
        self.stale = Counter(
            f"{prefix}_stale",
            "Pushes repeated since more others came between pull and push than the bound allows.",
            registry=self.registry,
        )
        self.overdue = Counter(
            f"{prefix}_overdue",
            "Micro-batches pushed without the bound after it turned them down too often.",
            registry=self.registry,
        )
        self.late = Counter(
            f"{prefix}_late", "Steps that some server took without this trainer's gradients.",
            registry=self.registry,
        )  # fmt: skip
        self.repeats = Counter(
            f"{prefix}_repeats", "Contributions to a step that have to be computed again.",
            registry=self.registry,
        )  # fmt: skip
        self.groups = Counter(
            f"{prefix}_groups", "Generations of the group that this trainer has gone through.",
            registry=self.registry,
        )  # fmt: skip
        self.reloads = Counter(
            f"{prefix}_reloads",
            "Dense weights loaded anew since they differed from the server's.",
            registry=self.registry,
        )
        self.failures = Counter(
            f"{prefix}_failures", "Failures waited out, by cause.", ["cause"], registry=self.registry
        )
        self.loss = Gauge(f"{prefix}_loss", "Mean loss of the last step.", ["loss"], registry=self.registry)
        self.step_seconds = Histogram(
            f"{prefix}_step_seconds",
            "Time from a micro-batch to its acknowledged push.",
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
            registry=self.registry,
        )
        self.age_seconds = Gauge(
            f"{prefix}_age_seconds",
            "Age of the newest event of the last step, since its acceptance.",
            registry=self.registry,
        )
