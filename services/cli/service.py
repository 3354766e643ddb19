"""``headwater service``: one process alone, as compose and Kubernetes run it, and its health check."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group
from services.processes import SERVICES

app = group("Run one process alone, or check those that run from this data folder.")


def _command(service: str) -> None:
    @app.command(service, help=f"Run one process of the {service} service until it is told to stop.")
    def run(
        context: typer.Context,
        name: Annotated[
            str, typer.Option(help="A stable name: a process that is started again takes its place.")
        ] = f"{service}-0",
        with_parent: Annotated[
            bool, typer.Option("--with-parent", hidden=True, help="End when standard input closes.")
        ] = False,
    ) -> None:
        from services.processes import leave, run_service

        options: Options = context.obj
        run_service(service, options.settings(), name, with_parent=with_parent)
        leave()


for _service in SERVICES:
    _command(_service)


@app.command("check")
def check(context: typer.Context) -> None:
    """Check that each process that runs from this data folder is ready; for health checks of containers."""
    from services.backends import open_coordination
    from services.cli.output import print_json, print_table
    from services.processes import running_here
    from services.supervisor.membership import MembershipProbe

    options: Options = context.obj
    settings = options.settings()
    here = running_here(settings.data.dir)
    if not here:
        raise CommandFailed(Exit.NOT_RUNNING, f"no process runs from {settings.data.dir}")
    with closing(open_coordination(settings)) as coordination:
        seen = MembershipProbe(coordination)()
    checks = [
        (name, name in seen and seen[name].pid == pid and seen[name].ready)
        for name, pid in sorted(here.items())
    ]
    if options.json:
        print_json(dict(checks))
    else:
        print_table(("check", "process"), [("PASS" if passed else "FAIL", name) for name, passed in checks])
    if not all(passed for _, passed in checks):
        raise CommandFailed(Exit.CHECK_FAILED, "")
