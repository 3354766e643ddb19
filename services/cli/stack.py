"""``headwater up``, ``status``, ``down``: all processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from services.settings.model import Settings
    from services.supervisor.folder import ChildState, RunFolder
    from services.supervisor.regions import Wanted

_POLL_S: Final = 0.1
_STOP_S: Final = 90.0


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("up")(up)
    app.command("status")(status)
    app.command("down")(down)


def up(
    context: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once all is ready.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait until all is ready.")] = 90.0,
    regions: Annotated[
        str,
        typer.Option(
            metavar="COUNT|NAMES",
            help="Regions to run, each with parameter servers and an API of its own: how many, or their names "
            "(home,eu,us), the training region first.",
        ),
    ] = "1",
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGION:CONDITIONS",
            help="Emulate the link between home and a region, as in eu:delay=80ms,jitter=5ms,rate=100mbit, each way "
            "(`headwater link set -h` lists what there is). May be repeated.",
        ),
    ] = None,
) -> None:
    """Start every process on this machine and keep them running."""
    from services.supervisor.regions import read_wanted

    options: Options = context.obj
    settings = options.settings()
    try:
        wanted = read_wanted(regions, link or (), settings.region.name)
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, str(error)) from None
    if detach:
        again = [f"--regions={regions}", *(f"--link={one}" for one in link or ())]
        _detached(options, settings, timeout_s, again)
    else:
        _foreground(options, settings, timeout_s, wanted)


def _foreground(options: Options, settings: Settings, timeout_s: float, wanted: Wanted) -> None:
    import threading

    from services.cli.output import note, waiting
    from services.processes import configure_logging, stop_on_signals
    from services.supervisor.up import supervised

    configure_logging("supervisor", level="WARNING")
    stop = threading.Event()
    with stop_on_signals(stop), supervised(settings, wanted) as supervisor:
        note(f"starting {len(supervisor.children())} processes; data in {settings.data.dir.absolute()}")
        with waiting() as show:
            supervisor.wait_ready(timeout_s, stop, lambda children: show(_in_short(children)))
        if not stop.is_set():
            _show_up(options, settings, supervisor.children(), "Ctrl-C (or `headwater down`) stops it")
        stop.wait()
        note("stopping: the API first, the parameter servers last")


def _in_short(children: Sequence[ChildState]) -> str:
    return ", ".join(f"{child.name} {child.state}" for child in children)


def _detached(options: Options, settings: Settings, timeout_s: float, again: Sequence[str]) -> None:
    from services.supervisor.folder import AlreadyRunning, RunFolder
    from services.supervisor.logs import tail

    folder = RunFolder(settings.data.dir.absolute())
    if folder.held():
        state = folder.state()
        raise AlreadyRunning(folder.path.parent, state.process.pid if state else None)
    folder.path.mkdir(parents=True, exist_ok=True)
    output = folder.path / "supervisor.log"
    program = [sys.executable, "-m", "services.cli.app", *_again(options)]
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [*program, "up", "--timeout", str(timeout_s), *again],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s + 10.0
    while process.poll() is None and time.monotonic() < deadline:
        state = folder.state()
        mine = state is not None and state.process.pid == process.pid
        if state is not None and mine and all(child.state == "ready" for child in state.children):
            _show_up(options, settings, state.children, f"`headwater down` stops it (process {process.pid})")
            return
        time.sleep(_POLL_S)
    raise CommandFailed(
        Exit.NOT_READY, "\n".join(tail(output, 20)) or "the supervisor ended", f"See {output}."
    )


def _again(options: Options) -> list[str]:
    """The global options for a second run of ourselves."""
    file = options.file(os.environ)
    config = [f"--config={file}"] if file else []
    return [*config, *(f"--set={override}" for override in options.overrides)]


def _show_up(options: Options, settings: Settings, children: Sequence[ChildState], stops: str) -> None:
    from services.cli.output import note, print_json
    from services.cli.running import child_json, print_children, print_regions, regions_of

    regions = regions_of(settings, children)
    url = regions[0].url
    if options.json:
        regions_json = [region.as_json() for region in regions]
        print_json({"url": url, "regions": regions_json, "processes": [child_json(one) for one in children]})
        return
    print_children(children, int(time.time() * 1e3))
    key = " -H 'X-API-Key: YOUR KEY'" if settings.api.keys else ""
    print(f"\nAPI      {url}/v1/        documentation  {url}/docs")
    print(f"health   {url}/health/ready   metrics  {url}/metrics\n")
    print_regions(regions)
    body = "-H 'Content-Type: application/json' -d '{\"user_id\": \"1\"}'"
    print(f"curl -s {url}/v1/recommendations{key} {body}\n")
    sys.stdout.flush()
    if len(regions) > 1:
        note(
            "`headwater recommend 1 --url URL` asks one region; `headwater sync status` shows how far each is"
        )
    note(f"`headwater import ml-100k` fills it with films; {stops}")


def status(context: typer.Context) -> None:
    """Show the processes, and how far behind the log each group is."""
    from services.cli.output import print_json, print_table
    from services.cli.running import child_json, print_children, print_regions, regions_of
    from services.cli.standing import registered, standing

    options: Options = context.obj
    settings = options.settings()
    folder = _folder(settings)
    state = folder.state() if folder.held() else None
    members = [] if state else registered(settings)
    if state is None and not members:
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}")
    children = state.children if state else tuple(members)
    regions, lags = regions_of(settings, children), standing(settings)
    if options.json:
        print_json(
            {
                "supervisor": state.process.pid if state else None,
                "regions": [region.as_json() for region in regions],
                "processes": [child_json(child) for child in children],
                "lag": [
                    {
                        "group": lag.group, "topic": lag.topic, "partition": lag.partition,
                        "messages": lag.messages, "seconds": round(lag.seconds, 3),
                    }
                    for lag in lags
                ],
            }
        )  # fmt: skip
        return
    print_children(children, int(time.time() * 1e3))
    print()
    print_regions(regions)
    rows = [(lag.group, lag.topic, lag.partition, lag.messages, f"{lag.seconds:.2f}") for lag in lags]
    print_table(("group", "topic", "partition", "messages behind", "seconds behind"), rows)


def _folder(settings: Settings) -> RunFolder:
    from services.supervisor.folder import RunFolder

    return RunFolder(settings.data.dir.absolute())


def down(context: typer.Context) -> None:
    """Stop what ``headwater up`` started on this data folder."""
    import signal

    from services.cli.output import note, print_json

    options: Options = context.obj
    settings = options.settings()
    folder = _folder(settings)
    state = folder.state() if folder.held() else None
    process = state.process.process() if state else None
    if process is None and folder.held():
        raise CommandFailed(
            Exit.NOT_RUNNING,
            f"region {settings.region.name} runs as part of a stack with another data folder",
            "`headwater down` with the settings of that stack stops all of its regions.",
        )
    if process is None:
        raise CommandFailed(
            Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", "There is nothing to stop."
        )
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    while folder.held():
        if time.monotonic() > deadline:
            raise CommandFailed(
                Exit.NOT_READY,
                f"process {process.pid} still stops its processes after {_STOP_S:g} s",
                "Wait on.",
            )
        time.sleep(_POLL_S)
    if options.json:
        print_json({"stopped": process.pid})
    else:
        note("stopped")
