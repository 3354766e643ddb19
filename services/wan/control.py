"""Control of running links by calls between our processes: what is asked, what is answered, both ends of it.

Methods: ``show``, ``set``, ``partition``, ``heal``, ``reset`` (a ``Command`` each, answered by ``Standing``) and
``metrics`` (answered by ``Exposition``). Codes of failures: ``unknown-link``, ``unusable`` (of conditions),
``malformed``, ``unknown-method``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeVar

import msgspec

from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.codec import Failure
from services.rpc.errors import NoAnswer, RemoteFailure
from services.rpc.server import Call, RpcServer
from services.wan.conditions import parse_conditions
from services.wan.emulator import Emulator
from services.wan.link import Link
from services.wan.metrics import exposition
from services.wan.types import LinkStatus, LinkUnknown

Action = Literal["show", "set", "partition", "heal", "reset"]
SERVICE: Final = "link"
UNKNOWN_LINK: Final = "unknown-link"
UNUSABLE: Final = "unusable"
MALFORMED: Final = "malformed"
UNKNOWN_METHOD: Final = "unknown-method"
ANSWER_S: Final = 5.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Command(msgspec.Struct, frozen=True):
    """What is asked of the link ``name`` (``show``: of all where it is empty). ``forward`` and ``back`` are the new
    conditions of a ``set``, as text; None leaves a direction as it is."""

    name: str = ""
    forward: str | None = None
    back: str | None = None


class Standing(msgspec.Struct, frozen=True):
    """The links that were asked for, as they stand after it; ``broken``: connections that a ``reset`` broke."""

    links: tuple[LinkStatus, ...] = ()
    broken: int = 0


class Exposition(msgspec.Struct, frozen=True):
    """All metrics in Prometheus' text form."""

    text: str = ""


class Controls:
    """Answers calls to ``rpc`` by what ``emulator`` does. Used by one thread."""

    def __init__(self, emulator: Emulator, rpc: RpcServer) -> None:
        self._emulator, self._rpc = emulator, rpc

    def turn(self, timeout_s: float) -> None:
        """Wait for calls, ``timeout_s`` at most, and answer them."""
        self._rpc.wait(timeout_s)
        while (call := self._rpc.take()) is not None:
            try:
                self._rpc.answer(call, msgspec.msgpack.encode(self._answer(call)))
            except LinkUnknown as error:
                self._rpc.fail(call, UNKNOWN_LINK, str(error))
            except msgspec.DecodeError as error:
                self._rpc.fail(call, MALFORMED, str(error))
            except ValueError as error:
                self._rpc.fail(call, UNUSABLE, str(error))
            except LookupError:
                self._rpc.fail(call, UNKNOWN_METHOD, f"there is no method {call.request.method!r}")

    def _answer(self, call: Call) -> Standing | Exposition:
        method = call.request.method
        if method == "metrics":
            return Exposition(exposition(self._emulator.status()))
        command = _decode(bytes(call.request.body), Command)
        if method == "show":
            if not command.name:
                return Standing(self._emulator.status())
            return Standing((self._emulator.do(command.name, Link.status),))
        change = _CHANGES[method]
        broken = self._emulator.do(command.name, lambda link: change(link, command))
        _log.info("link %s: %s %s", command.name, method, _told(command))
        return Standing((self._emulator.do(command.name, Link.status),), broken)


def _told(command: Command) -> str:
    ways = {"forward": command.forward, "back": command.back}
    return " ".join(f"{way} {text or 'without limits'}" for way, text in ways.items() if text is not None)


def _set(link: Link, command: Command) -> int:
    forward, back = (
        None if text is None else parse_conditions(text) for text in (command.forward, command.back)
    )
    link.set(forward, back)
    return 0


def _partition(link: Link, _command: Command) -> int:
    link.partition()
    return 0


def _heal(link: Link, _command: Command) -> int:
    link.heal()
    return 0


def _reset(link: Link, _command: Command) -> int:
    return link.reset()


_CHANGES: Final[Mapping[str, Callable[[Link, Command], int]]] = {
    "set": _set,
    "partition": _partition,
    "heal": _heal,
    "reset": _reset,
}


def order(
    client: RpcClient, address: str, action: Action, command: Command, timeout_s: float = ANSWER_S
) -> Standing:
    """Have the process at ``address`` do ``action``. Raises RemoteFailure with the code, NoAnswer."""
    outgoing = Outgoing(action, msgspec.msgpack.encode(command))
    return _decode(_call(client, address, outgoing, timeout_s), Standing)


def metrics(client: RpcClient, address: str) -> str:
    """The metrics of the links at ``address``, in Prometheus' text form. Raises RemoteFailure, NoAnswer."""
    return _decode(_call(client, address, Outgoing("metrics", b""), ANSWER_S), Exposition).text


def _call(client: RpcClient, address: str, outgoing: Outgoing, timeout_s: float) -> bytes:
    answer = client.exchange({address: outgoing}, timeout_s).get(address)
    if answer is None:
        raise NoAnswer(f"{address}: no answer within {timeout_s:g} s")
    if isinstance(answer, Failure):
        raise RemoteFailure(answer.code, answer.message)
    return bytes(answer.body)


def _decode(data: bytes, kind: type[T]) -> T:
    """Read a message. Raises msgspec.DecodeError."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error
