"""Identifiers as the parties compare them: one stated rule, so that the same person has the same bytes at every party.

The rule: a text in Unicode's form NFC, without white space at its ends; with ``case="fold"`` case-folded, then NFC
again; encoded as UTF-8; 1 to 256 bytes, no control characters. The parties tell each other the rule before anything
else. Whatever an id looks like beyond that (leading zeros, dots in mail addresses) is the parties' own business: they
agree on it before.

What is not an id is named with examples: empty ones, repeated ones (the first row counts), refused ones.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

MOST_ID_BYTES: Final = 256
EXAMPLES: Final = 5
_FLOAT: Final = re.compile(rb"[0-9]+\.0|[0-9](\.[0-9]+)?[eE]\+[0-9]{2,3}")

Case = Literal["keep", "fold"]
Rows = npt.NDArray[np.int64]


class IdRefused(ValueError):
    """A text that is no id; the message says why."""


class IdsRefused(ValueError):
    """Ids that may not enter; the message counts them and gives examples."""


@dataclass(frozen=True, slots=True)
class IdRule:
    """How texts become comparable bytes. ``case``: ``keep``, or ``fold`` where case means nothing."""

    case: Case = "keep"

    def __post_init__(self) -> None:
        if self.case not in ("keep", "fold"):
            raise ValueError(f"case is keep or fold, not {self.case!r}")

    def apply(self, text: str) -> bytes:
        """The bytes of ``text``; empty for a text of white space. Raises IdRefused."""
        if text.isascii():  # already NFC
            text = text.strip()
            if self.case == "fold":
                text = text.lower()
        else:
            text = unicodedata.normalize("NFC", text).strip()
            if self.case == "fold":
                text = unicodedata.normalize("NFC", text.casefold())
        if not text.isprintable() and any(unicodedata.category(letter) == "Cc" for letter in text):
            raise IdRefused("holds a control character")
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            raise IdRefused("holds half a surrogate pair") from None
        if len(encoded) > MOST_ID_BYTES:
            raise IdRefused(f"has {len(encoded)} bytes, at most {MOST_ID_BYTES} are allowed")
        return encoded


@dataclass(frozen=True, slots=True)
class Named:
    """How many rows are of a kind, and the first of them as (row, what stands there)."""

    count: int
    examples: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        shown = ", ".join(f"row {row + 1} ({text!r})" for row, text in self.examples)
        return f"{self.count} (such as {shown})" if self.count else "none"


@dataclass(frozen=True, slots=True)
class Ids:
    """A party's set: ``values`` (N different ids as bytes) and ``rows`` (int64 [N]: where each stood first).

    ``empty`` and ``repeated`` name the rows that are not in it.
    """

    values: list[bytes]
    rows: Rows
    empty: Named
    repeated: Named

    def __len__(self) -> int:
        return len(self.values)

    @property
    def complaint(self) -> str:
        """What a person should know of the rows that were left out; empty where none were."""
        return complaint_of(self.empty, self.repeated)


def complaint_of(empty: Named, repeated: Named) -> str:
    """What a person should know of rows without an id, and of rows whose id stood before; empty without any."""
    parts = []
    if empty.count:
        parts.append(f"rows without an id: {empty}")
    if repeated.count:
        parts.append(f"rows whose id stood before: {repeated}")
    return "; ".join(parts)


def normalise(texts: Iterable[str], rule: IdRule) -> Ids:
    """The set of ids in ``texts``, in their order.

    Raises IdsRefused where a text is no id at all (too long, control characters): such a file is not what it seems.
    """
    values: list[bytes] = []
    rows: list[int] = []
    seen: set[bytes] = set()
    empty, repeated, refused = _Naming(), _Naming(), _Naming()
    for row, text in enumerate(texts):
        try:
            value = rule.apply(text)
        except IdRefused as why:
            refused.add(row, f"{text[:40]} {why}")
            continue
        if not value:
            empty.add(row, text[:40])
        elif value in seen:
            repeated.add(row, value.decode()[:40])
        else:
            seen.add(value)
            values.append(value)
            rows.append(row)
    if refused.count:
        raise IdsRefused(f"texts that are no ids: {refused.named()}")
    return Ids(values, np.array(rows, np.int64), empty.named(), repeated.named())


def floats(ids: Ids) -> Named:
    """Ids that a spreadsheet or a column of floats seems to have made of whole numbers (7.0, 4.47E+11): they are
    compared as they stand, and the other parties' are probably written in full."""
    found = _Naming()
    for value, row in zip(ids.values, ids.rows.tolist(), strict=True):
        if _FLOAT.fullmatch(value):
            found.add(row, value.decode())
    return found.named()


class _Naming:
    def __init__(self) -> None:
        self.count = 0
        self._examples: list[tuple[int, str]] = []

    def add(self, row: int, text: str) -> None:
        self.count += 1
        if len(self._examples) < EXAMPLES:
            self._examples.append((row, text))

    def named(self) -> Named:
        return Named(self.count, tuple(self._examples))
