"""What is wrong in a party's file, in words: pydantic's errors name what it expects, not what to do about it."""

from __future__ import annotations

import difflib
import re
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError


def formed(pattern: str, what: str) -> AfterValidator:
    """A text that is ``what``: of the form ``pattern``. It is not repeated in the message: it may be a secret."""
    form = re.compile(pattern)

    def check(text: str) -> str:
        if form.fullmatch(text) is None:
            raise ValueError(f"is not {what}")
        return text

    return AfterValidator(check)


def with_port(least: int) -> AfterValidator:
    """``HOST:PORT`` whose port is one."""

    def check(text: str) -> str:
        port = int(text.rpartition(":")[2])
        if not least <= port <= 65_535:
            raise ValueError(f"{port} is not a port between {least} and 65535")
        return text

    return AfterValidator(check)


def told(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Each mistake that ``error`` names in a file of ``model``: its place, what is wrong, and what may be meant."""
    found: dict[str, str] = {}
    for one in error.errors():
        # Of a value that may be of several types, each has its own error, with pydantic's names below the place.
        parts = [part for part in map(str, one["loc"]) if re.fullmatch(r"[A-Za-z0-9_-]+", part)]
        place = ".".join(parts[: len(one["loc"])])
        if one["loc"][:2] == ("data", "columns"):
            place, what = "data.columns", "is neither a file's name nor a list of columns' names"
        else:
            what = _what(one["type"], one["msg"], one["loc"], model)
        found.setdefault(place, f"{place}: {what}" if place else what)
    return list(found.values())


def _what(kind: str, message: str, place: tuple[int | str, ...], model: type[BaseModel]) -> str:
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        known = _fields(model, place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, 1)
        return (
            f"is unknown; did you mean {near[0]!r}?" if near else f"is unknown; there are {', '.join(known)}"
        )
    return message.removeprefix("Value error, ")


def _fields(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The names that the section at ``place`` of a file of ``model`` has."""
    section: Any = model
    for part in place:
        if get_origin(section) is dict:  # A table of sections by name.
            section = get_args(section)[1]
            continue
        section = section.model_fields[str(part)].annotation
        if get_origin(section) is UnionType:  # A section that may be left out.
            section = get_args(section)[0]
    return list(section.model_fields)
