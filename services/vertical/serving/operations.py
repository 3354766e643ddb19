"""A host's health and metrics over HTTP, beside its answers to guests; served where ``serve.metrics`` says."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.api.bodies import json_response
from services.listening import serve_until
from services.vertical.serving.bodies import Live, Ready

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class HostMetrics:
    """What a host counts of its guests' questions. Guests are bounded by the party's file, outcomes by the host."""

    def __init__(self, audit_bytes: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._asks = Counter(
            "headwater_vertical_asks",
            "Questions of guests, by what became of them.",
            ("guest", "outcome"),
            registry=self.registry,
        )
        self._rows = Counter(
            "headwater_vertical_asked_rows",
            "Rows that guests asked for, by whether they are here: many that are not may be a guest that tries ids.",
            ("guest", "here"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "headwater_vertical_ask_seconds",
            "Time of an answer, from its turn on.",
            ("guest",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        Gauge(
            "headwater_vertical_audit_bytes",
            "Size of the audit log, older lines included.",
            registry=self.registry,
        ).set_function(audit_bytes)

    def asked(self, guest: str, outcome: str) -> None:
        """Count one question."""
        self._asks.labels(guest, outcome).inc()

    def answered(self, guest: str, here: int, missing: int, seconds: float) -> None:
        """Count one answer's rows."""
        self.asked(guest, "answered")
        self._rows.labels(guest, "yes").inc(here)
        self._rows.labels(guest, "no").inc(missing)
        self._seconds.labels(guest).observe(seconds)

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)


def operations_app(metrics: HostMetrics, ready: Callable[[], Ready]) -> ASGIApp:
    """``/health/live``, ``/health/ready`` and ``/metrics``."""

    async def live(request: Request) -> Response:
        return json_response(Live())

    async def is_ready(request: Request) -> Response:
        return json_response(ready())

    async def render(request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = (("/health/live", live), ("/health/ready", is_ready), ("/metrics", render))
    return Starlette(routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes])


@contextmanager
def operations(listener: socket.socket | None, app: ASGIApp) -> Iterator[None]:
    """Serve ``app`` in a thread of its own while the body runs; nothing where there is no ``listener``."""
    if listener is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve_until(stop, listener, app)), name="operations")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        listener.close()
