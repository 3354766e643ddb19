"""The file of scores of a bulk prediction: lines in the order of the rows, begun again where it was left.

    OUTPUT.part         header and lines so far; what a cut left of the last line is dropped
    OUTPUT.part.json    what they belong to: rows, model, job
    OUTPUT              when all are there

A line has the id, ``score`` (of more than two classes ``score_0`` and so on, labels rising), whether it is ``degraded``
(by the guest's part of the model alone), and ``why``.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np

from services.vertical.party import write_text
from services.vertical.serving.bulk import Tally, reasons_of
from services.vertical.serving.guest import Answer

_TRUTH: Final = {"true": True, "false": False}


class ScoresRefused(ValueError):
    """A file that cannot be written, or gone on with; the message says which, and the next step."""


class Scores:
    """Writes ``output`` for rows with these ``ids``. ``belongs``: what its lines depend on. Raises ScoresRefused."""

    def __init__(
        self, output: Path, ids: Sequence[str], belongs: Mapping[str, str], *, fresh: bool = False
    ) -> None:
        self._output, self._ids = output, ids
        self._part = output.with_name(f"{output.name}.part")
        self._beside = output.with_name(f"{output.name}.part.json")
        self.tally, self.resumed = Tally(), 0
        self._columns: tuple[str, ...] = ()
        try:
            descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ScoresRefused(f"{self._part} cannot be written: {error.strerror}") from error
        self._file: IO[str] = os.fdopen(descriptor, "r+", newline="", encoding="utf-8")
        try:
            # Scores are about people: for their owner alone, whoever made the file.
            os.fchmod(descriptor, 0o600)
            self._begin(dict(belongs), fresh)
        except BaseException:
            self._file.close()
            raise

    @property
    def done(self) -> int:
        """How many rows have their line."""
        return self.tally.joint + self.tally.degraded

    def _begin(self, belongs: dict[str, str], fresh: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ScoresRefused(f"{self._part} is being written by another process; stop it first") from None
        if fresh:
            os.ftruncate(self._file.fileno(), 0)
        if os.fstat(self._file.fileno()).st_size:
            self._check(belongs)
            self._resume()
        write_text(self._beside, json.dumps(belongs))
        self._file.seek(0, os.SEEK_END)

    def _check(self, belongs: dict[str, str]) -> None:
        try:
            found = json.loads(self._beside.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ScoresRefused(
                f"{self._part} is there, but {self._beside.name}, which says what it belongs to, cannot be read "
                f"({error}); --fresh begins anew"
            ) from error
        if found != belongs:
            other = [
                name for name in belongs if not isinstance(found, dict) or found.get(name) != belongs[name]
            ]
            raise ScoresRefused(
                f"{self._part} was begun with another {' and '.join(other) or 'version'}; --fresh begins anew"
            )

    def _resume(self) -> None:
        kept = _whole_lines(self._part)
        os.ftruncate(self._file.fileno(), kept)
        lines = csv.reader(self._file, strict=True)
        try:
            for place, line in enumerate(lines, -1):
                if place < 0:
                    self._columns = tuple(line)
                    continue
                self._read(line, place)
        except (csv.Error, UnicodeDecodeError, ValueError, IndexError, KeyError) as error:
            raise ScoresRefused(
                f"{self._part}, line {lines.line_num}: not a line of these rows ({error}); --fresh begins anew"
            ) from error
        self.resumed = self.done

    def _read(self, line: Sequence[str], place: int) -> None:
        if len(line) != len(self._columns) or line[0] != self._ids[place]:
            raise ValueError(f"{line[:1]} where {self._ids[place]!r} is expected")
        degraded, why = _TRUTH[line[-2]], line[-1]
        if degraded != bool(why) or not np.isfinite([float(value) for value in line[1:-2]]).all():
            raise ValueError("no score of ours")
        self.tally.add([why])

    def write(self, start: int, answer: Answer) -> None:
        """The lines of the rows from place ``start`` on. Raises ScoresRefused, OSError."""
        if start != self.done:
            raise ValueError(f"rows from {start} on after {self.done}")
        scores = answer.scores.reshape(len(answer.scores), -1)
        columns = _columns(scores.shape[1], answer.scores.ndim == 1)
        writer = csv.writer(self._file, lineterminator="\n")
        if not self._columns:
            writer.writerow(columns)
            self._columns = columns
        if columns != self._columns:
            raise ScoresRefused(f"{self._part} has the columns {self._columns}, answers have {columns}")
        reasons = reasons_of(answer)
        for place, (values, why) in enumerate(zip(scores.tolist(), reasons, strict=True)):
            told = (repr(value) for value in values)
            writer.writerow((self._ids[start + place], *told, "true" if why else "false", why))
        self._file.flush()
        self.tally.add(reasons)

    def finish(self) -> None:
        """All rows are there: the file takes its name. Raises OSError."""
        if self.done != len(self._ids):
            raise ValueError(f"{self.done} of {len(self._ids)} rows")
        os.fsync(self._file.fileno())
        self._part.replace(self._output)
        self._beside.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; what is there stays for the next try."""
        self._file.close()


def _columns(count: int, single: bool) -> tuple[str, ...]:
    scores: Iterator[str] = iter(("score",)) if single else (f"score_{place}" for place in range(count))
    return ("id", *scores, "degraded", "why")


def _whole_lines(path: Path) -> int:
    """The bytes of ``path`` up to its last line's end."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - 2**16)
            file.seek(begin)
            at = file.read(end - begin).rfind(b"\n")
            if at >= 0:
                return begin + at + 1
            end = begin
    return 0
