"""What a party needs before it answers, whichever way it does: its part of the model, whom it asks, its log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from federated.psi.ids import IdRule
from services.vertical.config import ConfigRefused, PartyConfig
from services.vertical.jobs import find_kind
from services.vertical.network import Peer
from services.vertical.party import Part, read_part
from services.vertical.serving.audit import AuditLog
from services.vertical.serving.parts import Loaded

AUDIT: Final = "audit.jsonl"


def open_part(path: Path) -> Part:
    """The party's part of the model. Raises ConfigRefused, StateDamaged."""
    if not path.exists():
        raise ConfigRefused(
            f"{path} is not there: train first (`headwater fl vertical party`), with the same [job]"
        )
    return read_part(path)


def load_part(config: PartyConfig, part: Part) -> Loaded:
    """``part`` as it answers. Raises ConfigRefused, PeerFault."""
    kind = find_kind(config.job.what)
    if kind.load is None:
        raise ConfigRefused(f"{kind.name} leaves no model that answers")
    return Loaded(part.run, kind.load(part.model))


def peers_of(config: PartyConfig, role: str) -> dict[str, Peer]:
    """The peers with this role, by name."""
    return {
        name: Peer(bytes.fromhex(peer.key), peer.address)
        for name, peer in config.peers.items()
        if peer.role == role
    }


def hosts_of(config: PartyConfig) -> dict[str, Peer]:
    """The hosts that a guest asks. Raises ConfigRefused for one without an address."""
    hosts = peers_of(config, "host")
    if missing := [name for name, peer in hosts.items() if peer.address is None]:
        raise ConfigRefused(f"peers.{missing[0]}.address is left out: the guest asks the hosts")
    return hosts


def id_rule(config: PartyConfig) -> IdRule:
    """How ids are normalised."""
    return IdRule(config.job.psi.get("case", "keep"))


def open_audit(config: PartyConfig) -> AuditLog:
    """The party's log of what was asked. Raises ConfigRefused."""
    path = config.party.state / AUDIT
    try:
        return AuditLog(path, config.serve.audit_bytes, keep_s=config.serve.audit_keep)
    except OSError as error:
        raise ConfigRefused(
            f"the audit log {path} cannot be used, so nothing is answered: {error}"
        ) from error
