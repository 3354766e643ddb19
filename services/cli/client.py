"""A small REST client on the standard library: quick to import, and enough for the command line."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, quote, urlsplit

from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from services.settings.model import Settings

URL_VARIABLE: Final = "HEADWATER_URL"
KEY_VARIABLE: Final = "HEADWATER_API_KEY"
_TIMEOUT_S: Final = 30.0


class Api:
    """Speaks to one API. ``ca`` is a file with the authority of its certificate, where the system does not know it.
    Raises CommandFailed: NOT_RUNNING where nothing answers, REFUSED for a problem."""

    def __init__(self, url: str, key: str | None = None, ca: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self._ca = ca

    def get(self, *path: str) -> object:
        """``GET /v1/path...``, each part escaped."""
        return self.request("GET", "/v1/" + "/".join(quote(part, safe="") for part in path))

    def post(self, path: str, body: object) -> object:
        """``POST path`` with ``body`` as JSON."""
        return self.request("POST", path, body)

    def request(self, method: str, path: str, body: object = None) -> object:
        """One request; returns the decoded reply (None if it is empty)."""
        parts = urlsplit(self.url)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["X-API-Key"] = self.key
        try:
            connection = self._connection(parts)
            try:
                connection.request(method, parts.path + path, data, headers)
                reply = connection.getresponse()
                text = reply.read()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CommandFailed(Exit.NOT_RUNNING, f"{self.url} does not answer: {error}") from error
        if reply.status >= http.client.BAD_REQUEST:
            raise CommandFailed(Exit.REFUSED, _problem(reply.status, text), _advice(reply.status))
        return _decoded(text, self.url)

    def _connection(self, parts: SplitResult) -> http.client.HTTPConnection:
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an address begins with http:// or https://")
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        import ssl

        context = ssl.create_default_context(cafile=self._ca)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)


def _decoded(text: bytes, url: str) -> object:
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise CommandFailed(
            Exit.NOT_RUNNING, f"{url} answers, but not as Headwater does", "Check the address."
        ) from error


def _problem(status: int, text: bytes) -> str:
    """A problem+json reply as text for people."""
    try:
        problem = json.loads(text)
    except ValueError:
        return f"HTTP {status}"
    if not isinstance(problem, Mapping):
        return f"HTTP {status}"
    lines = [
        f"{problem.get('code', f'HTTP {status}')}: {problem.get('detail') or problem.get('title') or ''}"
    ]
    lines += [
        f"  {field.get('path', '')}: {field.get('message', '')}" for field in problem.get("errors") or []
    ]
    if problem.get("request_id"):
        lines.append(f"  request {problem['request_id']}")
    return "\n".join(lines)


def _advice(status: int) -> str:
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return f"Pass a key with the needed scope by --key or {KEY_VARIABLE}."
    if status == http.client.SERVICE_UNAVAILABLE:
        return "`headwater status` shows what is not ready."
    return ""


def api_of(settings: Settings, url: str | None, key: str | None) -> Api:
    """The API to speak to: as given, else of the environment, else the one that runs from this data folder,
    else where the settings say that it listens."""
    chosen = url or os.environ.get(URL_VARIABLE) or _running(settings) or f"http://{settings.api.listen}"
    return Api(chosen, key or os.environ.get(KEY_VARIABLE))


def _running(settings: Settings) -> str | None:
    from services.supervisor.folder import RunFolder

    folder = RunFolder(settings.data.dir)
    state = folder.state() if folder.held() else None
    addresses = (child.address for child in state.children if child.service == "api") if state else ()
    found = next((address for address in addresses if address), None)
    return found if found is None or "://" in found else f"http://{found}"
