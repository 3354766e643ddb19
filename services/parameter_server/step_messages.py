"""What a group of trainers and the parameter servers say to each other about synchronous steps.

Beside ``messages.py``, under the same rules: MessagePack arrays, new fields at the end with defaults.
"""

from __future__ import annotations

from typing import Final, Literal

from services.parameter_server.messages import Part, PushRequest, Wire

CONTRIBUTE: Final = "contribute"
ATTEND: Final = "attend"
DENSE_STATE: Final = "dense-state"

ABSTAIN: Final = -1
"""As the step of an ``AttendRequest``: none, until further notice."""

StepVerdict = Literal["taken", "pending", "regrouped", "late", "again"]
StepStatus = Literal["applied", "duplicate", "gap", "refused", "late", "again"]


class WireGroup(Wire):
    """A generation of the group: its members, the asking one's rank, and the share (a decimal number) of those
    present that makes a step whole."""

    generation: int
    members: int
    rank: int
    ratio: str


class ContributeRequest(Wire):
    """A member's part of ``step``. Arrays: those of ``push``, then those of ``shared``: keys uint64 ``[N]`` and
    gradients float32 ``[N, d]`` per part, in turn.

    ``push``: the micro-batch that it learned from, on those shards of the server that step together; None where
    it has none for them. ``shared``: gradients of the step as a whole; it is then applied only if every push
    in it is next, and refused as ``again`` otherwise. ``late``: what becomes of a push that comes after its
    step was taken: ``drop`` counts it as done without its gradients, ``again`` does nothing. Parks for at most
    ``wait_ms``; ``pending`` says that the step is not whole yet, and the contribution stays. ``more``: the
    member has further micro-batches waiting.
    """

    model: str
    group: WireGroup
    step: int
    push: PushRequest | None
    shared: list[Part]
    late: Literal["drop", "again"]
    wait_ms: int
    incarnation: int = 0
    digest: bool = False
    more: bool = False


class StepOutcome(Wire):
    """What became of a member's push on one shard."""

    shard: int
    status: StepStatus
    applied: int
    durable: int
    reason: str = ""


class ContributeReply(Wire):
    """``open``: the step that is collected now. ``digest``: of the live values of the dense table, where it was
    asked for and is on this server, else empty. ``more``: some member of the step has more waiting."""

    verdict: StepVerdict
    incarnation: int
    open: int
    outcomes: list[StepOutcome]
    digest: str = ""
    more: bool = False


class AttendRequest(Wire):
    """``step``: the first in which the member takes part (0: the open one), or ``ABSTAIN``."""

    model: str
    group: WireGroup
    step: int


class AttendReply(Wire):
    """``verdict``: ``taken`` or ``regrouped``."""

    verdict: StepVerdict
    incarnation: int
    open: int


class DenseStateRequest(Wire):
    """The stored rows of a single table, with what its optimiser remembers, as ``group`` is to find them: whatever
    waits in an older generation is discarded first."""

    model: str
    group: WireGroup
    table: str


class DenseStateReply(Wire):
    """Arrays: keys uint64 ``[N]``, values float32 ``[N, d]``, state float32 ``[N, s]`` of the stored rows.
    ``digest``: of the live values. ``verdict``: ``taken`` or ``regrouped`` (no arrays)."""

    verdict: StepVerdict
    incarnation: int
    digest: str
