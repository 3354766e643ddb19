"""What clients ask of a round and what they are told. Times are the server's, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from federated.selection import DeviceFacts

# Both lists stand on the wire by their order: append, never insert.
WaitReason = Literal[
    "full",  # as many have started as the iteration takes
    "starting",  # the start phase has not closed: hold the update and ask again
    "aggregating",  # uploads are being summed
    "counted",  # this client has done its part of this iteration
    "busy",  # as many train at once as may
    "not_selected",  # the draw, the device's state or its share of late: see the detail
    "stopped",  # the job is stopped and may be resumed
]
RefusalCode = Literal[
    "foreign_ticket",  # not signed by this job for this client and iteration
    "not_a_member",  # cross-silo: not named
    "late",  # its iteration is over or full
    "future_iteration",  # beyond what the store knows: the store was set back
    "different_body",  # this client's upload was counted with another body
    "too_stale",  # buffered: more versions old than max_staleness
    "expired",  # buffered: took longer than its window
    "bad_examples",  # not a positive count
    "bad_loss",  # not finite
    "bad_id",  # client id empty, too long or with control characters
]


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A client asks to take part. ``version`` is the model it holds, 0 for none."""

    client: str
    facts: DeviceFacts = field(default_factory=DeviceFacts)
    version: int = 0


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """A client's update was stored under ``digest`` (16 bytes) and asks to be counted."""

    client: str
    iteration: int
    ticket: bytes
    digest: bytes
    examples: int
    steps: int
    loss: float


@dataclass(frozen=True, slots=True)
class PollRequest:
    """A client asks where things stand; ``iteration`` is that of its ticket, 0 for none."""

    client: str
    iteration: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """Train on model ``version`` and upload with ``ticket`` before ``until`` (at the latest)."""

    iteration: int
    version: int
    ticket: bytes
    until: float
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """The upload is counted, this time or (``repeated``) before."""

    iteration: int
    come_back_at: float
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class NotYet:
    """Ask again at ``come_back_at``."""

    come_back_at: float
    reason: WaitReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Asking the same again is of no use. ``come_back_at`` is when to start anew, if ever."""

    code: RefusalCode
    reason: str
    come_back_at: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is over: ``version`` is its last model."""

    iteration: int
    version: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the job stands, and whether the asking client's upload was counted."""

    iteration: int
    version: int
    phase: str
    counted: bool
    come_back_at: float


Request = StartRequest | UploadRequest | PollRequest
Reply = Admitted | Accepted | NotYet | Refused | Finished | Standing
