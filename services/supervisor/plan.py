"""Which processes the settings ask for, and how each is started. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.processes import SERVICES, limit_threads
from services.settings.load import PREFIX
from services.settings.model import Settings

STOP_ORDER: Final = ("api", "trainer", "processor", "parameter-server")
"""The API first, so that nothing more comes in; parameter servers last, so that they save all of it."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running. The higher its ``stop_rank``, the later it is stopped."""

    name: str
    service: str
    command: tuple[str, ...]
    stop_rank: int = 0


def plan(settings: Settings, settings_file: Path) -> tuple[ChildSpec, ...]:
    """The processes, in the order of their start: each group finds what it depends on already starting."""
    counts = {
        "parameter-server": settings.parameters.servers,
        "processor": settings.processor.count,
        "trainer": settings.trainer.count,
        "api": 1,
    }
    assert set(counts) == set(SERVICES)
    return tuple(
        ChildSpec(
            f"{service}-{number}",
            service,
            _command(service, f"{service}-{number}", settings_file),
            STOP_ORDER.index(service),
        )
        for service, count in counts.items()
        for number in range(count)
    )


def _command(service: str, name: str, settings_file: Path) -> tuple[str, ...]:
    program = (sys.executable, "-m", "services.cli.app", "--config", str(settings_file))
    return (*program, "service", service, "--name", name, "--with-parent")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: one thread per library, and no settings beside those of its file."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    limit_threads(kept)
    # Lines of a log that is read while the process runs must not wait in a buffer.
    return kept | {"PYTHONUNBUFFERED": "1"}
