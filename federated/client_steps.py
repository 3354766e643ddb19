"""What a device's loop is told at its start, and what it says to do next."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from federated.client_secure import SecureTerms
from federated.compression import Grid, Scheme
from federated.privacy.protection import Protection, Unprotected


@dataclass(frozen=True)
class Terms:
    """What the job says that concerns its devices. ``scheme`` None: float32; ``grid`` None: whole models; ``secure``
    None: updates travel without masks."""

    job: str
    seed: int
    scheme: Scheme | None = None
    grid: Grid | None = None
    part_bytes: int = 2**20
    protection: Protection = field(default_factory=Unprotected)
    secure: SecureTerms | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one run of the loop: iterations in which an update was accepted, seconds, bytes sent and received."""

    rounds: int | None = None
    seconds: float = inf
    bytes: float = inf


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until ``until``."""

    until: float
    why: str


@dataclass(frozen=True, slots=True)
class Train:
    """Call ``train``: it takes the time that training takes."""


@dataclass(frozen=True, slots=True)
class Done:
    """The loop has ended: ``finished``, by the budget's ``rounds``, ``seconds`` or ``bytes``, by its privacy
    ``budget``, or ``refused``."""

    why: str
    detail: str = ""


@dataclass(slots=True)
class Spent:
    """What the loop has used and done so far. ``diverged``: trainings that came to NaN or infinity;
    ``missed``: stages of secure aggregation that came too late."""

    accepted: int = 0
    refused: int = 0
    lost: int = 0
    diverged: int = 0
    missed: int = 0
    sent: int = 0
    received: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    losses: list[float] = field(default_factory=list)
