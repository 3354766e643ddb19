"""From a received call to an answer: every method with its message, every error with its code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from services.parameter_server import messages as wire
from services.parameter_server.declarations import decode_declaration
from services.parameter_server.holdings import NotMine
from services.parameter_server.host import Answer, Host
from services.parameter_server.types import (
    IncarnationChanged,
    ModelMismatch,
    ModelUnknown,
    ParametersRefused,
)
from services.rpc.codec import Array, Request
from sync.errors import BadSpec, PeerFault, TableFull

T = TypeVar("T")
_log = logging.getLogger(__name__)
Handler = Callable[[Host, bytes, Sequence[Array]], Answer]


class Rejected(Exception):
    """The call is answered with an error ``code`` and message."""

    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(f"{code}: {message}")


def _declare(host: Host, body: bytes, _arrays: Sequence[Array]) -> Answer:
    host.declare(decode_declaration(wire.unpack(body, wire.DeclareRequest).declaration))
    return wire.Done(), ()


def _pull(host: Host, body: bytes, arrays: Sequence[Array]) -> Answer:
    return host.pull(wire.unpack(body, wire.PullRequest), arrays)


def _push(host: Host, body: bytes, arrays: Sequence[Array]) -> Answer:
    return host.push(wire.unpack(body, wire.PushRequest), arrays)


def _applied(host: Host, body: bytes, _arrays: Sequence[Array]) -> Answer:
    return host.applied(wire.unpack(body, wire.AppliedRequest))


def _dense(host: Host, body: bytes, _arrays: Sequence[Array]) -> Answer:
    return host.dense(wire.unpack(body, wire.DenseRequest))


def _publish(host: Host, body: bytes, _arrays: Sequence[Array]) -> Answer:
    request = wire.unpack(body, wire.PublishRequest)
    return wire.PublishReply(host.publish(request.model, request.table)), ()


_HANDLERS: Final[Mapping[str, Handler]] = {
    "declare": _declare,
    "pull": _pull,
    "push": _push,
    "applied": _applied,
    "dense": _dense,
    "publish": _publish,
}

# The first class that fits decides, so a subclass stands before its base.
_CODES: Final[tuple[tuple[type[Exception], str], ...]] = (
    (NotMine, wire.NOT_MINE),
    (ModelUnknown, wire.MODEL_UNKNOWN),
    (ModelMismatch, wire.MODEL_MISMATCH),
    (ParametersRefused, wire.REFUSED),
    (TableFull, wire.FULL),
    (PeerFault, wire.REFUSED),
    (BadSpec, wire.REFUSED),
    (msgspec.DecodeError, wire.REFUSED),
    (UnicodeDecodeError, wire.REFUSED),
)


def handle(host: Host, request: Request) -> Answer:
    """Answer a call that can be answered at once. Raises Rejected with the code to send."""
    handler = _HANDLERS.get(request.method)
    if handler is None:
        raise Rejected(wire.UNKNOWN_METHOD, f"no method {request.method[:64]!r}")
    return guarded(lambda: handler(host, request.body, request.arrays), request.method)


def guarded(answer: Callable[[], T], method: str) -> T:
    """``answer()`` with its errors as Rejected. What nobody foresaw is logged, and its text stays here."""
    try:
        return answer()
    except IncarnationChanged as error:
        raise Rejected(wire.INCARNATION, str(error.found)) from error
    except Rejected:
        raise
    except Exception as error:
        for kind, code in _CODES:
            if isinstance(error, kind):
                raise Rejected(code, str(error)) from error
        _log.exception("%s failed", method)
        raise Rejected(wire.INTERNAL, f"{method} failed on the server; see its log") from error
