"""The session of a party over ZeroMQ: threads that carry frames; the role's thread waits on one condition.

For each pair of parties one calls the other: whoever knows an address of the other, and of two who do, the one whose
name comes first (the other does, where it is not called). A caller has two lanes: *push* sends units and hears the
answer at once, *poll* waits at the other end until there are units or news for the caller. So a party without an
address takes part like any other.

Who a caller is, CURVE proves: the key that it came in with must be a peer's. Each peer's server is expected to have
that same key.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Array, Failure, Reply
from services.rpc.errors import RpcError
from services.rpc.security import KeyPair, Security
from services.rpc.server import Call, RpcServer
from services.vertical.channel import MOST_UNITS, UNIT_BYTES
from services.vertical.session import Frame, Session

METHOD: Final = "vertical"
BEAT_S: Final = 1.0
PARK_S: Final = 1.0
"""How long a poll waits at the other end."""
ANSWER_S: Final = 3.0
"""How long an answer may take at first: whoever died meanwhile is asked again after that."""
MOST_ANSWER_S: Final = 60.0
"""How long it may take where answers come slowly, which each that did not come in time allows twice as long."""
UNCALLED_S: Final = 4.0
"""A party that should be called, and was not for so long, calls itself where it can: the other may not know how."""
_LOOK_S: Final = 0.2
_PAUSE_S: Final = 0.02
_MOST_PAUSE_S: Final = 1.0
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another party: its public key [32 bytes], and its address where we may call it."""

    key: bytes
    address: str | None = None


class Network:
    """Carries ``session``'s frames until ``close``. ``changed`` is notified whenever something arrived."""

    def __init__(
        self,
        session: Session,
        me: str,
        keys: KeyPair,
        peers: Mapping[str, Peer],
        listen: str | None,
        *,
        beat_s: float = BEAT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ZMQError where ``listen`` cannot be had."""
        self.session = session
        self.changed = threading.Condition()
        self.failure: Exception | None = None
        self._keys, self._beat_s, self._monotonic = keys, beat_s, monotonic
        self._names = {peer.key.hex(): name for name, peer in peers.items()}
        self._parked: dict[str, tuple[Call, float]] = {}
        self._called_s: dict[str, float] = {}
        self._why: dict[str, str] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._server: RpcServer | None = None
        if listen is not None:
            security = Security(keys.public, keys, keys, frozenset(peer.key for peer in peers.values()))
            try:
                self._server = RpcServer(listen, security)
            except BaseException:
                os.close(self._woken)
                os.close(self._waker)
                raise
            self._server.watch(self._woken)
            self._start("answers", self._serve)
        for name, peer in peers.items():
            if peer.address is not None:
                # Of two who could call each other one does: messages would come twice otherwise.
                self._called_s[name] = monotonic() if listen is not None and me > name else float("-inf")
                self._start(f"push-{name}", self._call, name, peer.address, peer.key, False)
                self._start(f"poll-{name}", self._call, name, peer.address, peer.key, True)

    @property
    def port(self) -> int | None:
        """The port that is listened on."""
        return None if self._server is None else self._server.port

    def why(self, peer: str) -> str:
        """Why ``peer`` may not be heard, as far as is known here, to stand after that it is not; empty for nothing."""
        told = self._why.get(peer, "")
        turned_away = "" if self._server is None else self._server.turned_away
        if turned_away and self.session.silent_s(peer, 0.0) == math.inf:
            told += f"; this party turned somebody away: {turned_away}"
        return told

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                target(*arguments)
            except Exception as error:
                # Told to the role's thread, which would wait for ever without this one.
                with self.changed:
                    self.failure = error
                    self.changed.notify_all()

        thread = threading.Thread(target=run, name=f"vertical-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def wake(self) -> None:
        """Let the threads look at the session again. Called with ``changed`` held."""
        self.changed.notify_all()
        if self._parked:
            # A full pipe: the loop is woken already.
            with contextlib.suppress(BlockingIOError):
                os.write(self._waker, b"\0")

    def _hear(self, peer: str, frame: Frame, arrays: tuple[Array, ...]) -> None:
        before = self.session.version
        # What no honest peer sends is not copied first: the session finds that it is missing.
        fits = len(arrays) <= MOST_UNITS and all(array.nbytes <= UNIT_BYTES for array in arrays)
        data = [array.tobytes() for array in arrays] if fits else []
        self.session.hear(peer, frame, data, self._monotonic())
        self.changed.notify_all()
        if self.session.version != before:
            self.wake()

    # The answering end.

    def _serve(self) -> None:
        assert self._server is not None
        while not self._stop.is_set():
            self._server.wait(0.2)
            with contextlib.suppress(BlockingIOError):
                while os.read(self._woken, 4_096):
                    pass
            while (call := self._server.take()) is not None:
                self._answer(call)
            self._answer_parked()

    def _answer(self, call: Call) -> None:
        assert self._server is not None
        name = self._names.get(call.key)
        if name is None or call.request.method != METHOD:
            self._server.fail(call, "unknown", "no such party, or no such method")
            return
        try:
            frame = _decoder.decode(call.request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._server.fail(call, "malformed", "no frame of this version")
            _log.warning("%s sent a frame that cannot be read", name)
            return
        with self.changed:
            if self._called_s.get(name, float("-inf")) > float("-inf"):
                self._called_s[name] = self._monotonic()
            self._hear(name, frame, call.request.arrays)
            if frame.wait_ms:
                older = self._parked.pop(name, None)
                if older is not None:
                    self._server.fail(older[0], "replaced", "a newer call of this party waits")
                until_s = self._monotonic() + min(frame.wait_ms / 1_000, PARK_S)
                self._parked[name] = call, until_s
                return
            told, _, _ = self.session.frame(name, units=False)
        self._server.answer(call, _encoder.encode(told))

    def _answer_parked(self) -> None:
        assert self._server is not None
        now = self._monotonic()
        with self.changed:
            for name, (call, until_s) in list(self._parked.items()):
                if now >= until_s or self.session.has_news(name):
                    del self._parked[name]
                    told, data, _ = self.session.frame(name, units=True)
                    self._server.answer(call, _encoder.encode(told), _arrays(data))

    # The calling end.

    def _call(self, name: str, address: str, key: bytes, polls: bool) -> None:
        client = RpcClient(Security(key, self._keys))
        pause_s, allowed_s = _PAUSE_S, ANSWER_S
        try:
            while not self._stop.is_set():
                if self._monotonic() - self._called_s[name] < UNCALLED_S:
                    self._stop.wait(_LOOK_S)
                    continue
                with self.changed:
                    if not polls and not self.session.has_news(name):
                        self.changed.wait_for(
                            lambda: self._stop.is_set() or self.session.has_news(name), self._beat_s
                        )
                        if self._stop.is_set():
                            return
                    wait_ms = round(1_000 * PARK_S) if polls else 0
                    frame, data, version = self.session.frame(name, units=not polls, wait_ms=wait_ms)
                    received = self.session.channel(name).received
                began_s = self._monotonic()
                answer = self._exchange(client, name, address, frame, data, version, allowed_s)
                took_s = self._monotonic() - began_s
                allowed_s = min(MOST_ANSWER_S, max(ANSWER_S, 2 * allowed_s if answer is None else 4 * took_s))
                if answer is not None and self._moved(name, frame, answer, received):
                    pause_s = _PAUSE_S
                else:
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        finally:
            client.close()

    def _moved(self, name: str, sent: Frame, answer: Frame, received: int) -> bool:
        """Whether an exchange got anywhere: units that nobody takes yet are not sent again at once."""
        with self.changed:
            channel = self.session.channel(name)
            taken = not answer.units or channel.received > received
            given = not sent.units or channel.first is None or channel.first > sent.units[0][0]
        return taken and given

    def _exchange(
        self,
        client: RpcClient,
        name: str,
        address: str,
        frame: Frame,
        data: list[bytes],
        version: int,
        timeout_s: float,
    ) -> Frame | None:
        """Ask once; the answer, where one came."""
        try:
            outgoing = Outgoing(METHOD, _encoder.encode(frame), _arrays(data))
            reply = client.exchange(
                {address: outgoing}, timeout_s, keep_waiting=lambda: not self._stop.is_set()
            ).get(address)
        except RpcError as error:
            _log.warning("%s: %s", name, error)
            return None
        if reply is None:
            refusal = client.refusal(address)
            self._why[name] = f"; {address} {f'says: {refusal}' if refusal else 'does not answer'}"
            client.forget(address)
            return None
        if isinstance(reply, Failure):
            if reply.code != "replaced":
                told = f"{reply.code}: {reply.message[:200]}"
                why = f"; {address} answers: {told}"
                if self._why.get(name) != why:
                    # Once, not at every try: it is asked again until it is given up.
                    _log.warning("%s answered: %s", name, told)
                self._why[name] = why
            return None
        return self._heard(name, reply, version)

    def _heard(self, name: str, reply: Reply, version: int) -> Frame | None:
        try:
            answer = _decoder.decode(reply.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _log.warning("%s answered with a frame that cannot be read", name)
            self._why[name] = "; it answers with frames that cannot be read: of another version of Headwater?"
            return None
        self._why.pop(name, None)
        with self.changed:
            self.session.was_told(name, version)
            self._hear(name, answer, reply.arrays)
        return answer

    def close(self) -> None:
        """Stop all threads."""
        self._stop.set()
        with self.changed:
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
        if self._server is not None:
            self._server.close()
        os.close(self._woken)
        os.close(self._waker)


def _arrays(data: list[bytes]) -> tuple[Array, ...]:
    return tuple(np.frombuffer(one, np.uint8) for one in data)
