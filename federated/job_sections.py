"""The tables of a job's file, except those of parts that have one of their own (rounds, training, privacy).

JobRefused (ValueError)     the file cannot be read, a key or value is wrong, or parts do not go together
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from federated.device import LocalTraining
from federated.privacy.section import PrivacySection, SecureAggregationSection
from federated.rounds.settings import RoundSettings
from federated.sections import unknown


class JobRefused(ValueError):
    """A job that cannot be run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Named:
    """Something chosen by name, with its own options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobSection:
    """``name`` is the job's on servers (1 to 64 of a-z, 0-9, ``_.-``); ``seed`` decides all that is drawn."""

    name: str = "job"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"job.seed must be at least 0 and below 2**63, not {self.seed}")


@dataclass(frozen=True, slots=True)
class DataSection:
    """Whose data: a data set's name or path, over ``clients`` by ``partition`` ("iid", "dirichlet:0.1", "label:2", …).

    None leaves the data set's own rule. ``features`` and ``classes`` need only be told to servers, which see no data.
    ``context`` is the window of text in characters, ``view`` what ratings are seen as, ``items`` the ids of a model
    of items, by number.
    """

    name: str = "digits"
    clients: int | None = None
    partition: str | None = None
    features: int | None = None
    classes: int | None = None
    context: int | None = None
    view: str | None = None
    items: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.items)) < len(self.items):
            raise ValueError("data.items names an item twice")


@dataclass(frozen=True, slots=True)
class CompressionSection:
    """``upload`` is a scheme such as "top_k:0.03,quantise:1,deflate" ("" sends float32). ``download_bits`` rounds
    versions to a grid and sends differences (0 sends the whole model in float32)."""

    upload: str = ""
    download_bits: int = 0


@dataclass(frozen=True, slots=True)
class SimulationSection:
    """What the simulator alone needs. ``engine`` is one of ``simulator.engines``, ``auto`` the fastest for the model
    and ``device``; ``memory_bytes`` bounds a cohort's chunk (0: the device's default), ``threads`` of which are in
    work; ``state_bytes`` bounds what clients remember. ``ray`` is "local" or a cluster's address: Ray's tasks train the
    chunks, on ``threads`` cores if local.

    ``availability`` is always, bernoulli, diurnal (``share`` of the clients) or trace (a file, ``trace``); ``habits``
    are speeds, bandwidths, dropouts and stragglers of the population. Checkpoints and evaluations come every so many
    iterations (0: never).
    """

    engine: Literal["auto", "batched", "torch", "numpy"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    memory_bytes: int = 0
    threads: int = 1
    ray: str = ""
    state_bytes: int = 2**32
    availability: Literal["always", "bernoulli", "diurnal", "trace"] = "always"
    share: float = 0.5
    trace: str | None = None
    patience_s: float = 86_400.0
    checkpoint_every: int = 10
    evaluate_every: int = 1
    habits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServersSection:
    """What real servers and their clients need: where they are, how large a body and a part of it may be, and how long
    a request may take."""

    urls: tuple[str, ...] = ()
    max_body_bytes: int = 2**28
    part_bytes: int = 2**20
    request_s: float = 60.0


@dataclass(frozen=True, slots=True)
class IntoSection:
    """Where else what a job of items learns goes: into the served ``model`` of the stack that its servers belong to
    ("": nowhere). An iteration counts there as ``weight`` samples of a trainer."""

    model: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < math.inf:
            raise ValueError(f"into.weight must be positive, not {self.weight}")


KINDS: Mapping[str, type[Any]] = {
    "rounds": RoundSettings,
    "job": JobSection,
    "data": DataSection,
    "training": LocalTraining,
    "compression": CompressionSection,
    "privacy": PrivacySection,
    "secure_aggregation": SecureAggregationSection,
    "simulation": SimulationSection,
    "servers": ServersSection,
    "into": IntoSection,
}

_ALSO_CALLED: Mapping[str, str] = {
    "secagg": "secure_aggregation",
    "dp": "privacy",
    "differential_privacy": "privacy",
    "simulator": "simulation",
    "dataset": "data",
}
"""What sections are called elsewhere."""


def unknown_section(title: str, known: list[str]) -> str:
    """The sentence that refuses the section ``title``, with the nearest of ``known`` or what is meant by it."""
    meant = _ALSO_CALLED.get(title.lower())
    if meant in known:
        return f"the section {title!r} is unknown; did you mean {meant!r}?"
    return unknown(title, known, "the section")


@contextmanager
def refusing(where: str) -> Iterator[None]:
    """What a part refuses is refused by the job, with the part's name before it."""
    try:
        yield
    except JobRefused:
        raise
    except ValueError as error:
        raise JobRefused(f"{where}: {error}" if where else str(error)) from error
