"""A host's end of joint inference: answers a guest with its share for the rows that are asked for by name.

Codes of failures: ``unknown`` (no such party or method), ``malformed`` (no request of this version), ``another-model``
(this host has no part of the guest's run), ``internal``, ``too-many`` (more rows than this host takes at once, or in a
minute); and those of ``services.rpc.server``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from federated.psi.ids import IdRule
from federated.vertical.tables import Table
from services.rpc.security import KeyPair, Security
from services.rpc.server import BUSY, LATE, TOO_LARGE, Call, RpcServer
from services.vertical.network import Peer
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.operations import HostMetrics
from services.vertical.serving.parts import Parts
from services.vertical.serving.quota import Quota
from services.vertical.serving.tokens import TOKEN_BYTES, Naming, names_in, value_of

METHOD: Final = "partial"
HELLO: Final = "hello"
MOST_NONCE: Final = 32
CODES: Final = frozenset(
    {"unknown", "malformed", "another-model", "internal", "too-many", BUSY, LATE, TOO_LARGE}
)
"""All codes that an honest host may answer with."""
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """A guest's request; the names [N, 16] come as its array. ``run``: of the guest's part of the model. ``nonce``:
    comes back with the share, so that one of another request is not taken for this one's."""

    run: str
    request_id: str
    nonce: bytes = b""


class Share(msgspec.Struct, array_like=True, frozen=True):
    """The answer: with an array of truth values [N] (rows that are here), and the share [n, ...] of those that are."""

    run: str
    nonce: bytes = b""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The answer to HELLO: the runs whose parts this host has, the newest first."""

    runs: tuple[str, ...]


_asks = msgspec.msgpack.Decoder(Ask)


class ServingHost:
    """Answers the guests among ``peers`` for the rows of ``table``."""

    def __init__(
        self,
        listen: str,
        keys: KeyPair,
        guests: Mapping[str, Peer],
        parts: Parts,
        table: Table,
        audit: AuditLog,
        *,
        rule: IdRule,
        most_rows: int,
        quota: Quota,
        metrics: HostMetrics | None = None,
    ) -> None:
        """Raises ZMQError where ``listen`` cannot be had, IdRefused for a row whose id is none."""
        self._parts, self._table, self._audit = parts, table, audit
        self._most_rows, self._quota = most_rows, quota
        self._metrics = metrics or HostMetrics(audit.size)
        self._guests = {peer.key.hex(): name for name, peer in guests.items()}
        self._rows: dict[str, dict[bytes, int]] = {}
        for name, peer in guests.items():
            naming = Naming(keys, peer.key, rule)
            self._rows[name] = {naming.token(value_of(one, rule)): row for row, one in enumerate(table.ids)}
        allowed = frozenset(peer.key for peer in guests.values())
        self._server = RpcServer(listen, Security(keys.public, keys, keys, allowed))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    def serve(self, stop: threading.Event) -> None:
        """Answer until ``stop`` is set."""
        while not stop.is_set():
            self._server.wait(0.1)
            while (call := self._server.take()) is not None:
                try:
                    self._answer(call)
                except Exception:
                    # One request that cannot be answered, or written down, must not end the others'.
                    _log.exception("a request could not be answered")
                    self._server.fail(call, "internal", "the host failed; its log says why")

    def _answer(self, call: Call) -> None:
        guest = self._guests.get(call.key)
        if guest is None or call.request.method not in (METHOD, HELLO):
            self._server.fail(
                call, "unknown", "this process serves a trained model (`serve`), and takes part in no job"
            )
            return
        if call.request.method == HELLO:
            self._server.answer(call, _encoder.encode(Hello(self._parts.runs)))
            return
        try:
            ask = _asks.decode(call.request.body)
            names = _names(call.request.arrays)
            if len(ask.nonce) > MOST_NONCE:
                raise ValueError("a nonce of another length")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            self._refuse(call, guest, 0, "malformed", "no request of this version")
            return
        self._share(call, guest, ask, names)

    def _share(self, call: Call, guest: str, ask: Ask, names: npt.NDArray[np.uint8]) -> None:
        began_s, count, told = time.perf_counter(), len(names), {"request_id": ask.request_id[:64]}
        loaded = self._parts.of(ask.run)
        if loaded is None:
            why = f"this host's part is of run {', '.join(self._parts.runs)}"
            self._refuse(call, guest, count, "another-model", why, **told)
            return
        if count > self._most_rows or not self._quota.take(guest, count):
            why = f"at most {self._most_rows} rows at once, and so many a minute"
            self._refuse(call, guest, count, "too-many", why, **told)
            return
        wanted, index = names_in(names), self._rows[guest]
        here = np.array([name in index for name in wanted], np.bool_)
        rows = np.array([index[name] for name in wanted if name in index], np.int64)
        share: npt.NDArray[Any] = np.empty(0)
        try:
            if len(rows):
                share = np.asarray(loaded.part.partial(self._table.features[rows]))
        except Exception:
            self._metrics.asked(guest, "internal")
            self._audit.refuse(guest, count, "internal", **told)
            raise
        marks = self._audit.marks(wanted)
        self._audit.write(guest, count, marks, "answered", here=len(rows), run=loaded.run, **told)
        self._server.answer(call, _encoder.encode(Share(loaded.run, ask.nonce)), (here, share))
        self._metrics.answered(guest, len(rows), count - len(rows), time.perf_counter() - began_s)

    def _refuse(self, call: Call, guest: str, rows: int, code: str, why: str, **told: str) -> None:
        self._metrics.asked(guest, code)
        self._audit.refuse(guest, rows, code, **told)
        self._server.fail(call, code, why)

    def close(self) -> None:
        """Give up the address."""
        self._server.close()


def _names(arrays: tuple[npt.NDArray[np.generic], ...]) -> npt.NDArray[np.uint8]:
    """The names [N, 16] of a request, N at least 1. Raises ValueError."""
    (names,) = arrays
    if names.dtype != np.uint8 or names.ndim != 2 or names.shape[1] != TOKEN_BYTES or not len(names):
        raise ValueError("names of another form")
    return names.astype(np.uint8, copy=False)
