"""A data set of one's own by one command, and what joint inference takes afterwards: real processes, keys, sockets.

headwater fl vertical split FILE        scikit-learn's breast cancer, cut into a guest's and a host's table
headwater fl vertical run linear        every party a process: alignment by PSI, training, held-out rows
headwater fl vertical serve             guest and host; requests one after another over one connection
"""

from __future__ import annotations

import csv
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from sklearn.datasets import load_breast_cancer

from benchmarks.report import Row
from services.vertical.trial import FILE

COMMAND: Final = ("-c", "from services.cli.app import main; main()", "fl", "vertical")
POOLED: Final = "scikit-learn, pooled"
LOGISTIC: Final = "logistic"
_READY_S: Final = 60.0
_TRIAL_S: Final = 600.0
_DEADLINE: Final = "100ms"


class CommandEnded(RuntimeError):
    """A command failed, or was not ready in time; the message holds its last lines."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """``requests`` of one id, a tenth as many of ``batch`` ids."""

    requests: int = 1_000
    batch: int = 100
    kinds: tuple[str, ...] = ("linear",)
    options: tuple[str, ...] = ()


def measure(sizes: Sizes) -> list[Row]:
    """All rows."""
    console = Console(stderr=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headwater-vertical-") as name:
        folder = Path(name)
        write_table(folder / "breast.csv")
        command("split", str(folder / "breast.csv"), "--label", "benign", "--out", str(folder / "tables"))
        for kind in sizes.kinds:
            console.print(
                f"vertical: {kind} on scikit-learn's breast cancer by one command, then its answers"
            )
            rows += _kind(kind, folder, sizes)
    return rows


def write_table(path: Path) -> None:
    """scikit-learn's breast cancer as a table that somebody might have: a header, a column ``benign`` of labels."""
    found = load_breast_cancer()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*(name.replace(" ", "_") for name in found.feature_names), "benign"])
        for values, label in zip(found.data.tolist(), found.target.tolist(), strict=True):
            writer.writerow([*values, label])


def command(*arguments: str) -> dict[str, Any] | list[Any]:
    """What ``headwater --format json fl vertical ARGUMENTS`` prints. Raises CommandEnded."""
    ended = subprocess.run(
        [sys.executable, *COMMAND[:2], "--format", "json", *COMMAND[2:], *arguments],
        capture_output=True,
        text=True,
        timeout=_TRIAL_S,
        check=False,
    )
    if ended.returncode:
        raise CommandEnded(f"{arguments[0]}: {ended.returncode}\n{_last(ended.stderr)}")
    found: dict[str, Any] | list[Any] = json.loads(ended.stdout)
    return found


def _kind(kind: str, folder: Path, sizes: Sizes) -> Iterator[Row]:
    parties = folder / kind
    began_s = time.perf_counter()
    options = [part for one in sizes.options for part in ("--option", one)]
    report = command("run", kind, "--data", str(folder / "tables"), "--out", str(parties), *options)
    seconds = time.perf_counter() - began_s
    assert isinstance(report, dict)
    yield from _trained(kind, report, seconds)
    guest = parties / "guest" / FILE
    text = guest.read_text(encoding="utf-8")
    guest.write_text(f'{text}\n[serve]\nlisten = "127.0.0.1:0"\ndeadline = "{_DEADLINE}"\n', encoding="utf-8")
    ids = _ids(folder / "tables" / "guest.csv")
    with ExitStack() as stack:
        host, _ = stack.enter_context(serving(parties / "host" / FILE))
        _, address = stack.enter_context(serving(guest))
        work = f"breast of scikit-learn, {kind}, joint inference"
        one, many = ids[:1], ids[: sizes.batch]
        yield from _latency(f"{work}, an id", ask_all(address, one, sizes.requests))
        yield from _latency(f"{work}, {len(many)} ids", ask_all(address, many, sizes.requests // 10))
        host.kill()
        host.wait()
        alone = ask_all(address, one, max(3, sizes.requests // 100))
        yield from _latency(f"{work}, an id, the host's process killed", alone)


def _trained(kind: str, report: dict[str, Any], seconds: float) -> Iterator[Row]:
    guest = report["parties"]["guest"]
    auc = guest["figures"]["test auc"]
    baseline = "boosting" if kind == "boosting" else LOGISTIC
    pooled = report["pooled"][baseline]["auc"]
    work = f"breast of scikit-learn, {kind}, `headwater fl vertical run`"
    sent = sum(one["bytes_sent"] for one in report["parties"].values())
    yield Row(
        f"{work}: AUC",
        "AUC",
        auc,
        peer=pooled,
        peer_name=f"{POOLED}, {baseline}",
        ratio=auc / pooled,
        note=f"on held-out rows; guest alone {guest['alone'][baseline]['auc']:.4f}",
    )
    yield Row(
        f"{work}: the whole command",
        "s",
        seconds,
        note=f"a process a party, PSI, training and pooled models; {sent / 1e6:,.3g} MB between the parties",
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """Milliseconds of each request, and how many of its rows the guest answered alone."""

    took_ms: tuple[float, ...]
    degraded: int


def ask_all(address: str, ids: Sequence[str], requests: int) -> Asked:
    """``requests`` for ``ids``, one after another over one connection. Raises CommandEnded."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_READY_S)
    body, degraded = json.dumps({"ids": list(ids)}), 0
    took_ms: list[float] = []
    try:
        for _ in range(requests):
            began_s = time.perf_counter()
            connection.request("POST", "/v1/predictions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
            took_ms.append(1e3 * (time.perf_counter() - began_s))
            if reply.status != http.client.OK:
                raise CommandEnded(f"{reply.status}: {text[:500].decode(errors='replace')}")
            degraded += sum(bool(row.get("degraded")) for row in json.loads(text)["predictions"])
    finally:
        connection.close()
    return Asked(tuple(took_ms), degraded)


def _latency(work: str, asked: Asked) -> Iterator[Row]:
    note = f"{len(asked.took_ms):,} requests one after another, {asked.degraded} rows by the guest alone"
    for name, part in (("p50", 50.0), ("p99", 99.0)):
        yield Row(f"{work}: {name}", "ms", float(np.percentile(asked.took_ms, part)), note=note)


@contextmanager
def serving(file: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A party's process of joint inference, and the address that it told. Raises CommandEnded."""
    log = file.with_name("serve.txt")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *COMMAND[:2], "--config", str(file), *COMMAND[2:], "serve"],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
            env=dict(os.environ),
        )
    try:
        yield process, _address(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str], log: Path) -> str:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s and process.poll() is None:
        text = log.read_text(errors="replace")
        told = [line.rsplit(" answers at ", 1)[1] for line in text.splitlines() if " answers at " in line]
        if told:
            return told[0].strip().removeprefix("http://").rstrip("/")
        time.sleep(0.05)
    raise CommandEnded(f"{log.parent.name} is not ready\n{_last(log.read_text(errors='replace'))}")


def _last(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


def _ids(table: Path) -> list[str]:
    with table.open(newline="", encoding="utf-8") as file:
        return [row["id"] for row in csv.DictReader(file)]
