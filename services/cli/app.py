"""The ``headwater`` command. Commands import what they need when they run, so that ``-h`` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from services.cli import (
    config,
    data,
    events,
    federation,
    freshness,
    keys,
    learn,
    link,
    model,
    recommend,
    service,
    stack,
    sync,
)
from services.cli.context import Format, Options, hoist
from services.cli.exits import HELP, Exit
from services.cli.failures import code_of, tell
from services.cli.groups import HELP_NAMES

_EPILOG: Final = (
    "--config, --set and --format may stand anywhere on the line. `headwater exits` explains the exit codes."
)


app = typer.Typer(
    name="headwater",
    help="Recommendations that learn in seconds.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # Terminals wider than 80 columns need not cut summaries.
    context_settings={**HELP_NAMES, "max_content_width": 120},
)


@app.callback()
def options(
    context: typer.Context,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="The settings file (TOML).")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="Tables for people, or JSON alone.")] = "table",
) -> None:
    """Recommendations that learn in seconds."""
    context.obj = Options(config_file, tuple(overrides or ()), format_)


@app.command("exits")
def exits(context: typer.Context) -> None:
    """Explain the exit codes."""
    from services.cli.output import print_json, print_table

    if context.obj.json:
        print_json({str(code.value): {"name": code.name.lower(), "help": HELP[code]} for code in Exit})
    else:
        rows = [(code.value, code.name.lower().replace("_", " "), HELP[code]) for code in Exit]
        print_table(("code", "meaning", "what to do"), rows)


stack.register(app)
learn.register(app)
data.register(app)
recommend.register(app)
freshness.register(app)
app.add_typer(events.app, name="events")
app.add_typer(config.app, name="config")
app.add_typer(federation.app, name="fl")
app.add_typer(keys.app, name="keys")
app.add_typer(link.app, name="link")
app.add_typer(model.app, name="model")
app.add_typer(service.app, name="service")
app.add_typer(sync.app, name="sync")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of the catalogue."""
    given = hoist(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given, prog_name="headwater")
    except Exception as error:
        code = code_of(error)
        if code is None:
            raise
        tell(error, code)
        sys.exit(code)


if __name__ == "__main__":
    main()
