"""Answers of joint inference that are written down, or not given."""

from __future__ import annotations

from collections.abc import Sequence

from services.vertical.serving.audit import AuditLog
from services.vertical.serving.guest import Answer, ServingGuest, off_loop


async def answer_audited(
    guest: ServingGuest,
    audit: AuditLog,
    who: str,
    values: Sequence[bytes],
    deadline_s: float,
    request_id: str,
) -> Answer:
    """The answer for ids in their normalised form, with its line in the log. Raises OSError where that cannot be."""
    count = len(values)
    marks = await off_loop(count, lambda: audit.marks(values))
    try:
        answer = await guest.answer(values, deadline_s, request_id)
    except BaseException:
        # Hosts may have answered already, so their logs have it.
        audit.write(who, count, marks, "failed", request_id=request_id)
        raise
    outcome = "degraded" if answer.degraded.any() else "answered"
    audit.write(who, count, marks, outcome, request_id=request_id, run=answer.run)
    return answer
