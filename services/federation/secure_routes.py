"""The routes of secure aggregation, for devices: what a stage needs, the answers to it, and signing keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from federated.secagg.stages import Stage
from services.api.problems import Problem
from services.federation.app import CLIENT, ClientAccess
from services.federation.host import Host
from services.federation.requests import client_of, read_within, ticket_in_header
from services.federation.secure import SecureRounds

MESSAGE: Final = "application/octet-stream"
KEY_BYTES: Final = 32
_STAGES: Final[Mapping[str, Stage]] = {
    stage.name.lower(): stage for stage in Stage if stage < Stage.REVEAL and stage is not Stage.MASKED
}
_FETCHED: Final[Mapping[str, Stage]] = {
    stage.name.lower(): stage for stage in Stage if Stage.ADVERTISE < stage < Stage.REVEAL
}


class SecureRoutes:
    """``host`` finds who serves a job. A body takes at most ``body_s`` seconds, and has as many bytes as the job's plan
    says."""

    def __init__(self, host: Callable[[str], Awaitable[Host]], access: ClientAccess, body_s: float) -> None:
        self._host, self._access, self._body_s = host, access, body_s

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(f"{CLIENT}/secure/{{iteration:int}}/{{stage}}", self.answer, methods=["POST"]),
            Route(f"{CLIENT}/secure/{{iteration:int}}/{{stage}}", self.message, methods=["GET"]),
            Route(f"{CLIENT}/certificate", self.certify, methods=["POST"]),
        ]

    async def answer(self, request: Request) -> Response:
        """A client's answer to a stage; nothing is replied."""
        host, rounds, client = await self._asked(request)
        stage = self._stage(request, _STAGES)
        body = await read_within(request, rounds.most_bytes(stage), self._body_s)
        await host.run(partial(rounds.take, client, request.path_params["iteration"], stage, body))
        return Response(status_code=204)

    async def message(self, request: Request) -> Response:
        """What a client needs before it answers a stage; 204 while the others are waited for."""
        host, rounds, client = await self._asked(request)
        stage = self._stage(request, _FETCHED)
        found = await host.run(partial(rounds.message, client, request.path_params["iteration"], stage))
        return Response(status_code=204) if found is None else Response(found, media_type=MESSAGE)

    async def certify(self, request: Request) -> Response:
        """A client's signing key (32 bytes) in, the registrar's signature and public key (64 and 32 bytes) out. The
        first key that a client enrols is its key for good."""
        host, client = await self._host(request.path_params["job"]), client_of(request)
        self._access.client(request, host.job, client)
        public = await read_within(request, KEY_BYTES, self._body_s)
        if len(public) != KEY_BYTES:
            raise Problem.field("invalid_value", "body", f"is no key of {KEY_BYTES} bytes")
        return Response(await host.run(partial(host.certify, client, public)), media_type=MESSAGE)

    async def _asked(self, request: Request) -> tuple[Host, SecureRounds, str]:
        host, client = await self._host(request.path_params["job"]), client_of(request)
        self._access.client(request, host.job, client)
        if host.secure is None:
            raise Problem("not_found", "This job has no secure aggregation.")
        host.require_ticket(client, request.path_params["iteration"], ticket_in_header(request))
        return host, host.secure, client

    @staticmethod
    def _stage(request: Request, known: Mapping[str, Stage]) -> Stage:
        try:
            return known[request.path_params["stage"]]
        except KeyError:
            raise Problem("not_found", f"The stages are {', '.join(known)}.") from None
