"""Which processes a region consists of, and how each is started. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.processes import SERVICES, limit_threads
from services.settings.load import PREFIX
from services.settings.model import LinkSettings
from services.settings.show import override
from services.supervisor.regions import Region

STOP_ORDER: Final = ("api", "trainer", "processor", "parameter-server", "link")
"""The API first, so that nothing more comes in; parameter servers last, so that they save all of it."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running. The higher its ``stop_rank``, the later it is stopped."""

    name: str
    service: str
    command: tuple[str, ...]
    stop_rank: int = 0
    region: str = "home"


def plan(region: Region, settings_file: Path) -> tuple[ChildSpec, ...]:
    """The processes of ``region``, in the order of their start: each group finds what it depends on already starting.

    All of them read ``settings_file``. Only the home region has processors and trainers, and emulated links to others.
    """
    settings = region.settings
    counts = {
        "link": 1 if settings.wan.links else 0,
        "parameter-server": settings.parameters.servers,
        "processor": settings.processor.count if region.home else 0,
        "trainer": settings.trainer.count if region.home else 0,
        "api": 1,
        "federation": 0,  # started on its own, by `headwater fl serve` or `headwater service federation`
    }
    assert set(counts) == set(SERVICES)
    own = tuple(
        ChildSpec(
            name := region.child(service, number),
            service,
            _command(service, name, settings_file, _overrides(region, service, number)),
            STOP_ORDER.index(service),
            region.name,
        )
        for service, count in counts.items()
        for number in range(count)
    )
    return (*own, *(_link(name, links, settings_file) for name, links in region.links.items()))


def _link(region: str, links: tuple[LinkSettings, ...], settings_file: Path) -> ChildSpec:
    """The process of the emulated links that lead to ``region``."""
    name = f"link@{region}"
    given = (f"--set={override('wan.links', links)}",)
    return ChildSpec(
        name, "link", _command("link", name, settings_file, given), STOP_ORDER.index("link"), region
    )


def _overrides(region: Region, service: str, number: int) -> tuple[str, ...]:
    """What one process has for itself beside the settings of all."""
    if service != "parameter-server" or not region.servers:
        return ()
    return (f"--set=parameters.listen={region.servers[number]}",)


def _command(service: str, name: str, settings_file: Path, overrides: tuple[str, ...]) -> tuple[str, ...]:
    program = (sys.executable, "-m", "services.cli.app", "--config", str(settings_file), *overrides)
    return (*program, "service", service, "--name", name, "--with-parent")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: one thread per library, and no settings beside those of its file."""
    kept = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
    limit_threads(kept)
    # Lines of a log that is read while the process runs must not wait in a buffer.
    return kept | {"PYTHONUNBUFFERED": "1"}
