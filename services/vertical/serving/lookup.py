"""Reading a party's audit log: all of it, or the lines in which somebody was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from federated.psi.ids import IdRule
from services.vertical.config import ConfigRefused, PartyConfig
from services.vertical.keys import load_party_keys
from services.vertical.serving.audit import entries, marks_in, marks_of, read_key
from services.vertical.serving.opening import AUDIT
from services.vertical.serving.tokens import Naming, value_of


def lines(config: PartyConfig, ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The lines of the log, oldest first; where ``ids`` are given, those with one of them, whose ids are left out.

    Needs no stop of the process that writes. Raises ConfigRefused, IdRefused, KeysError, OSError.
    """
    path = config.party.state / AUDIT
    if not path.exists():
        raise ConfigRefused(f"{path} is not there: nothing was asked of this party yet")
    wanted = _marks(config, ids)
    for entry in entries(path):
        if not ids:
            yield entry
        elif wanted & marks_in(entry):
            yield {name: value for name, value in entry.items() if name != "ids"}


def _marks(config: PartyConfig, ids: Sequence[str]) -> frozenset[str]:
    """The marks that ``ids`` have in this party's log."""
    rule = IdRule(config.job.psi.get("case", "keep"))
    values = [value_of(one, rule) for one in ids]
    key = read_key(config.party.state / "audit.key")
    if config.party.role == "guest":
        return frozenset(marks_of(key, [value]) for value in values)
    keys = load_party_keys(config.party.keys)
    namings = [
        Naming(keys, bytes.fromhex(peer.key), rule) for peer in config.peers.values() if peer.role == "guest"
    ]
    return frozenset(marks_of(key, [naming.token(value)]) for naming in namings for value in values)
