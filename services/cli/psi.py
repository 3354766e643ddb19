"""``headwater fl psi``: which ids companies have in common, and nothing of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

if TYPE_CHECKING:
    from services.psi.trial import Trial

app = group("Which ids companies have in common, and nothing of the others (private set intersection).")


@app.command("check")
def check(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="CSV with a header, or Parquet.")],
    column: Annotated[str, typer.Option("--id", help="The column of ids.")] = "id",
    case: Annotated[str, typer.Option(help="keep, or fold where case means nothing.")] = "keep",
) -> None:
    """Say how the ids of a file will be compared: how many there are, and which rows will be left out.

    The rule: Unicode's form NFC, no white space at the ends, UTF-8, 1 to 256 bytes, no control characters.
    """
    from federated.psi.ids import IdRule, IdsRefused, floats, normalise
    from services.cli.output import print_json, print_table
    from services.psi.files import read_ids

    options: Options = context.obj
    rule: dict[str, Any] = {"case": case}
    with _refusals():
        try:
            ids = normalise(read_ids(file, column), IdRule(**rule))
        except IdsRefused as error:
            checks = [("texts are ids", False, str(error))]
            count = 0
        else:
            count, made = len(ids), floats(ids)
            checks = [
                ("texts are ids", True, ""),
                ("every row has an id", not ids.empty.count, str(ids.empty)),
                ("every id stands once", not ids.repeated.count, str(ids.repeated)),
                ("no number is written as 7.0 or 4.47E+11", not made.count, str(made)),
            ]
    if options.json:
        rows = [dict(zip(("check", "passed", "detail"), one, strict=True)) for one in checks]
        print_json({"ids": count, "checks": rows})
    else:
        print_table(
            ("check", "", "rows"),
            [(name, "PASS" if passed else "FAIL", detail) for name, passed, detail in checks],
            f"{count} ids in {file}",
        )
    if not all(passed for _, passed, _ in checks):
        raise typer.Exit(Exit.CHECK_FAILED)


@app.command("run")
def run(
    context: typer.Context,
    files: Annotated[
        list[Path], typer.Argument(help="A file of ids for each party: two, or with several three and more.")
    ],
    protocol: Annotated[
        str, typer.Option(help="auto, ecdh, rsa, ot, unbalanced (first small, second large) or several.")
    ] = "auto",
    learns: Annotated[
        str, typer.Option(help="both (all), guest (the first file's party), or host (the second).")
    ] = "both",
    count: Annotated[bool, typer.Option("--count", help="Their count alone (ecdh).")] = False,
    column: Annotated[str, typer.Option("--id", help="The column of ids.")] = "id",
    case: Annotated[str, typer.Option(help="keep, or fold where case means nothing.")] = "keep",
    chunk: Annotated[int, typer.Option(min=1, help="Ids in a message.")] = 8_192,
    bits: Annotated[int, typer.Option(help="Of RSA's key: 2048 to 4096.")] = 2_048,
    filter_bits: Annotated[
        int, typer.Option(help="unbalanced: a stranger passes the filter with probability 2**-bits.")
    ] = 30,
    cores: Annotated[int | None, typer.Option(min=1, max=256, help="All if left out.")] = None,
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For sets beyond memory (ecdh): an empty folder for them."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="rsa, unbalanced: what the next run with the same file need not do again; keep it secret.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write every party's common ids and rows there.")
    ] = None,
) -> None:
    """Intersect files on this machine, for a trial of the protocols: all parties in one process, on all cores.

    Companies run `headwater fl vertical party` with what = "psi" in the [job] of their files: the same roles, over the
    network.
    """
    import os

    from services.cli.output import print_json, print_table, waiting
    from services.processes import limit_threads

    limit_threads(os.environ)
    from federated.psi.kind import PsiOptions
    from services.psi.trial import intersect

    options: Options = context.obj
    fields: dict[str, Any] = {
        "protocol": protocol,
        "learns": learns,
        "wants": "count" if count else "ids",
        "case": case,
        "chunk": chunk,
        "bits": bits,
        "filter_bits": filter_bits,
    }
    with _refusals(), waiting() as line:
        trial = intersect(
            _named(files),
            PsiOptions(**fields),
            column=column,
            cores=cores or os.cpu_count() or 1,
            disk=disk,
            keep=keep,
            progress=lambda name, step: line(f"{name}: {step.what} {step.done} of {step.total}"),
        )
    if out is not None:
        _write(trial, out)
    report = _report(trial)
    if options.json:
        print_json(report)
        return
    print_table(
        ("party", "ids", "common", "bytes sent", "left out"),
        [
            (
                one["party"],
                one["ids"],
                "does not learn it" if one["common"] is None else one["common"],
                one["bytes_sent"],
                one["left_out"],
            )
            for one in report["parties"]
        ],
        f"{trial.protocol}: {trial.seconds:.2f} s",
    )


def _named(files: list[Path]) -> dict[str, Path]:
    """The files by a name each: the file's own, with a number where two are the same."""
    named: dict[str, Path] = {}
    for path in files:
        name, number = path.stem or "party", 2
        while name in named:
            name, number = f"{path.stem}-{number}", number + 1
        named[name] = path
    return named


def _report(trial: Trial) -> dict[str, Any]:
    parties = [
        {
            "party": name,
            "ids": found.mine,
            "common": found.count,
            "bytes_sent": sum(size for (sender, _, _), size in trial.sent.items() if sender == name),
            "left_out": trial.complaints.get(name, ""),
        }
        for name, found in trial.found.items()
    ]
    sent = [
        {"from": sender, "to": receiver, "kind": kind, "bytes": size}
        for (sender, receiver, kind), size in trial.sent.items()
    ]
    return {
        "protocol": trial.protocol,
        "seconds": round(trial.seconds, 3),
        "parties": sorted(parties, key=lambda one: str(one["party"])),
        "sent": sent,
    }


def _write(trial: Trial, folder: Path) -> None:
    import csv

    folder.mkdir(parents=True, exist_ok=True)
    for name, found in trial.found.items():
        if found.ids is None or found.rows is None:
            continue
        with (folder / f"{name}.common.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("id", "row"))
            writer.writerows(
                (value.decode(), row + 1) for value, row in zip(found.ids, found.rows.tolist(), strict=True)
            )


@contextmanager
def _refusals() -> Iterator[None]:
    from federated.psi.ids import IdsRefused
    from federated.vertical.parties import PeerFault
    from federated.vertical.tables import TableRefused
    from services.vertical.store import StateDamaged, StateNotKept

    try:
        yield
    except StateNotKept as error:
        raise CommandFailed(Exit.SETTINGS, str(error), "Make room, or name another folder.") from error
    except (PeerFault, StateDamaged) as error:
        raise CommandFailed(
            Exit.REFUSED, str(error), "What --keep kept is damaged, or of other options: name another folder."
        ) from error
    except (TableRefused, IdsRefused) as error:
        raise CommandFailed(
            Exit.BAD_INPUT,
            str(error),
            "`headwater fl psi check FILE --id COLUMN` names what is wrong with a file.",
        ) from error
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, str(error), "`headwater fl psi run -h` says what fits.") from error
