"""What may keep a party from taking part, found before it does: each with the next step.

Nothing of the job is sent, and nothing is left on disk. A peer that has an address is called to see whether it answers
with the key that the file has for it; its session does not notice.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from federated.psi.ids import IdRule, IdsRefused, normalise
from federated.psi.members import BUCKETS
from federated.vertical.tables import Table, TableRefused
from services.psi.budget import FileBudget
from services.psi.files import read_ids
from services.rpc.calls import Outgoing
from services.rpc.client import RpcClient
from services.rpc.errors import KeysError, RpcError
from services.rpc.security import KeyPair, Security
from services.settings.checks import parse_address
from services.vertical.columns import open_tables
from services.vertical.config import ConfigRefused, PartyConfig
from services.vertical.jobs import JobRefused
from services.vertical.keys import load_party_keys
from services.vertical.party import Prepared, prepare
from services.vertical.store import StateDamaged

Result = Literal["PASS", "LATER", "FAIL"]
ANSWER_S: Final = 3.0
"""How long a peer may take to answer."""
_AT_ONCE: Final = 8
_PING: Final = "check"


@dataclass(frozen=True, slots=True)
class Check:
    """LATER: what is not so yet, but may be when the party begins. ``step``: what to do about it."""

    name: str
    result: Result
    detail: str = ""
    step: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """``prepared`` is None where the party could not begin; ``table`` where there is none in memory."""

    checks: tuple[Check, ...]
    prepared: Prepared | None
    table: Table | None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(one.result != "FAIL" for one in self.checks)


def check_party(config: PartyConfig, answer_s: float = ANSWER_S) -> Checked:
    """All checks of the party whose file is ``config``."""
    keys, told = _keys(config)
    checks = [told]
    prepared: Prepared | None = None
    try:
        prepared = prepare(config)
    except TableRefused as error:
        checks.append(Check("table", "FAIL", str(error), "mend the table, or [data] path, id and label"))
    except (JobRefused, ConfigRefused) as error:
        checks.append(
            Check("job", "FAIL", str(error), "mend [job]; `headwater fl vertical kinds` lists options")
        )
    except KeysError:
        pass  # Told above.
    else:
        checks.append(Check("job", "PASS", config.job.what))
    table = prepared.table if prepared is not None else None
    if config.data is not None and not any(one.name == "table" for one in checks):
        table, told = _table(config, table)
        checks += [told, *([] if told.result == "FAIL" else [_ids(config, table)])]
    checks += _folders(config)
    running = prepared is not None and _held(prepared.folder)
    if prepared is not None:
        checks.append(_state(prepared, running))
    if config.party.listen is not None:
        checks.append(_listen(config.party.listen, running))
    checks += _peers(config, keys, answer_s)
    return Checked(tuple(checks), prepared, table)


def _keys(config: PartyConfig) -> tuple[KeyPair | None, Check]:
    try:
        keys = load_party_keys(config.party.keys)
    except KeysError as error:
        step = (
            f"mend that; where there is no pair, `headwater fl vertical keys {config.party.keys}` makes one"
        )
        return None, Check("keys", "FAIL", str(error), step)
    public = keys.public.hex()
    if same := [name for name, peer in config.peers.items() if peer.key == public]:
        detail = f"peers.{same[0]}.key is this party's own key"
        return keys, Check("keys", "FAIL", detail, f"ask {same[0]} for its party.public")
    return keys, Check("keys", "PASS", f"public key {public}")


def _table(config: PartyConfig, table: Table | None) -> tuple[Table | None, Check]:
    data = config.data
    assert data is not None
    if table is None and (config.psi.disk is None or config.job.what != "psi"):
        try:
            table = open_tables(data).learned
        except (TableRefused, ConfigRefused) as error:
            step = "mend the table, or [data] path, id and label"
            return None, Check("table", "FAIL", str(error), step)
    detail = "read as it is needed" if table is None else f"{len(table)} rows, {len(table.names)} columns"
    return table, Check("table", "PASS", detail)


def _ids(config: PartyConfig, table: Table | None) -> Check:
    """Whether the ids are ones by the rule that the parties agreed on."""
    data, job = config.data, config.job
    assert data is not None
    fields = job.options if job.what == "psi" else job.psi
    rule = IdRule("fold" if fields.get("case") == "fold" else "keep")
    step = f"mend the column {data.id!r}; `headwater fl psi check {data.path}` names more"
    try:
        if table is None:
            # A set beyond memory: repeats are found, and left out, when the party takes part.
            count = sum(bool(rule.apply(text)) for text in read_ids(data.path, data.id))
            return Check(
                "ids", "PASS" if count else "FAIL", f"{count} rows with an id", "" if count else step
            )
        ids = normalise(table.ids, rule)
    except (IdsRefused, TableRefused, ValueError) as error:
        return Check("ids", "FAIL", str(error), step)
    if not len(ids):
        return Check("ids", "FAIL", "no row has an id", step)
    aside = f"; left out: {ids.complaint}" if ids.complaint else ""
    return Check("ids", "PASS", f"{len(ids)} different ids{aside}")


def _folders(config: PartyConfig) -> Iterator[Check]:
    """Of ``[psi]``."""
    psi = config.psi
    if psi.keep is not None:
        yield _writable("psi.keep", psi.keep)
    if psi.disk is not None:
        yield _writable("psi.disk", psi.disk) if config.data is None else _room(config, psi.disk)
    if psi.keep is not None and psi.most_ids_of_a_peer is not None:
        yield _budget(config, psi.keep, psi.most_ids_of_a_peer)


def _budget(config: PartyConfig, keep: Path, most: int) -> Check:
    name = "psi.most_ids_of_a_peer"
    keys = {peer: one.key for peer, one in config.peers.items() if one.role != "coordinator"}
    try:
        left = FileBudget(keep, most, keys).left()
    except StateDamaged as error:
        return Check(name, "FAIL", str(error), "put a copy of the file there")
    detail = ", ".join(f"{peer} may ask {count} more ids" for peer, count in left.items())
    if spent := [peer for peer, count in left.items() if not count]:
        return Check(name, "FAIL", detail, f"raise it, where {' and '.join(spent)} may ask more")
    return Check(name, "PASS", detail)


def _existing(path: Path) -> Path:
    """The nearest folder above that is there, or ``path`` itself."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _writable(name: str, path: Path) -> Check:
    there = _existing(path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "FAIL", f"{there} is no folder that can be written to", f"name another in {name}")
    if path.is_dir() and path.stat().st_mode & 0o077:
        return Check(
            name, "FAIL", f"{path} is readable by others: it is as secret as the ids", f"chmod 700 {path}"
        )
    return Check(name, "PASS", str(path))


def _room(config: PartyConfig, path: Path) -> Check:
    found = _writable("psi.disk", path)
    assert config.data is not None
    if found.result == "FAIL" or not config.data.path.exists():
        return found
    # Ids are no longer than their file; of the tags of both sides little more is known before it is read.
    free = shutil.disk_usage(_existing(path)).free
    needed = 4 * config.data.path.stat().st_size + BUCKETS * 4_096
    if free < needed:
        detail = f"{free} bytes are free at {path}, about {needed} are needed"
        return Check("psi.disk", "FAIL", detail, "make room, or name another folder")
    return found


def _held(folder: Path) -> bool:
    """Whether a process of this party runs the job now."""
    lock = folder / "lock"
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _state(prepared: Prepared, running: bool) -> Check:
    folder = prepared.folder
    there = _existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(
            "state", "FAIL", f"{there} is no folder that can be written to", "name another in party.state"
        )
    if running:
        return Check("state", "LATER", f"{folder} is held: this party runs now", "start it once, not twice")
    if (folder / "result").exists():
        detail = f"this job was done before, its result is in {folder}"
        return Check("state", "LATER", detail, "`headwater fl vertical party --fresh` begins it anew")
    kept = sorted(folder.glob("checkpoint-*")) if folder.exists() else []
    return Check("state", "PASS", f"{folder}" + (f", {len(kept)} checkpoints to go on from" if kept else ""))


def _listen(text: str, running: bool) -> Check:
    try:
        address = parse_address(text)
        host = "" if address.host == "*" else address.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, address.port))
    except (OSError, ValueError) as error:
        if running:
            return Check("party.listen", "LATER", f"{text} is this party's, which runs now")
        told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        step = "stop the process that has the port, or name another address of this machine"
        return Check("party.listen", "FAIL", f"{text}: {told}", step)
    return Check("party.listen", "PASS", text)


def _peers(config: PartyConfig, keys: KeyPair | None, answer_s: float) -> list[Check]:
    """In the order of the file."""

    def reach(name: str) -> Check:
        peer = config.peers[name]
        if peer.address is None:
            return Check(f"peers.{name}", "LATER", "has no address: it calls this party")
        if keys is None:
            return Check(
                f"peers.{name}", "LATER", "is not called without keys", "make this party's keys first"
            )
        found = _reach(peer.address, bytes.fromhex(peer.key), keys, name, answer_s)
        return Check(f"peers.{name}", *found)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(reach, config.peers))


def _reach(address: str, key: bytes, keys: KeyPair, name: str, answer_s: float) -> tuple[Result, str, str]:
    try:
        found = parse_address(address)
        socket.create_connection((found.host, found.port), answer_s).close()
    except ValueError as error:
        return "FAIL", f"{address} {error}", f"mend peers.{name}.address"
    except ConnectionRefusedError:
        step = f"start {name} (`headwater fl vertical party`); it is waited for"
        return "LATER", f"nothing listens at {address} yet", step
    except socket.gaierror as error:
        return (
            "FAIL",
            f"{address}: {error.strerror}",
            f"mend peers.{name}.address: no such host is known here",
        )
    except OSError as error:
        step = f"ask whether {name} listens there, and whether a firewall is between"
        return "FAIL", f"{address}: {error.strerror or 'no answer'}", step
    why = _called(address, key, keys, answer_s)
    if why is None:
        return "PASS", f"{address} answers with the key that is expected", ""
    step = (
        f"compare peers.{name}.key with {name}'s party.public, and what {name} has for this party with this party's; "
        "and that it is a party that listens there"
    )
    aside = f": {why}" if why else ""
    return "FAIL", f"something listens at {address}, but does not answer this party{aside}", step


def _called(address: str, key: bytes, keys: KeyPair, answer_s: float) -> str | None:
    """None where a party answers that has ``key`` and lets us in; else why not, as far as it is told."""
    client = RpcClient(Security(key, keys))
    try:
        # A method that no party has: it answers so, which is enough.
        answers = client.exchange({address: Outgoing(_PING, b"", ())}, answer_s)
        return None if address in answers else client.refusal(address)
    except RpcError as error:
        return str(error)
    finally:
        client.close()
