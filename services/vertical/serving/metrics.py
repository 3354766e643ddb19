"""What a guest's endpoint counts, in a registry of its own. Label sets are bounded: hosts by the party's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class ServingMetrics:
    """Counters, histograms and gauges of joint answers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headwater_vertical_requests",
            "Requests answered, by method, route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "headwater_vertical_request_seconds",
            "Time from a request's head to its last reply byte.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._rows = Counter(
            "headwater_vertical_rows", "Rows answered, by how.", ("how",), registry=self.registry
        )
        self._degraded = Counter(
            "headwater_vertical_degraded_answers",
            "Answers with a row that the guest scored alone, by why: what became of a host's question.",
            ("reason",),
            registry=self.registry,
        )
        self._hosts = Counter(
            "headwater_vertical_host_answers",
            "Questions to hosts, by what became of them.",
            ("host", "outcome"),
            registry=self.registry,
        )
        self._host_seconds = Histogram(
            "headwater_vertical_host_seconds",
            "Time until a host's answer, or until it was not waited for any more.",
            ("host",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def host(self, host: str, outcome: str, seconds: float) -> None:
        """Count one question to a host."""
        self._hosts.labels(host, outcome).inc()
        self._host_seconds.labels(host).observe(seconds)

    def answered(self, joint: int, degraded: int, not_found: int, reasons: Iterable[str]) -> None:
        """Count one answer's rows, and each of the reasons why some are the guest's alone."""
        for how, count in (("joint", joint), ("degraded", degraded), ("not_found", not_found)):
            self._rows.labels(how).inc(count)
        for reason in reasons:
            self._degraded.labels(reason).inc()

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def reached(self, hosts: Iterable[str], read: Callable[[str], float]) -> None:
        """Whether each host is reached, read when the metrics are."""
        gauge = Gauge(
            "headwater_vertical_host_reached",
            "1 where the host answers and has the model that answers here.",
            ("host",),
            registry=self.registry,
        )
        for host in hosts:
            gauge.labels(host).set_function(partial(read, host))

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
