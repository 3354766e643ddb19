"""HTTP for measuring: keep-alive connections on one event loop, cheap enough not to be what is measured.

Exceptions::

    Unreachable          the server does not answer, or ends the connection
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools


class Unreachable(ConnectionError):
    """The server does not answer; the text names it."""


class Parser(Protocol):
    """The part of httptools' response parser that is used here."""

    def feed_data(self, data: bytes) -> None: ...
    def get_status_code(self) -> int: ...


@dataclass(slots=True)
class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on its way."""

    done: asyncio.Future[tuple[int, bytes]] | None = None
    transport: asyncio.Transport | None = None
    parser: Parser | None = None
    body: list[bytes] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none by their class, only by what they can do.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(Unreachable(f"the connection ended: {exc or 'closed by the server'}"))

    def data_received(self, data: bytes) -> None:
        if self.parser is not None:
            self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        if self.done is not None and self.parser is not None and not self.done.done():
            self.done.set_result((self.parser.get_status_code(), b"".join(self.body)))

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return self.transport is not None and not self.transport.is_closing()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the reply to ``request``, which is the whole of it."""
        assert self.transport is not None
        self.done = asyncio.get_running_loop().create_future()
        self.parser, self.body = httptools.HttpResponseParser(self), []
        self.transport.write(request)
        try:
            return await self.done
        except BaseException:
            # Whoever asks next must not get the answer to this.
            self.transport.abort()
            raise


class Server:
    """One server at ``url``; connections are opened as requests overlap, and kept."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address that begins with http:// or https://")
        self.url = url
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/")
        self._free: list[Connection] = []
        headers: Mapping[str, str] = {"Host": parts.netloc, **({"X-API-Key": key} if key else {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())

    async def request(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 30.0
    ) -> tuple[int, bytes]:
        """Status and body of the reply. Raises Unreachable."""
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection()
                reply = await connection.ask(self._wire(method, path, body))
        except TimeoutError as error:
            raise Unreachable(f"{self.url} did not answer within {timeout_s:g} s") from error
        except Unreachable as error:
            raise Unreachable(f"{self.url}: {error}") from error
        except OSError as error:
            raise Unreachable(f"{self.url} does not answer: {error}") from error
        if connection.usable:
            self._free.append(connection)
        return reply

    def close(self) -> None:
        """Close the connections."""
        while self._free:
            transport = self._free.pop().transport
            if transport is not None:
                transport.close()

    async def _connection(self) -> Connection:
        while self._free:
            connection = self._free.pop()
            if connection.usable:
                return connection
        context = ssl.create_default_context() if self._secure else None
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._host, self._port, ssl=context
        )
        return connection

    def _wire(self, method: str, path: str, body: bytes | None) -> bytes:
        content = b"" if body is None else body
        kind = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        return f"{method} {self._base}{path} HTTP/1.1\r\n{self._head}{kind}\r\n".encode() + content
