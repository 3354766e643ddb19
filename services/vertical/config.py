"""A party's own file (TOML): ``example.toml`` has all sections with what they mean (``headwater fl vertical example``).

``[job]`` has to be the same at every party; all else is this party's. Relative paths start at the file's folder.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from services.settings.units import Duration, DurationOrNone, parse_size
from services.vertical.mistakes import formed, told, with_port

MOST_PEERS: Final = 32
Name = Annotated[
    str, formed(r"[A-Za-z][A-Za-z0-9_-]{0,31}", "a name: a letter, then at most 31 letters, digits, _ or -")
]
Key = Annotated[
    str, formed(r"[0-9a-f]{64}", "64 hexadecimal digits (0-9, a-f), as that party's party.public has them")
]
HashedKey = Annotated[
    str, formed(r"(read|write|admin):[0-9a-f]{64}", "a key as `headwater config new-key` makes it")
]
_host_port: Final = formed(r"[^\s/]+:[0-9]{1,5}", "HOST:PORT")
HostPort = Annotated[str, _host_port, with_port(0)]
PeerAddress = Annotated[str, _host_port, with_port(1)]
RoleName = Literal["guest", "host", "coordinator"]


class ConfigRefused(ValueError):
    """The file is not a party's; the message names each wrong value."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PartySection(_Section):
    """Who this party is. ``dead_after``: a peer that was not heard for so long is named. ``wait``: for how long such a
    peer, or one that was never there, is waited for. ``stuck_after``: a peer that is there, but gets nothing done for
    so long while it is waited for, is given up by name. ``workers``: processes for long computations."""

    name: Name
    role: RoleName
    keys: Path
    state: Path = Path("state")
    listen: HostPort | None = None
    dead_after: Duration = 10.0
    wait: Duration = 300.0
    stuck_after: Duration = 900.0
    workers: Annotated[int, Field(ge=1, le=256)] = 1


class PeerSection(_Section):
    """Another party."""

    role: RoleName
    key: Key
    address: PeerAddress | None = None


class DataSection(_Section):
    """This party's table."""

    path: Path
    id: str = "id"
    label: str | None = None
    columns: Path | Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Those to learn from: names, or a file that has them under ``columns`` (``binning.json``). All if left out."""


class JobSection(_Section):
    """What all parties agree on."""

    what: Name
    align: Literal["psi", "none"] = "psi"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    test: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
    options: dict[str, Any] = Field(default_factory=dict)
    psi: dict[str, Any] = Field(default_factory=dict)
    """Options of the alignment."""

    @field_validator("options", "psi")
    @classmethod
    def _finite(cls, options: dict[str, Any]) -> dict[str, Any]:
        # The parties compare their jobs as JSON, which has no such numbers: different ones would look alike.
        for name, value in options.items():
            if any(isinstance(one, float) and not math.isfinite(one) for one in _leaves(value)):
                raise ValueError(f"{name} is not a finite number")
        return options


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


class PsiSection(_Section):
    """This party's own side of intersections. ``keep``: a folder as secret as the ids, for what one run leaves to the
    next. ``disk``: a folder for sets beyond memory. ``most_ids_of_a_peer``: every run in which a peer learns something
    takes as many as its set has; a peer is its public key, and what it asked is in ``keep``."""

    keep: Path | None = None
    disk: Path | None = None
    most_ids_of_a_peer: Annotated[int, Field(ge=1, lt=2**53)] | None = None

    @model_validator(mode="after")
    def _together(self) -> PsiSection:
        if self.most_ids_of_a_peer is not None and self.keep is None:
            raise ValueError("most_ids_of_a_peer needs keep: what peers asked is to outlive this run")
        return self


class ServeSection(_Section):
    """Joint inference: where the guest's REST listens, and how long hosts may take."""

    listen: HostPort = "127.0.0.1:8400"
    deadline: Duration = 1.0
    api_keys: tuple[HashedKey, ...] = ()
    """Of the guest's clients, ``read:sha256-hex`` (made by ``headwater config new-key read``). Required where
    ``listen`` is not this machine alone."""
    most_ids: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    metrics: HostPort | None = None
    """Where a host has its health and metrics, over HTTP without a key; nowhere if left out. A guest's are beside its
    REST."""
    rows: Literal["all", "joint"] = "all"
    """Which a host answers for: ``all`` of its table (a guest may then find out of any id whether it is there), or
    those that were ``joint`` when the model was trained, which the guest knows of already."""
    most_rows_a_minute: Annotated[int, Field(ge=1)] = 100_000
    """That a host answers each guest: shares of many chosen rows tell of its columns."""
    audit_bytes: Annotated[int, BeforeValidator(parse_size), Field(ge=65_536)] = 64 * 2**20
    """Of the audit log, beside as much of older lines."""
    audit_keep: DurationOrNone = 0.0
    """Lines younger than this are not dropped: when they fill the log, nothing is answered. 0: the oldest are."""

    @model_validator(mode="after")
    def _lines_fit(self) -> ServeSection:
        if self.audit_bytes < (least := 4_096 + 16 * self.most_ids):
            raise ValueError(f"audit_bytes must be at least {least}, for lines of most_ids = {self.most_ids}")
        return self


class PartyConfig(_Section):
    """All of a party's file."""

    party: PartySection
    peers: Annotated[dict[Name, PeerSection], Field(min_length=1, max_length=MOST_PEERS)]
    job: JobSection
    data: DataSection | None = None
    psi: PsiSection = Field(default_factory=PsiSection)
    serve: ServeSection = Field(default_factory=ServeSection)

    @model_validator(mode="after")
    def _together(self) -> PartyConfig:
        if self.party.name in self.peers:
            raise ValueError(f"party.name {self.party.name!r} is also the name of a peer")
        keys = [peer.key for peer in self.peers.values()]
        if len(set(keys)) != len(keys):
            raise ValueError("two peers have the same key")
        unreachable = [name for name, peer in self.peers.items() if peer.address is None]
        if self.party.listen is None and unreachable:
            raise ValueError(
                f"{', '.join(unreachable)} without an address, and party.listen is left out: one must be there"
            )
        if (self.data is None) != (self.party.role == "coordinator"):
            raise ValueError("a guest and a host need [data], a coordinator has none")
        labelled = self.data is not None and self.data.label is not None
        if labelled and self.party.role != "guest":
            raise ValueError("data.label is for the guest alone")
        return self

    def roles(self) -> dict[str, str]:
        """Every party's role by name, in the same order at all parties: guest, hosts, others, then by name."""
        order = ("guest", "host", "coordinator")
        all_: dict[str, str] = {self.party.name: self.party.role}
        all_ |= {name: peer.role for name, peer in self.peers.items()}
        return dict(sorted(all_.items(), key=lambda one: (order.index(one[1]), one[0])))

    def agreed(self) -> dict[str, Any]:
        """What is compared between parties: the job, and who has which role."""
        return {"job": self.job.model_dump(mode="json"), "parties": self.roles()}


def load_party(path: Path) -> PartyConfig:
    """The party's file. Raises ConfigRefused naming all that is wrong."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise ConfigRefused(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigRefused(f"{path} is no TOML: {error}") from error
    return parse_party(found, path.parent, str(path))


def parse_party(found: Mapping[str, Any], folder: Path, what: str = "the party's file") -> PartyConfig:
    """``found`` as a party's file in ``folder``. Raises ConfigRefused."""
    try:
        config = PartyConfig.model_validate(found)
    except ValidationError as error:
        raise ConfigRefused(f"{what}: {'; '.join(told(error, PartyConfig))}") from error
    party = config.party.model_copy(
        update={"keys": folder / config.party.keys, "state": folder / config.party.state}
    )
    data = config.data
    if data is not None:
        columns = folder / data.columns if isinstance(data.columns, Path) else data.columns
        data = data.model_copy(update={"path": folder / data.path, "columns": columns})
    own = {"keep": config.psi.keep, "disk": config.psi.disk}
    psi = config.psi.model_copy(update={name: path and folder / path for name, path in own.items()})
    return config.model_copy(update={"party": party, "data": data, "psi": psi})
