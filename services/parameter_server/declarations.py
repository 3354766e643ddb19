"""Which models there are: each is declared once, in coordination, by its tables and schema fingerprint.

The declaration is what servers start from and what clients route by, so that neither can disagree silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

import msgspec
import xxhash

from services.coordination.contract import Conflict, Coordination
from services.parameter_server.types import ModelMismatch, ParametersRefused
from services.rpc.codec import MAX_FRAME_BYTES
from sync.errors import BadSpec
from sync.spec import TableSpec

FORMAT: Final = 1
PREFIX: Final = "parameters/models/"
_FLOAT_BYTES: Final = 4
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}")
"""Names become folders of snapshots, so they are no paths."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A model: its tables, by name unique, and the fingerprint of the schema whose keys they hold."""

    model: str
    fingerprint: str
    tables: tuple[TableSpec, ...]

    def table(self, name: str) -> TableSpec:
        """The table ``name``. Raises ParametersRefused."""
        for spec in self.tables:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in self.tables)
        raise ParametersRefused(f"model {self.model} has no table {name!r} (tables: {known})")


class _Stored(msgspec.Struct):
    format: int
    model: str
    fingerprint: str
    tables: list[dict[str, object]]


def encode_declaration(declaration: Declaration) -> bytes:
    """The stored form, JSON."""
    tables = [spec.to_plain() for spec in declaration.tables]
    return msgspec.json.encode(_Stored(FORMAT, declaration.model, declaration.fingerprint, tables))


def digest_of(declaration: Declaration) -> str:
    """Tells whether two regions declare a model alike."""
    return xxhash.xxh3_64_hexdigest(encode_declaration(declaration))


def decode_declaration(data: bytes) -> Declaration:
    """Read the stored form back. Raises ParametersRefused naming what is wrong."""
    try:
        stored = msgspec.json.decode(data, type=_Stored)
        if stored.format != FORMAT:
            raise ParametersRefused(f"declaration of format {stored.format}; this version reads {FORMAT}")
        tables = tuple(TableSpec.from_plain(plain) for plain in stored.tables)
    except (msgspec.DecodeError, BadSpec) as error:
        raise ParametersRefused(f"a model's declaration cannot be read: {error}") from error
    if _NAME.fullmatch(stored.model) is None:
        raise ParametersRefused(f"{stored.model[:64]!r} is not a name for a model: {_NAME.pattern}")
    for spec in tables:
        if spec.rows * spec.dim * _FLOAT_BYTES > MAX_FRAME_BYTES:
            raise ParametersRefused(f"table {spec.name}: its {spec.rows} rows do not fit one message")
    return Declaration(stored.model, stored.fingerprint, tables)


def read_declaration(store: Coordination, model: str) -> Declaration | None:
    """The declaration of ``model``, or None where nobody declared it."""
    entry = store.get(PREFIX + model)
    return None if entry is None else decode_declaration(entry.value)


def read_declarations(store: Coordination) -> list[Declaration]:
    """All models declared, by name."""
    return [decode_declaration(entry.value) for entry in store.scan(PREFIX)]


def settle_declaration(store: Coordination, declaration: Declaration) -> bool:
    """Write ``declaration`` unless the model is declared already; whether it was not. Raises ModelMismatch if it is
    declared otherwise."""
    try:
        store.put(PREFIX + declaration.model, encode_declaration(declaration), expect_revision=0)
    except Conflict:
        found = read_declaration(store, declaration.model)
        if found is not None:
            require_same(found, declaration)
        return False
    return True


def withdraw_declaration(store: Coordination, model: str) -> None:
    """Undo what ``settle_declaration`` wrote."""
    store.delete(PREFIX + model)


def require_same(declared: Declaration, wanted: Declaration) -> None:
    """Raises ModelMismatch naming every difference."""
    differences = list(_differences(declared, wanted))
    if differences:
        raise ModelMismatch(f"model {wanted.model} is declared otherwise: {'; '.join(differences)}")


def _differences(declared: Declaration, wanted: Declaration) -> Iterator[str]:
    if declared.fingerprint != wanted.fingerprint:
        yield f"schema fingerprint {declared.fingerprint} was declared, this one is {wanted.fingerprint}"
    theirs, ours = _by_name(declared.tables), _by_name(wanted.tables)
    if theirs.keys() != ours.keys():
        yield f"tables {', '.join(sorted(theirs))} were declared, these are {', '.join(sorted(ours))}"
    for name in sorted(theirs.keys() & ours.keys()):
        for field in fields(TableSpec):
            was, now = getattr(theirs[name], field.name), getattr(ours[name], field.name)
            if was != now:
                yield f"table {name}: {field.name} {was} was declared, this one is {now}"


def _by_name(tables: Sequence[TableSpec]) -> dict[str, TableSpec]:
    return {spec.name: spec for spec in tables}
