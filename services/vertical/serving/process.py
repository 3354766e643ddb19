"""A party's process of joint inference: a host's answers, or a guest's REST."""

from __future__ import annotations

import asyncio
import csv
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

import numpy as np

from federated.psi.ids import IdRule
from federated.vertical.tables import Table
from services.listening import address_of, cancel, listen, serve_until
from services.settings import Address
from services.settings.checks import parse_address
from services.vertical.config import ConfigRefused
from services.vertical.party import MODEL, ROWS, Part, Prepared
from services.vertical.serving.app import PredictionRoutes, Terms, assemble
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.bodies import Ready
from services.vertical.serving.callers import Callers
from services.vertical.serving.guest import ServingGuest
from services.vertical.serving.host import ServingHost
from services.vertical.serving.metrics import ServingMetrics
from services.vertical.serving.opening import hosts_of, id_rule, load_part, open_audit, open_part, peers_of
from services.vertical.serving.operations import HostMetrics, operations, operations_app
from services.vertical.serving.parts import Parts, Renewal
from services.vertical.serving.quota import WINDOW_S, Quota

_log = logging.getLogger(__name__)
RENEW_S: Final = 1.0
"""How often a newer run's part is looked for."""
Listening = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Serving:
    """What both roles need."""

    prepared: Prepared
    table: Table
    rule: IdRule
    parts: Parts
    job: str
    audit: AuditLog
    stop: threading.Event


def serve_party(
    prepared: Prepared, stop: threading.Event, listening: Listening = lambda address: None
) -> None:
    """Answer until ``stop`` is set; ``listening`` is told the address.

    Raises ConfigRefused, StateDamaged, StateInUse, OSError.
    """
    config, table = prepared.config, prepared.table
    if table is None:
        raise ConfigRefused("a coordinator has no part in joint inference")
    part = _part(prepared)
    parts = Parts(load_part(config, part))
    audit = open_audit(config)
    serving = _Serving(prepared, table, id_rule(config), parts, part.job, audit, stop)
    try:
        with _renewed(serving):
            if config.party.role == "guest":
                asyncio.run(_serve_guest(serving, listening))
            else:
                _serve_host(serving, listening)
    finally:
        audit.close()


@contextmanager
def _renewed(serving: _Serving) -> Iterator[None]:
    """Newer runs' parts are taken up while the body runs."""
    prepared, ended = serving.prepared, threading.Event()
    renewal = Renewal(
        prepared.folder / MODEL, lambda: load_part(prepared.config, _part(prepared)), serving.parts
    )
    thread = threading.Thread(target=renewal.follow, args=(ended, RENEW_S), name="renew-part")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _part(prepared: Prepared) -> Part:
    path = prepared.folder / MODEL
    part = open_part(path)
    table = prepared.table
    if table is not None and part.features != table.names:
        raise ConfigRefused(
            f"{path} was trained on the columns {', '.join(part.features)}, the table has {', '.join(table.names)}"
        )
    return part


def _serve_host(serving: _Serving, listening: Listening) -> None:
    config = serving.prepared.config
    if config.party.listen is None:
        raise ConfigRefused("party.listen is left out: a host is asked, so it needs an address")
    metrics = HostMetrics(serving.audit.size)
    host = ServingHost(
        config.party.listen,
        serving.prepared.keys,
        peers_of(config, "guest"),
        serving.parts,
        _answerable(serving),
        serving.audit,
        rule=serving.rule,
        most_rows=config.serve.most_ids,
        quota=_quota(config.serve.most_rows_a_minute, serving.audit),
        metrics=metrics,
    )

    def ready() -> Ready:
        return Ready("ready", serving.job, serving.parts.newest.run, {})

    try:
        listener = None
        if config.serve.metrics is not None:
            listener = _listen("serve.metrics", _address("serve.metrics", config.serve.metrics))
        if listener is not None:
            _log.info("health and metrics are at http://%s", address_of(listener))
        with operations(listener, operations_app(metrics, ready)):
            listening(f"port {host.port}")
            host.serve(serving.stop)
    finally:
        host.close()


def _address(setting: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ConfigRefused(f"{setting}: {error}") from error


def _listen(setting: str, address: Address) -> socket.socket:
    """Raises OSError where the address is in use, ConfigRefused where it cannot be had at all."""
    try:
        return listen(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        raise ConfigRefused(f"{setting}: {address} cannot be had: {error.strerror or error}") from error


def _answerable(serving: _Serving) -> Table:
    """The rows that the host answers for."""
    table, path = serving.table, serving.prepared.folder / ROWS
    if serving.prepared.config.serve.rows == "all":
        return table
    if not path.exists():
        raise ConfigRefused(f'{path} is not there, which serve.rows = "joint" needs: train first')
    with path.open(newline="", encoding="utf-8") as file:
        joint = {row["id"] for row in csv.DictReader(file)}
    return table.take(np.array([row for row, one in enumerate(table.ids) if one in joint], np.int64))


def _quota(most: int, audit: AuditLog) -> Quota:
    """With what was answered within the last minute: a restart gives nothing back."""
    quota, now = Quota(most), datetime.now(UTC)
    recent = [entry for entry in audit.recent(WINDOW_S) if entry["outcome"] == "answered"]
    for entry in reversed(recent):
        age_s = (now - datetime.fromisoformat(entry["at"])).total_seconds()
        quota.spent(entry["who"], int(entry["rows"]), age_s)
    return quota


async def _serve_guest(serving: _Serving, listening: Listening) -> None:
    config = serving.prepared.config
    hosts = hosts_of(config)
    address = _address("serve.listen", config.serve.listen)
    if not address.loopback and not config.serve.api_keys:
        raise ConfigRefused(
            "serve.listen is open to others and serve.api_keys is empty; `headwater config new-key read` makes one"
        )
    listener = _listen("serve.listen", address)
    metrics, callers = ServingMetrics(), Callers(config.serve.api_keys)
    guest = ServingGuest(
        serving.prepared.keys,
        hosts,
        serving.parts,
        serving.table,
        serving.rule,
        longest_s=config.serve.deadline,
        observe=metrics.host,
    )
    watching = asyncio.create_task(guest.watch(), name="watch-hosts")
    watching.add_done_callback(partial(_end, serving.stop))
    try:
        terms = Terms(serving.job, serving.rule, config.serve.deadline, config.serve.most_ids)
        routes = PredictionRoutes(guest, serving.audit, metrics, callers, terms)
        listening(f"http://{address_of(listener)}")
        await serve_until(serving.stop, listener, assemble(routes, callers, metrics).asgi)
    finally:
        await cancel(watching)
        guest.close()
        listener.close()


def _end(stop: threading.Event, watching: asyncio.Task[None]) -> None:
    """Hosts are watched for as long as the process answers: without that it ends, and says why."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _log.error("hosts are not watched any more", exc_info=error)
        stop.set()
