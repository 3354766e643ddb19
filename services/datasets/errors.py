"""What can go wrong with data sets.

Exceptions::

    DatasetError             the data set cannot be had or used
    ├── DatasetUnavailable   no source could be reached; carries each source's reason
    ├── DatasetUnsuited      the data are there and cannot be dealt out as asked
    ├── DatasetDamaged       what was received is not what was published
    └── BadRows              a folder's files have wrong rows; carries the first of them
"""

from __future__ import annotations

from dataclasses import dataclass


class DatasetError(Exception):
    """The data set cannot be had or used."""


class DatasetUnavailable(DatasetError):
    """No source could be reached."""


class DatasetUnsuited(DatasetError):
    """The data are there and cannot be dealt out as asked."""


class DatasetDamaged(DatasetError):
    """What was received is not what was published: a checksum or the contents differ."""


@dataclass(frozen=True, slots=True)
class RowError:
    """A wrong row: its file, its line (or row, in Parquet; 0 for the whole file), and what is wrong."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class BadRows(DatasetError):
    """A folder's files have wrong rows: ``errors`` are the first, ``total`` counts all that were met."""

    def __init__(self, errors: tuple[RowError, ...], total: int) -> None:
        self.errors = errors
        self.total = total
        more = f"\n... and {total - len(errors)} more" if total > len(errors) else ""
        super().__init__("\n".join(str(error) for error in errors) + more)
