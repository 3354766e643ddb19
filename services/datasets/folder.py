"""A folder of ``users``, ``items`` and ``events`` files as a data set, with all that is wrong in it named.

``users`` have ``user_id``, ``items`` have ``item_id``; all other columns are attributes. ``events`` are
interactions: ``user_id``, ``item_id``, ``action`` (``rating`` where only a ``value`` is given), ``value``,
``event_id`` and ``timestamp_ms`` (Unix ms) or ``timestamp`` (ISO 8601, Unix seconds or Unix ms). In CSV, lists
are separated by ``|``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from featurestore.feature import suggestion
from featurestore.schema import Schema
from services.datasets.dataset import NO_VALUE, Attribute, Dataset, Entities, Interactions
from services.datasets.errors import BadRows, DatasetError, RowError
from services.datasets.rows import Cells, find, read_rows
from services.processor.records import is_id

_EVENT_COLUMNS: Final = ("user_id", "item_id", "action", "value", "event_id", "timestamp_ms", "timestamp")
_SHOWN: Final = 20
_LIST_SEPARATOR: Final = "|"
# Unix seconds reach this in the year 5138, Unix milliseconds reached it in 1973.
_SECONDS_BELOW: Final = 1e11
_LAST_MS: Final = 2**52


class _Wrong(Exception):
    """What is wrong with a row."""


@dataclass(slots=True)
class _Errors:
    """The first wrong rows, and how many there are."""

    first: list[RowError] = field(default_factory=list)
    total: int = 0

    def add(self, error: RowError) -> None:
        self.total += 1
        if len(self.first) < _SHOWN:
            self.first.append(error)


@dataclass(slots=True)
class _Table:
    """Users or items as they are gathered: id to row, and the attributes of each row."""

    rows: dict[str, int] = field(default_factory=dict)
    attributes: list[Mapping[str, Attribute]] = field(default_factory=list)

    def add(self, id_: str, attributes: Mapping[str, Attribute]) -> int:
        row = self.rows[id_] = len(self.attributes)
        self.attributes.append(attributes)
        return row

    def row(self, id_: str) -> int:
        """The row of ``id_``; an event for something unknown creates it."""
        found = self.rows.get(id_)
        return self.add(id_, {}) if found is None else found

    def entities(self) -> Entities:
        return Entities(tuple(self.rows), tuple(self.attributes))


@dataclass(slots=True)
class _Events:
    """Columns of the interactions as they are gathered."""

    user: list[int] = field(default_factory=list)
    item: list[int] = field(default_factory=list)
    action: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    timestamp_ms: list[int] = field(default_factory=list)
    event_id: list[str] = field(default_factory=list)
    actions: dict[str, int] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)

    def interactions(self) -> Interactions:
        return Interactions(
            np.array(self.user, np.int32),
            np.array(self.item, np.int32),
            np.array(self.action, np.int16),
            np.array(self.value, np.float64),
            np.array(self.timestamp_ms, np.int64),
            np.array(self.event_id, np.object_),
            tuple(self.actions),
        )


def read_folder(folder: Path, schema: Schema, *, skip_bad: bool = False) -> tuple[Dataset, tuple[str, ...]]:
    """The data set in ``folder`` and what its user must be told (rows passed over with ``skip_bad``).

    Raises BadRows with the first 20 wrong rows, or DatasetError where a file is missing or unreadable.
    """
    files = {name: find(folder, name) for name in ("users", "items", "events")}
    if not any(files.values()):
        raise DatasetError(f"{folder} has none of users, items, events as .csv, .jsonl or .parquet")
    errors = _Errors()
    users, items, events = _Table(), _Table(), _Events()
    _read_entities(files["users"], "user", schema, users, errors)
    _read_entities(files["items"], "item", schema, items, errors)
    _read_events(files["events"], folder.resolve().name, users, items, events, errors)
    if errors.total and not skip_bad:
        raise BadRows(tuple(errors.first), errors.total)
    notes = (f"{errors.total} wrong rows were passed over:\n{BadRows(tuple(errors.first), errors.total)}",)
    dataset = Dataset(
        folder.resolve().name, str(folder), users.entities(), items.entities(), events.interactions()
    )
    return dataset, notes if errors.total else ()


def _good_rows(path: Path | None, errors: _Errors) -> Iterator[tuple[Path, int, Cells]]:
    if path is None:
        return
    for line, row in read_rows(path):
        if isinstance(row, RowError):
            errors.add(row)
        else:
            yield path, line, row


def _read_entities(path: Path | None, entity: str, schema: Schema, table: _Table, errors: _Errors) -> None:
    lists, numbers = _kinds(schema, entity)
    first_line: dict[str, int] = {}
    for file, line, row in _good_rows(path, errors):
        try:
            id_ = _id(row, f"{entity}_id")
            if id_ in first_line:
                raise _Wrong(f"{entity}_id {id_!r} already stands in line {first_line[id_]}")
            attributes = {
                name: _typed(name, value, lists, numbers)
                for name, value in row.items()
                if name != f"{entity}_id"
            }
            problems = schema.validate(entity, attributes)
            if problems:
                raise _Wrong("; ".join(f"{problem.path} {problem.message}" for problem in problems))
        except _Wrong as error:
            errors.add(RowError(file.name, line, str(error)))
        else:
            first_line[id_] = line
            table.add(id_, attributes)


def _kinds(schema: Schema, entity: str) -> tuple[frozenset[str], frozenset[str]]:
    """Which attributes are lists and which are numbers: a CSV's text says neither."""
    features = [feature for feature in schema.of(entity) if not feature.managed]
    lists = frozenset(feature.attribute for feature in features if feature.kind == "list")
    numbers = (feature.attribute for feature in features if feature.kind == "number" or feature.buckets)
    return lists, frozenset(numbers) - lists


def _typed(name: str, value: object, lists: frozenset[str], numbers: frozenset[str]) -> Attribute:
    if isinstance(value, str) and name in lists:
        return [part for part in value.split(_LIST_SEPARATOR) if part]
    if isinstance(value, str) and name in numbers:
        return _number(name, value)
    if isinstance(value, list):
        if not all(isinstance(part, str) for part in value):
            raise _Wrong(f"{name} must hold texts alone")
        return [str(part) for part in value]
    if isinstance(value, str | int | float):
        return value
    raise _Wrong(f"{name} is {type(value).__name__}, where text, a number, true or false or a list belongs")


def _number(name: str, value: object) -> int | float:
    """``value`` as a finite number; whole numbers stay whole."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(str(value))
            except ValueError:
                raise _Wrong(f"{name} {value!r} is not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong(f"{name} {value!r} is not a number")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise _Wrong(f"{name} is not a finite number that fits 64 bits")
    return value


def _id(row: Cells, name: str) -> str:
    value = row.get(name)
    if value is None:
        raise _Wrong(f"{name} is missing")
    # Numbers are common as ids in JSONL and Parquet, and mean their decimal text.
    text = str(value) if isinstance(value, str) or type(value) is int else ""
    if not is_id(text):
        raise _Wrong(f"{name} {value!r:.60} is not an id: 1 to 256 bytes of UTF-8 without control characters")
    return text


def _read_events(
    path: Path | None, name: str, users: _Table, items: _Table, events: _Events, errors: _Errors
) -> None:
    for file, line, row in _good_rows(path, errors):
        try:
            _add_event(row, name, users, items, events)
        except _Wrong as error:
            errors.add(RowError(file.name, line, str(error)))


def _add_event(row: Cells, name: str, users: _Table, items: _Table, events: _Events) -> None:
    """Check all of a row before any of it is added."""
    unknown = [column for column in row if column not in _EVENT_COLUMNS]
    if unknown:
        raise _Wrong(f"{unknown[0]!r} is not a column of events{suggestion(unknown[0], _EVENT_COLUMNS)}")
    user_id, item_id = _id(row, "user_id"), _id(row, "item_id")
    value = _number("value", row["value"]) if "value" in row else None
    action = row.get("action", "rating" if value is not None else None)
    if action is None:
        raise _Wrong("action is missing, and there is no value that would make it a rating")
    if not isinstance(action, str) or not is_id(action):
        raise _Wrong(f"action {action!r:.60} is not a short text")
    if len(events.actions) >= np.iinfo(np.int16).max and action not in events.actions:
        raise _Wrong("there are too many different actions")
    timestamp_ms = _timestamp_ms(row)
    given_id = _id(row, "event_id") if "event_id" in row else None
    events.event_id.append(
        given_id or _content_id(name, (user_id, item_id, action, value, timestamp_ms), events.repeats)
    )
    events.user.append(users.row(user_id))
    events.item.append(items.row(item_id))
    events.action.append(events.actions.setdefault(action, len(events.actions)))
    events.value.append(NO_VALUE if value is None else float(value))
    events.timestamp_ms.append(timestamp_ms)


def _content_id(name: str, content: tuple[object, ...], repeats: dict[str, int]) -> str:
    """An id that depends on what the row says, and not on its line: a file may grow or be sorted anew."""
    digest = xxhash.xxh3_128_hexdigest(repr(content).encode())
    repeats[digest] = count = repeats.get(digest, 0) + 1
    prefix = name if is_id(f"{name}/{digest}/{count}") else "folder"
    return f"{prefix}/{digest}" if count == 1 else f"{prefix}/{digest}/{count}"


def _timestamp_ms(row: Cells) -> int:
    if "timestamp_ms" in row:
        ms = _number("timestamp_ms", row["timestamp_ms"])
    elif "timestamp" in row:
        ms = _any_time_ms(row["timestamp"])
    else:
        raise _Wrong("timestamp is missing (or timestamp_ms)")
    if ms != int(ms) or not 0 <= ms < _LAST_MS:
        raise _Wrong(f"timestamp {ms} ms is no time after 1970")
    return int(ms)


def _any_time_ms(value: object) -> int:
    if isinstance(value, datetime):
        # A Parquet timestamp without a zone counts from 1970 in UTC.
        return round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1e3)
    try:
        number = _number("timestamp", value)
    except _Wrong:
        return _iso_ms(value)
    return round(number * 1e3) if abs(number) < _SECONDS_BELOW else round(number)


def _iso_ms(value: object) -> int:
    try:
        parsed = datetime.fromisoformat(str(value))
    except ValueError:
        raise _Wrong(f"timestamp {value!r:.60} is neither ISO 8601 nor a number") from None
    if parsed.tzinfo is None:
        raise _Wrong(f"timestamp {value!r:.60} has no time zone; end it with Z for UTC")
    return round(parsed.timestamp() * 1e3)
