"""Several regions on one machine: their names, and the settings that the processes of each read.

The first region is home: it has the log, the processors and the trainers, and its settings stay as they are. Each
further one has a coordination store, parameter servers and an API of its own in a folder of its own, follows the home
region's parameter servers, and shares its log and its online features. Pure, but for the ports that are asked for.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final

from services.settings.checks import Address, parse_address
from services.settings.model import DataSettings, LinkSettings, RegionSettings, Settings, WanSettings
from services.settings.problems import SettingProblem, SettingsError
from services.supervisor.places import PlaceBook
from services.wan.conditions import LinkConditions, parse_named

MAX_REGIONS: Final = 64
"""On one machine; each has at least two processes."""
_USUAL: Final = ("eu", "asia")
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Region:
    """One region on this machine. ``settings``: what its processes read. ``servers``: where its parameter servers
    listen, by number; empty where each chooses for itself. ``links``: emulated ones that lead to it, by the region
    at their other end; only the home region has some, so that one command finds them all."""

    settings: Settings
    servers: tuple[str, ...] = ()
    home: bool = True
    links: Mapping[str, tuple[LinkSettings, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As its settings call it."""
        return self.settings.region.name

    def child(self, service: str, number: int) -> str:
        """The name of its process ``number`` of ``service``: unique over all regions of the machine."""
        if self.home:
            return f"{service}-{number}"
        return f"server-{number}@{self.name}" if service == "parameter-server" else f"{service}@{self.name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The regions to run, home first, and the conditions of emulated links between home and some of the others.

    Raises ValueError for regions that cannot be.
    """

    names: tuple[str, ...]
    links: Mapping[str, LinkConditions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a region: lower-case letters, digits and hyphens")
        if not 1 <= len(self.names) <= MAX_REGIONS:
            raise ValueError(f"{len(self.names)} regions; there can be 1 to {MAX_REGIONS}")
        if len(set(self.names)) != len(self.names):
            raise ValueError("two regions have one name")
        for name in self.links:
            if name not in self.names[1:]:
                others = ", ".join(self.names[1:]) or "none"
                raise ValueError(
                    f"a link leads to a region beside {self.names[0]} ({others}), not to {name!r}"
                )


def read_names(text: str, home: str) -> tuple[str, ...]:
    """The regions that ``text`` stands for: how many (``home``, eu, asia, r4, ...), or their names, home first.

    Raises ValueError.
    """
    if not (text.isascii() and text.isdecimal()):
        return tuple(name.strip() for name in text.split(","))
    count = int(text)
    if not 1 <= count <= MAX_REGIONS:
        raise ValueError(f"{count} regions; there can be 1 to {MAX_REGIONS}")
    others = (name for name in chain(_USUAL, (f"r{place}" for place in range(4, count + 4))) if name != home)
    return (home, *islice(others, count - 1))


def read_wanted(regions: str, links: Iterable[str], home: str) -> Wanted:
    """What the options of ``headwater up`` ask for. Raises ValueError."""
    found: dict[str, LinkConditions] = {}
    for text in links:
        name, conditions = parse_named(text)
        if name in found:
            raise ValueError(f"two links lead to {name}")
        found[name] = conditions
    return Wanted(read_names(regions, home), found)


def folder_of(data_dir: Path, name: str) -> Path:
    """The data folder of the further region ``name``, below that of home."""
    return data_dir / "regions" / name


def lay_out(settings: Settings, wanted: Wanted, book: PlaceBook) -> tuple[Region, ...]:
    """The regions ``wanted`` of the machine whose settings (with absolute folders) are ``settings``, home first.

    Raises SettingsError for what only suits one region, OSError where no port is free.
    """
    home = _with(settings, region=settings.region.model_copy(update={"name": wanted.names[0]}))
    if len(wanted.names) == 1:
        return (Region(home),)
    _check(home)
    servers = tuple(_listens(home, book))
    reached = tuple(_reached(address) for address in servers)
    links = {
        name: tuple(_links(name, conditions, reached, book)) for name, conditions in wanted.links.items()
    }
    others = [
        _follower(home, name, [link.listen for link in links.get(name, ())] or reached, place, book)
        for place, name in enumerate(wanted.names[1:], 1)
    ]
    return (Region(home, servers, links=links), *others)


def _links(
    name: str, conditions: LinkConditions, targets: Sequence[str], book: PlaceBook
) -> Iterator[LinkSettings]:
    """A link from region ``name`` to each of ``targets``: one process serves all, but each has the whole rate."""
    for number, target in enumerate(targets):
        link = name if len(targets) == 1 else f"{name}-{number}"
        host = parse_address(target).host
        listen = str(Address(host, book.port(f"link@{link}", host)))
        yield LinkSettings(name=link, target=target, listen=listen, conditions=str(conditions))


def _follower(home: Settings, name: str, upstreams: Sequence[str], place: int, book: PlaceBook) -> Region:
    """The region ``name``, number ``place`` after home, which follows the parameter servers at ``upstreams``."""
    api, first = parse_address(home.api.listen), home.region.number
    try:
        number = book.number(name, first)
    except ValueError as error:
        raise SettingsError((SettingProblem("region.number", str(first), "settings", str(error)),)) from error
    port = book.port(f"api@{name}", api.host, api.port and api.port + place)
    chosen = parse_address(home.parameters.listen)
    return Region(
        _with(
            home,
            data=DataSettings(dir=folder_of(home.data.dir, name), shared=home.data.shared or home.data.dir),
            region=RegionSettings(name=name, number=number),
            sync=home.sync.model_copy(update={"upstreams": tuple(upstreams), "writes": "auto"}),
            api=home.api.model_copy(update={"listen": str(Address(api.host, port)), "advertise": None}),
            parameters=home.parameters.model_copy(
                update={"listen": str(Address(chosen.host, 0)), "advertise": None}
            ),
            wan=WanSettings(),
        ),
        home=False,
    )


def _listens(home: Settings, book: PlaceBook) -> Iterator[str]:
    """Where each parameter server of the home region listens: others have to know it before it runs."""
    chosen = parse_address(home.parameters.listen)
    for number in range(home.parameters.servers):
        port = chosen.port or book.port(f"parameter-server-{number}", chosen.host)
        yield str(Address(chosen.host, port))


def _reached(listen: str) -> str:
    """Where on this machine a process is reached that listens at ``listen``."""
    address = parse_address(listen)
    try:
        everywhere = ipaddress.ip_address(address.host).is_unspecified
    except ValueError:
        everywhere = False
    loopback = "::1" if ":" in address.host else "127.0.0.1"
    return str(Address(loopback, address.port)) if everywhere else listen


def _with(settings: Settings, **sections: object) -> Settings:
    return settings.model_copy(update=sections)


def _check(settings: Settings) -> None:
    """Each region has a coordination store of its own, which only a file can be on one machine."""
    if settings.coordination.backend != "sqlite":
        problem = SettingProblem(
            "coordination.backend",
            settings.coordination.backend,
            "settings",
            "each region has a coordination store of its own, and there is one url",
            "set coordination.backend=sqlite, or start each region by itself with the url of its own store",
            "sqlite, where one machine runs several regions",
        )
        raise SettingsError((problem,))
