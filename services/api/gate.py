"""The outermost layer of the API, in plain ASGI: request ids, keys, counting, and the last catch.

Routes that are asked thousands of times a second and have no parameters in their path (``hot``) are called
from here, without the router and its layers; they are the same functions that the router holds.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.problems import Problem

Endpoint = Callable[[Request], Awaitable[Response]]
Admit = Callable[[Scope], None]
"""Raises Problem unless the request may be made."""


class Observes(Protocol):
    """Counts answered requests."""

    def observe(self, method: str, route: str, status: int, seconds: float) -> None: ...


METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_GONE: Final = 499
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


class Gate:
    """Wraps ``app``. ``route_of`` names the route of an answered request, for the metrics."""

    def __init__(
        self,
        app: ASGIApp,
        hot: Mapping[tuple[str, str], Endpoint],
        admit: Admit,
        metrics: Observes,
        route_of: Callable[[Scope], str],
    ) -> None:
        self._app = app
        self._hot = hot
        self._admit = admit
        self._metrics = metrics
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        exchange = _Exchange(send, scope.setdefault("request_id", request_id(scope)))
        try:
            await self._answer(scope, receive, exchange)
        except Problem as problem:
            await exchange.reply(problem, scope, receive)
        except ClientDisconnect:
            exchange.status = exchange.status or _CLIENT_GONE
        except Exception:
            log.exception("request %s failed: %s", exchange.request_id, scope["method"])
            await exchange.reply(Problem("internal"), scope, receive)
        method, path = scope["method"], scope["path"]
        route = path if (method, path) in self._hot else self._route_of(scope)
        method = method if method in METHODS else "other"
        self._metrics.observe(method, route, exchange.status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, exchange: _Exchange) -> None:
        method, path = scope["method"], scope["path"]
        self._admit(scope)
        endpoint = self._hot.get((method, path))
        if endpoint is None:
            await self._app(scope, receive, exchange.send)
        else:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, exchange.send)


class _Exchange:
    """One request's sending side: notes the status, adds the request id."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((b"x-request-id", self.request_id.encode()))
        await self._send(message)

    async def reply(self, problem: Problem, scope: Scope, receive: Receive) -> None:
        """Answer with ``problem``, unless an answer is already under way: then the connection just ends."""
        if not self.status:
            await problem.response(self.request_id)(scope, receive, self.send)


def request_id(scope: Scope) -> str:
    """The client's ``X-Request-ID`` if it is harmless in a log, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value).decode()
    return secrets.token_hex(8)
