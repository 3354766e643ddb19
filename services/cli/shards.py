"""``headwater model shards``: where each shard is, and moves of shards between parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import HELP_NAMES

if TYPE_CHECKING:
    from services.parameter_server.client.moving import Move, Moved
    from services.parameter_server.client.summary import ShardSummary

TIMEOUT_S: Final = 600.0

app = typer.Typer(
    help="Show where each shard is, or move shards between servers.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)

Timeout = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for each move.")]


@app.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    """Show each shard's leader and followers, what it holds, and whether it moves.

    Figures are the leader's: rows and bytes over all models, steps since the shard was born.
    """
    if context.invoked_subcommand is not None:
        return
    from services.cli.output import note, print_json, print_table
    from services.cli.parameters import answered, surveying
    from services.parameter_server.client.summary import summarise_shards

    options: Options = context.obj
    with surveying(options.settings()) as surveyor:
        survey = answered(surveyor)
    found = summarise_shards(survey)
    if options.json:
        shards = [asdict(one) for one in found]
        print_json({"epoch": survey.map.epoch, "shards": shards, "silent": survey.silent})
        return
    print(f"epoch of the map: {survey.map.epoch}")
    columns = ("shard", "leader", "followers (steps behind)", "fence", "rows", "bytes", "steps", "moving to")
    print_table(columns, [_row(one) for one in found])
    if survey.silent:
        note(f"no answer from {', '.join(survey.silent)}")


def _row(shard: ShardSummary) -> tuple[object, ...]:
    from services.cli.parameters import size

    behind = (f"{s} ({'?' if steps is None else steps})" for s, steps in shard.behind.items())
    return (
        shard.shard,
        shard.leader if shard.leads else f"{shard.leader} (does not lead it now)",
        ", ".join(behind) or "none",
        shard.fence,
        "" if shard.rows is None else f"{shard.rows:,}",
        size(shard.bytes),
        "" if shard.steps is None else f"{shard.steps:,}",
        shard.moving_to,
    )


@app.command("move")
def move(
    context: typer.Context,
    shard: Annotated[int, typer.Argument(metavar="SHARD", help="Its number.")],
    to: Annotated[str, typer.Option("--to", metavar="SERVER", help="The server that is to lead it.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until that server leads it.")] = True,
    timeout_s: Timeout = TIMEOUT_S,
) -> None:
    """Have a shard led by another server. Pulls and pushes go on; to the server that leads it, a move is taken back.

    A server that does not hold the shard copies it first, and takes the place of the one that led it.
    """
    from services.cli.output import note, print_json, waiting
    from services.cli.parameters import surveying
    from services.parameter_server.client.moving import Mover, order

    options: Options = context.obj
    with surveying(options.settings()) as surveyor, _told():
        if not wait:
            now = order(surveyor.store, shard, to)
            moving_to = now.moves.get(shard)
            if options.json:
                print_json({"shard": shard, "leader": now.places[shard].leader, "moving_to": moving_to})
            elif moving_to is None:
                note(f"shard {shard} is led by {now.places[shard].leader}")
            else:
                note(f"shard {shard} moves to {moving_to}; `headwater model shards` shows how far it is")
            return
        with waiting() as tell:
            moved = Mover(surveyor, tell).move(shard, to, timeout_s)
    if options.json:
        print_json(asdict(moved))
    else:
        note(_said(moved))


@app.command("rebalance")
def rebalance(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Move without asking.")] = False,
    timeout_s: Timeout = TIMEOUT_S,
) -> None:
    """Move shards, one after another, until each server that is there leads its fair share of them."""
    from services.cli.output import note, print_json, print_table, waiting
    from services.cli.parameters import surveying
    from services.parameter_server.client.moving import Mover, fair_moves

    options: Options = context.obj
    with surveying(options.settings()) as surveyor, _told():
        survey = surveyor.look()
        plan = fair_moves(survey.map, survey.members)
        if plan and not options.json:
            print_table(("shard", "from", "to", ""), [_planned(one) for one in plan])
        if plan and not yes and not typer.confirm(f"Move {len(plan)} shards?", err=True):
            raise CommandFailed(Exit.DECLINED, "every shard stays where it is")
        done: list[Moved] = []
        with waiting() as tell:
            for one in plan:
                done.append(Mover(surveyor, tell).move(one.shard, one.to, timeout_s))
                if not options.json:
                    note(_said(done[-1]))
    if options.json:
        print_json({"moved": [asdict(one) for one in done]})
    elif not plan:
        note("every server leads its fair share already")


def _planned(move: Move) -> tuple[object, ...]:
    return (move.shard, move.source, move.to, "copies it" if move.copies else "holds it already")


def _said(moved: Moved) -> str:
    if moved.source == moved.to:
        return f"shard {moved.shard} is led by {moved.to} already"
    return f"shard {moved.shard}: {moved.to} leads it instead of {moved.source}, after {moved.took_s:.2f} s"


@contextmanager
def _told() -> Iterator[None]:
    """What went wrong with a move, with what to do about it."""
    from services.parameter_server.client.moving import MoveFailed, MoveNotNow, MoveRefused

    codes = {MoveRefused: Exit.USAGE, MoveNotNow: Exit.NOT_READY}
    try:
        yield
    except MoveFailed as error:
        code = codes.get(type(error), Exit.NOT_PROCESSED)
        raise CommandFailed(code, str(error), error.next_step) from error
