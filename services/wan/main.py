"""The process of emulated links: ``[[wan.links]]`` of the settings, and calls that change them."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from typing import Final

from services.backends import open_coordination, open_security
from services.coordination.contract import Coordination
from services.coordination.membership import Member, Registration
from services.rpc.server import RpcServer
from services.settings.checks import Address, parse_address
from services.settings.model import Settings, WanSettings
from services.wan.conditions import parse_conditions
from services.wan.control import SERVICE, Controls
from services.wan.emulator import Emulator
from services.wan.types import LinkPlan
from services.workers import now_ms

POLL_S: Final = 0.1
_log = logging.getLogger(__name__)


def run(settings: Settings, name: str, stop: threading.Event) -> None:
    """Run the links of the settings as ``name`` until ``stop`` is set.

    Raises AddressUnusable, KeysError, CoordinationError, and what went wrong in a link's loop.
    """
    with ExitStack() as stack:
        coordination = open_coordination(settings)
        stack.callback(coordination.close)
        emulator = stack.enter_context(Emulator(link_plans(settings.wan)))
        rpc = RpcServer(settings.wan.control, open_security(settings))
        stack.callback(rpc.close)
        member = _member(settings, name, coordination, rpc.port)
        registration = stack.enter_context(
            Registration(coordination, member, settings.coordination.lease_ttl)
        )
        for link in emulator.status():
            _log.info("link %s: %s to %s", link.name, link.address, link.target)
        controls = Controls(emulator, rpc)
        registration.update(ready=True)
        while not (stop.is_set() or registration.replaced.is_set() or emulator.failure is not None):
            controls.turn(POLL_S)


def link_plans(wan: WanSettings) -> tuple[LinkPlan, ...]:
    """The links that the settings ask for. Raises ValueError for conditions that cannot be."""
    return tuple(
        LinkPlan(
            link.name,
            link.target,
            parse_conditions(link.conditions),
            parse_conditions(link.conditions if link.back is None else link.back),
            link.listen,
        )
        for link in wan.links
    )


def _member(settings: Settings, name: str, coordination: Coordination, port: int) -> Member:
    host = parse_address(settings.wan.control).host
    return Member(
        name=name,
        service=SERVICE,
        address=settings.wan.advertise or str(Address(host, port)),
        pid=os.getpid(),
        incarnation=coordination.increment(f"incarnations/{SERVICE}"),
        started_at_ms=now_ms(),
    )
