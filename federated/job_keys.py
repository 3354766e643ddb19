"""The keys of a job's file as a flat list: section, key, kind, default, meaning. All but the meaning (``job_texts``) is
read from the dataclasses, functions and catalogues that read the file, so that it is what they take.

UnknownSection (ValueError)     there is no such section; the message names the nearest
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from federated.job import FederatedJob
from federated.job_sections import KINDS, Named, unknown_section
from federated.job_texts import TEXTS
from federated.models import MODELS
from federated.recommendation.model import OBJECTIVES, item_table
from federated.selection import RULES, FairnessCap
from federated.simulator.population import Habits
from federated.strategies import STRATEGIES

DERIVED: Final = frozenset({
    ("rounds", "", "most_releases"), ("rounds", "", "sampled"), ("simulation", "", "habits"),
    *(("strategy", name, "max_examples") for name in STRATEGIES),
    ("strategy", "signds", "server_rate"), ("strategy", "signds", "magnitude_epsilon"),
    *(("selection", name, "window") for name in RULES if name != FairnessCap.name),
})  # fmt: skip
"""(section, whose, field) of what is no key: a job finds it from other keys, and refuses it or has no use for it; and
a table of its own."""
_WORDS: Final[Mapping[object, str]] = {
    int: "whole number", float: "number", Decimal: "decimal number", str: "text", bool: "true or false",
}  # fmt: skip
_UNITS: Final = {"_s": 'seconds, or text such as "30s"', "_bytes": 'bytes, or text such as "64MiB"'}
_DATA: Final = ("features", "classes", "items")  # of models: what the data decide


class UnknownSection(ValueError):
    """No section of a job's file."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """One key. ``of`` are the strategies, selections or models whose option it is, nothing for all; ``default`` None
    where nothing is as good as said, or, if ``needed``, where there is none."""

    section: str
    key: str
    kind: str
    default: object
    doc: str
    choices: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    needed: bool = False

    def as_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        default = float(self.default) if isinstance(self.default, Decimal) else self.default
        return {**dataclasses.asdict(self), "default": default}


@cache
def job_keys() -> tuple[JobKey, ...]:
    """All keys, in the order of the job's sections."""
    found: list[JobKey] = []
    named = {"strategy": _strategies, "selection": _selections, "model": _models}
    for section in dataclasses.fields(FederatedJob):
        if section.name in named:
            default = section.default
            assert isinstance(default, Named)
            found += [_name(section.name, default.name), *_merged(named[section.name]())]
        else:
            found += _of_kind(section.name, "", "", KINDS[section.name])
            if section.name == "simulation":
                found += _of_kind("simulation", "", "habits.", Habits)
    return tuple(found)


def keys_of(section: str) -> tuple[JobKey, ...]:
    """The keys of one section. Raises UnknownSection."""
    found = tuple(key for key in job_keys() if key.section == section)
    if not found:
        raise UnknownSection(unknown_section(section, list(dict.fromkeys(key.section for key in job_keys()))))
    return found


def names_of(section: str) -> tuple[str, ...]:
    """The strategies, selections or models that there are; nothing for other sections."""
    catalogues: Mapping[str, Mapping[str, object]] = {
        "strategy": STRATEGIES,
        "selection": RULES,
        "model": MODELS,
    }
    return tuple(catalogues.get(section, ()))


def _name(section: str, default: str) -> JobKey:
    choices = names_of(section)
    return JobKey(section, "name", _listed(choices), default, TEXTS[f"{section}.name"], choices)


def _strategies() -> Iterator[JobKey]:
    for name, kind in STRATEGIES.items():
        yield from _of_kind("strategy", name, "", kind)


def _selections() -> Iterator[JobKey]:
    for name, kind in RULES.items():
        yield from _of_kind("selection", name, "", kind)


def _models() -> Iterator[JobKey]:
    for name, make in MODELS.items():
        yield from _of_function(name, item_table if name == "items" else make)
    for name, kind in OBJECTIVES.items():
        # ``dim`` is the table's own, above.
        yield from (key for key in _of_kind("model", f"items/{name}", "", kind) if key.key != "dim")


def _of_kind(section: str, whose: str, prefix: str, kind: type[Any]) -> list[JobKey]:
    """The keys that the fields of the dataclass ``kind`` are, each after ``prefix``."""
    hints = get_type_hints(kind)
    found = []
    for field in dataclasses.fields(kind):
        if not field.init or (section, whose, field.name) in DERIVED:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        missing = default is dataclasses.MISSING
        found.append(
            _key(
                section,
                whose,
                prefix + field.name,
                hints[field.name],
                None if missing else default,
                needed=missing,
            )
        )
    return found


def _of_function(model: str, make: Callable[..., object]) -> Iterator[JobKey]:
    hints = get_type_hints(make)
    for parameter in inspect.signature(make).parameters.values():
        if parameter.name not in _DATA and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            key = _key("model", model, parameter.name, hints[parameter.name], parameter.default)
            if key.key == "objective":
                key = dataclasses.replace(key, kind=_listed(list(OBJECTIVES)), choices=tuple(OBJECTIVES))
            yield key


def _key(
    section: str, whose: str, key: str, hint: object, default: object, *, needed: bool = False
) -> JobKey:
    choices = _choices(hint)
    doc = TEXTS.get(f"{section}.{whose}.{key}") or TEXTS[f"{section}.{key}"]
    return JobKey(section, key, _kind(key, hint), default, doc, choices, (whose,) if whose else (), needed)


def _merged(keys: Iterator[JobKey]) -> list[JobKey]:
    """Options that are the same for several, once; for all, of nobody in particular."""
    found: dict[tuple[object, ...], JobKey] = {}
    for key in keys:
        same = (key.key, key.kind, repr(key.default), key.doc, key.needed)
        of = (*found[same].of, *key.of) if same in found else key.of
        found[same] = dataclasses.replace(key, of=of)
    return [
        dataclasses.replace(key, of=() if set(key.of) == set(names_of(key.section)) else key.of)
        for key in found.values()
    ]


def _choices(hint: object) -> tuple[str, ...]:
    return tuple(str(choice) for choice in get_args(hint)) if get_origin(hint) is Literal else ()


def _kind(key: str, hint: object) -> str:
    """What a key takes, in words."""
    unit = next((words for unit, words in _UNITS.items() if key.endswith(unit)), None)
    if unit is not None:
        return unit
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return _listed([str(part) for part in parts])
    if origin in (Union, types.UnionType):
        return " or ".join(_kind("", part) for part in parts if part is not type(None))
    if origin is tuple or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return f"list of {_kind('', parts[0])}s"
    return _WORDS[hint]


def _listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
