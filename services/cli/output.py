"""Printing: JSON alone or tables on standard output; on standard error progress, a bar where that is a terminal and a
line now and then elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

EVERY_S: Final = 30.0
"""Between two lines of progress where standard error is no terminal: a log shows that there is life, and stays short.
What ends sooner leaves none."""

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


class Advance(Protocol):
    """Told how many more are done."""

    def __call__(self, count: int) -> None: ...


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_json_line(value: object) -> None:
    """One line of JSON, at once: for output that has no end."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table for people. Where output is not a terminal it is as wide as it needs to be."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # As Text: ids and titles may hold brackets, which are not markup.
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 200).print(table)


def note(text: str) -> None:
    """A line for people on standard error."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """A line on standard error that cannot be overlooked."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(text, style="bold red"))


class Lines:
    """Lines on standard error with the seconds since the beginning: the first after ``EVERY_S``, no more often than
    that, and only when told one."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._began_s = monotonic()
        self._next_s = self._began_s + EVERY_S

    def __call__(self, text: str) -> None:
        """Print ``text``, unless it is too soon."""
        now = self._monotonic()
        if now >= self._next_s:
            self._next_s = now + EVERY_S
            note(f"{text} ({now - self._began_s:.0f} s)")


@contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """A line on standard error that changes while something is waited for; where that is no terminal, ``Lines``."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield line.update


@contextmanager
def progress(
    description: str, total: int | None, monotonic: Callable[[], float] = time.monotonic
) -> Iterator[Advance]:
    """A bar on standard error; where that is no terminal, ``Lines``."""
    if not sys.stderr.isatty():
        yield _counting(description, total, Lines(monotonic))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(description, total=total)
        yield lambda count: bars.advance(task, count)


def _counting(description: str, total: int | None, tell: Callable[[str], None]) -> Advance:
    """Tells how many are done, at every advance."""
    done = 0
    end = "" if total is None else f"/{total:,}"

    def advance(count: int) -> None:
        nonlocal done
        done += count
        tell(f"{description} {done:,}{end}")

    return advance
