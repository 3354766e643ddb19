"""Who may ask a federation server for what.

Operators (below ``/v1/fl/jobs`` and ``/v1/fl/servers``): keys with scopes, as at the API. Devices (below
``/v1/fl/jobs/JOB/clients/CLIENT``): with ``tokens`` a token of that client, with client certificates one of that name.
An edge speaks for clients by its own token, and hands on theirs where tokens are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.types import Scope

from services.api.auth import Keys, presented
from services.api.problems import Problem
from services.federation.enrolment import Enrolled, TokenRefused, enrolled
from services.federation.hosted import HostedJob
from services.federation.listening import PEER

HANDED_ON: Final = "x-client-token"
_JOBS: Final = "/v1/fl/jobs/"


def bearer(request: Request) -> str:
    """The token that a request carries, empty for none."""
    return next(presented(request.scope["headers"]), b"").decode("latin-1")


class Access:
    """The rules of one server."""

    def __init__(self, keys: Keys, tokens: bool, certificates: bool, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._tokens = tokens
        self._certificates = certificates
        self._clock = clock

    def admit(self, scope: Scope) -> None:
        """The gate's rule, for operators; devices are looked at where their job is known. Raises Problem."""
        path, method = scope["path"], scope["method"]
        if not path.startswith("/v1/"):
            return
        below = path.removeprefix(_JOBS).split("/")[1:] if path.startswith(_JOBS) else []
        if below and (below[0] in ("clients", "sums") or (below[0] == "definition" and method == "GET")):
            return
        self._keys.check(scope["headers"], "read" if method in ("GET", "HEAD") else "admin")

    def client(self, request: Request, job: HostedJob, client: str) -> None:
        """Raises Problem unless the request may speak for ``client``."""
        found = self._token(request, job)
        if found is not None and found.role == "edge":
            if self._tokens and client != found.id:  # an edge fetches models under its own name
                own = self._read(job, request.headers.get(HANDED_ON, ""))
                self._require(own.role == "client" and own.id == client)
            return
        if self._certificates:
            self._require(request.scope.get(PEER) == client)
        if self._tokens:
            if found is None:
                raise Problem("key_missing", "Send the client's token as Authorization: Bearer TOKEN.")
            self._require(found.id == client)

    def reader(self, request: Request, job: HostedJob) -> None:
        """Who may read a job's file: whoever may take part in it, and operators. Raises Problem."""
        if not self._tokens:
            return
        try:
            self._read(job, bearer(request))
        except Problem:
            self._keys.check(request.scope["headers"], "read")
            if self._keys.open:
                raise

    def edge(self, request: Request, job: HostedJob) -> str:
        """The edge that asks. Raises Problem unless it is one; without tokens none can be told from a stranger."""
        found = self._token(request, job)
        if found is None:
            raise Problem("key_missing", "An edge sends its token as Authorization: Bearer TOKEN.")
        self._require(found.role == "edge")
        return found.id

    def _token(self, request: Request, job: HostedJob) -> Enrolled | None:
        token = bearer(request)
        return self._read(job, token) if token else None

    def _read(self, job: HostedJob, token: str) -> Enrolled:
        try:
            return enrolled(job.name, job.key, token, self._clock())
        except TokenRefused as error:
            raise Problem("token_refused", f"{error}.") from error

    @staticmethod
    def _require(holds: bool) -> None:
        if not holds:
            raise Problem("wrong_client")


class RegionAccess:
    """An edge's rule: its parent decides who is admitted, and a ticket that the edge has seen is needed for the rest.
    With client certificates, one of that name, too."""

    def __init__(self, certificates: bool) -> None:
        self._certificates = certificates

    def admit(self, scope: Scope) -> None:
        """The gate's rule: there are routes for devices alone."""

    def client(self, request: Request, job: HostedJob, client: str) -> None:
        """Raises Problem unless the request may speak for ``client``."""
        if self._certificates and request.scope.get(PEER) != client:
            raise Problem("wrong_client")
