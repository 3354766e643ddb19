"""The state of rounds in Redis, for servers on several machines.

Keys (``NAME`` is the store's name, in braces so that a cluster keeps all of it on one node)::

    hw:{fl:NAME}:record:KEY    a record
    hw:{fl:NAME}:blob:KEY      a body
    hw:{fl:NAME}:records       sorted set of the records' keys, all of score 0: ranges by beginning, in byte order
    hw:{fl:NAME}:blobs         the same of the bodies

A transaction watches what it read; one that lost a race reads again. What an acknowledged write survives is decided by
the server's ``appendonly`` and ``appendfsync``: only ``appendfsync always`` survives a power cut, as the SQLite store
does. What belongs to one iteration ends by itself after ``life_s``, should nobody sweep it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import redis
from redis import exceptions

from federated.rounds import StoreUnavailable
from services.federation.prefixes import after

T = TypeVar("T")
Step = Callable[[Mapping[str, bytes | None]], tuple[Mapping[str, bytes | None], T]]

_CONNECT_S: Final = 2.0
_REPLY_S: Final = 10.0
_MAX_CONNECTIONS: Final = 64
_MOST_TRIES: Final = 200
_PAGE_KEYS: Final = 500
LIFE_S: Final = 7 * 86_400


class RedisStore:
    """A ``Store`` in the database that ``url`` names. Safe under threads. Raises StoreUnavailable."""

    def __init__(self, url: str, name: str = "main", life_s: int = LIFE_S) -> None:
        self._redis = redis.Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_REPLY_S,
            max_connections=_MAX_CONNECTIONS,
        )
        self._prefix = f"hw:{{fl:{name}}}"
        self._life_s = life_s
        try:
            with _translated():
                self._redis.ping()
        except BaseException:
            self._redis.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def transact(self, keys: Sequence[str], step: Step[T]) -> T:
        """See ``Store.transact``."""
        names = [self._name("record", key) for key in keys]
        with _translated(), self._redis.pipeline() as opened:
            pipe: Any = opened  # redis-py's annotations leave half of it untyped
            for attempt in range(_MOST_TRIES):
                if names:
                    pipe.watch(*names)
                # A watching pipeline answers at once.
                found: list[bytes | None] = pipe.mget(names) if names else []
                writes, result = step(dict(zip(keys, found, strict=True)))
                pipe.multi()
                for key, value in writes.items():
                    self._write(pipe, key, value)
                try:
                    pipe.execute()
                except exceptions.WatchError:
                    time.sleep(random.random() * min(0.001 * 2**attempt, 0.05))
                    continue
                return result
        raise StoreUnavailable(f"others changed the same records {_MOST_TRIES} times in a row")

    def put_blob(self, key: str, body: bytes) -> None:
        """See ``Store.put_blob``."""
        with _translated(), self._redis.pipeline() as pipe:
            pipe.zadd(f"{self._prefix}:blobs", {key: 0})
            pipe.set(self._name("blob", key), body, ex=self._life(key))
            pipe.execute()

    def get_blob(self, key: str) -> bytes | None:
        """See ``Store.get_blob``."""
        with _translated():
            return cast("bytes | None", self._redis.get(self._name("blob", key)))

    def blobs(self, prefix: str) -> Iterator[str]:
        """See ``Store.blobs``."""
        for page in self._pages("blobs", prefix):
            with _translated():
                there = cast("list[int]", self._exist([self._name("blob", key) for key in page]))
            # A body that ended by itself is still in the set.
            yield from (key for key, exists in zip(page, there, strict=True) if exists)

    def delete(self, prefix: str) -> None:
        """See ``Store.delete``."""
        for kind in ("record", "blob"):
            for page in self._pages(f"{kind}s", prefix):
                with _translated(), self._redis.pipeline() as pipe:
                    pipe.unlink(*(self._name(kind, key) for key in page))
                    pipe.zrem(f"{self._prefix}:{kind}s", *page)
                    pipe.execute()

    def _pages(self, index: str, prefix: str) -> Iterator[list[str]]:
        first, end = b"[" + prefix.encode(), b"(" + after(prefix.encode())
        while True:
            with _translated():
                found = cast(
                    "list[bytes]",
                    self._redis.zrangebylex(f"{self._prefix}:{index}", first, end, 0, _PAGE_KEYS),
                )
            if found:
                yield [key.decode() for key in found]
            if len(found) < _PAGE_KEYS:
                return
            first = b"(" + found[-1]

    def _exist(self, names: Sequence[str]) -> list[Any]:
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(name)
            return pipe.execute()

    def _write(self, pipe: Any, key: str, value: bytes | None) -> None:
        if value is None:
            pipe.unlink(self._name("record", key))
            pipe.zrem(f"{self._prefix}:records", key)
        else:
            pipe.set(self._name("record", key), value, ex=self._life(key))
            pipe.zadd(f"{self._prefix}:records", {key: 0})

    def _name(self, kind: str, key: str) -> str:
        return f"{self._prefix}:{kind}:{key}"

    def _life(self, key: str) -> int | None:
        return self._life_s if "/iteration/" in key else None


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except exceptions.RedisError as error:
        raise StoreUnavailable(f"Redis cannot be used now: {error}") from error
