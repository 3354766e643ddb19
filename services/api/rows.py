"""Batches of rows: decoded in one go where all rows are good, row by row where one is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec
from msgspec.json import Decoder

from services.api.bodies import Body, lenient_rows
from services.api.problems import Problem
from services.events import Event

Batch = TypeVar("Batch")
Row = TypeVar("Row")

_CUT: Final = Body(Decoder(dict[str, list[msgspec.Raw]]))


class RowReader(Generic[Batch, Row]):
    """Reads bodies of type ``whole``, which is ``{name: [row, ...]}`` and nothing else in it."""

    def __init__(
        self,
        name: str,
        whole: Body[Batch],
        one: Body[Row],
        rows_of: Callable[[Batch], Sequence[Row]],
        event: Callable[[Row], Event],
    ) -> None:
        self._name = name
        self._whole = whole
        self._one = one
        self._rows_of = rows_of
        self._event = event

    def read(self, raw: bytes, most: int) -> Sequence[Event | Problem]:
        """An event or the problem of each row, in order. Raises Problem where the body has no such list, or
        one of more than ``most`` rows."""
        try:
            batch = self._whole.decode(raw)
        except Problem:
            cut = self._cut(raw)
            self._limit(len(cut), most)
            return [self._decode(row) for row in cut]
        rows = self._rows_of(batch)
        self._limit(len(rows), most)
        return [self._event(row) for row in rows]

    def _limit(self, rows: int, most: int) -> None:
        if rows > most:
            raise Problem("body_too_large", f"At most {most} rows are taken at once; {rows} came.")

    def _cut(self, raw: bytes) -> Sequence[msgspec.Raw | Problem]:
        """The rows undecoded. One NaN makes all of the body something else than JSON; then a lenient
        reader cuts it, so that the other rows are not lost."""
        try:
            lists = _CUT.decode(raw)
        except Problem as problem:
            if problem.code != "invalid_value":
                raise
            return lenient_rows(raw, self._name)
        for name in lists:
            if name != self._name:
                raise Problem.field("invalid_request", name, "is not a known field")
        if self._name not in lists:
            raise Problem.field("invalid_request", self._name, "is required")
        return lists[self._name]

    def _decode(self, row: msgspec.Raw | Problem) -> Event | Problem:
        if isinstance(row, Problem):
            return row
        try:
            return self._event(self._one.decode(row))
        except Problem as problem:
            return problem
