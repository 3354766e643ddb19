"""``headwater fl vertical audit | openapi``: who asked for whom in joint inference, and the document of its REST."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.vertical.config import PartyConfig


def register(
    app: typer.Typer,
    config: Callable[[typer.Context], PartyConfig],
    refusals: Callable[[], AbstractContextManager[None]],
) -> None:
    """Add the commands to ``app``. ``config``: the party's file of --config. ``refusals``: exit codes of failures."""

    @app.command("audit")
    def audit(
        context: typer.Context,
        ids: Annotated[
            list[str] | None, typer.Argument(help="Ids to look for; all lines where none is given.")
        ] = None,
    ) -> None:
        """Show what was asked of this party in joint inference (--config FILE), of everybody or of some ids."""
        from services.cli.output import print_json, print_table
        from services.vertical.serving.lookup import lines

        with refusals():
            found = list(lines(config(context), ids or []))
        if context.obj.json:
            print_json(found)
            return
        if not found:
            print("no line of the audit log tells of them" if ids else "nothing was asked of this party yet")
            return
        columns = ("at", "who", "rows", "outcome", "request_id")
        print_table(columns, [[entry.get(column, "") for column in columns] for entry in found])

    @app.command("openapi")
    def openapi(
        write: Annotated[
            bool, typer.Option("--write", help="Write it to services/vertical/serving/openapi.json instead.")
        ] = False,
    ) -> None:
        """Print the OpenAPI document of joint inference."""
        from services.api.assembled import rendered, write_openapi
        from services.vertical.serving.openapi import PATH, document

        if write:
            print(f"{PATH} {'written' if write_openapi(document(), PATH) else 'is as it was'}")
        else:
            print(rendered(document()), end="")
