"""Printing: JSON alone or tables on standard output, progress on standard error when that is a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

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


@contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """A line on standard error that changes while something is waited for; nothing if it is no terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield line.update


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Advance]:
    """A bar on standard error; nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(description, total=total)
        yield lambda count: bars.advance(task, count)
