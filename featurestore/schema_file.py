"""Schemas as TOML: ``[entity.feature]`` tables in, features out, every mistake named.

::

    [item.year]
    kind = "number"          # categorical, number, list, counter
    mean = 1990
    std = 14
    ttl = "30d"              # seconds, or a number with ms, s, m, h, d
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Final, cast

from featurestore.feature import ENTITIES, KINDS, Default, Feature, Kind, SchemaError, Transform, suggestion

_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_IN_SECONDS: Final = {"ttl": "ttl_s", "half_life": "half_life_s"}
_KEYS: Final = tuple(
    {name: key for key, name in _IN_SECONDS.items()}.get(field.name, field.name)
    for field in fields(Feature)
    if field.name not in ("entity", "name")
)


def load_features(path: Path) -> tuple[Feature, ...]:
    """The features declared in the file. Raises SchemaError that begins with the file's name."""
    try:
        return parse_features(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path}: cannot be read: {error}") from error
    except SchemaError as error:
        raise SchemaError(f"{path}: {error}") from error


def default_features() -> tuple[Feature, ...]:
    """The features of the built-in schema."""
    return parse_features(files("featurestore").joinpath("default_schema.toml").read_text(encoding="utf-8"))


def parse_features(text: str) -> tuple[Feature, ...]:
    """The features declared in TOML ``text``, in its order. Raises SchemaError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SchemaError(f"not valid TOML: {error}") from error
    features = []
    for entity, of in document.items():
        if entity not in ENTITIES:
            legal = f"is not one of {', '.join(ENTITIES)}{suggestion(entity, ENTITIES)}"
            raise SchemaError(f"entity {entity!r} {legal}")
        for name, table in _table(entity, of).items():
            features.append(_feature(entity, name, _table(f"{entity}.{name}", table)))
    return tuple(features)


def _table(path: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise SchemaError(f"{path} = {value!r} must be a table, such as [{path}]")
    return value


def _feature(entity: str, name: str, table: Mapping[str, object]) -> Feature:
    where = f"{entity}.{name}"
    for key, value in table.items():
        if key not in _KEYS:
            raise SchemaError(f"{where}: unknown key {key} = {value!r}{suggestion(key, _KEYS)}")
    if "kind" not in table:
        raise SchemaError(f"{where}: kind is missing; it is one of {', '.join(KINDS)}")
    return Feature(
        entity,
        name,
        cast(Kind, _text(where, table, "kind")),
        default=_default(where, table),
        ttl_s=_seconds(where, table, "ttl"),
        table=_text(where, table, "table"),
        mean=_number(where, table, "mean", 0.0),
        std=_number(where, table, "std", 1.0),
        transform=cast(Transform, _text(where, table, "transform") or "none"),
        source=_text(where, table, "source"),
        buckets=_numbers(where, table, "buckets"),
        half_life_s=_seconds(where, table, "half_life"),
        max_values=_integer(where, table, "max_values", 64),
        managed=_flag(where, table, "managed"),
    )


def _wrong(where: str, key: str, value: object, legal: str) -> SchemaError:
    return SchemaError(f"{where}: {key} = {value!r} must be {legal}")


def _text(where: str, table: Mapping[str, object], key: str) -> str | None:
    value = table.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _wrong(where, key, value, "a text")


def _flag(where: str, table: Mapping[str, object], key: str) -> bool:
    value = table.get(key, False)
    if isinstance(value, bool):
        return value
    raise _wrong(where, key, value, "true or false")


def _integer(where: str, table: Mapping[str, object], key: str, default: int) -> int:
    value = table.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _wrong(where, key, value, "a whole number")


def _number(where: str, table: Mapping[str, object], key: str, default: float) -> float:
    value = table.get(key, default)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _wrong(where, key, value, "a number")


def _numbers(where: str, table: Mapping[str, object], key: str) -> tuple[float, ...]:
    values = table.get(key, [])
    if isinstance(values, list) and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in values
    ):
        return tuple(float(v) for v in values)
    raise _wrong(where, key, values, "a list of numbers")


def _seconds(where: str, table: Mapping[str, object], key: str) -> float:
    value = table.get(key, 0.0)
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise _wrong(where, key, value, "a number with ms, s, m, h or d, such as '30d'")
        return float(match[1]) * _SECONDS[match[2]]
    return _number(where, table, key, 0.0)


def _default(where: str, table: Mapping[str, object]) -> Default:
    value = table.get("default")
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise _wrong(where, "default", value, "a text, a number or a list of texts")
