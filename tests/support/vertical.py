"""Parties of one small job as files, as threads' sessions and as processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from federated.vertical.tables import Table, write_csv
from services.vertical.keys import make_party_keys

ROOT = Path(__file__).parents[2]
ROWS = 12


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    found = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in found]
    for one in found:
        one.close()
    return ports


def party_files(
    folder: Path,
    roles: Mapping[str, str],
    *,
    listening: Sequence[str],
    options: Mapping[str, Any],
    rows: int = ROWS,
    dead_after: str = "1s",
    wait: str = "30s",
) -> dict[str, Path]:
    """A file with keys and a table for each of ``roles``; those ``listening`` have addresses."""
    ports = dict(zip(listening, free_ports(len(listening)), strict=True))
    publics = {name: make_party_keys(folder / name / "keys").public.hex() for name in roles}
    found: dict[str, Path] = {}
    for place, (name, role) in enumerate(roles.items()):
        ids = tuple(str(row) for row in range(rows))
        labels = np.arange(float(rows)) % 2 if role == "guest" else None
        table = Table(ids, np.full((rows, 1), float(place + 1)), ("x",), labels)
        write_csv(table, folder / name / "rows.csv")
        lines = ["[party]", f'name = "{name}"', f'role = "{role}"', 'keys = "keys"']
        lines += [f'dead_after = "{dead_after}"', f'wait = "{wait}"']
        if name in ports:
            lines.append(f'listen = "127.0.0.1:{ports[name]}"')
        for peer, peer_role in roles.items():
            if peer != name:
                lines += [f"[peers.{peer}]", f'role = "{peer_role}"', f'key = "{publics[peer]}"']
                if peer in ports:
                    lines.append(f'address = "127.0.0.1:{ports[peer]}"')
        lines += ["[data]", 'path = "rows.csv"', *(['label = "y"'] if role == "guest" else [])]
        lines += ["[job]", 'what = "sums"', 'align = "none"', "[job.options]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        found[name] = folder / name / "party.toml"
        found[name].write_text("\n".join(lines) + "\n")
    return found


class PartyProcess:
    """A party as a process of its own."""

    def __init__(self, file: Path) -> None:
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        environment["HEADWATER_VERTICAL_KINDS"] = "sums=tests.support.vertical_sums:KIND"
        self.errors = file.with_name("errors.txt")
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.vertical.main", str(file)],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
                text=True,
            )

    def until(self, key: str) -> dict[str, Any]:
        """Its next line that has ``key``. Raises AssertionError where it ends before."""
        assert self.process.stdout is not None
        found: dict[str, Any] = {}
        for line in self.process.stdout:
            found = json.loads(line)
            if key in found:
                return found
        raise AssertionError(f"it ended without {key!r}: {found}\n{self.errors.read_text()[-2000:]}")

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Wait for it, ending it if need be."""
        if self.process.poll() is None:
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def reports_after_kill(
    files: Mapping[str, Path], victim: str, begun: Callable[[Mapping[str, PartyProcess]], None]
) -> dict[str, dict[str, Any]]:
    """All parties' reports of a job in which ``victim`` was killed, once ``begun`` returned, and started again."""
    running = {name: PartyProcess(file) for name, file in files.items()}
    try:
        begun(running)
        running[victim].kill()
        time.sleep(0.3)
        running[victim] = PartyProcess(files[victim])
        return {name: one.until("report")["report"] for name, one in running.items()}
    finally:
        for one in running.values():
            one.kill() if one.process.poll() is None else one.close()
