"""``headwater keys``: the keys with which our processes know each other. Secrets are never printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

Folder = Annotated[Path, typer.Argument(help="The folder that rpc.keys names.")]
Name = Annotated[str, typer.Argument(help="What the client is called here.")]

app = group("Make and manage the keys of calls between Headwater's own processes.")


@contextmanager
def _told(next_step: str) -> Iterator[None]:
    """What is wrong with a folder of keys, with what to do about it."""
    from services.rpc.errors import KeysError

    try:
        yield
    except KeysError as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), next_step) from error


@app.command("create")
def create(
    context: typer.Context,
    folder: Folder,
    server: Annotated[
        str | None,
        typer.Option(metavar="PUBLIC", help="Make a client's keys alone, for servers with this public key."),
    ] = None,
) -> None:
    """Make a folder with new keys: a server's and a client's. Nothing is ever overwritten.

    Every machine of the deployment gets a copy of it, or, with --server, a folder of its own.
    """
    from services.rpc.keys import CLIENT, PUBLIC, SERVER, create_keys, read_key

    with _told("Name a folder that does not exist yet."):
        create_keys(folder, server)
        made = {name: read_key(folder / f"{name}{PUBLIC}").hex() for name in (SERVER, CLIENT)}
    options: Options = context.obj
    if options.json:
        from services.cli.output import print_json

        print_json({"folder": str(folder), **made})
        return
    for name, key in made.items():
        print(f"{name}  {key}")
    print(f"\nThe secrets are in {folder}, for its owner alone; no other program needs them.")
    if server is None:
        print(f'Set rpc.keys = "{folder}" for every process. Another machine\'s own client keys:')
        print(f"  headwater keys create FOLDER --server {made[SERVER]}")
    else:
        print(f"Where the servers run: headwater keys add FOLDER NAME {made[CLIENT]}")


@app.command("add")
def add(
    context: typer.Context,
    folder: Folder,
    name: Name,
    public: Annotated[str, typer.Argument(help="Its public key, 64 hexadecimal digits (its client.public).")],
) -> None:
    """Let the client with this public key in. Running servers notice by themselves."""
    from services.rpc.keys import allow

    with _told("`headwater keys list FOLDER` shows who is allowed."):
        allow(folder, name, public)
    _done(context.obj, folder, f"{name} may come in")


@app.command("remove")
def remove(
    context: typer.Context,
    folder: Folder,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
) -> None:
    """Let a client in no more. What it has open stays open until it, or the server, restarts."""
    from services.rpc.keys import forbid

    if not yes and not typer.confirm(f"Let {name} in no more?", err=True):
        raise CommandFailed(Exit.DECLINED, f"{name} stays allowed")
    with _told("`headwater keys list FOLDER` shows who is allowed."):
        forbid(folder, name)
    _done(context.obj, folder, f"{name} may come in no more")


@app.command("list")
def list_(context: typer.Context, folder: Folder) -> None:
    """Show the clients that servers with this folder let in, with their public keys."""
    from services.cli.output import print_json, print_table
    from services.rpc.keys import allowed_keys, shown

    with _told("Name a folder of a server: `headwater keys create FOLDER`, without --server, makes one."):
        found = shown(allowed_keys(folder))
    options: Options = context.obj
    if options.json:
        print_json(found)
    else:
        print_table(("client", "public key"), list(found.items()))


def _done(options: Options, folder: Path, text: str) -> None:
    from services.cli.output import note, print_json
    from services.rpc.keys import allowed_keys, shown

    if options.json:
        print_json(shown(allowed_keys(folder)))
    else:
        note(text)
