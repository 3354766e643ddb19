"""What a hosted job's protection is worth so far: for its status and its log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from federated.privacy.accounting_statement import accountant_of, last_release, spent_by, statement
from federated.rounds import Closed, Header
from services.federation.hosted import HostedJob


def standing(job: HostedJob, header: Header) -> dict[str, Any] | None:
    """The statement on ``job`` as it stands, None without a mechanism."""
    exposure = job.exposure
    if exposure is None or exposure.section.mechanism == "none":
        return None
    return statement(exposure, spent_by(exposure.section, header.iteration, header.releases)).as_json()


def epsilons(job: HostedJob, ended: Sequence[Closed]) -> list[float | None]:
    """ε after each iteration that ``ended``: of local mechanisms what a client has spent that took part in all of them.
    None without a mechanism, and where nothing is promised."""
    accountant = None if job.exposure is None else accountant_of(job.exposure)
    if job.exposure is None or accountant is None:
        return [None] * len(ended)
    section, last = job.exposure.section, last_release(job.exposure)
    found = [
        accountant.running(min(spent_by(section, closed.iteration, closed.releases), last), last)
        for closed in ended
    ]
    return [epsilon if math.isfinite(epsilon) else None for epsilon in found]
