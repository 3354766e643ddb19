"""The schema: every feature declared once, with a fingerprint that all parties compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Final

from featurestore.feature import (
    ENTITIES,
    ID_SOURCE,
    Feature,
    SchemaError,
    suggestion,
    value_problems,
)
from featurestore.online import Cell, Value
from featurestore.schema_file import default_features, load_features

__all__ = [
    "ENTITIES",
    "ID_SOURCE",
    "Feature",
    "FieldError",
    "Schema",
    "SchemaError",
    "SchemaMismatch",
    "default_schema",
]

ENCODING_VERSION: Final = 1
"""Raised when the encoder's arithmetic changes, since the same schema then means something else."""
MAX_ATTRIBUTES: Final = 128
RESERVED_ATTRIBUTES: Final = frozenset({"seen", "state", "deleted"})
"""Cell names that the platform keeps beside the features."""


class SchemaMismatch(SchemaError):
    """Two parties encode by different schemas; ``expected`` and ``found`` are their fingerprints."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"schema fingerprint {found} found where {expected} was expected")
        self.expected = expected
        self.found = found


@dataclass(frozen=True, slots=True)
class FieldError:
    """Something wrong with one attribute: where (``age``, ``categories[2]``) and what."""

    path: str
    message: str


@dataclass(frozen=True, slots=True)
class Columns:
    """The features of an entity as the encoder's columns, each group in schema order."""

    categorical: tuple[Feature, ...]
    numeric: tuple[Feature, ...]
    lists: tuple[Feature, ...]

    @property
    def width(self) -> tuple[int, int, int]:
        """(C, D, L): how many categorical and numeric columns and lists."""
        return len(self.categorical), len(self.numeric), len(self.lists)

    @property
    def id_column(self) -> int | None:
        """Which categorical column holds the entity's own id, if one does."""
        return next((n for n, f in enumerate(self.categorical) if f.source == ID_SOURCE), None)


class Schema:
    """An immutable, ordered set of features. Raises SchemaError where they contradict each other."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = tuple(features)
        _check_unique(self.features)
        _check_tables(self.features)
        self._by_entity = {e: tuple(f for f in self.features if f.entity == e) for e in ENTITIES}
        self._columns = {entity: _columns(of) for entity, of in self._by_entity.items()}
        self._half_lives = {
            entity: tuple(dict.fromkeys(f.half_life_s for f in of if f.kind == "counter"))
            for entity, of in self._by_entity.items()
        }
        self._attributes = {
            entity: {f.attribute: f for f in reversed(of) if f.kind != "counter" and f.source != ID_SOURCE}
            for entity, of in self._by_entity.items()
        }
        self.fingerprint: str = _fingerprint(self.features)

    @classmethod
    def load(cls, path: str | Path) -> Schema:
        """The schema in a TOML file (see ``default_schema.toml``). Raises SchemaError naming the file, key,
        value and, for a misspelt key, the nearest legal one."""
        features = load_features(Path(path))
        try:
            return cls(features)
        except SchemaError as error:
            raise SchemaError(f"{path}: {error}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.features == other.features

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Schema({len(self.features)} features, fingerprint={self.fingerprint!r})"

    def of(self, entity: str) -> tuple[Feature, ...]:
        """The features of ``entity`` in order. Raises SchemaError for an unknown entity."""
        return self._by_entity[self._known(entity)]

    def columns(self, entity: str) -> Columns:
        """The features of ``entity`` grouped as the encoder's columns."""
        return self._columns[self._known(entity)]

    def feature(self, entity: str, name: str) -> Feature:
        """The feature of that name. Raises SchemaError with the nearest name."""
        for feature in self.of(entity):
            if feature.name == name:
                return feature
        names = [feature.name for feature in self.of(entity)]
        raise SchemaError(f"{entity} has no feature {name!r}{suggestion(name, names)}")

    def half_lives(self, entity: str) -> tuple[float, ...]:
        """The distinct half-lives (seconds) of the entity's counters: what the processor has to count."""
        return self._half_lives[self._known(entity)]

    def cell(self, entity: str, attribute: str, value: Value, event_time_ms: int) -> Cell:
        """``value`` as the store keeps it, with the attribute's TTL (for ever if it is not declared)."""
        feature = self._attributes[self._known(entity)].get(attribute)
        return Cell(value, event_time_ms, round(feature.ttl_s * 1_000) if feature else 0)

    def validate(self, entity: str, attributes: Mapping[str, object]) -> list[FieldError]:
        """What is wrong with a client's ``attributes``: nothing ([]), or an error per attribute or value.

        Undeclared attributes are accepted (they are stored, not encoded) if the store can hold them.
        """
        known = self._attributes[self._known(entity)]
        if len(attributes) > MAX_ATTRIBUTES:
            return [FieldError("", f"{len(attributes)} attributes are more than {MAX_ATTRIBUTES}")]
        errors = []
        for name, value in attributes.items():
            if problem := self._name_problem(entity, name):
                errors.append(FieldError(name, problem))
                continue
            problems = value_problems(known.get(name), value)
            errors.extend(FieldError(f"{name}{path}", message) for path, message in problems)
        return errors

    def require(self, found: str) -> None:
        """Raises SchemaMismatch unless ``found`` is this schema's fingerprint."""
        if found != self.fingerprint:
            raise SchemaMismatch(self.fingerprint, found)

    def _name_problem(self, entity: str, name: str) -> str | None:
        if not 1 <= len(name.encode(errors="surrogatepass")) <= 64 or not name.isprintable() or "@" in name:
            return "must be 1 to 64 bytes long, without control characters or @"
        declared = {f.name: f for f in self._by_entity[entity]}.get(name)
        attribute = self._attributes[entity].get(name)
        if name in RESERVED_ATTRIBUTES or any(f is not None and f.managed for f in (declared, attribute)):
            return "is computed by the platform and cannot be set"
        return None

    def _known(self, entity: str) -> str:
        if entity not in self._by_entity:
            raise SchemaError(f"unknown entity {entity!r}{suggestion(entity, ENTITIES)}")
        return entity


@cache
def default_schema() -> Schema:
    """The built-in schema (``default_schema.toml``): films, and any catalogue of items with categories."""
    return Schema(default_features())


def _columns(features: tuple[Feature, ...]) -> Columns:
    return Columns(
        tuple(f for f in features if f.kind == "categorical"),
        tuple(f for f in features if f.is_numeric),
        tuple(f for f in features if f.kind == "list"),
    )


def _fingerprint(features: tuple[Feature, ...]) -> str:
    document = {"encoding": ENCODING_VERSION, "features": [_declared(feature) for feature in features]}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _declared(feature: Feature) -> dict[str, object]:
    """What differs from the defaults, so that a key added to Feature changes no older fingerprint."""
    declared: dict[str, object] = {}
    for field in fields(feature):
        value = getattr(feature, field.name)
        if value != field.default:
            whole = isinstance(value, int) and not isinstance(value, bool)
            declared[field.name] = float(value) if whole else value
    return declared


def _check_unique(features: tuple[Feature, ...]) -> None:
    seen: set[tuple[str, str]] = set()
    for feature in features:
        if (feature.entity, feature.name) in seen:
            raise SchemaError(f"{feature.entity}.{feature.name} is declared twice")
        seen.add((feature.entity, feature.name))


def _check_tables(features: tuple[Feature, ...]) -> None:
    """A shared key space is wanted only where ``table`` says so; a table names a feature that owns one."""
    owners: dict[str, Feature] = {}
    for feature in features:
        if feature.is_numeric or feature.table is not None:
            continue
        other = owners.setdefault(feature.name, feature)
        if other is not feature:
            raise SchemaError(
                f"{other.entity}.{other.name} and {feature.entity}.{feature.name} would share their keys;"
                f" rename one, or say table = {feature.name!r} on one of them if that is meant"
            )
    for feature in features:
        if feature.table is not None and feature.table not in owners:
            raise SchemaError(
                f"{feature.entity}.{feature.name}: table = {feature.table!r} names no categorical or list"
                f" feature{suggestion(feature.table, owners)}"
            )
