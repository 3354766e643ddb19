"""A party's table with the columns that it learns from: named in its file, or kept by a job of kind ``binning``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from federated.vertical.tables import Table, read_table
from services.vertical.config import ConfigRefused, DataSection

MOST_BYTES: Final = 2**28


@dataclass(frozen=True, slots=True)
class Chosen:
    """``learned``: the columns to learn from. ``among``: those of the job that chose them. None: all there are."""

    learned: tuple[str, ...] | None = None
    among: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """``whole``: with the columns of the job that chose among them, so that the same rows are held out as there:
    columns that were chosen by a row's label must not be measured on that row. ``learned``: with those to learn from.
    """

    whole: Table
    learned: Table


def read_columns(chosen: Path | tuple[str, ...] | None) -> Chosen:
    """What ``data.columns`` says: names, or a file (JSON) with names under ``columns`` and ``among``.

    Raises ConfigRefused.
    """
    if not isinstance(chosen, Path):
        return Chosen(chosen, chosen)
    try:
        if chosen.stat().st_size > MOST_BYTES:
            raise ConfigRefused(f"{chosen} has more than {MOST_BYTES} bytes")
        found = json.loads(chosen.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigRefused(f"data.columns: {chosen} cannot be read as JSON: {error}") from error
    try:
        return Chosen(*(_names(found[key]) for key in ("columns", "among")))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigRefused(
            f"data.columns: {chosen} has no lists of names under 'columns' and 'among'"
        ) from error


def _names(found: object) -> tuple[str, ...]:
    """Raises ValueError for what is no list of names."""
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{type(found).__name__} where a list of names is expected")
    return tuple(found)


def open_tables(data: DataSection) -> Tables:
    """The party's table. Raises ConfigRefused, TableRefused."""
    chosen = read_columns(data.columns)
    whole = read_table(data.path, id_column=data.id, label_column=data.label, features=chosen.among)
    if chosen.learned is None:
        return Tables(whole, whole)
    if missing := [name for name in chosen.learned if name not in whole.names]:
        raise ConfigRefused(f"data.columns: {missing[0]!r} is not among the columns of the job that chose it")
    return Tables(whole, whole.only(chosen.learned))
