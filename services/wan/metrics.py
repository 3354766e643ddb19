"""What links count, in Prometheus' text form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.wan.types import LinkStatus

_PREFIX: Final = "headwater_link"
_LINK: Final = {
    "connections": "Connections that are open now.",
    "connections_total": "Connections that were accepted.",
    "resets_total": "Connections that were reset on demand.",
    "failed_connects_total": "Connections that were broken since the target could not be reached.",
}
_DIRECTION: Final = {
    "bytes_total": "Bytes passed on.",
    "queued_bytes": "Bytes under way now.",
    "unread_bytes": "Bytes that arrived and are not read.",
    "bound_bytes": "Bytes under way at most.",
    "waiting": "Connections that may not send now, since the link is full.",
}


class _Links(Collector):
    def __init__(self, links: Iterable[LinkStatus]) -> None:
        self._links = tuple(links)

    def collect(self) -> Iterator[Metric]:
        for name, help_ in _LINK.items():
            family = _family(name, help_, ("link",))
            for link in self._links:
                family.add_metric((link.name,), getattr(link, name))
            yield family
        for name, help_ in _DIRECTION.items():
            family = _family(name, help_, ("link", "direction"))
            for link in self._links:
                for way in ("forward", "back"):
                    family.add_metric((link.name, way), getattr(getattr(link, way), name))
            yield family
        partitioned = _family("partitioned", "1 where nothing passes, else 0.", ("link",))
        for link in self._links:
            partitioned.add_metric((link.name,), float(link.partitioned))
        yield partitioned


def _family(name: str, help_: str, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(f"{_PREFIX}_{name}", help_, labels=labels)


def exposition(links: Iterable[LinkStatus]) -> str:
    """All metrics of ``links`` as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Links(links))
    return generate_latest(registry).decode()
