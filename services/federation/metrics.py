"""What a federation server counts. Labels are bounded: jobs by the registry, outcomes by the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)

_STAGE_SECONDS: Final = (0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0)


class FederationMetrics:
    """Counters, a histogram and gauges in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headwater_federation_requests",
            "Requests answered, by method, route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._latency = Histogram(
            "headwater_federation_request_seconds",
            "Time from a request's head to its last reply byte.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.starts = Counter(
            "headwater_federation_starts", "Clients that asked to take part, by the reply.", ("job", "reply"),
            registry=self.registry,
        )  # fmt: skip
        self.uploads = Counter(
            "headwater_federation_uploads", "Updates that asked to be counted, by what became of them.",
            ("job", "outcome"), registry=self.registry,
        )  # fmt: skip
        self.upload_bytes = Counter(
            "headwater_federation_upload_bytes",
            "Bytes of updates that were checked and stored.",
            ("job",),
            registry=self.registry,
        )
        self.downloads = Counter(
            "headwater_federation_downloads", "Models handed out, whole or as differences.", ("job", "form"),
            registry=self.registry,
        )  # fmt: skip
        self.download_bytes = Counter(
            "headwater_federation_download_bytes",
            "Bytes of models handed out.",
            ("job",),
            registry=self.registry,
        )
        self.refused = Counter(
            "headwater_federation_refused_bodies", "Bodies that broke a rule, by the rule.", ("job", "rule"),
            registry=self.registry,
        )  # fmt: skip
        self.secure_seconds = Histogram(
            "headwater_federation_secure_stage_seconds",
            "How long stages of secure aggregation lasted, as a server saw them.",
            ("job", "stage"),
            buckets=_STAGE_SECONDS,
            registry=self.registry,
        )
        self.secure_failures = Counter(
            "headwater_federation_secure_failures",
            "Iterations whose masks could not come off, by the stage that failed.",
            ("job", "stage"), registry=self.registry,
        )  # fmt: skip

        self.pushes = Counter(
            "headwater_federation_pushes", "Pushes of what a job learned into its stack, by what became of them.",
            ("job", "outcome"), registry=self.registry,
        )  # fmt: skip
        self.unpushed = Gauge(
            "headwater_federation_unpushed_versions", "Versions of a job that its stack does not have yet.",
            ("job",), registry=self.registry,
        )  # fmt: skip

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
