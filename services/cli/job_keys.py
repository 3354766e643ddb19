"""``headwater fl keys``: what may stand in a federated job's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from federated.job_keys import JobKey

KEYS_STEP: Final = "`headwater fl keys` lists all that may stand in it."
"""What to do about a job's file that was refused."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("keys")(keys)


def keys(
    context: typer.Context,
    section: Annotated[str | None, typer.Argument(help="One section alone, such as privacy.")] = None,
) -> None:
    """List the keys of a job's file, by section: what each takes, what it is unless told otherwise, what it does.

    `fl simulate --job FILE` and `fl serve --job FILE` read such a file; `fl simulate --with SECTION.KEY=VALUE` sets a
    key without one, and with --out writes the file.
    """
    from federated.job_keys import UnknownSection, job_keys, keys_of
    from federated.job_texts import SECTIONS
    from services.cli.output import print_json

    options: Options = context.obj
    try:
        found = job_keys() if section is None else keys_of(section)
    except UnknownSection as error:
        raise CommandFailed(
            Exit.USAGE, str(error), "`headwater fl keys`, without a section, lists all."
        ) from error
    if options.json:
        print_json([key.as_json() for key in found])
        return
    for number, title in enumerate(dict.fromkeys(key.section for key in found)):
        if number:
            print()
        print(f"[{title}]  {SECTIONS[title]}")
        _print(title, [key for key in found if key.section == title])


def _print(section: str, keys: Sequence[JobKey]) -> None:
    from services.cli.output import print_table

    optional = any(key.of for key in keys)
    print_table(
        ("key", *(("of",) if optional else ()), "takes", "default", "what it does"),
        [
            (
                key.key,
                *((_whose(section, key.of),) if optional else ()),
                key.kind,
                "no default" if key.needed else _written(key.default),
                key.doc,
            )
            for key in keys
        ],
    )


def _whose(section: str, of: tuple[str, ...]) -> str:
    """Whose option it is, in the fewest names."""
    from federated.job_keys import names_of

    others = [name for name in names_of(section) if name not in of]
    return f"all but {', '.join(others)}" if 0 < len(others) < len(of) else ", ".join(of)


def _written(value: object) -> str:
    """A default as the file has it; nothing where leaving it out is all there is."""
    from decimal import Decimal

    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    return str(value) if isinstance(value, Decimal) else f"{value:.10g}"
