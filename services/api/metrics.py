"""What the API counts, in a registry of its own: counters end in ``_total``, units stand in the names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

LATENCY_S: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
FRESHNESS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


GROUP: Final = (1, 3, 10, 30, 100, 300, 1_000, 3_000)


class ApiMetrics:
    """The API's counters, histograms and gauges. Label sets are bounded: routes are templates."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "headwater_api_requests",
            "Requests answered, by method, route and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._latency = Histogram(
            "headwater_api_request_seconds",
            "Time from a request's first byte here to its last reply byte.",
            ("route",),
            buckets=LATENCY_S,
            registry=self.registry,
        )
        self.events = Counter(
            "headwater_api_events",
            "Events by what became of them: accepted, or refused with the first problem's code.",
            ("outcome",),
            registry=self.registry,
        )
        self.recommendations = Counter(
            "headwater_api_recommendations",
            "Lists made, by whom they were for and whether they fell short.",
            ("audience", "degraded"),
            registry=self.registry,
        )
        self.parameters_age = Histogram(
            "headwater_api_parameters_age_seconds",
            "Age of the newest event contained in the parameters that a list was made with.",
            buckets=FRESHNESS_S,
            registry=self.registry,
        )
        self._append_s = Histogram(
            "headwater_api_log_append_seconds",
            "Time of one append to the event log: a group of events, until they are durable.",
            buckets=LATENCY_S,
            registry=self.registry,
        )
        self._group = Histogram(
            "headwater_api_log_append_events",
            "Events in one append to the event log.",
            buckets=GROUP,
            registry=self.registry,
        )
        self._children: dict[tuple[str, str, int], Callable[[float], None]] = {}

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (method, route, status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._child(method, route, status)
        child(seconds)

    def _child(self, method: str, route: str, status: int) -> Callable[[float], None]:
        """Looking labels up costs more than counting, so each combination is looked up once."""
        counter = self._requests.labels(method, route, str(status))
        histogram = self._latency.labels(route)

        def observe(seconds: float) -> None:
            counter.inc()
            histogram.observe(seconds)

        return observe

    def appended(self, events: int, seconds: float) -> None:
        """Count one append to the event log."""
        self._append_s.observe(seconds)
        self._group.observe(events)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def totals(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """A counter that is read when the metrics are, by the values of ``label``."""
        self.registry.register(_Totals(name, text, label, read))

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True, slots=True, eq=False)
class _Totals(Collector):
    name: str
    text: str
    label: str
    read: Callable[[], Mapping[str, int]]

    def collect(self) -> Iterator[CounterMetricFamily]:
        found = CounterMetricFamily(self.name, self.text, labels=(self.label,))
        for value, total in self.read().items():
            found.add_metric((value,), float(total))
        yield found
