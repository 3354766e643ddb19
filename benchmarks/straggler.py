"""``straggler``: four trainers, one of them ten times slower: time to a fixed AUC in the four training modes.

Each mode starts its own parameter server and trainers as processes (niced, one thread each) on the same recorded
MovieLens samples, one partition a trainer. The slow one sleeps nine times what each micro-batch took. The clock
runs from the moment the samples are there. The peer of each mode is ``sync``, where every step waits for the
slowest, measured in the same run.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from benchmarks.recorded import Recording, quality, record
from benchmarks.report import Row
from featurestore.schema import Schema
from models.parameters import Floats
from models.samples import MicroBatch
from models.training import Gradients, RecommenderModel, Rows
from services.backends import open_coordination, open_log
from services.coordination.contract import Coordination
from services.coordination.membership import members
from services.messagelog.contract import Message, MessageLog
from services.modelling import build_model, open_schema
from services.parameter_server.client import ParameterClient
from services.parameter_server.types import ParameterError
from services.processes import configure_logging, limit_threads
from services.settings.model import (
    DataSettings,
    LogSettings,
    ModelSettings,
    ParameterSettings,
    Settings,
    TrainerSettings,
)
from services.topics import SAMPLES
from sync.pushes import Source

Mode = Literal["async", "sync", "backup", "hybrid"]
MODES: tuple[Mode, ...] = ("async", "backup", "sync", "hybrid")
TRAINERS = 4
SLOWDOWN = 10.0
AIM_AUC, QUICK_AUC = 0.74, 0.70
"""To be reached on all that is recorded, and on the little of a quick run."""
LOOK_S = 0.25
NICE = 5


def run(quick: bool, console: Console) -> list[Row]:
    """One row a mode; without ``quick`` more samples, a higher AUC and three rounds, modes in turn."""
    limit_threads(os.environ)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
        recording = record(Path(folder) / "recorded", TRAINERS, 20_000 if quick else 60_000)
        for note in recording.notes:
            console.print(note)
        console.print(f"{recording.samples:,} samples recorded")
        aim = QUICK_AUC if quick else AIM_AUC
        limit_s = 9.0 if quick else 120.0
        times: dict[Mode, list[float]] = {mode: [] for mode in MODES}
        for number in range(1 if quick else 3):
            for mode in MODES:
                own = Path(folder) / f"{mode}-{number}"
                times[mode].append(_time_to_auc(own, mode, recording, aim, limit_s, console))
    return [_row(mode, times, aim, limit_s) for mode in MODES]


def _row(mode: Mode, times: dict[Mode, list[float]], aim: float, limit_s: float) -> Row:
    ours, peer = float(np.median(times[mode])), float(np.median(times["sync"]))
    never = sum(one == float("inf") for one in times[mode])
    spread = (min(times[mode]), max(times[mode]))
    return Row(
        f"{mode}: time to AUC {aim:g}, one of {TRAINERS} trainers {SLOWDOWN:g}x slower",
        "s",
        min(ours, limit_s),
        spread=None if never else spread,
        peer=None if mode == "sync" else min(peer, limit_s),
        peer_name=None if mode == "sync" else "sync, in this run",
        ratio=None if mode == "sync" else min(peer, limit_s) / min(ours, limit_s),
        note=f"not reached within {limit_s:g} s in {never} of {len(times[mode])}" if never else "",
    )


def _time_to_auc(
    folder: Path, mode: Mode, recording: Recording, aim: float, limit_s: float, console: Console
) -> float:
    """Seconds until the held-out AUC was reached; infinity beyond ``limit_s``."""
    settings = Settings(
        data=DataSettings(dir=folder),
        log=LogSettings(partitions=TRAINERS),
        parameters=ParameterSettings(servers=1, shards=4, generation_interval=3_600.0),
        trainer=TrainerSettings(mode=mode, count=TRAINERS, backup_ratio=0.75),
    )
    model = build_model(open_schema(settings), settings.model)
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_log(settings)))
        coordination = stack.enter_context(closing(open_coordination(settings)))
        client = stack.enter_context(closing(ParameterClient(coordination, deadline_s=10.0)))
        stack.enter_context(_processes(settings))
        _wait_ready(coordination, log, client)
        curve: list[tuple[float, float]] = []
        started = time.monotonic()
        _append(log, recording)
        while time.monotonic() - started < limit_s:
            curve.append((time.monotonic() - started, _quality(model, client, recording)))
            if curve[-1][1] >= aim or _all_done(client, log, recording):
                break
            time.sleep(LOOK_S)
    reached = curve[-1][1] >= aim
    console.print(
        f"{mode}: " + " ".join(f"{at:.1f}s:{found:.3f}" for at, found in curve[:: max(1, len(curve) // 8)])
    )
    return curve[-1][0] if reached else float("inf")


def _quality(model: RecommenderModel, client: ParameterClient, recording: Recording) -> float:
    try:
        return quality(model, client, recording.held_out)
    except ParameterError:
        return 0.5


def _append(log: MessageLog, recording: Recording) -> None:
    with closing(log.producer()) as producer:
        now = time.time_ns() // 1_000_000
        for partition, values in enumerate(recording.training):
            producer.append([Message(SAMPLES, partition, b"", value, now) for value in values])


def _all_done(client: ParameterClient, log: MessageLog, recording: Recording) -> bool:
    incarnation = log.incarnation(SAMPLES)
    for partition, values in enumerate(recording.training):
        states = client.applied("main", Source(incarnation, partition)).values()
        if min(state.applied for state in states) + 1 < len(values):
            return False
    return True


def _wait_ready(coordination: Coordination, log: MessageLog, client: ParameterClient) -> None:
    deadline = time.monotonic() + 60.0
    while sum(member.ready for member in members(coordination, "trainer")) < TRAINERS:
        if time.monotonic() > deadline:
            raise TimeoutError("the trainers did not become ready")
        time.sleep(0.05)
    # One look of every trainer at its group, so that none of them is still on its own.
    time.sleep(0.5)


@contextmanager
def _processes(settings: Settings) -> Iterator[None]:
    """A parameter server and the trainers, killed at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["services.trainer.main", "services.parameter_server.main"])
    names = ("parameter-server-0", *(f"trainer-{number}" for number in range(TRAINERS)))
    running: Sequence[BaseProcess] = [
        context.Process(target=_serve, args=(name, settings), daemon=True) for name in names
    ]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def _serve(name: str, settings: Settings) -> None:
    """One process; the last trainer is the slow one."""
    configure_logging(name, "ERROR")
    stop = threading.Event()
    if name.startswith("parameter-server"):
        from services.parameter_server.main import run as serve

        serve(settings, name, stop)
        return
    from services.trainer.main import run as train

    os.nice(NICE)
    train(settings, name, stop, _slow_model if name == f"trainer-{TRAINERS - 1}" else build_model)


class _SlowModel(RecommenderModel):
    """The same model on a machine that takes ``SLOWDOWN`` times as long for its gradients."""

    def gradients(self, batch: MicroBatch, rows: Rows, dense: Floats, *, in_batch: bool = False) -> Gradients:
        started = time.monotonic()
        found = super().gradients(batch, rows, dense, in_batch=in_batch)
        time.sleep((SLOWDOWN - 1) * (time.monotonic() - started))
        return found


def _slow_model(schema: Schema, settings: ModelSettings) -> RecommenderModel:
    return _SlowModel(schema, build_model(schema, settings).config)
