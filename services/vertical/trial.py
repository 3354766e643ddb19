"""A whole job on this machine, for a trial: every party a process with keys, a port and a folder of its own.

The parties' processes know of each other no more than they would elsewhere; only the end, where pooled models are
trained for comparison, sees all tables at once.
"""

from __future__ import annotations

import csv
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from federated.vertical.evaluation import baselines
from federated.vertical.kinds import Kind
from services.vertical.columns import open_tables
from services.vertical.config import ConfigRefused, DataSection
from services.vertical.keys import make_party_keys
from services.vertical.party import ROWS

FILE: Final = "party.toml"
REPORT: Final = "report.json"
BINNING: Final = "binning.json"
_SUFFIXES: Final = (".csv", ".parquet")
_END_S: Final = 10.0


class TrialFailed(Exception):
    """A party ended without a result; the message has its own words."""


@dataclass(frozen=True, slots=True)
class Party:
    """Who takes part in the trial; ``table`` is None at a coordinator. ``columns``: as in its file's [data]."""

    name: str
    role: str
    table: Path | None
    columns: Path | None = None


def find_parties(data: Path, kind: Kind[Any], *, coordinator: bool = False) -> list[Party]:
    """The parties whose tables lie in the folder ``data``: a file with ``guest`` in its name, others with ``host``.

    ``data`` may also be a folder and the beginning of names (``FOLDER/breast``). A coordinator is added where
    ``kind`` needs one, or where asked for. Raises ConfigRefused.
    """
    if data.suffix in _SUFFIXES and not data.exists():
        raise ConfigRefused(f"{data}: there is no such file")
    folder, prefix = (data, "") if data.is_dir() else (data.parent, data.name)
    if not folder.is_dir():
        raise ConfigRefused(f"{folder} is no folder")
    files = sorted(one for one in folder.iterdir() if one.suffix in _SUFFIXES and one.name.startswith(prefix))
    guests = [one for one in files if "guest" in one.stem]
    hosts = [one for one in files if "host" in one.stem and "guest" not in one.stem]
    if len(guests) != 1 or not hosts:
        told = ", ".join(one.name for one in files[:10]) or "none"
        raise ConfigRefused(
            f"{data}: one table of a guest and at least one of a host are needed, named so "
            f"(guest.csv, host.csv); there is {told}. FOLDER/PREFIX chooses among several sets"
        )
    parties = [Party("guest", "guest", guests[0])]
    if len(hosts) == 1:
        parties.append(Party("host", "host", hosts[0]))
    else:
        parties += [Party(f"host{place + 1}", "host", host) for place, host in enumerate(hosts)]
    needed = kind.roles.get("coordinator")
    if needed is not None and (needed.least > 0 or (coordinator and needed.most > 0)):
        parties.append(Party("coordinator", "coordinator", None))
    return parties


def with_columns(parties: list[Party], folder: Path) -> list[Party]:
    """``parties`` with the columns that a trial of kind ``binning`` kept, whose files are in ``folder``.

    Raises ConfigRefused.
    """
    found: list[Party] = []
    for party in parties:
        files = list(folder.glob(f"{party.name}/state/*/{BINNING}")) if party.table is not None else []
        if party.table is not None and not files:
            raise ConfigRefused(f"{folder} has no {BINNING} of {party.name}; `run binning --out` leaves one")
        newest = max(files, key=lambda one: one.stat().st_mtime_ns, default=None)
        found.append(replace(party, columns=newest))
    return found


def write_files(
    folder: Path,
    parties: list[Party],
    job: Mapping[str, Any],
    *,
    id_column: str = "id",
    label_column: str = "y",
    workers: int = 1,
) -> dict[str, Path]:
    """A folder with keys and a file for each party below ``folder``; the files by party's name.

    Raises KeysError where keys are there already.
    """
    ports = _free_ports(len(parties))
    publics = {one.name: make_party_keys(folder / one.name / "keys").public.hex() for one in parties}
    found: dict[str, Path] = {}
    for party, port in zip(parties, ports, strict=True):
        lines = ["[party]", *_values({"name": party.name, "role": party.role, "keys": "keys"})]
        lines += _values({"listen": f"127.0.0.1:{port}", "workers": workers})
        for peer, peer_port in zip(parties, ports, strict=True):
            if peer is not party:
                lines += [f"\n[peers.{peer.name}]"]
                address = f"127.0.0.1:{peer_port}"
                lines += _values({"role": peer.role, "key": publics[peer.name], "address": address})
        if party.table is not None:
            lines += ["\n[data]", *_values({"path": str(party.table.absolute()), "id": id_column})]
            lines += _values({"label": label_column}) if party.role == "guest" else []
            lines += [] if party.columns is None else _values({"columns": party.columns.absolute()})
        plain = {key: value for key, value in job.items() if not isinstance(value, Mapping)}
        lines += ["\n[job]", *_values(plain)]
        for key, value in job.items():
            if isinstance(value, Mapping):
                lines += [f"\n[job.{key}]", *_values(value)]
        found[party.name] = folder / party.name / FILE
        found[party.name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return found


def _values(values: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in values.items()]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, but for the one escape that JSON leaves out.
    return json.dumps(str(value)).replace("\x7f", "\\u007F")


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in listeners]
    for one in listeners:
        one.close()
    return ports


Told = Callable[[str, dict[str, Any]], None]


def run_trial(
    files: Mapping[str, Path], told: Told, environ: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Run every party's process until all have reported; the reports by party's name.

    ``told`` hears each line of each party. Raises TrialFailed with the first failure, after which all are ended.
    """
    lines: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
    running: dict[str, subprocess.Popen[str]] = {}
    readers: list[threading.Thread] = []
    reports: dict[str, dict[str, Any]] = {}
    try:
        for name, file in files.items():
            with file.with_name("errors.txt").open("wb") as errors:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "services.vertical.main", str(file)],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=dict(os.environ if environ is None else environ),
                )
            reader = threading.Thread(target=_read, args=(name, running[name], lines), daemon=True)
            reader.start()
            readers.append(reader)
        ended: set[str] = set()
        while len(ended) < len(running):
            name, line = lines.get()
            if line is None:
                ended.add(name)
                if name not in reports:
                    raise TrialFailed(
                        f"{name} ended without a result; see {files[name].with_name('errors.txt')}"
                    )
                continue
            if "error" in line:
                raise TrialFailed(
                    f"{_cause(name, str(line['error']), lines)}; the parties' files: {_above(files)}"
                )
            if "report" in line:
                reports[name] = line["report"]
            told(name, line)
        return {name: reports[name] for name in files}
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        for process in running.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in readers:
            reader.join()
        for process in running.values():
            if process.stdout is not None:
                process.stdout.close()


def _above(files: Mapping[str, Path]) -> Path:
    """The folder that has all parties' folders."""
    return next(iter(files.values())).parent.parent


def _read(
    name: str, process: subprocess.Popen[str], lines: queue.Queue[tuple[str, dict[str, Any] | None]]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            lines.put((name, found))
    lines.put((name, None))


def _cause(name: str, error: str, lines: queue.Queue[tuple[str, dict[str, Any] | None]]) -> str:
    """The failure that came first: one that only tells of another party's waits for that party's own words."""
    told = f"{name}: {error}"
    if not error.startswith("PeerAborted"):
        return told
    try:
        while True:
            other, line = lines.get(timeout=_END_S)
            if line is not None and "error" in line and not str(line["error"]).startswith("PeerAborted"):
                return f"{other}: {line['error']}"
            if line is None and other != name:
                return told
    except queue.Empty:
        return told


def pooled(
    files: Mapping[str, Path], parties: list[Party], id_column: str, label: str
) -> dict[str, dict[str, float]]:
    """What plain models reach that see all tables at once, on the same rows. Empty where nothing was held out."""
    guest = next(party for party in parties if party.role == "guest")
    rows = next(iter(sorted(files[guest.name].parent.glob(f"state/*/{ROWS}"))), None)
    if rows is None or guest.table is None:
        return {}
    with rows.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    held = np.array([row["held_out"] == "1" for row in found])
    if not held.any() or held.all():
        return {}
    ids = [row["id"] for row in found]
    tables = [
        open_tables(
            DataSection(
                path=party.table,
                id=id_column,
                label=label if party is guest else None,
                columns=party.columns,
            )
        ).learned.align(ids)
        for party in parties
        if party.table is not None
    ]
    labels = tables[0].labels
    assert labels is not None
    features = np.hstack([table.features for table in tables])
    try:
        return dict(baselines((features[~held], labels[~held]), (features[held], labels[held])))
    except ImportError:
        return {}


def whole_report(
    job: Mapping[str, Any], reports: Mapping[str, dict[str, Any]], together: Mapping[str, dict[str, float]]
) -> dict[str, Any]:
    """One document of all parties' reports."""
    return {"job": dict(job), "parties": dict(reports), "pooled": dict(together)}


def parse_value(text: str) -> Any:
    """An option's value as given on a command line: what TOML reads, or else text."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` each. Raises ConfigRefused."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
            raise ConfigRefused(f"{pair!r} is not NAME=VALUE")
        found[name] = parse_value(value)
    return found
