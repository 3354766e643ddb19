"""The edge process: learns its job from its parent, then serves the devices of its region."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final
from urllib.parse import quote

import uvloop
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from federated.job import load_job
from federated.rounds import Store
from services.api.problems import Problem
from services.federation.access import RegionAccess
from services.federation.app import DeviceRoutes, HealthRoutes, assemble
from services.federation.assembly import assemble_job
from services.federation.edge import Edge, EdgeRefused, OneJob, require_edge
from services.federation.listening import serve_app
from services.federation.metrics import FederationMetrics
from services.federation.parent import Parent, ParentLost
from services.settings.model import FederationSettings

_RETRY_S: Final = 0.5

log = logging.getLogger(__name__)


def run_edge(
    federation: FederationSettings,
    store: Store,
    listener: socket.socket,
    address: str,
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    """Serve until ``stop`` is set; ``ready`` is called once that begins. Raises JobRefused and EdgeRefused for a job
    that an edge cannot serve, or a parent that refuses it, and OSError for files that cannot be read."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(federation, store, listener, address, stop, ready))


async def _serve(
    federation: FederationSettings,
    store: Store,
    listener: socket.socket,
    address: str,
    stop: threading.Event,
    ready: Callable[[], None],
) -> None:
    token = "" if federation.token_file is None else federation.token_file.read_text(encoding="ascii").strip()
    async with AsyncExitStack() as stack:
        parent = Parent(
            federation.parent,
            edge_name(token),
            token,
            ca=federation.parent_ca,
            certificate=federation.certificate if federation.parent.startswith("https") else None,
            key=federation.certificate_key,
        )
        stack.push_async_callback(parent.close)
        definition = await _definition(parent, federation.job, stop)
        if definition is None:
            return
        # Tickets and tokens are the parent's: this key signs nothing.
        job = assemble_job(load_job(tomllib.loads(definition)), secrets.token_bytes(32))
        require_edge(job)
        pool = stack.enter_context(ThreadPoolExecutor(federation.threads, "fl-edge"))
        metrics, access = FederationMetrics(), RegionAccess(federation.client_ca is not None)
        edge = Edge(job, parent, store, pool, metrics, time.time, federation.edge_wait)
        found = edge.recover()
        routes = DeviceRoutes(
            OneJob(edge).host, access, time.time, federation.max_body, federation.body_timeout
        ).routes()
        routes += HealthRoutes(_nothing_wrong, metrics).routes()
        routes.append(Route("/v1/fl/jobs/{job}/definition", _told(job.name, definition), methods=["GET"]))
        handing = asyncio.create_task(edge.run(), name="hand-on")
        handing.add_done_callback(_failed(stop))
        log.info(
            "edge of %s for job %s at %s; %d updates from before", federation.parent, job.name, address, found
        )
        ready()
        try:
            await serve_app(federation, assemble(routes, access, metrics), listener, stop)
        finally:
            handing.cancel()
            await asyncio.wait([handing])


def edge_name(token: str) -> str:
    """The name in an edge's token, which only its parent can check."""
    parts = token.split(".")
    try:
        return base64.urlsafe_b64decode(parts[2] + "=" * (-len(parts[2]) % 4)).decode()
    except (IndexError, ValueError) as error:
        raise EdgeRefused("an edge needs its token: `headwater fl token JOB NAME --edge`") from error


async def _definition(parent: Parent, job: str, stop: threading.Event) -> str | None:
    """The job's file; None when told to stop before the parent answered."""
    while not stop.is_set():
        try:
            return (await parent.ask("GET", f"/v1/fl/jobs/{quote(job, safe='')}/definition", b"")).decode()
        except ParentLost as error:
            log.warning("the parent does not answer: %s", error)
            await asyncio.sleep(_RETRY_S)
        except Problem as problem:
            raise EdgeRefused(f"the parent refuses: {problem.kind.title}. {problem.detail}") from problem
    return None


def _told(job: str, definition: str) -> Callable[[Request], object]:
    async def told(request: Request) -> Response:
        """The job's file (TOML)."""
        if request.path_params["job"] != job:
            raise Problem("unknown_job")
        return PlainTextResponse(definition, media_type="application/toml")

    return told


def _failed(stop: threading.Event) -> Callable[[asyncio.Task[None]], None]:
    """An edge that can hand nothing on must not go on taking updates."""

    def failed(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("handing on failed", exc_info=task.exception())
            stop.set()

    return failed


async def _nothing_wrong() -> Mapping[str, str]:
    return {}
