"""A party's process: its file, its table, its role in the job, and what it leaves behind.

Below the state's folder, in a folder of the job's fingerprint: checkpoints and result (``store``), ``part.model`` (this
party's part of the model), ``rows.csv`` (ids of the joint rows, in the joint order), ``report.json``, and ``KIND.json``
where the kind has findings.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from federated.vertical.evaluation import baselines
from federated.vertical.kinds import Kind, Setup
from federated.vertical.parties import Alone, Make, PartResult, Progress, Workers
from federated.vertical.pipeline import SEEN, Alignment, joint
from federated.vertical.tables import Table
from federated.vertical.wire import Bytes, Text, pack, unpack
from services.rpc.errors import KeysError
from services.rpc.security import KeyPair
from services.vertical.columns import open_tables
from services.vertical.config import ConfigRefused, PartyConfig
from services.vertical.jobs import JobRefused, find_kind, parse_options, settings_of
from services.vertical.keys import load_party_keys
from services.vertical.network import Network, Peer
from services.vertical.own import OwnSets
from services.vertical.pulse import Pulse, SteadyClock, WatchedWorkers
from services.vertical.report import FORMAT
from services.vertical.runner import RUN, Patience, Runner
from services.vertical.session import Session, job_fingerprint
from services.vertical.store import StateFolder, StateNotKept, read_whole, write_whole
from services.vertical.traffic import Traffic

_log = logging.getLogger(__name__)
PSI: Final = "psi"
MODEL: Final = "part.model"
ROWS: Final = "rows.csv"
REPORT: Final = "report.json"
MOST_MODEL: Final = 2**31


@dataclass(frozen=True, slots=True)
class Prepared:
    """A party that could begin. ``seen``: what a receiver learns, by kind of message. ``own``: its own side of
    intersections. ``pulse``: beats with what the role gets done."""

    config: PartyConfig
    kind: Kind[Any]
    keys: KeyPair
    table: Table | None
    make: Make
    seen: dict[str, str]
    folder: Path
    own: OwnSets
    pulse: Pulse

    def table_digest(self) -> bytes:
        """Equal for the same table; empty where there is none. Raises TableRefused."""
        if self.own.streamed:
            return self.own.fingerprint()
        return b"" if self.table is None else self.table.fingerprint()


def prepare(config: PartyConfig, workers: Workers | None = None) -> Prepared:
    """Read all that the party needs. Raises ConfigRefused, JobRefused, KeysError, TableRefused."""
    job = config.job
    kind = find_kind(job.what)
    options = parse_options(kind, job.options)
    alignment, seen = Alignment(), {**SEEN, **kind.seen}
    fingerprint, pulse = job_fingerprint(config.agreed()), Pulse()
    disk = config.psi.disk and config.psi.disk / fingerprint
    own = OwnSets(
        config.psi,
        config.data,
        {name: peer.key for name, peer in config.peers.items()},
        pulse,
        disk,
        streamed=kind.name == PSI and disk is not None,
    )
    if kind.name == PSI:
        kind = own.psi(kind)
    if kind.aligned and job.align == "psi":
        psi = own.psi(find_kind(PSI))
        alignment = Alignment(psi, parse_options(psi, job.psi))
        seen = {**psi.seen, **seen}
    keys = load_party_keys(config.party.keys)
    if same := [name for name, peer in config.peers.items() if peer.key == keys.public.hex()]:
        raise KeysError(f"peers.{same[0]}.key is this party's own; ask {same[0]} for its party.public")
    whole = table = None
    if config.data is not None and not own.streamed:
        tables = open_tables(config.data)
        whole, table = tables.whole, tables.learned
    watched = WatchedWorkers(workers or Alone(), pulse)
    columns = None if table is None else table.names
    setup = Setup(config.party.name, config.roles(), whole, job.seed, workers=watched, columns=columns)
    try:
        make = joint(kind, options, setup, alignment, job.test)
    except ValueError as error:
        raise JobRefused(str(error)) from error
    return Prepared(config, kind, keys, table, make, seen, config.party.state / fingerprint, own, pulse)


def run_party(
    prepared: Prepared,
    *,
    progress: Callable[[Progress], None] = lambda progress: None,
    listening: Callable[[int], None] = lambda port: None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Take part until all parties have their results; the report, which ``report.json`` has, too.

    ``listening`` is told the port. ``fresh``: forget checkpoints and results, so that all begin anew.
    Raises PeerFault, PeerGone, StateInUse, StateDamaged, StateNotKept, ZMQError, and what our own role raises.
    """
    config = prepared.config
    me, peers = config.party.name, tuple(config.peers)
    store = StateFolder(prepared.folder, f"{prepared.folder.name}/{me}")
    try:
        if fresh:
            store.clear()
        for damage in store.drop_damaged():
            _log.warning("%s: %s; an older checkpoint is used", me, damage)
        store.belongs_to(prepared.table_digest())
        before = store.result()
        if before is not None:
            _log.info("%s: this job was done before, and its result is here; --fresh begins anew", me)
            # Now: whoever was ended between its result and these files may be the last of all parties.
            report = _reported(prepared, before) or report_of(prepared, before, store.traffic(), 0.0)
            leave_behind(prepared, before, report)
        done = b"" if before is None else bytes.fromhex(str(before.figures[RUN]))
        pulse, clock = prepared.pulse, SteadyClock()
        session = Session(
            peers,
            config.agreed(),
            labels=store.labels(),
            runs=store.runs(),
            done=done,
            me=me,
            work=lambda: pulse.count,
        )
        addresses = {name: Peer(bytes.fromhex(peer.key), peer.address) for name, peer in config.peers.items()}
        began_s = time.monotonic()
        with prepared.own.held():
            network = Network(session, me, prepared.keys, addresses, config.party.listen, monotonic=clock)
            try:
                if network.port is not None:
                    listening(network.port)
                runner = Runner(
                    network,
                    prepared.make,
                    store,
                    peers,
                    me=me,
                    patience=Patience(config.party.dead_after, config.party.wait, config.party.stuck_after),
                    progress=progress,
                    pulse=pulse,
                    monotonic=clock,
                )
                result = runner.run()
            finally:
                network.close()
        if before is None or result.figures[RUN] != before.figures[RUN]:
            report = report_of(prepared, result, runner.traffic, time.monotonic() - began_s)
            leave_behind(prepared, result, report)
        store.settle(str(result.figures[RUN]))
        return report
    finally:
        store.close()


def report_of(prepared: Prepared, result: PartResult, traffic: Traffic, seconds: float) -> dict[str, Any]:
    """What this party did, sent and saw (JSON; ``report.FORMAT``). ``seconds``: of this process."""
    config = prepared.config
    received = [
        {
            "from": peer,
            "kind": kind,
            "messages": count,
            "bytes": traffic.received_bytes[peer, kind],
            "learns": prepared.seen.get(kind, "not described by its kind of job"),
        }
        for (peer, kind), count in traffic.received.items()
    ]
    sent = [
        {"to": peer, "kind": kind, "messages": count, "bytes": traffic.sent_bytes[peer, kind]}
        for (peer, kind), count in traffic.sent.items()
    ]
    return {
        "format": FORMAT,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "party": config.party.name,
        "role": config.party.role,
        "job": prepared.config.job.what,
        "settings": settings_of(config.job.model_dump(mode="json")),
        "parties": config.roles(),
        "seconds": round(traffic.seconds + seconds, 3),
        "attempts": traffic.attempts,
        "bytes_sent": sum(traffic.sent_bytes.values()),
        "bytes_received": sum(traffic.received_bytes.values()),
        "figures": dict(result.figures),
        "curves": {name: list(values) for name, values in result.curves.items()},
        "tables": findings_of(prepared.kind, result).get("tables", {}),
        # Beside what learns nothing that answers there is nothing to compare.
        "alone": {} if prepared.kind.load is None else _alone(prepared.table, result, config.job.seed),
        "sent": sent,
        "received": received,
    }


def _reported(prepared: Prepared, result: PartResult) -> dict[str, Any] | None:
    """The report that was left of ``result``'s run; None where there is none that can be read."""
    try:
        found = json.loads((prepared.folder / REPORT).read_text(encoding="utf-8"))
        same = found["format"] == FORMAT and found["figures"][RUN] == result.figures[RUN]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if same else None


def findings_of(kind: Kind[Any], result: PartResult) -> Mapping[str, Any]:
    """What the kind says of this party's result (JSON); empty where it says nothing."""
    return {} if kind.findings is None or result.model is None else kind.findings(result.model)


def _alone(table: Table | None, result: PartResult, seed: int) -> dict[str, Any]:
    """What the label party reaches with its own columns: the same rows trained on, the same held out."""
    if table is None or table.labels is None or result.rows is None or result.test is None:
        return {}
    if not len(result.test) or not table.names:
        return {}
    aligned = table.take(result.rows)
    kept = np.ones(len(aligned), np.bool_)
    kept[result.test] = False
    assert aligned.labels is not None
    train = aligned.features[kept], aligned.labels[kept]
    try:
        return dict(
            baselines(train, (aligned.features[result.test], aligned.labels[result.test]), seed % 2**31)
        )
    except ImportError:
        return {}


def leave_behind(prepared: Prepared, result: PartResult, report: dict[str, Any]) -> None:
    """Write a party's files, but for what ``store`` keeps."""
    folder = prepared.folder
    if result.model is not None:
        config, table = prepared.config, prepared.table
        head = {
            "job": config.job.what,
            "party": config.party.name,
            "parties": config.roles(),
            "features": list(table.names) if table is not None else [],
            "run": result.figures[RUN],
        }
        write_whole(folder / MODEL, pack({"head": json.dumps(head), "model": result.model}))
    if result.rows is not None:
        table, rows = prepared.table, result.rows
        ids = prepared.own.ids_at(rows) if table is None else [table.ids[row] for row in rows.tolist()]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["id", "held_out"])
        held = set() if result.test is None else set(result.test.tolist())
        for place, one in enumerate(ids):
            writer.writerow([one, int(place in held)])
        write_text(folder / ROWS, text.getvalue())
    if findings := findings_of(prepared.kind, result):
        text_of = json.dumps(findings, indent=1, ensure_ascii=False, allow_nan=False)
        write_text(folder / f"{prepared.kind.name}.json", text_of)
    write_text(folder / REPORT, json.dumps(report, indent=2, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a whole file in the place of the older one, for its owner alone. Raises StateNotKept."""
    beside = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        beside.rename(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StateNotKept(
            f"{path} cannot be written: {error.strerror}; make room, and start again: the result is kept"
        ) from error


@dataclass(frozen=True, slots=True)
class Part:
    """A party's part of a trained model, as it lies on its disk."""

    job: str
    party: str
    parties: dict[str, str]
    features: tuple[str, ...]
    run: str
    model: bytes


def read_part(path: Path) -> Part:
    """The part in ``path``. Raises StateDamaged, ConfigRefused."""
    found = unpack(read_whole(path), str(path), {"head": Text(2**20), "model": Bytes(MOST_MODEL)})
    head = json.loads(found["head"])
    try:
        return Part(
            head["job"], head["party"], head["parties"], tuple(head["features"]), head["run"], found["model"]
        )
    except KeyError as error:
        raise ConfigRefused(f"{path} lacks {error}") from error
