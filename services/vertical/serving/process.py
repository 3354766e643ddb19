"""A party's process of joint inference: a host's answers, or a guest's REST."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from federated.psi.ids import IdRule
from federated.vertical.tables import Table
from services.api.auth import Keys
from services.listening import address_of, listen, serve_until
from services.settings.checks import parse_address
from services.vertical.config import ConfigRefused, PartyConfig
from services.vertical.jobs import find_kind
from services.vertical.network import Peer
from services.vertical.party import MODEL, Part, Prepared, read_part
from services.vertical.serving.app import Metrics, Predictions, predictions_app
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.guest import ServingGuest
from services.vertical.serving.host import Rate, ServingHost

AUDIT: Final = "audit.jsonl"


def serve_party(
    prepared: Prepared, stop: threading.Event, listening: Callable[[str], None] = lambda address: None
) -> None:
    """Answer until ``stop`` is set; ``listening`` is told the address. Raises ConfigRefused, StateDamaged, OSError."""
    config = prepared.config
    part, table = _part(prepared), prepared.table
    if table is None:
        raise ConfigRefused("a coordinator has no part in joint inference")
    audit = AuditLog(config.party.state / AUDIT, config.serve.audit_bytes)
    try:
        rule = IdRule(config.job.psi.get("case", "keep"))
        if config.party.role == "guest":
            asyncio.run(_serve_guest(prepared, part, table, rule, audit, stop, listening))
        else:
            _serve_host(prepared, part, table, rule, audit, stop, listening)
    finally:
        audit.close()


def _part(prepared: Prepared) -> Part:
    path: Path = prepared.folder / MODEL
    if not path.exists():
        raise ConfigRefused(
            f"{path} is not there: train first (`headwater fl vertical party`), with the same [job]"
        )
    part = read_part(path)
    table = prepared.table
    if table is not None and part.features != table.names:
        raise ConfigRefused(
            f"{path} was trained on the columns {', '.join(part.features)}, the table has {', '.join(table.names)}"
        )
    return part


def _load(config: PartyConfig, part: Part) -> Any:
    kind = find_kind(config.job.what)
    if kind.load is None:
        raise ConfigRefused(f"{kind.name} leaves no model that answers")
    return kind.load(part.model)


def _peers(config: PartyConfig, role: str) -> dict[str, Peer]:
    return {
        name: Peer(bytes.fromhex(peer.key), peer.address)
        for name, peer in config.peers.items()
        if peer.role == role
    }


def _serve_host(
    prepared: Prepared,
    part: Part,
    table: Table,
    rule: IdRule,
    audit: AuditLog,
    stop: threading.Event,
    listening: Callable[[str], None],
) -> None:
    config = prepared.config
    if config.party.listen is None:
        raise ConfigRefused("party.listen is left out: a host is asked, so it needs an address")
    host = ServingHost(
        config.party.listen,
        prepared.keys,
        _peers(config, "guest"),
        _load(config, part),
        part.run,
        table,
        audit,
        rule=rule,
        most_rows=config.serve.most_ids,
        rate=Rate(config.serve.most_rows_a_minute),
    )
    try:
        listening(f"port {host.port}")
        host.serve(stop)
    finally:
        host.close()


async def _serve_guest(
    prepared: Prepared,
    part: Part,
    table: Table,
    rule: IdRule,
    audit: AuditLog,
    stop: threading.Event,
    listening: Callable[[str], None],
) -> None:
    config = prepared.config
    hosts = _peers(config, "host")
    if missing := [name for name, peer in hosts.items() if peer.address is None]:
        raise ConfigRefused(f"peers.{missing[0]}.address is left out: the guest asks the hosts")
    address = parse_address(config.serve.listen)
    if not address.loopback and not config.serve.api_keys:
        raise ConfigRefused(
            "serve.listen is open to others and serve.api_keys is empty; `headwater config new-key read` makes one"
        )
    listener = listen(address)
    guest = ServingGuest(prepared.keys, hosts, _load(config, part), part.run, table, rule)
    try:
        metrics = Metrics()
        routes = Predictions(
            guest,
            audit,
            metrics,
            job=part.job,
            run=part.run,
            deadline_s=config.serve.deadline,
            most_ids=config.serve.most_ids,
        )
        listening(f"http://{address_of(listener)}")
        await serve_until(stop, listener, predictions_app(routes, Keys(config.serve.api_keys), metrics))
    finally:
        guest.close()
        listener.close()
