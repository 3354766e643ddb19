"""``headwater config``: what is set and why, new keys, a file to start from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.cli.context import DEFAULT_FILE, Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

app = group("Show the settings, make keys, write a settings file.")


@app.command("show")
def show(context: typer.Context) -> None:
    """Print each setting with its value and where that came from. Secrets are masked."""
    from services.cli.output import print_json, print_table
    from services.settings.show import shown

    options: Options = context.obj
    settings = list(shown(options.load()))
    if options.json:
        print_json([asdict(setting) for setting in settings])
    else:
        rows = [(setting.name, _cell(setting.text), setting.origin) for setting in settings]
        print_table(("setting", "value", "from"), rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return " ".join(f"{key}={_cell(part)}" for key, part in value.items())
    return ", ".join(map(_cell, value)) if isinstance(value, list) else str(value)


@app.command("new-key")
def new_key(
    context: typer.Context,
    scope: Annotated[str, typer.Argument(help="What the key allows: read, write or admin.")],
) -> None:
    """Make an API key. It is printed once; only its hash belongs in the settings."""
    from services.cli.output import print_json
    from services.settings.keys import new_key as make

    try:
        key, hashed = make(scope)
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, str(error)) from None
    options: Options = context.obj
    if options.json:
        print_json({"key": key, "hashed": hashed})
    else:
        print(f"key      {key}")
        print(f"setting  {hashed}")
        print("\nGive the key to the client and keep it nowhere else.")
        print('Put the setting into the file: [api] keys = ["…"]')


@app.command("init")
def init(
    file: Annotated[Path, typer.Argument(help="Where to write.")] = DEFAULT_FILE,
    yes: Annotated[bool, typer.Option("--yes", help="Overwrite without asking.")] = False,
) -> None:
    """Write a settings file with every setting, commented out, with its default and meaning."""
    from services.cli.output import note
    from services.settings.show import defaults_toml

    if file.exists() and not yes and not typer.confirm(f"{file} exists. Overwrite it?", err=True):
        raise CommandFailed(Exit.DECLINED, f"{file} stays as it is")
    try:
        file.write_text(defaults_toml(), encoding="utf-8")
    except OSError as error:
        raise CommandFailed(
            Exit.BAD_INPUT, f"{file} cannot be written: {error.strerror}", "Choose another place."
        ) from error
    note(f"wrote {file}")
