"""The device's network: HTTP by the standard library, one connection that stays open, several servers in turn."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

LARGEST_ANSWER = 1 << 30


class NetworkLost(ConnectionError):
    """No server could be reached, or the answer broke off: try again later."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request: ``path`` below the server's address, ``body`` as it travels."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, its headers in lower case, and the bytes that request and reply took, heads and all."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: int = 0
    received: int = 0


class HttpTransport:
    """Calls to one of ``servers`` (``http://HOST:PORT`` or ``https://``), all of the same deployment.

    A server that fails is left for the next one. ``token`` enrols the device. ``ca`` is the authority of the servers'
    certificates where the system does not know it; ``certificate`` and ``key`` are the device's own. ``most`` bounds an
    answer. Not thread-safe. Raises ValueError for an address that is none, ``OSError`` for files that cannot be read.
    """

    def __init__(
        self,
        servers: Sequence[str],
        token: str = "",
        *,
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        timeout_s: float = 30.0,
        most: int = LARGEST_ANSWER,
        first: int = 0,
    ) -> None:
        if not servers:
            raise ValueError("no server is named")
        self._places = [_place(server) for server in servers]
        self._token = token
        self._timeout_s = timeout_s
        self._most = most
        self._at = first % len(servers)
        self._connection: http.client.HTTPConnection | None = None
        self._tls: ssl.SSLContext | None = None
        if any(secure for secure, _, _ in self._places):
            self._tls = ssl.create_default_context(cafile=ca)
            if certificate is not None:
                self._tls.load_cert_chain(certificate, key)

    def __enter__(self) -> HttpTransport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def turn(self) -> None:
        """Use the next server from now on."""
        self.close()
        self._at = (self._at + 1) % len(self._places)

    def send(self, call: Call) -> Answer:
        """The answer to ``call``. Raises NetworkLost; then the next call goes to the next server."""
        # A connection that was kept open may have ended while it was idle: that is not the server's fault.
        for kept in (True, False) if self._connection is not None else (False,):
            try:
                return self._send(call)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if not kept:
                    self.turn()
                    raise NetworkLost(str(error) or type(error).__name__) from error
        raise AssertionError("the last try returns or raises")

    def _send(self, call: Call) -> Answer:
        if self._connection is None:
            self._connection = self._connect()
        headers = dict(call.headers)
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._connection.request(call.method, call.path, call.body or None, headers)
        reply = self._connection.getresponse()
        body = reply.read(self._most + 1)
        if len(body) > self._most:
            raise http.client.HTTPException(f"an answer of more than {self._most} bytes")
        found = {name.lower(): value for name, value in reply.getheaders()}
        # http.client does not count: names, values and separators, and the lines that it adds by itself.
        head_out = (
            len(call.method) + len(call.path) + 60 + sum(len(n) + len(v) + 4 for n, v in headers.items())
        )
        head_in = 20 + sum(len(name) + len(value) + 4 for name, value in found.items())
        if reply.will_close:
            self.close()
        return Answer(reply.status, body, found, head_out + len(call.body), head_in + len(body))

    def _connect(self) -> http.client.HTTPConnection:
        secure, host, port = self._places[self._at]
        if secure:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)


@dataclass(slots=True)
class Clock:
    """The device's time: ``now`` in seconds, ``sleep`` until later. Replaced in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def _place(server: str) -> tuple[bool, str, int]:
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.rstrip("/"):
        raise ValueError(f"a server is http://HOST:PORT or https://HOST:PORT, not {server!r}")
    return parts.scheme == "https", parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
