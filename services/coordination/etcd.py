"""Coordination in etcd 3.4 or later, by its JSON gateway: keys and values in base64, numbers as text.

Revisions are etcd's own. A compacted history cannot be watched: the watch then answers with what is there
now, and the caller, who reads a prefix anew after a change, is none the worse.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeGuard

import httpx

from services.coordination import recipes
from services.coordination.contract import (
    Change,
    Conflict,
    CoordinationError,
    Entry,
    Lease,
    LeaseLost,
    Unavailable,
)

Json = dict[str, object]
_NOT_FOUND: Final = 5
_TRANSIENT: Final = frozenset({4, 8, 14})
"""gRPC codes: deadline exceeded, resource exhausted, unavailable."""


class EtcdCoordination:
    """``Coordination`` in etcd at ``url`` (``http://host:2379``). TTLs are rounded up to whole seconds."""

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=8)
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s, limits=limits, trust_env=False)

    def _call(self, path: str, body: Json) -> Json:
        try:
            with _mapped_errors():
                response = self._http.post(path, json=body)
        except _Quiet as error:
            raise Unavailable(f"etcd did not answer within {self._timeout_s:g} s") from error
        return _checked(response.status_code, response.content)

    def _range(self, key: bytes, end: bytes | None) -> list[Entry]:
        body: Json = {"key": _text(key), "sort_target": "KEY", "sort_order": "ASCEND"}
        if end is not None:
            body["range_end"] = _text(end)
        return [
            Entry(_bytes(kv, "key").decode(), _bytes(kv, "value"), _number(kv, "mod_revision"))
            for kv in _objects(self._call("/v3/kv/range", body), "kvs")
        ]

    def get(self, key: str) -> Entry | None:
        found = self._range(key.encode(), None)
        return found[0] if found else None

    def scan(self, prefix: str) -> list[Entry]:
        return self._range(*_span(prefix))

    def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, expect_revision: int | None = None
    ) -> int:
        name = _text(key.encode())
        request: Json = {"key": name, "value": _text(value)}
        if lease is not None:
            request["lease"] = str(lease.id)
        compare: list[Json] = []
        if expect_revision is not None:
            compare.append(
                {"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(expect_revision)}
            )
        body: Json = {"compare": compare, "success": [{"request_put": request}]}
        reply = self._call("/v3/kv/txn", body)
        if reply.get("succeeded") is not True:
            raise Conflict(f"{key} does not have revision {expect_revision} any more")
        return _revision(reply)

    def delete(self, key: str) -> bool:
        return _number(self._call("/v3/kv/deleterange", {"key": _text(key.encode())}), "deleted") > 0

    def lease(self, ttl_s: float) -> recipes.StoreLease:
        reply = self._call("/v3/lease/grant", {"TTL": str(max(1, math.ceil(ttl_s)))})
        return recipes.StoreLease(self, _number(reply, "ID"))

    def renew(self, lease_id: int) -> None:
        """Give a lease another full TTL (``Lease.keep_alive``)."""
        reply = self._call("/v3/lease/keepalive", {"ID": str(lease_id)}).get("result")
        if not _is_object(reply) or _number(reply, "TTL") <= 0:
            raise LeaseLost(f"lease {lease_id} ended")

    def end(self, lease_id: int) -> None:
        """End a lease and remove its keys (``Lease.revoke``)."""
        try:
            self._call("/v3/lease/revoke", {"ID": str(lease_id)})
        except LeaseLost:
            return  # it ended by itself, which is what was wanted

    def acquire(self, name: str, owner: str, lease: Lease) -> int | None:
        return recipes.acquire(self, name, owner, lease)

    def increment(self, name: str) -> int:
        return recipes.increment(self, name)

    def watch(self, prefix: str, after_revision: int, timeout_s: float) -> list[Change]:
        start, end = _span(prefix)
        request: Json = {
            "key": _text(start),
            "range_end": _text(end),
            "start_revision": str(after_revision + 1),
        }
        timeout = httpx.Timeout(self._timeout_s, read=max(timeout_s, 0.001))
        try:
            with (
                _mapped_errors(),
                self._http.stream(
                    "POST", "/v3/watch", json={"create_request": request}, timeout=timeout
                ) as reply,
            ):
                if reply.status_code != httpx.codes.OK:
                    _checked(reply.status_code, reply.read())
                for line in reply.iter_lines():
                    result = _watch_result(line)
                    if "compact_revision" in result:
                        break
                    if events := _objects(result, "events"):
                        return _folded(events)
        except _Quiet:
            return []
        return [Change(entry.key, entry.value, entry.revision) for entry in self.scan(prefix)]

    def close(self) -> None:
        self._http.close()


class _Quiet(Exception):
    """Nothing arrived within the time given."""


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """httpx's exceptions as ours, in one place."""
    try:
        yield
    except httpx.ReadTimeout as error:
        raise _Quiet from error
    except httpx.HTTPError as error:
        raise Unavailable(f"etcd: {error or type(error).__name__}") from error


def _checked(status: int, content: bytes) -> Json:
    try:
        reply = json.loads(content)
    except ValueError as error:
        raise Unavailable(f"etcd answered {status} with something that is not JSON") from error
    if not _is_object(reply):
        raise Unavailable(f"etcd answered {status} with something that is not an object")
    if status == httpx.codes.OK:
        return reply
    code, message = reply.get("code"), str(reply.get("message") or reply.get("error"))
    if code == _NOT_FOUND and "lease" in message:
        raise LeaseLost(message)
    if code in _TRANSIENT or status >= httpx.codes.BAD_GATEWAY:
        raise Unavailable(f"etcd: {message}")
    raise CoordinationError(f"etcd answered {status}: {message}")


def _watch_result(line: str) -> Json:
    message = _checked(httpx.codes.OK, line.encode())
    result = message.get("result")
    if not _is_object(result):
        raise Unavailable(f"etcd ended the watch: {message.get('error')}")
    return result


def _folded(events: list[Json]) -> list[Change]:
    last: dict[str, Change] = {}
    for event in events:
        kv = event.get("kv")
        assert _is_object(kv)
        key = _bytes(kv, "key").decode()
        value = None if event.get("type") == "DELETE" else _bytes(kv, "value")
        last[key] = Change(key, value, _number(kv, "mod_revision"))
    return sorted(last.values(), key=lambda change: change.revision)


def _span(prefix: str) -> tuple[bytes, bytes]:
    """Key and range end of a prefix, in etcd's terms (a zero byte as range end: to the last key)."""
    start = prefix.encode() or b"\0"
    return start, (recipes.prefix_end(start) if prefix else None) or b"\0"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_object(value: object) -> TypeGuard[Json]:
    return isinstance(value, dict)


def _objects(message: Json, name: str) -> list[Json]:
    """The list of objects under ``name``; etcd leaves empty lists out."""
    values = message.get(name) or []
    assert isinstance(values, list)
    return [value for value in values if _is_object(value)]


def _bytes(message: Json, name: str) -> bytes:
    return base64.b64decode(str(message.get(name, "")))


def _number(message: Json, name: str) -> int:
    """The 64-bit number under ``name``; etcd writes it as text and leaves zeros out."""
    return int(str(message.get(name, 0)))


def _revision(message: Json) -> int:
    header = message.get("header")
    assert _is_object(header)
    return _number(header, "revision")
