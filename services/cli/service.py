"""``headwater service``: one process alone, as compose and Kubernetes run it, and its health check."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group
from services.processes import SERVICES

if TYPE_CHECKING:
    from pathlib import Path

    from services.coordination.membership import Member
    from services.settings.model import Settings

_ANSWER_S: Final = 3.0
_NEXT_STEP: Final = "Its log says why; `headwater status` lists what is registered."

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
def check(
    context: typer.Context,
    service: Annotated[
        str | None, typer.Option(metavar="SERVICE", help=f"Check this service: {', '.join(SERVICES)}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Check the process of this name.")] = None,
) -> None:
    """Check that processes are registered and ready; for health checks of containers.

    Without options: each that was started from this data folder. APIs and federation's servers must also answer
    /health/ready.
    """
    from services.cli.output import print_json

    options: Options = context.obj
    if service is not None and service not in SERVICES:
        raise CommandFailed(Exit.USAGE, f"{service!r} is not a service: {', '.join(SERVICES)}")
    named = service is not None or name is not None
    checks = _named(options.settings(), service, name) if named else _started_here(options.settings())
    if options.json:
        print_json({name: not fault for name, fault in checks.items()})
    else:
        # Plain lines: a table would take longer to load than the check takes.
        for name, fault in checks.items():
            print(f"FAIL  {name}: {fault}" if fault else f"PASS  {name}")
    if any(checks.values()):
        raise CommandFailed(Exit.CHECK_FAILED, "")


def _named(settings: Settings, service: str | None, name: str | None) -> dict[str, str]:
    """By name, what is wrong with the registered members that are asked for (nothing: an empty text)."""
    members = _members(settings, SERVICES if service is None else (service,))
    found = {member.name: _fault(settings, member) for member in members if name in (None, member.name)}
    if not found:
        who = name if name is not None else "a process"
        of = "" if service is None else f" of the {service} service"
        raise CommandFailed(Exit.NOT_RUNNING, f"{who}{of} is not registered", _NEXT_STEP)
    return found


def _started_here(settings: Settings) -> dict[str, str]:
    from services.processes import running_here

    here = running_here(settings.data.dir)
    if not here:
        raise CommandFailed(Exit.NOT_RUNNING, f"no process runs from {settings.data.dir}")
    members = {member.name: member for member in _members(settings, SERVICES)}
    return {name: _fault(settings, members.get(name), pid) for name, pid in sorted(here.items())}


def _members(settings: Settings, services: Iterable[str]) -> list[Member]:
    """The registered members of ``services``. Raises CoordinationError."""
    from services.backends import open_coordination
    from services.coordination.membership import members

    # Where nothing ever ran, nothing is made by looking.
    if settings.coordination.backend == "sqlite" and not settings.data.dir.is_dir():
        return []
    with closing(open_coordination(settings)) as coordination:
        return [member for service in services for member in members(coordination, service)]


def _fault(settings: Settings, member: Member | None, pid: int | None = None) -> str:
    """What keeps ``member`` from being well; an empty text for nothing."""
    if member is None or (pid is not None and member.pid != pid):
        return "not registered"
    if not member.ready:
        return "registered, but not ready"
    if member.service == "federation" and member.address.startswith("https:"):
        federation = settings.federation
        # It may want a certificate that this check does not have.
        asked = federation.client_ca is None and federation.certificate is not None
        return _unwell(member.address, federation.certificate) if asked else ""
    return _unwell(member.address) if member.service in ("api", "federation") else ""


def _unwell(url: str, certificate: Path | None = None) -> str:
    """What the API at ``url`` says is not well; an empty text for nothing. ``certificate``: it must show this very one,
    whoever signed it and whatever it is called."""
    import http.client
    import json
    import ssl
    from urllib.parse import urlsplit

    try:
        where = urlsplit(url)
        opened: http.client.HTTPConnection
        if where.scheme == "https":
            context = ssl.create_default_context(cafile=certificate)
            if certificate is not None:
                context.check_hostname = False
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            opened = http.client.HTTPSConnection(
                where.hostname or "", where.port, timeout=_ANSWER_S, context=context
            )
        else:
            opened = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_ANSWER_S)
        with closing(opened) as connection:
            connection.request("GET", f"{where.path.rstrip('/')}/health/ready")
            reply = connection.getresponse()
            said = json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{url}/health/ready: {error or type(error).__name__}"
    if reply.status == http.client.OK:
        return ""
    states = said.get("dependencies", {}) if isinstance(said, dict) else {}
    faults = said.get("faults", {}) if isinstance(said, dict) else {}
    poor = [f"{name}: {state.get('detail')}" for name, state in states.items() if not state.get("ok")]
    poor += [f"{name}: {fault}" for name, fault in faults.items()]
    return "; ".join(poor) or f"{url}/health/ready: {reply.status}"
