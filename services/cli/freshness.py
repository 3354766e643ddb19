"""``headwater freshness``: send marked events and updates, and measure how soon every region has them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.recommend import Key, Url

if TYPE_CHECKING:
    from services.cli.client import Api
    from services.freshness.measure import Push
    from services.freshness.report import Report
    from services.freshness.stages import Kind
    from services.freshness.stamps import Stamper
    from services.freshness.updates import Update, UpdateWriter
    from services.settings.model import Settings

WRITERS: Final = 4
"""Who push marked updates in turn, each from a slot of its own."""
PICTURE: Final = "freshness.png"
FIGURES: Final = "freshness.json"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("freshness")(freshness)


def freshness(
    context: typer.Context,
    rate: Annotated[float, typer.Option(min=0.01, help="Probes of each kind a second.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=0.01, help="For how long.")] = 30.0,
    region: Annotated[
        list[str] | None,
        typer.Option(
            "--region",
            metavar="NAME=URL",
            help="A region to watch beside the one that events go to; for that one, at which of its APIs. May be "
            "repeated; without it, those that run here, or those of the settings.",
        ),
    ] = None,
    events: Annotated[
        bool, typer.Option(help="Send marked events through log, processor and trainer.")
    ] = True,
    updates: Annotated[bool, typer.Option(help="Push marked updates to the parameter servers.")] = True,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help=f"Write {PICTURE} and {FIGURES} there.")
    ] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Measure how soon what happens is in every region's parameters and recommendations.

    Stages: an event is accepted (durable in the log), processed (its features and sample are durable), trained (its
    gradient is computed), applied (the home region's parameter servers have it); then each region's parameters and
    recommendations contain it. An update is pushed to the parameter servers directly, without log and trainer.

    Where a probe was not taken, or is missing somewhere, the check failed (exit code 13).
    """
    from services.cli.client import api_of
    from services.cli.output import note, print_json, print_table, progress
    from services.freshness.measure import MAX_PROBES, Plan, measure
    from services.freshness.report import COLUMNS, report, table

    options: Options = context.obj
    settings = options.settings()
    kinds = _kinds(events, updates)
    api = api_of(settings, url, key)
    # A URL that is given need not be of the stack that the settings describe.
    regions = read_regions(region) if region else {} if url else _known(settings)
    if not rate * seconds <= MAX_PROBES:
        what = f"--rate {rate:g} and --seconds {seconds:g} are more than {MAX_PROBES:,} probes of each kind"
        raise CommandFailed(Exit.USAGE, what, "Make one of them smaller.")
    if out is not None:
        _make(out)
    plan = Plan(api.url, regions, api.key, rate, seconds, kinds=kinds)
    with ExitStack() as stack:
        pushes = stack.enter_context(_pushing(settings, api)) if updates else ()
        advance = stack.enter_context(progress("probes sent", plan.count * len(kinds)))
        found = report(measure(plan, pushes, advance))
    if out is not None:
        _write(found, out)
        note(f"wrote {out / PICTURE} and {out / FIGURES}")
    for problem in found.problems:
        note(f"problem: {problem}")
    if options.json:
        print_json(_plain(found))
    else:
        print_table(COLUMNS, table(found))
        print(f"\nms since {found.counted_from}; the aim is {found.slo_ms:,.0f}.")
        print(
            "On other clocks: " + "; ".join(f"{s} {c}" for s, c in found.clocks.items() if "client" not in c)
        )
    failures = list(_failures(found))
    for failure in failures:
        note(f"FAIL  {failure}")
    if failures:
        raise CommandFailed(Exit.CHECK_FAILED, "")


def _failures(found: Report) -> Iterator[str]:
    """What keeps the measurement from being whole. A region that nobody reaches lacks every probe."""
    if found.failed:
        yield f"{found.failed:,} probes were not taken"
    for row in found.rows:
        if row.missing:
            where = f"{row.region}: " if row.region else ""
            yield f"{where}{row.missing:,} of {row.sent:,} {row.kind} probes are missing at stage {row.stage}"


def _kinds(events: bool, updates: bool) -> tuple[Kind, ...]:
    if events and updates:
        return ("event", "update")
    if not events and not updates:
        raise CommandFailed(Exit.USAGE, "neither events nor updates are to be sent")
    return ("event",) if events else ("update",)


def read_regions(texts: Sequence[str]) -> dict[str, str]:
    """URL by name of ``NAME=URL`` texts. Raises CommandFailed."""
    from services.freshness.http import Server

    found: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        try:
            Server(url)
            complete = bool(name and equals) and "://" in url
        except ValueError:
            complete = False
        if not complete:
            raise CommandFailed(Exit.USAGE, f"{text!r} is no region", "Write --region eu=http://HOST:PORT.")
        found[name] = url.rstrip("/")
    return found


def _known(settings: Settings) -> dict[str, str]:
    """The regions that run from this data folder, else those of the settings."""
    from services.cli.running import regions_of
    from services.supervisor.folder import RunFolder

    folder = RunFolder(settings.data.dir.absolute())
    state = folder.state() if folder.held() else None
    if state is not None:
        return {one.name: one.url for one in regions_of(settings, state.children)[1:] if one.url}
    return read_regions(settings.freshness.regions)


@contextmanager
def _pushing(settings: Settings, api: Api) -> Iterator[Sequence[Push]]:
    """How marked updates are sent: straight to the parameter servers where the settings lead to those of the API,
    else by the API, which pushes them from there."""
    if not _know(settings, api):
        yield [lambda: _push_by(api)] * WRITERS
        return
    from services.backends import open_coordination, open_log, open_security
    from services.freshness.stamps import Stamper
    from services.freshness.updates import SLOTS, UpdateWriter
    from services.parameter_server.client import ParameterClient

    with ExitStack() as stack:
        coordination = stack.enter_context(closing(open_coordination(settings)))
        stamper = stack.enter_context(
            closing(Stamper(stack.enter_context(closing(open_log(settings))).producer))
        )
        security, pushes = open_security(settings), []
        for slot in random.sample(range(SLOTS), WRITERS):
            client = ParameterClient(coordination, deadline_s=settings.parameters.deadline, security=security)
            writer = UpdateWriter(stack.enter_context(closing(client)), slot)
            writer.open()
            pushes.append(partial(_push_by_writer, writer, stamper))
        yield pushes


def _push_by_writer(writer: UpdateWriter, stamper: Stamper) -> Update:
    from services.freshness.updates import update_stamp

    update = writer.push()
    stamper.put(update_stamp(update))
    return update


def _know(settings: Settings, api: Api) -> bool:
    """Whether the coordination store of the settings knows the API: then its parameter servers are that API's."""
    from services.backends import open_coordination
    from services.coordination.contract import CoordinationError
    from services.coordination.membership import members

    if settings.coordination.backend == "sqlite" and not (settings.data.dir / "coordination.db").exists():
        return False  # an embedded store is a file, and is not to be made by looking
    try:
        with closing(open_coordination(settings)) as coordination:
            return any(member.address.rstrip("/") == api.url for member in members(coordination, "api"))
    except CoordinationError:
        return False


class _Probe(msgspec.Struct):
    token: str
    accepted_at_ms: float
    after_ms: dict[str, float]


class _Sent(msgspec.Struct):
    probes: list[_Probe]


def _push_by(api: Api) -> Update:
    """Let the API push one marked update. Raises ParameterError where it cannot."""
    from services.freshness.updates import Update
    from services.parameter_server.types import ParameterError
    from services.tokens import decode_token

    try:
        reply = api.post("/v1/probes", {"kind": "update"})
        probe = msgspec.convert(reply, type=_Sent).probes[0]
    except (CommandFailed, msgspec.ValidationError) as error:
        raise ParameterError(str(error)) from error
    ((slot, number),) = decode_token(probe.token).positions
    return Update(slot, number, probe.accepted_at_ms, probe.accepted_at_ms + probe.after_ms["applied"])


def _make(folder: Path) -> None:
    """Before anything is measured: a folder that cannot be made must not cost the figures."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"--out {folder} is no folder that can be made: {error.strerror}"
        raise CommandFailed(Exit.USAGE, what) from error


def _write(found: Report, folder: Path) -> None:
    import json

    from services.freshness.picture import draw

    (folder / FIGURES).write_text(json.dumps(_plain(found), indent=2) + "\n", encoding="utf-8")
    draw(found, folder / PICTURE)


def _plain(found: Report) -> Mapping[str, object]:
    plain: Mapping[str, object] = msgspec.to_builtins(found)
    return plain
