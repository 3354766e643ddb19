"""The socket's side of a federation server: uvicorn with deadlines and bounds that devices from anywhere call for.

Rules:

- a connection beyond ``max_connections`` is closed at once, before a byte of it is read;
- a connection without a whole request head after ``header_s`` is closed: when it is new, and when it has begun a
  request; an idle one that waits for its next request has uvicorn's keep-alive time;
- with client certificates, the certificate's common name stands in the scope as ``PEER``; TLS has refused all others.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.listening import serve_until
from services.settings.model import FederationSettings

PEER: Final = "headwater.peer"
KEEP_ALIVE_S: Final = 30

log = logging.getLogger(__name__)


def bounded_protocol(max_connections: int, header_s: float) -> type[HttpToolsProtocol]:
    """The protocol with these bounds."""

    class Bounded(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _peer: str | None = None
        _refused = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if len(self.connections) >= max_connections:
                self._refused = True
                self.transport = transport
                transport.abort()
                return
            super().connection_made(transport)
            self._peer = _common_name(transport.get_extra_info("ssl_object"))
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._got_head()
            if not self._refused:
                super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._await_head()
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._peer is not None:
                self.scope[PEER] = self._peer  # type: ignore[typeddict-unknown-key]

        def on_headers_complete(self) -> None:
            self._got_head()
            super().on_headers_complete()

        def _await_head(self) -> None:
            self._deadline = self.loop.call_later(header_s, self._too_slow)

        def _got_head(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            if not self.transport.is_closing():
                log.info("a connection without a request head after %g s is closed", header_s)
                self.transport.abort()

    return Bounded


async def serve_app(
    federation: FederationSettings, app: Callable[..., Any], listener: socket.socket, stop: threading.Event
) -> None:
    """Serve ``app`` on ``listener`` by the settings' bounds and certificates until ``stop`` is set."""
    client_ca = federation.client_ca
    await serve_until(
        stop,
        listener,
        app,
        http=bounded_protocol(federation.max_connections, federation.header_timeout),
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=federation.certificate,
        ssl_keyfile=federation.certificate_key,
        ssl_ca_certs=None if client_ca is None else str(client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED,
    )


def _common_name(ssl_object: ssl.SSLObject | None) -> str | None:
    certificate: Any = None if ssl_object is None else ssl_object.getpeercert()
    parts = (certificate or {}).get("subject", ())
    return next((str(value) for part in parts for name, value in part if name == "commonName"), None)
