"""How processes that run are shown, and the regions that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.settings.model import Settings
    from services.supervisor.folder import ChildState


@dataclass(frozen=True, slots=True)
class RegionShown:
    """One region. ``url``: of its API. ``settings``: the file that its processes read, for ``--config`` (None where no
    supervisor wrote one)."""

    name: str
    url: str
    settings: Path | None

    def as_json(self) -> dict[str, object]:
        """For ``--format json``."""
        return {"name": self.name, "url": self.url, "settings": self.settings and str(self.settings)}


def regions_of(settings: Settings, children: Sequence[ChildState]) -> list[RegionShown]:
    """The regions of ``children``, in their order; that of ``settings`` first."""
    from services.supervisor.folder import RunFolder
    from services.supervisor.regions import folder_of

    data_dir = settings.data.dir.absolute()
    home = children[0].region if children else settings.region.name
    found = []
    for name in dict.fromkeys((home, *(child.region for child in children))):
        file = RunFolder(data_dir if name == home else folder_of(data_dir, name)).settings_file
        apis = (child.address for child in children if child.service == "api" and child.region == name)
        api = next((address for address in apis if address), settings.api.listen if name == home else "")
        url = api if "://" in api or not api else f"http://{api}"
        found.append(RegionShown(name, url, file if file.exists() else None))
    return found


def print_regions(regions: Sequence[RegionShown]) -> None:
    """Each region's API and settings; nothing where there is but one."""
    from services.cli.output import print_table

    if len(regions) < 2:
        return
    rows = [(region.name, region.url or "not ready", region.settings) for region in regions]
    print_table(("region", "API", "settings (for --config)"), rows)
    print()


def print_children(children: Sequence[ChildState], now_ms: int) -> None:
    """A table of processes."""
    from services.cli.output import print_table

    rows = [
        (
            child.name,
            child.state,
            f"{max(0, now_ms - child.since_ms) / 1e3:.0f} s",
            child.restarts,
            child.process.pid if child.process else "",
            child.address,
        )
        for child in children
    ]
    print_table(("process", "state", "since", "restarts", "pid", "address"), rows)


def child_json(child: ChildState) -> dict[str, object]:
    """One process, for ``--format json``."""
    return {
        "name": child.name,
        "service": child.service,
        "region": child.region,
        "state": child.state,
        "since_ms": child.since_ms,
        "restarts": child.restarts,
        "last_exit": child.last_exit,
        "pid": child.process.pid if child.process else None,
        "address": child.address or None,
    }
