"""``headwater link``: what emulated links do, and what is to be done to them, while they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

if TYPE_CHECKING:
    from services.coordination.membership import Member
    from services.rpc.client import RpcClient
    from services.settings.model import Settings
    from services.wan.control import Action, Command
    from services.wan.types import DirectionStatus, LinkStatus

_START: Final = (
    "`headwater up --regions 2 --link REGION:delay=80ms` starts links, as does `headwater service link` with "
    "[[wan.links]] in its settings."
)
_CODES: Final = {"unknown-link": Exit.USAGE, "unusable": Exit.USAGE}

app = group("Show emulated links, and change, cut or break them while they run.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The link; `headwater link show` lists them.")]


@app.command("show")
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One link; all by default.")] = "",
) -> None:
    """Show links: where they listen and lead, their conditions, what passed, what waits."""
    from services.cli.output import note

    options: Options = context.obj
    with _controls(options.settings()) as controls:
        links, silent = controls.show()
    if name:
        links = _only(name, links, silent)
    _print(options, links)
    if silent and not options.json:
        note(f"no answer from {', '.join(silent)}")


@app.command("set")
def set_(
    context: typer.Context,
    name: Name,
    conditions: Annotated[
        str,
        typer.Argument(
            metavar="CONDITIONS",
            help="Such as delay=80ms,jitter=5ms,rate=100mbit,queue=512KiB. Delay and jitter in s or ms, one way; rate "
            "in kbit, mbit or gbit a second. What is not named ends; '' ends all of them.",
        ),
    ],
    direction: Annotated[
        Literal["both", "forward", "back"],
        typer.Option(help="Which way: forward is what the connecting side sends."),
    ] = "both",
) -> None:
    """Change the conditions of a link, for what is under way as well."""
    from services.wan.control import Command

    forward = None if direction == "back" else conditions
    back = None if direction == "forward" else conditions
    _change(context.obj, "set", Command(name, forward, back))


@app.command("partition")
def partition(context: typer.Context, name: Name) -> None:
    """Let nothing pass. Connections stay open, new ones hang, until `headwater link heal`."""
    from services.wan.control import Command

    _change(context.obj, "partition", Command(name))
    _hint(context.obj, f"`headwater sync status` shows who is cut off; `headwater link heal {name}` ends it")


@app.command("heal")
def heal(context: typer.Context, name: Name) -> None:
    """End a partition: what was held passes now."""
    from services.wan.control import Command

    _change(context.obj, "heal", Command(name))


@app.command("reset")
def reset(context: typer.Context, name: Name) -> None:
    """Break every connection of a link: both ends see a reset."""
    from services.wan.control import Command

    _change(context.obj, "reset", Command(name))


def _change(options: Options, action: Action, command: Command) -> None:
    from services.cli.output import note

    with _controls(options.settings()) as controls:
        links, broken = controls.order(action, command)
    _print(options, links)
    if action == "reset" and not options.json:
        note(f"connections broken: {broken}")


def _hint(options: Options, text: str) -> None:
    from services.cli.output import note

    if not options.json:
        note(text)


@dataclass(frozen=True, slots=True)
class _Controls:
    """The processes of links, and a client that calls them."""

    members: Sequence[Member]
    client: RpcClient

    def show(self) -> tuple[list[LinkStatus], list[str]]:
        """All links, and the processes that do not answer."""
        from services.rpc.errors import NoAnswer
        from services.wan.control import Command, order

        links: list[LinkStatus] = []
        silent: list[str] = []
        for member in self.members:
            try:
                links += order(self.client, member.address, "show", Command()).links
            except NoAnswer:
                self.client.forget(member.address)
                silent.append(member.name)
        if not links and silent:
            raise CommandFailed(Exit.NOT_RUNNING, f"no answer from {', '.join(silent)}", _START)
        return links, silent

    def order(self, action: Action, command: Command) -> tuple[list[LinkStatus], int]:
        """Have it done by whoever has the link; the link afterwards, and the connections broken."""
        from services.rpc.errors import NoAnswer, RemoteFailure
        from services.wan.control import UNKNOWN_LINK, order

        for member in self.members:
            try:
                done = order(self.client, member.address, action, command)
            except NoAnswer:
                self.client.forget(member.address)
                continue
            except RemoteFailure as error:
                if error.code == UNKNOWN_LINK:
                    continue
                code = _CODES.get(error.code, Exit.UNEXPECTED)
                raise CommandFailed(code, error.message) from error
            return list(done.links), done.broken
        return _only(command.name, *self.show()), 0


def _only(name: str, links: Sequence[LinkStatus], silent: Sequence[str]) -> list[LinkStatus]:
    """The link ``name``. Raises CommandFailed where there is none."""
    found = [link for link in links if link.name == name]
    if not found:
        known = ", ".join(link.name for link in links) or "none"
        also = f"; no answer from {', '.join(silent)}" if silent else ""
        raise CommandFailed(Exit.USAGE, f"there is no link {name!r}; there are: {known}{also}")
    return found


@contextmanager
def _controls(settings: Settings) -> Iterator[_Controls]:
    """The processes of links that are registered. Raises CommandFailed (NOT_RUNNING) where there are none."""
    from services.backends import open_coordination, open_security
    from services.coordination.membership import members
    from services.rpc.client import RpcClient
    from services.wan.control import SERVICE

    if settings.coordination.backend == "sqlite" and not settings.data.dir.is_dir():
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", _START)
    with closing(open_coordination(settings)) as store:
        found = members(store, SERVICE)
    if not found:
        raise CommandFailed(Exit.NOT_RUNNING, "no process of links is registered", _START)
    with closing(RpcClient(open_security(settings))) as client:
        yield _Controls(found, client)


def _print(options: Options, links: Sequence[LinkStatus]) -> None:
    from services.cli.output import print_json, print_table

    if options.json:
        import msgspec

        print_json({"links": msgspec.to_builtins(list(links))})
        return
    columns = (
        "link",
        "from, to",
        "state",
        "connections",
        "way",
        "conditions",
        "passed",
        "under way",
        "unread",
    )
    rows = [row for link in links for row in _rows(link)]
    print_table(columns, rows)


def _rows(link: LinkStatus) -> Iterator[tuple[object, ...]]:
    state = "partitioned" if link.partitioned else "open"
    yield (link.name, link.address, state, link.connections, "forward", *_columns(link.forward))
    yield ("", link.target, "", "", "back", *_columns(link.back))


def _columns(direction: DirectionStatus) -> tuple[object, ...]:
    from services.cli.parameters import size

    under_way = f"{size(direction.queued_bytes)} of {size(direction.bound_bytes)}"
    full = f" ({direction.waiting} wait)" if direction.waiting else ""
    return (
        direction.conditions or "no delay, no limit",
        size(direction.bytes_total),
        under_way + full,
        size(direction.unread_bytes),
    )
