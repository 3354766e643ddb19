"""Tables of a settings file as frozen dataclasses, with the standard library alone.

A key is a field's name. Of a field whose name ends in a unit (``_s`` seconds, ``_bytes``) the unit may be left out, and
text says it: ``"300s"``, ``"2m"``, ``"64MiB"``. Nothing unknown, of another type or given twice is passed over.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "_s": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0},
    "_bytes": {
        "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
        "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    },
}  # fmt: skip
_EXAMPLE: Final = {"_s": "30s", "_bytes": "64MiB"}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


class SectionRefused(ValueError):
    """A table that does not fit; the message names the key and what it should be."""


def read_section(kind: type[T], table: object, where: str) -> T:
    """``table`` as a ``kind`` (a dataclass). ``where`` names it in errors. Raises SectionRefused."""
    if not isinstance(table, Mapping):
        raise SectionRefused(f"{where} must be a table, not {table!r}")
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = _field_of(str(key), list(fields), where)
        if name in values:
            raise SectionRefused(f"{where}.{key} is given twice, with and without its unit")
        values[name] = _value(value, hints[name], name, f"{where}.{key}")
    missing = [name for name, field in fields.items() if name not in values and _required(field)]
    if missing:
        raise SectionRefused(f"{where} needs {', '.join(missing)}")
    try:
        return kind(**values)
    except ValueError as error:
        raise SectionRefused(f"{where}: {error}") from error


def unknown(word: str, known: list[str], what: str) -> str:
    """The sentence that refuses ``word``, with the nearest of ``known``."""
    near = get_close_matches(word, known, 1)
    return f"{what} {word!r} is unknown" + (
        f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    )


def quantity(text: str, unit: str) -> float:
    """Seconds (``unit`` "_s") or bytes ("_bytes") of ``text``. Raises SectionRefused."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNITS[unit]:
        units = ", ".join(_UNITS[unit])
        raise SectionRefused(f"{text!r} is not a number and a unit ({units}), such as {_EXAMPLE[unit]!r}")
    return float(match[1]) * _UNITS[unit][match[2]]


def _field_of(key: str, names: list[str], where: str) -> str:
    for name in (key, *(key + unit for unit in _UNITS)):
        if name in names:
            return name
    short = [name.removesuffix("_bytes").removesuffix("_s") for name in names]
    raise SectionRefused(unknown(key, short, f"{where}: the key"))


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(value: object, hint: Any, name: str, where: str) -> Any:
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [option for option in options if option is not type(None)]
        return _value(value, inner[0], name, where)
    if origin is Literal:
        if value not in options:
            raise SectionRefused(
                unknown(str(value), [str(option) for option in options], f"{where}: the value")
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise SectionRefused(f"{where} must be a list, not {value!r}")
        return tuple(_value(one, options[0], name, where) for one in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise SectionRefused(f"{where} must be a table, not {value!r}")
        return dict(value)
    return _scalar(value, hint, name, where)


def _scalar(value: object, kind: type[Any], name: str, where: str) -> Any:
    unit = next((unit for unit in _UNITS if name.endswith(unit)), None)
    if unit is not None and isinstance(value, str):
        try:
            value = kind(quantity(value, unit))
        except SectionRefused as error:
            raise SectionRefused(f"{where}: {error}") from None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is Decimal and (number or isinstance(value, (str, Decimal))):
        try:
            return Decimal(str(value))
        except InvalidOperation:
            raise SectionRefused(f"{where} must be a decimal number, not {value!r}") from None
    if kind is float and number:
        return float(value)  # type: ignore[arg-type]
    if isinstance(value, kind) and (kind is not int or number):
        return value
    raise SectionRefused(f"{where} must be {_NAMES.get(kind, kind.__name__)}, not {value!r}")


_NAMES: Final = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def write_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML that ``tomllib`` reads back as ``tables`` (None is left out; a table in a table becomes its own)."""
    lines: list[str] = []
    for title, table in tables.items():
        plain = {
            key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)
        }
        if plain:
            lines += [f"[{title}]", *(f"{key} = {_written(value)}" for key, value in plain.items()), ""]
        inner = {
            f"{title}.{key}": value for key, value in table.items() if isinstance(value, Mapping) and value
        }
        if inner:
            lines += [write_tables(inner)]
    return "\n".join(lines)


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, Decimal)):
        return str(value) if isinstance(value, int) else f'"{value}"'
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return '"' + "".join(_ESCAPES.get(c, c) for c in value) + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_written(one) for one in value) + "]"
    raise TypeError(f"{value!r} has no place in a settings file")


_ESCAPES: Final = {'"': '\\"', "\\": "\\\\"} | {chr(c): f"\\u{c:04x}" for c in (*range(32), 127)}
