"""Several devices of a federated job in one process, each with a connection, a token and a folder of its own.

To its servers each is a device like any other: what is simulated is only that they share a machine. Training waits for
the interpreter's lock, so a cohort is for tries and tests of a deployment; `fl simulate` is for many clients.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from federated.client_agreed import keep_terms, require_terms
from federated.client_device import Device, summary
from federated.client_folder import DeviceFolder
from federated.client_http import Clock, HttpTransport
from federated.client_run import run_device, terms_of, with_identity
from federated.client_steps import Budget
from federated.client_trainer import Trainer, client_number
from federated.job import FederatedJob

MOST_DEVICES: Final = 256


@dataclass(frozen=True, slots=True)
class Seat:
    """A device of the cohort: its id, its token ("": none is asked for), and what trains on its data."""

    client: str
    token: str
    trainer: Trainer


def run_cohort(
    job: FederatedJob,
    urls: Sequence[str],
    seats: Sequence[Seat],
    folder: Path,
    *,
    ca: str | None = None,
    budget: Budget | None = None,
    told: Callable[[str], None] = lambda text: None,
    clock: Clock | None = None,
) -> dict[str, Mapping[str, object]]:
    """Let all ``seats`` take part in ``job`` at ``urls``, each keeping what it must below ``folder``. Gives, by client,
    how each ended (``client_device.summary``). Raises ValueError for no seat or more than MOST_DEVICES, and, once all
    have ended, what the first of them raised that could not take part."""
    if not 1 <= len(seats) <= MOST_DEVICES:
        raise ValueError(f"a cohort has 1 to {MOST_DEVICES} devices, not {len(seats)}")
    budget, clock = budget or Budget(), clock or Clock()
    ended: dict[str, Mapping[str, object]] = {}
    failed: list[BaseException] = []

    def run(seat: Seat) -> None:
        try:
            ended[seat.client] = _run(job, urls, seat, folder, ca, budget, clock)
            told(f"{len(ended)} of {len(seats)} devices have ended")
        except BaseException as error:  # raised again below, in the thread that waits
            failed.append(error)

    # Daemons: whoever interrupts the command does not wait for devices that wait for others.
    threads = [threading.Thread(target=run, args=(seat,), name=seat.client, daemon=True) for seat in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return {seat.client: ended[seat.client] for seat in seats}


def _run(
    job: FederatedJob,
    urls: Sequence[str],
    seat: Seat,
    folder: Path,
    ca: str | None,
    budget: Budget,
    clock: Clock,
) -> Mapping[str, object]:
    """One device, until its loop ends. Raises JobRefused, IdentityRefused, ValueError and OSError."""
    kept = DeviceFolder(folder / quote(seat.client, safe=""))
    began = clock.now()
    with HttpTransport(urls, seat.token, ca=ca, first=client_number(seat.client)) as transport:
        require_terms(job, kept, None)
        terms = with_identity(terms_of(job), job, seat.client, kept, transport, clock)
        keep_terms(job, kept)
        draw = random.SystemRandom().random
        device = Device(seat.client, terms, seat.trainer, kept, began, draw, budget=budget)
        return summary(device, run_device(device, transport, clock, began + budget.seconds))
