"""How a group of commands is made: the same everywhere."""

from __future__ import annotations

import typer

HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def group(help_: str) -> typer.Typer:
    """A group that prints its help when no command is given."""
    return typer.Typer(
        help=help_,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=HELP_NAMES,
    )
