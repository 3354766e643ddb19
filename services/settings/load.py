"""Reads the settings: defaults < file < environment < flags, all through one parser.

Every problem is collected before the start is refused, each with the setting's name, the value, where the
value came from, what is allowed and, for a name that does not exist, the likely one.

Exceptions::

    SettingsError            carries ``problems``, one for each wrong setting
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import ValidationError

from services.settings.catalogue import SettingKey, catalogue
from services.settings.checks import check
from services.settings.model import Settings
from services.settings.problems import SettingProblem, SettingsError

PREFIX: Final = "HEADWATER__"
_MASK: Final = "**********"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from, such as ``file headwater.toml, line 3`` or ``flag --set log.partitions``."""

    kind: Literal["default", "file", "environment", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and for each ``section.key`` where its value came from."""

    settings: Settings
    origins: Mapping[str, Origin]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as somebody gave it: text from environment and flags, TOML types from a file."""

    name: str
    value: object
    origin: Origin


def load_settings(
    file: Path | None = None, environ: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> Loaded:
    """Settings from a TOML ``file``, an environment and ``section.key=value`` overrides (later ones win).

    Raises SettingsError with all problems at once.
    """
    problems: list[SettingProblem] = []
    given: dict[str, _Given] = {}
    layers = (_from_file(file, problems), _from_environment(environ or {}), _from_flags(overrides, problems))
    known = {key.name: key for key in catalogue()}
    for layer in layers:
        for value in layer:
            if value.name in known:
                given[value.name] = value
            else:
                problems.append(_unknown(value, known))
    settings = _build(given, known, problems)
    origins = {name: given[name].origin if name in given else Origin("default") for name in known}
    if settings is not None:
        problems += [problem.at(str(origins[problem.name])) for problem in check(settings)]
    if problems or settings is None:
        raise SettingsError(tuple(problems))
    return Loaded(settings, origins)


def _from_file(file: Path | None, problems: list[SettingProblem]) -> Iterator[_Given]:
    if file is None:
        return
    origin = Origin("file", str(file))
    try:
        text = file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(SettingProblem("(file)", str(file), str(origin), f"cannot be read: {reason}"))
        return
    lines = _lines(text)
    for section, table in document.items():
        if not isinstance(table, dict):
            where = Origin("file", f"{file}, line {lines[section]}") if section in lines else origin
            yield _Given(section, table, where)
            continue
        for key, value in table.items():
            name = f"{section}.{key}"
            yield _Given(
                name, value, Origin("file", f"{file}, line {lines[name]}") if name in lines else origin
            )


def _lines(text: str) -> dict[str, int]:
    """The line of each ``section.key`` that stands plainly in a TOML text (dotted and inline ones do not)."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("[") and "]" in stripped and "=" not in stripped.split("]")[0]:
            section = stripped.lstrip("[")[: stripped.lstrip("[").index("]")].strip()
            if stripped.startswith("[["):
                found.setdefault(section, number)
        elif "=" in stripped and not stripped.startswith("#"):
            key = stripped.split("=", 1)[0].strip().strip("\"'")
            found.setdefault(f"{section}.{key}" if section else key, number)
    return found


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            name = variable[len(PREFIX) :].lower().replace("__", ".")
            yield _Given(name, environ[variable], Origin("environment", variable))


def _from_flags(overrides: Iterable[str], problems: list[SettingProblem]) -> Iterator[_Given]:
    for override in overrides:
        name, equals, value = override.partition("=")
        if equals:
            yield _Given(name.strip(), value, Origin("flag", f"--set {name.strip()}"))
        else:
            problems.append(
                SettingProblem(name, "", f"flag --set {override}", "has no value", "section.key=value")
            )


def _unknown(given: _Given, known: Mapping[str, SettingKey]) -> SettingProblem:
    near = difflib.get_close_matches(given.name, known, n=1, cutoff=0.5)
    if not near:
        # The section may be right and the key far off, or the other way round: compare the keys alone.
        by_key = {name.split(".", 1)[1]: name for name in known}
        near = [by_key[key] for key in difflib.get_close_matches(given.name.split(".")[-1], by_key, n=1)]
    suggestion = f"did you mean {near[0]}?" if near else "`headwater config show` lists all settings"
    # A mistyped name may well carry a secret, so its value is shown only when it cannot be one.
    secret = any(known[name].secret for name in near) or any(word in given.name for word in ("key", "url"))
    value = _MASK if secret else str(given.value)
    return SettingProblem(given.name, value, str(given.origin), "is not a setting", suggestion)


def _build(
    given: Mapping[str, _Given], known: Mapping[str, SettingKey], problems: list[SettingProblem]
) -> Settings | None:
    sections: dict[str, dict[str, object]] = {key.section: {} for key in known.values()}
    for name, value in given.items():
        key = known[name]
        if isinstance(value.value, bool) and key.kind not in ("bool", "text"):
            problems.append(_wrong(value, key, "true or false stands where something else belongs"))
            continue
        try:
            sections[key.section][key.key] = (
                key.parse(value.value) if isinstance(value.value, str) else value.value
            )
        except ValueError as error:
            problems.append(_wrong(value, key, str(error)))
    try:
        return Settings.model_validate(sections)
    except ValidationError as error:
        named: set[str] = set()
        for detail in error.errors(include_input=False, include_url=False):
            name = ".".join(str(part) for part in detail["loc"][:2])
            if name in given and name not in named:
                named.add(name)
                within = "".join(f"{part}: " for part in detail["loc"][3:])
                reason = within + detail["msg"].removeprefix("Value error, ")
                problems.append(_wrong(given[name], known[name], reason))
        return None


def _wrong(given: _Given, key: SettingKey, reason: str) -> SettingProblem:
    value = _MASK if key.secret else str(given.value)
    if key.secret:
        reason = "is not of the right form"
    suggestion = ""
    if key.choices and isinstance(given.value, str):
        near = difflib.get_close_matches(given.value, key.choices, n=1)
        suggestion = f"did you mean {near[0]}?" if near else ""
    return SettingProblem(key.name, value, str(given.origin), reason, suggestion, key.allowed)
