"""The settings as a flat list: name, kind, default, meaning; read from the model, never kept twice."""

from __future__ import annotations

import ast
import inspect
import tomllib
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Final, Literal, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.settings import model
from services.settings.units import parse_duration, parse_size

Kind = Literal["bool", "duration", "list", "number", "size", "tables", "text"]
_EXAMPLES: Final = {
    "bool": "true or false",
    "duration": 'a number of seconds, or text such as "250ms", "30s", "7d"',
    "list": "a list, or text separated by commas",
    "size": 'a number of bytes, or text such as "64MiB", "2GB"',
    "text": "text",
}
_LIMITS: Final = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting: where it stands, what it takes, what it is unless told otherwise, what it means."""

    section: str
    key: str
    kind: Kind
    default: object
    doc: str
    allowed: str
    choices: tuple[str, ...] = ()
    secret: bool = False
    optional: bool = False

    @property
    def name(self) -> str:
        """``section.key``, as flags and messages call it."""
        return f"{self.section}.{self.key}"

    def parse(self, text: str) -> object:
        """The value that ``text`` (of the environment, a flag, or a quoted TOML string) stands for.

        Raises ValueError where the text cannot be of this setting's kind.
        """
        if self.optional and text == "":
            return None
        if self.kind == "tables" and not text.lstrip().startswith("["):
            raise ValueError(f"{text!r} is not a TOML list of tables")
        if self.kind in ("list", "tables"):
            return _parse_list(text)
        if self.kind in ("duration", "size"):
            number = _literal(text)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return number
            return parse_duration(text) if self.kind == "duration" else parse_size(text)
        if self.kind == "bool" and text.lower() not in ("true", "false"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text


def _literal(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _parse_list(text: str) -> object:
    if text.lstrip().startswith("["):
        value = _literal(text)
        if isinstance(value, str):
            raise ValueError(f"{text!r} is not a TOML list")
        return value
    return [part.strip() for part in text.split(",") if part.strip()]


@cache
def catalogue() -> tuple[SettingKey, ...]:
    """All settings, in the order of the model."""
    keys: list[SettingKey] = []
    for section, info in model.Settings.model_fields.items():
        table = info.annotation
        assert isinstance(table, type)
        assert issubclass(table, BaseModel)
        docs = _field_docs(table)
        keys += [
            _describe(section, key, field, docs.get(key, "")) for key, field in table.model_fields.items()
        ]
    return tuple(keys)


@cache
def section_docs() -> dict[str, str]:
    """What each section is about."""
    return {
        section: inspect.cleandoc(info.annotation.__doc__ or "")
        for section, info in model.Settings.model_fields.items()
        if info.annotation is not None
    }


def _field_docs(table: type[BaseModel]) -> dict[str, str]:
    """The string that stands below each field in the source: Python keeps no docstring for attributes."""
    parsed = ast.parse(inspect.getsource(table)).body[0]
    assert isinstance(parsed, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(parsed.body, parsed.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[field.target.id] = inspect.cleandoc(str(below.value.value))
    return docs


def _describe(section: str, key: str, field: FieldInfo, doc: str) -> SettingKey:
    optional = NoneType in get_args(field.annotation)
    types = (
        [part for part in get_args(field.annotation) if part is not NoneType]
        if optional
        else [field.annotation]
    )
    choices = tuple(str(choice) for choice in get_args(types[0])) if get_origin(types[0]) is Literal else ()
    kind = _kind(types[0], field)
    allowed = _fields(types[0]) if kind == "tables" else _allowed(kind, choices, field)
    default = None if field.default is PydanticUndefined else field.default
    return SettingKey(
        section,
        key,
        kind,
        default,
        doc,
        allowed,
        choices,
        _is_secret(types[0]),
        optional,
    )


def _kind(annotation: object, field: FieldInfo) -> Kind:
    # Of what may be absent the marks stand on the part that is not None.
    marks = (*field.metadata, *getattr(annotation, "__metadata__", ()))
    functions = {getattr(mark, "func", None) for mark in marks}
    if parse_duration in functions:
        return "duration"
    if parse_size in functions:
        return "size"
    if get_origin(annotation) is tuple:
        return "list" if _table(annotation) is None else "tables"
    if annotation is bool:
        return "bool"
    return "number" if annotation in (int, float) else "text"


def _table(annotation: object) -> type[BaseModel] | None:
    """What the tables of a list are, if it is one of tables."""
    parts = get_args(annotation)
    return parts[0] if parts and isinstance(parts[0], type) and issubclass(parts[0], BaseModel) else None


def _fields(annotation: object) -> str:
    table = _table(annotation)
    assert table is not None
    needed = ", ".join(name for name, field in table.model_fields.items() if field.is_required())
    others = ", ".join(name for name, field in table.model_fields.items() if not field.is_required())
    return f"tables with {needed} and, optionally, {others}"


def _is_secret(annotation: object) -> bool:
    return annotation is SecretStr or SecretStr in get_args(annotation)


def _allowed(kind: Kind, choices: tuple[str, ...], field: FieldInfo) -> str:
    if choices:
        return "one of " + ", ".join(choices)
    limits = [
        f"{words} {getattr(mark, name):g}"
        for mark in field.metadata
        for name, words in _LIMITS.items()
        if getattr(mark, name, None) is not None
    ]
    if kind == "number":
        what = "a whole number" if field.annotation is int else "a number"
        return " ".join([what, " and ".join(limits)]).rstrip()
    return _EXAMPLES[kind]
