"""``headwater demo`` and ``headwater evaluate``: what it gives, on real data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from services.cli.context import Options


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("demo")(demo)


def demo(
    context: typer.Context,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Keep the demo's data folder there.")
    ] = None,
) -> None:
    """Learn from MovieLens-100K through the real pipeline and show what that gives."""
    from rich.console import Console

    from services.cli.output import print_json
    from services.datasets.download import user_cache
    from services.demo.main import run

    options: Options = context.obj
    outcome = run(user_cache(os.environ), Console(stderr=True), keep)
    print_json(outcome)
