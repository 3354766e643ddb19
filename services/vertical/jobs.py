"""The kinds of joint jobs, by name; each is imported when it is asked for, since some need torch or TenSEAL."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from federated.vertical.kinds import Kind

KINDS: Final[Mapping[str, str]] = {
    "psi": "federated.psi.kind:KIND",
    "binning": "federated.vertical.binning.kind:KIND",
    "linear": "federated.vertical.linear.kind:KIND",
    "boosting": "federated.vertical.boosting.kind:KIND",
    "split": "federated.vertical.split.kind:KIND",
    "transfer": "federated.vertical.transfer.kind:KIND",
}
EXTRA: Final = "HEADWATER_VERTICAL_KINDS"
"""Environment: kinds beside these, ``NAME=MODULE:ATTRIBUTE`` separated by commas. For kinds of one's own."""


class JobRefused(ValueError):
    """A kind or options that are not there; the message says what is."""


def names() -> dict[str, str]:
    """Where every kind is, by name."""
    found = dict(KINDS)
    for one in filter(None, os.environ.get(EXTRA, "").split(",")):
        name, _, place = one.partition("=")
        found[name.strip()] = place.strip()
    return found


def find_kind(name: str) -> Kind[Any]:
    """The kind called ``name``. Raises JobRefused."""
    places = names()
    if name not in places:
        close = difflib.get_close_matches(name, places, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(places)}"
        raise JobRefused(f"there is no kind of job {name!r}{hint}")
    module, _, attribute = places[name].partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise JobRefused(
            f"{name} cannot be loaded ({error}); `pip install headwater[vertical]` brings what it needs"
        ) from error
    assert isinstance(kind, Kind)
    return kind


def parse_options(kind: Kind[Any], given: Mapping[str, Any]) -> Any:
    """``given`` as the kind's options. Raises JobRefused naming each that is unknown or wrong."""
    known = getattr(kind.options, "__dataclass_fields__", {})
    if unknown := [name for name in given if name not in known]:
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(known) or 'none'}"
        raise JobRefused(f"{kind.name} has no option {unknown[0]!r}{hint}")
    adapter: TypeAdapter[Any] = TypeAdapter(kind.options)
    try:
        return adapter.validate_python(dict(given))
    except ValidationError as error:
        # What the options refuse as a whole has no place, and a message that begins with pydantic's own words.
        told = [
            ": ".join([*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")])
            for one in error.errors()
        ]
        raise JobRefused(f"options of {kind.name}: {'; '.join(told)}") from error
    except ValueError as error:
        raise JobRefused(f"options of {kind.name}: {error}") from error


def settings_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job's settings (``what``, ``options``, ``align``, ``psi`` and others) with the options' defaults. Raises
    JobRefused."""
    kind = find_kind(job["what"])
    found = {**job, "options": asdict(parse_options(kind, job["options"]))}
    if kind.aligned and job["align"] == "psi":
        found["psi"] = asdict(parse_options(find_kind("psi"), job["psi"]))
    else:
        found.pop("psi", None)
    return found
