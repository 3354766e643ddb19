"""``headwater events``: send some, watch them pass, see what was rejected and why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group
from services.cli.recommend import Key, Url

if TYPE_CHECKING:
    from services.cli.client import Api
    from services.messagelog.contract import MessageLog, Record

app = group("Send events over REST, read them from the log, list the rejected.")

_BATCH: Final = 500
_READ: Final = 500
_SHOWN: Final = 20
_POLL_S: Final = 0.2


@app.command("send")
def send(
    context: typer.Context,
    user: Annotated[str | None, typer.Argument(help="Who.")] = None,
    item: Annotated[str | None, typer.Argument(help="With what.")] = None,
    action: Annotated[str, typer.Argument(help="What was done.")] = "like",
    value: Annotated[float | None, typer.Option(help="A rating or a strength.")] = None,
    event_id: Annotated[str | None, typer.Option(help="The event's id; a repeat is counted once.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Events as JSON, one a line; - reads standard input.")
    ] = None,
    url: Url = None,
    key: Key = None,
) -> None:
    """Send one interaction, or a file of events of any kind."""
    from services.cli.client import api_of
    from services.cli.output import note, print_json

    options: Options = context.obj
    if file is None and (user is None or item is None):
        raise CommandFailed(Exit.USAGE, "either USER and ITEM or --file is needed")
    api = api_of(options.settings(), url, key)
    if file is None:
        optional = {"value": value, "event_id": event_id}
        event: dict[str, object] = {"type": "interaction", "user_id": user, "item_id": item, "action": action}
        event |= {name: given for name, given in optional.items() if given is not None}
        reply = api.post("/v1/events", event)
        if options.json:
            print_json(reply)
        else:
            note(f"accepted: {reply}")
        return
    _send_file(options, api, file)


def _send_file(options: Options, api: Api, file: Path) -> None:
    """Send a file batch by batch and name each refused line. Raises CommandFailed if there are any."""
    from services.cli.output import note, print_json
    from services.cli.replies import read_receipt

    accepted = 0
    refused: list[dict[str, object]] = []
    for lines, batch in _batches(file):
        receipt = read_receipt(api.post("/v1/events:batch", {"events": batch}))
        accepted += receipt.accepted
        refused += [
            {"line": line, "code": result.get("code"), "errors": result.get("errors")}
            for line, result in zip(lines, receipt.results, strict=False)
            if result.get("status") == "refused"
        ]
    if options.json:
        print_json({"accepted": accepted, "refused": refused})
    else:
        note(f"accepted {accepted} events, refused {len(refused)}")
        for one in refused[:_SHOWN]:
            note(f"  {file}:{one['line']}: {one['code']} {json.dumps(one['errors'], ensure_ascii=False)}")
    if refused:
        raise CommandFailed(Exit.REFUSED, f"{len(refused)} events were refused", "The others were accepted.")


def _batches(file: Path) -> Iterator[tuple[list[int], list[object]]]:
    """Line numbers and events of a JSON-lines file, some at a time. Raises CommandFailed naming the line."""
    try:
        source = sys.stdin if str(file) == "-" else file.open(encoding="utf-8")
    except OSError as error:
        raise CommandFailed(Exit.BAD_INPUT, f"{file}: {error.strerror}", "Check the name.") from error
    with source:
        lines: list[int] = []
        batch: list[object] = []
        for number, line in enumerate(source, 1):
            if not line.strip():
                continue
            try:
                batch.append(json.loads(line))
            except ValueError as error:
                raise CommandFailed(
                    Exit.BAD_INPUT, f"{file}:{number}: {error}", "Lines before this one may have been sent."
                ) from error
            lines.append(number)
            if len(batch) == _BATCH:
                yield lines, batch
                lines, batch = [], []
        if batch:
            yield lines, batch


@app.command("tail")
def tail(
    context: typer.Context,
    last: Annotated[int, typer.Option("-n", min=0, help="How many of the newest.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the newest events of the log."""
    from services.topics import EVENTS

    _listing(context.obj, EVENTS, last, follow)


@app.command("rejected")
def rejected(
    context: typer.Context,
    last: Annotated[int, typer.Option("-n", min=0, help="How many of the newest.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """List events that the processor could not use, each with its reason."""
    from services.topics import REJECTED

    _listing(context.obj, REJECTED, last, follow)


def _listing(options: Options, topic: str, last: int, follow: bool) -> None:
    from services.backends import open_log
    from services.cli.output import note, print_json_line

    with closing(open_log(options.settings())) as log:
        records, ends = _newest(log, topic, last)
        for record in records:
            print_json_line(_shown(record)) if options.json else print(_line(record))
        if not records and not options.json and not follow:
            note("there are no rejected events" if topic == "rejected" else "there are no events yet")
        while follow:
            for partition, end in ends.items():
                for record in _from(log, topic, partition, end):
                    ends[partition] = record.offset + 1
                    print_json_line(_shown(record)) if options.json else print(_line(record), flush=True)
            time.sleep(_POLL_S)


def _newest(log: MessageLog, topic: str, last: int) -> tuple[list[Record], dict[int, int]]:
    """The ``last`` records of all partitions together, oldest first, and where each partition ends."""
    from services.messagelog.contract import TopicPartition

    found: list[Record] = []
    ends: dict[int, int] = {}
    for number in range(log.partitions(topic)):
        ends[number] = end = log.end_offset(TopicPartition(topic, number))
        # Offsets may have gaps, so what stands between is read until enough is found or the start is reached.
        width = last
        records: list[Record] = []
        while last and len(records) < last:
            start = max(0, end - width)
            records = [record for record in _from(log, topic, number, start) if record.offset < end]
            if start == 0:
                break
            width *= 4
        found += records[-last:] if last else []
    found.sort(key=lambda record: (record.accepted_at_ms, record.partition, record.offset))
    return found[-last:] if last else [], ends


def _from(log: MessageLog, topic: str, partition: int, offset: int) -> list[Record]:
    from services.messagelog.contract import TopicPartition

    records: list[Record] = []
    while batch := log.read(TopicPartition(topic, partition), offset, _READ):
        records += batch
        offset = batch[-1].offset + 1
    return records


def _shown(record: Record) -> dict[str, object]:
    return {
        "partition": record.partition,
        "offset": record.offset,
        "accepted_at_ms": record.accepted_at_ms,
        record.topic.removesuffix("s"): _content(record),
    }


def _content(record: Record) -> object:
    """What the record holds: JSON of the rejected topic, an event of the others."""
    import msgspec

    from services.events import EventFormatError, decode_event

    try:
        return msgspec.to_builtins(decode_event(record.value))
    except EventFormatError as error:
        try:
            decoded: object = json.loads(record.value)
            return decoded
        except ValueError:
            return {"unreadable": str(error)}


def _line(record: Record) -> str:
    from datetime import UTC, datetime

    when = datetime.fromtimestamp(record.accepted_at_ms / 1e3, UTC).isoformat(timespec="milliseconds")
    return f"{when} {record.partition}/{record.offset} {json.dumps(_content(record), ensure_ascii=False)}"
