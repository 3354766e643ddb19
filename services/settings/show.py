"""Settings for people and for other processes: values with their origins, and as a TOML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from pydantic import BaseModel, SecretStr

from services.settings.catalogue import SettingKey, catalogue, section_docs
from services.settings.load import Loaded
from services.settings.model import Settings

MASK: Final = "**********"
_WIDTH: Final = 100
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "duration": {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 1e-6},
    "size": {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1},
}
Simple = None | bool | int | float | str
Plain = Simple | list[str] | list[dict[str, Simple]]


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One setting as shown to people; secrets are masked. ``text``: its value with its unit, as the settings file takes
    it."""

    name: str
    value: Plain
    origin: str
    text: Plain


def shown(loaded: Loaded) -> Iterator[ShownSetting]:
    """Each setting with its value and where it came from."""
    for key in catalogue():
        value = _plain(_value(loaded.settings, key), reveal=False)
        yield ShownSetting(key.name, value, str(loaded.origins[key.name]), _readable(key, value))


def to_toml(settings: Settings) -> str:
    """All values as a TOML file that reads back as the same settings. **Secrets are in it.**"""
    lines: list[str] = []
    for section, keys in _by_section().items():
        lines.append(f"[{section}]")
        for key in keys:
            value = _plain(_value(settings, key), reveal=True)
            if value is not None:
                lines.append(f"{key.key} = {_literal(value)}")
        lines.append("")
    return "\n".join(lines)


def override(name: str, value: object) -> str:
    """``section.key=value`` as ``--set`` takes it, which reads back as ``value``. **A secret stands in it plainly.**"""
    return f"{name}={_literal(_plain(value, reveal=True))}"


def defaults_toml() -> str:
    """Every setting as a comment with its default, meaning and what it takes: a file to start from."""
    lines = [
        "# Settings of Headwater. What stands here overrides the defaults shown; the environment",
        "# (HEADWATER__SECTION__KEY) and flags (--set section.key=value) override this file.",
    ]
    docs = section_docs()
    for section, keys in _by_section().items():
        lines += ["", *_comment(docs.get(section, "")), f"[{section}]"]
        for key in keys:
            lines += _comment(key.doc)
            default = _plain(key.default, reveal=True)
            shown_default = '""' if default is None else _literal(_readable(key, default))
            lines.append(f"# {key.key} = {shown_default}{_hint(key)}")
    return "\n".join(lines) + "\n"


def _hint(key: SettingKey) -> str:
    hints = [*([key.allowed] if key.choices else []), *(["optional"] if key.optional else [])]
    return f"  # {', '.join(hints)}" if hints else ""


def _comment(text: str) -> list[str]:
    """``text`` as comment lines of bounded width."""
    lines: list[str] = []
    for word in text.replace("``", "`").split():
        if lines and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"# {word}")
    return lines


def _readable(key: SettingKey, value: Plain) -> Plain:
    """Durations and sizes with the largest unit that they are a whole number of, to be read back as they are."""
    units = _UNITS.get(key.kind)
    if units is None or isinstance(value, bool) or not isinstance(value, int | float):
        return value
    for unit, factor in units.items():
        number = round(value / factor)
        if number >= 1 and number * factor == value:
            return f"{number}{unit}"
    return f"{Decimal(repr(value or 0)):f}{'s' if key.kind == 'duration' else 'B'}"


def _by_section() -> dict[str, list[SettingKey]]:
    sections: dict[str, list[SettingKey]] = {}
    for key in catalogue():
        sections.setdefault(key.section, []).append(key)
    return sections


def _value(settings: Settings, key: SettingKey) -> object:
    value: object = getattr(getattr(settings, key.section), key.key)
    return value


def _plain(value: object, *, reveal: bool) -> Plain:
    if isinstance(value, SecretStr):
        return value.get_secret_value() if reveal else MASK
    if isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        return [table.model_dump(exclude_none=True) for table in value]
    if isinstance(value, tuple | list):
        return [str(_plain(part, reveal=reveal)) for part in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a setting of type {type(value).__name__} has no text form")


def _literal(value: Plain) -> str:
    """A TOML value. JSON's strings, numbers, booleans and lists of strings are TOML's too, but for DEL."""
    if isinstance(value, list):
        return f"[{', '.join(_inline(part) for part in value)}]"
    return json.dumps(value).replace("\x7f", "\\u007f")


def _inline(part: str | dict[str, Simple]) -> str:
    if isinstance(part, str):
        return _literal(part)
    return "{" + ", ".join(f"{key} = {_literal(value)}" for key, value in part.items()) + "}"
