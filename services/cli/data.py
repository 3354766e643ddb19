"""``headwater import``: a data set into the event log."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from featurestore.schema import Schema
    from services.datasets.dataset import Dataset
    from services.datasets.importer import Imported
    from services.settings.model import Settings


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("import")(import_)


def import_(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FOLDER",
            help="ml-100k, generated-100k, or a folder with files `users`, `items`, `events` "
            "(.csv, .jsonl or .parquet).",
        ),
    ],
    until: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Only this fraction of the interactions, in time order.")
    ] = 1.0,
    shift_to_now: Annotated[
        bool, typer.Option("--shift-to-now", help="Move all times alike, so that the last imported is now.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Pass over wrong rows and count them.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once the processor is done with it; training goes on.")
    ] = False,
    stall_s: Annotated[
        float, typer.Option("--stall", help="With --wait: give up after so many seconds without progress.")
    ] = 60.0,
) -> None:
    """Append a data set's items, users and interactions to the event log.

    Event ids are stable, so importing the same data again within 7 days changes nothing.
    """
    from services.cli.output import note, print_json, warn

    options: Options = context.obj
    settings = options.settings()
    dataset, notes = open_source(source, settings, skip_bad)
    for text in notes:
        warn(text)
    if shift_to_now:
        dataset = dataset.shift_to(_now_ms(), until)
    dataset = dataset.split(until)[0]
    started = time.monotonic()
    imported = _append(dataset, settings, stall_s if wait else None)
    seconds = time.monotonic() - started
    if options.json:
        print_json(
            {
                "dataset": dataset.name,
                "source": dataset.source,
                "generated": dataset.generated,
                "notes": notes,
                "items": len(dataset.items),
                "users": len(dataset.users),
                "interactions": len(dataset.interactions),
                "events": imported.events,
                "processed": wait,
                "seconds": round(seconds, 3),
            }
        )
    else:
        note(
            f"{dataset.name} ({dataset.source}): {len(dataset.items)} items, {len(dataset.users)} users, "
            f"{len(dataset.interactions)} interactions {'processed' if wait else 'appended'} "
            f"in {seconds:.1f} s"
        )
        note("`headwater status` shows how far the trainer is with it")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def open_source(source: str, settings: Settings, skip_bad: bool) -> tuple[Dataset, tuple[str, ...]]:
    """The data set that a command names, and what its user must be told. Raises DatasetError."""
    import os

    from services.datasets.download import user_cache
    from services.datasets.errors import BadRows
    from services.datasets.open import open_dataset

    try:
        return open_dataset(source, user_cache(os.environ), schema=_schema(settings), skip_bad=skip_bad)
    except BadRows as error:
        raise CommandFailed(
            Exit.BAD_INPUT, f"{error.total} wrong rows; nothing was written\n{error}"
        ) from error


def _schema(settings: Settings) -> Schema:
    from featurestore.schema import Schema, default_schema

    file = settings.features.schema_file
    return default_schema() if file is None else Schema.load(file)


def _append(dataset: Dataset, settings: Settings, stall_s: float | None) -> Imported:
    import itertools

    from services.backends import open_log
    from services.cli.output import progress
    from services.datasets.importer import append_events, entity_events, interaction_events, wait_processed
    from services.topics import EVENTS, PROCESSOR_GROUP

    events = itertools.chain(entity_events(dataset), interaction_events(dataset))
    total = len(dataset.items) + len(dataset.users) + len(dataset.interactions)
    with closing(open_log(settings)) as log:
        with closing(log.producer()) as producer, progress("events → log", total) as advance:
            imported = append_events(
                events,
                producer,
                topic=EVENTS,
                partitions=settings.log.partitions,
                now_ms=_now_ms,
                progress=advance,
            )
        if stall_s is not None:
            with progress("log → features, samples", sum(imported.ends.values())) as advance:
                wait_processed(
                    log, PROCESSOR_GROUP, EVENTS, imported.ends, timeout_s=stall_s, progress=advance
                )
        return imported
