"""An edge's way to its parent: HTTP with the edge's token, one pool of connections."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

import httpx

from services.api.problems import KINDS, Problem
from services.federation.access import HANDED_ON

_TIMEOUT_S: Final = 20.0
_CONNECTIONS: Final = 32


class ParentLost(ConnectionError):
    """The parent does not answer, or cannot now: try again later."""


class Parent:
    """The parent at ``url``; ``name`` is this edge's, as its ``token`` says. ``ca`` is the authority of the parent's
    certificate, ``certificate`` and ``key`` are this edge's own. Raises OSError for files that cannot be read."""

    def __init__(
        self,
        url: str,
        name: str,
        token: str,
        *,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.name = name
        self._headers = {"Authorization": f"Bearer {token}"}
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        limits = httpx.Limits(max_connections=_CONNECTIONS)
        self._client = httpx.AsyncClient(
            base_url=url, verify=context, timeout=_TIMEOUT_S, limits=limits, trust_env=False
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: bytes, token: str = "") -> bytes:
        """The body of the reply. ``token``: a client's, handed on. Raises ParentLost, and the parent's own Problem."""
        return (await self._send(method, path, body, token)).content

    async def json(self, method: str, path: str, body: bytes) -> Any:
        """The reply's JSON. Raises ParentLost and Problem."""
        try:
            return (await self._send(method, path, body, "")).json()
        except ValueError as error:
            raise ParentLost("the reply is not JSON") from error

    async def _send(self, method: str, path: str, body: bytes, token: str) -> httpx.Response:
        headers = {**self._headers, HANDED_ON: token} if token else self._headers
        try:
            reply = await self._client.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise ParentLost(f"{type(error).__name__}: {error}") from error
        if reply.status_code in (408, 429) or reply.status_code >= 500:
            raise ParentLost(f"status {reply.status_code}")
        if reply.status_code >= 400:
            raise _problem(reply)
        return reply


def _problem(reply: httpx.Response) -> Problem:
    """The parent's problem, told on to the device."""
    try:
        told = reply.json()
        code, detail = str(told["code"]), str(told.get("detail", ""))
    except (ValueError, KeyError, TypeError):
        return Problem("unavailable", f"The parent answers with status {reply.status_code}.")
    return Problem(code, detail) if code in KINDS else Problem("unavailable", "The parent refuses.")
