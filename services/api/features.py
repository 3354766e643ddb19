"""Feature reads: the value of each declared feature, whether it is there, and the time of its event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from featurestore import counters
from featurestore.feature import ID_SOURCE, Feature
from featurestore.online import Cell
from featurestore.schema import Schema
from services.api.entities import Kind, expired, rfc3339, updated_at_ms
from services.events import Scalar

Status = Literal["present", "null", "not_found", "expired"]


class FeatureValue(msgspec.Struct, frozen=True):
    """One feature. ``value`` is null unless ``status`` is present; ``event_time`` is null where not found."""

    name: str
    value: Scalar | list[str | int | float]
    status: Status
    event_time: str | None
    event_time_ms: int | None


class FeatureValues(msgspec.Struct, frozen=True):
    """All declared features of one entity, in the order of the schema."""

    entity: Kind
    id: str
    schema_fingerprint: str
    features: list[FeatureValue]


def read_features(
    entity: Kind, entity_id: str, row: Mapping[str, Cell], schema: Schema, now_ms: int
) -> FeatureValues:
    """The features of the entity whose stored cells are ``row``, as of ``now_ms``."""
    counts = _counts(entity, row, schema, now_ms)
    features = [
        _value(feature, _cell(feature, entity_id, row, counts), now_ms) for feature in schema.of(entity)
    ]
    return FeatureValues(entity, entity_id, schema.fingerprint, features)


def _cell(
    feature: Feature, entity_id: str, row: Mapping[str, Cell], counts: Mapping[float, Cell]
) -> Cell | None:
    if feature.source == ID_SOURCE:
        return Cell(entity_id, updated_at_ms(row))
    if feature.kind == "counter":
        return counts.get(feature.half_life_s)
    return row.get(feature.attribute)


def _counts(entity: Kind, row: Mapping[str, Cell], schema: Schema, now_ms: int) -> dict[float, Cell]:
    """The decayed counts by half-life; empty where nothing was ever counted."""
    half_lives = schema.half_lives(entity)
    cells = [
        cell.value
        for name, cell in row.items()
        if name.startswith(counters.PREFIX) and isinstance(cell.value, bytes)
    ]
    if not cells or not half_lives:
        return {}
    decayed = counters.decode(list(cells), half_lives).decayed
    totals = counters.at(decayed, now_ms, half_lives).sum(axis=0)
    newest = int(decayed.time_ms.max())
    return {half_life: Cell(float(totals[n]), newest) for n, half_life in enumerate(half_lives)}


def _value(feature: Feature, cell: Cell | None, now_ms: int) -> FeatureValue:
    if cell is None:
        return FeatureValue(feature.name, None, "not_found", None, None)
    status: Status = "present"
    if expired(cell, now_ms):
        status = "expired"
    elif cell.value is None:
        status = "null"
    value = _shown(cell) if status == "present" else None
    return FeatureValue(feature.name, value, status, rfc3339(cell.event_time_ms), cell.event_time_ms)


def _shown(cell: Cell) -> Scalar | list[str | int | float]:
    value = cell.value
    if isinstance(value, list):
        return list(value)
    return None if isinstance(value, bytes) else value
