"""The online store in Redis or a Redis Cluster: one hash per entity, one packed cell per field.

Keys (a cluster hashes what stands in braces)::

    hw:row:user/42          hash: field -> packed cell
    hw:{marks:user}:last    the last sequence number given
    hw:{marks:user}:order   sorted set: id -> sequence number of its last change
    hw:{marks:user}:ids     sorted set of all live ids, for paging in lexicographic order
    hw:{claim:17}:DIGEST    the owner of a claim, with its time to live
    hw:{claim:17}:order     list of the claims of bucket 17, newest first
    hw:features:format      the format of all of this

One call is one round trip; a write to a cluster takes two, since the marks live on another node and must
follow the data. What an acknowledged write survives is decided by the server's ``appendonly`` and
``appendfsync`` settings: only ``appendfsync always`` survives a power cut, as the SQLite store does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final, cast

import redis
from redis import exceptions
from redis.cluster import RedisCluster

from featurestore.cells import pack, unpack
from featurestore.online import Cell, Claim, EntityKey, StoreError, StoreUnavailable

FORMAT: Final = b"1"
CLAIM_BUCKETS: Final = 64
"""Fixed, since processes that bucket differently would not see each other's claims."""
_MAX_CONNECTIONS: Final = 64
_CONNECT_TIMEOUT_S: Final = 2.0
_REPLY_TIMEOUT_S: Final = 5.0

_RETRY_LATER: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
    exceptions.RedisClusterException,
)

_MARK_CHANGED: Final = """
local before = redis.call('INCRBY', KEYS[1], #ARGV) - #ARGV
for n, id in ipairs(ARGV) do
  redis.call('ZADD', KEYS[2], before + n, id)
  redis.call('ZADD', KEYS[3], 0, id)
end
"""
_MARK_DELETED: Final = """
local existed = {}
for n, id in ipairs(ARGV) do
  existed[n] = redis.call('ZREM', KEYS[3], id)
  if existed[n] == 1 then redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[1]), id) end
end
return existed
"""
# ARGV: prefix, ttl in ms, most claims, then digest and owner of each. The oldest entries are popped while
# there are too many or they are stale: twice what a call adds, so the list stays bounded at constant cost.
_CLAIM: Final = """
local prefix, ttl_ms, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
local won = {}
for n = 4, #ARGV, 2 do
  local key, owner = prefix .. ARGV[n], ARGV[n + 1]
  if redis.call('SET', key, owner, 'NX', 'PX', ttl_ms) then
    redis.call('LPUSH', KEYS[1], ARGV[n] .. owner)
    won[#won + 1] = 1
  else
    won[#won + 1] = redis.call('GET', key) == owner and 1 or 0
  end
end
for _ = 1, 2 * #won + 8 do
  local oldest = redis.call('LINDEX', KEYS[1], -1)
  if not oldest then break end
  local key = prefix .. string.sub(oldest, 1, 16)
  if redis.call('GET', key) == string.sub(oldest, 17) then
    if redis.call('LLEN', KEYS[1]) <= most then break end
    redis.call('DEL', key)
  end
  redis.call('RPOP', KEYS[1])
end
return won
"""

Argument = str | bytes | int
Command = tuple[Argument, ...]


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Turn the exceptions of redis-py into StoreUnavailable (try again) and StoreError."""
    try:
        yield
    except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
        raise StoreError(f"Redis refused the credentials: {error}") from error
    except _RETRY_LATER as error:
        raise StoreUnavailable(f"Redis: {error}") from error
    except exceptions.RedisError as error:
        raise StoreError(f"Redis: {error}") from error


class RedisStore:
    """An ``OnlineStore`` shared by many machines. Thread-safe.

    ``url`` is ``redis://``, ``rediss://`` or, for any node of a cluster, ``redis+cluster://``.
    """

    def __init__(self, url: str, *, max_claims: int) -> None:
        self._claims_per_bucket = max(1, max_claims // CLAIM_BUCKETS)
        self._closed = False
        with mapped_errors():
            self._client, self._is_cluster = _connect(url)
        try:
            self._check_format()
        except StoreError:
            self._client.close()
            raise

    def read(self, keys: Sequence[EntityKey], fields: Sequence[str] | None = None) -> list[dict[str, Cell]]:
        if not keys or (fields is not None and not fields):
            return [{} for _ in keys]
        if fields is None:
            rows = cast(list[dict[bytes, bytes]], self._run([("HGETALL", _row(key)) for key in keys]))
            return [{name.decode(): unpack(cell) for name, cell in row.items()} for row in rows]
        found = cast(list[list[bytes | None]], self._run([("HMGET", _row(key), *fields) for key in keys]))
        return [
            {name: unpack(cell) for name, cell in zip(fields, cells, strict=True) if cell is not None}
            for cells in found
        ]

    def write(self, rows: Mapping[EntityKey, Mapping[str, Cell]]) -> None:
        if not rows:
            return
        data: list[Command] = [
            ("HSET", _row(key), *(part for name, cell in row.items() for part in (name, pack(name, cell))))
            for key, row in rows.items()
            if row
        ]
        self._run_then_mark(data, _MARK_CHANGED, list(rows))

    def delete(self, keys: Sequence[EntityKey]) -> list[bool]:
        unique = list(dict.fromkeys(keys))
        if not unique:
            return []
        marked = self._run_then_mark([("DEL", _row(key)) for key in unique], _MARK_DELETED, unique)
        existed = {
            EntityKey(entity, id)
            for entity, (ids, reply) in marked.items()
            for id, flag in zip(ids, cast(list[int], reply), strict=True)
            if flag
        }
        return [key in existed for key in keys]

    def changes(self, entity: str, cursor: int, limit: int) -> tuple[list[str], int]:
        last, order, _ = _marks(entity)
        window = ("ZRANGEBYSCORE", order, f"({cursor}", "+inf", "WITHSCORES", "LIMIT", 0, limit)
        newest, found = cast(tuple[bytes | None, list[bytes]], self._run([("GET", last), window]))
        # A cursor from the future belongs to a database that was emptied: the reader has to start again.
        if cursor > int(newest or 0):
            return self.changes(entity, 0, limit) if newest else ([], 0)
        return [id.decode() for id in found[::2]], int(float(found[-1])) if found else cursor

    def claim(self, claims: Sequence[Claim], ttl_s: float) -> list[bool]:
        buckets: dict[int, list[int]] = defaultdict(list)
        pairs = [(_digest(claim.id, 16), _digest(claim.owner, 8)) for claim in claims]
        for n, (digest, _) in enumerate(pairs):
            buckets[digest[0] % CLAIM_BUCKETS].append(n)
        commands = [
            self._claim_command(bucket, [pairs[n] for n in members], ttl_s)
            for bucket, members in buckets.items()
        ]
        won = [False] * len(claims)
        for members, flags in zip(buckets.values(), cast(list[list[int]], self._run(commands)), strict=True):
            for n, flag in zip(members, flags, strict=True):
                won[n] = bool(flag)
        return won

    def scan(self, entity: str, after: str, limit: int) -> list[str]:
        start = b"(" + after.encode() if after else b"-"
        command: Command = ("ZRANGEBYLEX", _marks(entity)[2], start, "+", "LIMIT", 0, limit)
        return [id.decode() for id in cast(list[bytes], self._run([command])[0])]

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _check_format(self) -> None:
        key = "hw:features:format"
        _, found = self._run([("SET", key, FORMAT, "NX"), ("GET", key)])
        if found != FORMAT:
            raise StoreError(f"Redis holds features of format {found!r}; this version reads {FORMAT!r}")

    def _claim_command(self, bucket: int, pairs: Sequence[tuple[bytes, bytes]], ttl_s: float) -> Command:
        prefix, ttl_ms = f"hw:{{claim:{bucket}}}:", max(1, round(ttl_s * 1_000))
        flat = (part for pair in pairs for part in pair)
        return "EVAL", _CLAIM, 1, f"{prefix}order", prefix, ttl_ms, self._claims_per_bucket, *flat

    def _run_then_mark(
        self, data: Sequence[Command], script: str, keys: Sequence[EntityKey]
    ) -> dict[str, tuple[list[str], object]]:
        """Run ``data``, then ``script`` over the ids of each entity; per entity its ids and the reply."""
        by_entity: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            by_entity[key.entity].append(key.id)
        marks: list[Command] = [
            ("EVAL", script, 3, *_marks(entity), *ids) for entity, ids in by_entity.items()
        ]
        if self._is_cluster:  # its pipelines run node by node, in no order between nodes
            self._run(data)
            replies = self._run(marks)
        else:
            replies = self._run([*data, *marks], atomic=True)[len(data) :]
        return {entity: (ids, reply) for (entity, ids), reply in zip(by_entity.items(), replies, strict=True)}

    def _run(self, commands: Sequence[Command], *, atomic: bool = False) -> list[object]:
        """The replies to ``commands``, sent together."""
        if self._closed:
            raise StoreError("Redis: the store is closed")
        if not commands:
            return []
        with mapped_errors(), self._client.pipeline(transaction=atomic) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return cast(list[object], pipeline.execute())


def _connect(url: str) -> tuple[redis.Redis | RedisCluster, bool]:
    scheme, _, rest = url.partition("://")
    options = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _REPLY_TIMEOUT_S,
        "protocol": 2,
    }
    if scheme.endswith("+cluster"):
        plain = f"{scheme.removesuffix('+cluster')}://{rest}"
        return RedisCluster.from_url(plain, max_connections=_MAX_CONNECTIONS, **options), True
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=_REPLY_TIMEOUT_S, **options
        )
    except ValueError as error:  # not one of its schemes; the URL itself may hold a password
        raise StoreError(f"not a Redis URL: {scheme}://...: {error}") from None
    return redis.Redis(connection_pool=pool), False


def _row(key: EntityKey) -> str:
    return f"hw:row:{key.entity}/{key.id}"


def _marks(entity: str) -> tuple[str, str, str]:
    """The keys of an entity's last sequence number, its order of changes and its live ids."""
    tag = f"hw:{{marks:{entity}}}"
    return f"{tag}:last", f"{tag}:order", f"{tag}:ids"


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()
