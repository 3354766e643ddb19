"""A host's end of joint inference: answers a guest with its share for the rows that are asked for by name.

Codes of failures: ``unknown`` (no such party or method), ``malformed``, ``another-model`` (the parts are of different
runs), ``internal``, ``too-many`` (more rows than this host takes at once, or in a minute).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from federated.psi.ids import IdRule
from federated.vertical.tables import Table
from services.rpc.security import KeyPair, Security
from services.rpc.server import Call, RpcServer
from services.vertical.network import Peer
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.tokens import TOKEN_BYTES, Naming, names_in

METHOD: Final = "partial"
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """A guest's request; the names [N, 16] come as its array. ``run``: of the guest's part of the model."""

    run: str
    request_id: str


class Share(msgspec.Struct, array_like=True, frozen=True):
    """The answer: with an array of truth values [N] (rows that are here), and the share [n, ...] of those that are."""

    run: str


_asks = msgspec.msgpack.Decoder(Ask)


class Rate:
    """At most ``most`` rows in each minute, by party: shares of many chosen rows tell of a host's columns."""

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most, self._monotonic = most, monotonic
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, party: str, rows: int) -> bool:
        """Whether ``party`` may ask for so many rows now; they are counted then."""
        now = self._monotonic()
        left, at = self._left.get(party, (float(self._most), now))
        left = min(float(self._most), left + (now - at) * self._most / 60.0)
        if rows > left:
            self._left[party] = left, now
            return False
        self._left[party] = left - rows, now
        return True


class ServingHost:
    """Answers the guests among ``peers``. ``part`` is this host's (``HostPart``), ``table`` all of its rows."""

    def __init__(
        self,
        listen: str,
        keys: KeyPair,
        guests: Mapping[str, Peer],
        part: Any,
        run: str,
        table: Table,
        audit: AuditLog,
        *,
        rule: IdRule,
        most_rows: int,
        rate: Rate,
    ) -> None:
        """Raises ZMQError where ``listen`` cannot be had, IdRefused for a row whose id is none."""
        self._part, self._run, self._table, self._audit = part, run, table, audit
        self._most_rows, self._rate = most_rows, rate
        self._guests = {peer.key.hex(): name for name, peer in guests.items()}
        self._rows: dict[str, dict[bytes, int]] = {}
        for name, peer in guests.items():
            naming = Naming(keys, peer.key, rule)
            self._rows[name] = {naming.of(one): row for row, one in enumerate(table.ids)}
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
        if guest is None or call.request.method != METHOD:
            self._server.fail(call, "unknown", "no such party, or no such method")
            return
        try:
            ask = _asks.decode(call.request.body)
            (names,) = call.request.arrays
            if names.dtype != np.uint8 or names.ndim != 2 or names.shape[1] != TOKEN_BYTES:
                raise ValueError("names of another form")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            self._audit.write(guest, 0, "", "malformed")
            self._server.fail(call, "malformed", "no request of this version")
            return
        wanted = names_in(names)
        digest = self._audit.digest(wanted)
        told = {"request_id": ask.request_id[:64]}
        if ask.run != self._run:
            self._audit.write(guest, len(wanted), digest, "another-model", **told)
            self._server.fail(call, "another-model", f"this host's part is of run {self._run}")
            return
        if len(wanted) > self._most_rows or not self._rate.take(guest, len(wanted)):
            self._audit.write(guest, len(wanted), digest, "too-many", **told)
            self._server.fail(
                call, "too-many", f"at most {self._most_rows} rows at once, and so many a minute"
            )
            return
        index = self._rows[guest]
        here = np.array([name in index for name in wanted], np.bool_)
        rows = np.array([index[name] for name in wanted if name in index], np.int64)
        share = np.asarray(self._part.partial(self._table.features[rows])) if len(rows) else np.empty(0)
        self._audit.write(guest, len(wanted), digest, "answered", here=len(rows), **told)
        self._server.answer(call, _encoder.encode(Share(self._run)), (here, share))

    def close(self) -> None:
        """Give up the address."""
        self._server.close()
