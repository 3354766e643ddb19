"""What a client is told when a request fails: ``application/problem+json`` (RFC 9457).

Every failure has a stable ``code``; codes, statuses and titles stand in one table here. Nothing of an
exception's own text reaches a client; the request id leads to it in the log.

Exceptions::

    Problem                  a request is answered with a problem document; raised anywhere in a handler
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec
from starlette.responses import Response

MEDIA_TYPE: Final = "application/problem+json"
MAX_ERRORS: Final = 100
"""Errors listed in one document at most; a body of nothing but mistakes must not be answered by megabytes."""


class Kind(NamedTuple):
    """One kind of failure: its HTTP status, and a title that never changes."""

    status: int
    title: str


KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "invalid_json": Kind(400, "The body is not JSON"),
        "invalid_request": Kind(400, "A part of the request is missing, unknown or of the wrong type"),
        "invalid_cursor": Kind(400, "The cursor was not made by this server"),
        "expired_cursor": Kind(400, "The cursor is too old; start again without it"),
        "invalid_token": Kind(400, "The token is not one that this server gave"),
        "key_missing": Kind(401, "This request needs a key"),
        "key_unknown": Kind(401, "The key is not known"),
        "scope_missing": Kind(403, "The key may not do this"),
        "token_refused": Kind(401, "The token is not one of this job, or has ended"),
        "wrong_client": Kind(403, "The token or certificate is another client's"),
        "foreign_ticket": Kind(403, "The ticket is not this job's for this client and iteration"),
        "not_found": Kind(404, "There is nothing at this path"),
        "unknown_item": Kind(404, "The item is not known"),
        "unknown_user": Kind(404, "The user is not known"),
        "unknown_probe": Kind(404, "The probe is not known here, or so old that it was forgotten"),
        "unknown_job": Kind(404, "There is no job of this name"),
        "method_not_allowed": Kind(405, "The path does not take this method"),
        "stale_token": Kind(409, "The event log that the token speaks of is gone"),
        "job_conflict": Kind(409, "A job of this name is there with another definition"),
        "body_missing": Kind(409, "The body is not here; send it again"),
        "offset_mismatch": Kind(409, "The part does not begin where the last one ended"),
        "not_here": Kind(409, "This client was not admitted through this server; start again here"),
        "version_gone": Kind(410, "That version of the model is gone; start again"),
        "body_too_slow": Kind(408, "The body did not arrive in time"),
        "body_too_large": Kind(413, "The body is too large"),
        "invalid_value": Kind(422, "A value is out of range or means nothing"),
        "upload_refused": Kind(422, "The update breaks a rule and is not counted"),
        "stage_early": Kind(409, "That stage of secure aggregation has not begun"),
        "stage_over": Kind(410, "That stage of secure aggregation goes on without this client; start again"),
        "message_refused": Kind(422, "The message breaks the protocol of secure aggregation"),
        "key_taken": Kind(409, "This client has enrolled another signing key"),
        "too_many_bodies": Kind(429, "This client has brought too many different bodies in this iteration"),
        "overloaded": Kind(429, "Too much is waiting already"),
        "internal": Kind(500, "The server failed; the request id leads to the reason in its log"),
        "unavailable": Kind(503, "Something that this request needs cannot be reached now"),
    }
)


class FieldProblem(msgspec.Struct, frozen=True):
    """What is wrong with one part of a request. ``path``: as in ``events[3].item_id``; "" for the whole."""

    path: str
    message: str


class ProblemDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """The document of RFC 9457, with a stable code, the parts at fault and the request's id."""

    type: str
    title: str
    status: int
    code: str
    request_id: str
    detail: str = ""
    errors: list[FieldProblem] = []


class Problem(Exception):
    """The request fails with ``code`` (a key of KINDS). ``retry_after_s`` becomes ``Retry-After``."""

    def __init__(
        self,
        code: str,
        detail: str = "",
        errors: Sequence[FieldProblem] = (),
        *,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(code)
        self.code = code
        self.kind = KINDS[code]
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after_s = retry_after_s

    @staticmethod
    def field(code: str, path: str, message: str) -> Problem:
        """A problem with one part of the request."""
        return Problem(code, errors=(FieldProblem(path, message),))

    def below(self, prefix: str) -> list[FieldProblem]:
        """Its errors (at least one), with their paths set below ``prefix``."""
        errors = self.errors or (FieldProblem("", self.detail or self.kind.title),)
        return [FieldProblem(join(prefix, error.path), error.message) for error in errors]

    def document(self, request_id: str) -> ProblemDocument:
        """What the client reads."""
        detail = self.detail
        if len(self.errors) > MAX_ERRORS:
            detail = f"{detail} The first {MAX_ERRORS} of {len(self.errors)} errors are listed.".lstrip()
        return ProblemDocument(
            f"urn:headwater:problem:{self.code}",
            self.kind.title,
            self.kind.status,
            self.code,
            request_id,
            detail,
            list(self.errors[:MAX_ERRORS]),
        )

    def response(self, request_id: str) -> Response:
        """The whole HTTP reply."""
        headers = {}
        if self.kind.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        body = msgspec.json.encode(self.document(request_id))
        return Response(body, self.kind.status, headers, MEDIA_TYPE)


def join(prefix: str, path: str) -> str:
    """``path`` below ``prefix``: ``events[0]`` and ``item_id`` make ``events[0].item_id``."""
    return prefix + path if not prefix or not path or path.startswith("[") else f"{prefix}.{path}"
