"""The federation process: a server, a scheduler or an edge, by its role, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Final

import uvloop
from starlette.types import ASGIApp

from services.api.auth import Keys
from services.backends import open_coordination
from services.coordination.membership import Member as Registered
from services.coordination.membership import Registration
from services.federation.access import Access
from services.federation.app import DeviceRoutes, HealthRoutes, OperatorRoutes, assemble
from services.federation.certificates import ensure_certificate
from services.federation.edge_main import run_edge
from services.federation.into import ServedStack
from services.federation.listening import serve_app
from services.federation.metrics import FederationMetrics
from services.federation.node import Node
from services.federation.registry import Member
from services.federation.secure_routes import SecureRoutes
from services.federation.stores import open_round_store
from services.listening import address_of, listen
from services.settings import Settings, SettingsError, parse_address
from services.settings.checks import check
from services.settings.model import FederationSettings

SERVICE: Final = "federation"

log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Serve as ``name`` until ``stop`` is set. Raises SettingsError (an address that others reach, without TLS and
    tokens), StoreUnavailable, CoordinationError, and OSError where the address or its certificate cannot be had."""
    if problems := tuple(check(settings)):
        raise SettingsError(tuple(problem.at("settings") for problem in problems))
    federation = settings.federation
    ensure_certificate(federation)
    with ExitStack() as stack:
        # Taken first, so that a port in use shows at once; connections wait until all is open.
        listener = listen(parse_address(federation.listen))
        stack.callback(listener.close)
        scheme = "https" if federation.certificate else "http"
        address = federation.advertise or f"{scheme}://{address_of(listener)}"
        registration = _register(settings, name, address, stack)
        store = open_round_store(settings)
        stack.callback(store.close)
        if federation.role == "edge":
            run_edge(federation, store, listener, address, stop, lambda: registration.update(ready=True))
            return
        metrics = FederationMetrics()
        access = _access(federation)
        member = Member(
            name, federation.role, address, os.getpid(), time.time(), time.time(), federation.heartbeat
        )
        node = Node(
            store,
            member,
            metrics,
            threads=federation.threads,
            most_waiting=federation.max_waiting,
            devices=federation.role == "server",
            failed=stop.set,
            into=partial(ServedStack, settings),
        )
        stack.callback(node.close)
        node.begin()
        app = _app(federation, node, access, metrics)
        registration.update(ready=True)
        log.info("%s at %s", federation.role, address)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_app(federation, app, listener, stop))


def _app(federation: FederationSettings, node: Node, access: Access, metrics: FederationMetrics) -> ASGIApp:
    serves = federation.role == "server"
    routes = OperatorRoutes(
        node, access, time.time, federation.max_body, federation.body_timeout, sums=serves
    ).routes()
    routes += HealthRoutes(node.faults, metrics).routes()
    if serves:
        routes += DeviceRoutes(
            node.host, access, time.time, federation.max_body, federation.body_timeout
        ).routes()
        routes += SecureRoutes(node.host, access, federation.body_timeout).routes()
    return assemble(routes, access, metrics)


def _access(federation: FederationSettings) -> Access:
    keys = Keys(key.get_secret_value() for key in federation.keys)
    return Access(keys, federation.tokens, federation.client_ca is not None, time.time)


def _register(settings: Settings, name: str, address: str, stack: ExitStack) -> Registration:
    """Be known to ``headwater service check`` and ``headwater status``, as every process is."""
    coordination = open_coordination(settings)
    stack.callback(coordination.close)
    incarnation = coordination.increment(f"incarnations/{SERVICE}")
    found = Registered(name, SERVICE, address, os.getpid(), incarnation, round(time.time() * 1_000))
    registration = Registration(coordination, found, settings.coordination.lease_ttl)
    stack.callback(registration.close)
    return registration
