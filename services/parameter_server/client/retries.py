"""How clients retry, without I/O: what an answer means for the next attempt, and how long to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from services.parameter_server import messages as wire
from services.parameter_server.client.operations import raise_failure
from services.rpc.codec import Failure, Reply
from services.rpc.server import BUSY, LATE

LOOK_S: Final = 0.2
"""How often a client that waits for an answer looks whether the server is still the same process."""
RESEND_S: Final = 2.0
"""After this long a request is sent again: the connection may have broken and been made anew."""
ELSEWHERE_S: Final = 0.25
"""After this long another server is asked where one can stand in."""
_FIRST_S: Final = 0.02
_LONGEST_S: Final = 0.5


class Replan(Exception):
    """The shard map changed: the operation has to be planned anew."""


class Elsewhere(Exception):
    """A server failed that another can stand in for: the operation has to be planned without it."""


Next = Literal["done", "again", "declare", "replan"]


def pause_s(attempt: int, random: Callable[[], float]) -> float:
    """Pause before attempt number ``attempt`` (from 1): doubling up to half a second, half of it random."""
    longest: float = min(_FIRST_S * 2 ** (attempt - 1), _LONGEST_S)
    return longest * (0.5 + 0.5 * random())


def judge(what: str, server: str, expected: int, answer: Reply | Failure) -> Next:
    """What to do about a server's answer. Raises what its error means, where a retry is no use.

    ``expected``: the incarnation that the request was meant for (0: any).
    """
    if isinstance(answer, Reply):
        return "done"
    if answer.code in (BUSY, LATE):
        return "again"
    if answer.code == wire.NOT_MINE:
        return "replan"
    if answer.code == wire.MODEL_UNKNOWN:
        return "declare"
    raise_failure(what, server, answer.code, answer.message, expected)
