"""``headwater fl attack``: what each kind of protection keeps from whom, measured by attacking it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.job_keys import KEYS_STEP

if TYPE_CHECKING:
    from federated.attacks.contest import Plan, Row
    from federated.attacks.setting import Setting
    from federated.job import FederatedJob
    from federated.privacy.section import PrivacySection, SecureAggregationSection

FIGURES: Final = "attacks.json"
ROWS: Final = "attacks.csv"
PICTURE: Final = "attacks.png"
_MECHANISMS: Final = (
    "secagg",
    "local_gaussian",
    "local_laplace",
    "signds",
    "central_gaussian",
    "distributed_gaussian",
)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("attack")(attack)


def attack(
    context: typer.Context,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job", metavar="FILE", help="Attack this job's protection alone, beside plain updates."
        ),
    ] = None,
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", help="inversion, membership or audit; may be repeated. All if left out."),
    ] = None,
    mechanisms: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism",
            help=f"{', '.join(_MECHANISMS)} (all if left out) or distributed_skellam; may be repeated.",
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Whose rows: digits if nothing is said.")] = None,
    candidates: Annotated[int, typer.Option(min=2, help="Records of which one is the client's.")] = 1_000,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Games of inversion.")] = 200,
    records: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Records of the attacked client (1 and 8); may be repeated."),
    ] = None,
    knows: Annotated[
        str,
        typer.Option(help="What is known of a client's other records: rest (all), or candidates (nothing)."),
    ] = "rest",
    cohort: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=10_000,
            help="Clients whose updates are summed (10; of a job its own, up to 100 and to what rows are left).",
        ),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Of a report, local mechanisms (1 and 8); may be repeated.")
    ] = None,
    sign_epsilon: Annotated[
        list[float] | None, typer.Option(help="Of SignDS's choice (1 and 100); may be repeated.")
    ] = None,
    noise: Annotated[float, typer.Option(min=1e-6, help="Noise multiplier, central and distributed.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Of all claims.")] = 1e-5,
    compression: Annotated[
        list[str] | None, typer.Option(help="A scheme of compression to attack, too; may be repeated.")
    ] = None,
    hidden: Annotated[int, typer.Option(min=0, max=10_000, help="Hidden units (0: none).")] = 16,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Local steps on all of a client's rows (1).")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Local learning rate (.1).")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Iterations, membership.")] = 5,
    worlds: Annotated[
        int, typer.Option(min=8, max=100_000, help="Runs with the record, and as many without, membership.")
    ] = 100,
    audited: Annotated[
        int, typer.Option(min=8, max=1_000_000, help="Reports of each input, audit.")
    ] = 10_000,
    seed: Annotated[int | None, typer.Option(min=0, help="Decides all that is drawn.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help=f"Write {FIGURES}, {ROWS} and {PICTURE} there."),
    ] = None,
) -> None:
    """Attack simulated clients under each protection, and say how well that goes beside plain updates.

    inversion: the adversary knows the model and which records may be a client's; it names the one that the client
    trained on. membership: over all iterations, was this record there? audit: our own noise on the inputs that are
    hardest to hide; an epsilon that measurably is larger than claimed is a failed check (exit code 13).

    For each mechanism the table says who attacks and what they see: one that protects against whoever downloads the
    models need not protect against its server. Clips are the median norm of updates, a job's own with --job.
    """
    import os

    from services.attacks.report import SIMULATED, document
    from services.cli.output import note, print_json, progress
    from services.processes import limit_threads

    options: Options = context.obj
    limit_threads(os.environ)  # before NumPy loads: the products here are small
    with _refusals():
        wanted = None if job is None else _job(job)
        protections, secure = _protections(wanted, mechanisms, epsilon, sign_epsilon, noise, delta)
        from federated.attacks.contest import Plan, games
        from federated.attacks.inversion import Client
        from federated.attacks.membership import Federations

        if knows not in ("rest", "candidates"):
            raise CommandFailed(Exit.USAGE, f"--knows is rest or candidates, not {knows}")
        victims = tuple(
            Client(count, "candidates" if knows == "candidates" and count > 1 else "rest")
            for count in records or (1, 8)
        )
        if seed is None:
            seed = 0 if wanted is None else wanted.job.seed
        setting = _setting(wanted, seed, dataset, candidates, hidden, steps, rate)
        summed = cohort or _cohort(wanted, setting, victims[-1].records)
        plan = Plan(
            protections,
            _attacks(attacks),
            tuple(compression or _schemes(wanted)),
            secure,
            keep_clips=wanted is not None,
            victims=victims,
            trials=trials,
            clients=summed,
            delta=delta,
            federations=Federations(worlds, rounds, summed, victims[-1].records),
            audited=audited,
            seed=seed,
        )
        rows: list[Row] = []
        planned = games(setting, plan)
        with progress("attacks", len(planned)) as advance:
            for play in planned:
                rows.append(play())
                advance(1)
    found = document(rows, _settings(setting, plan))
    if out is not None:
        _write(rows, found, out)
        note(f"wrote {out / FIGURES}, {out / ROWS} and {out / PICTURE}")
    if options.json:
        print_json(found)
    else:
        _show(rows)
        print(f"\n{SIMULATED}")
    broken = [row for row in found["rows"] if row["attack"] == "audit" and not row["passed"]]
    if broken:
        labels = ", ".join(row["label"] for row in broken)
        raise CommandFailed(Exit.CHECK_FAILED, f"more leaks than is claimed: {labels}")


def _job(path: Path) -> FederatedJob:
    from federated.job import load_job

    return load_job(path)


def _cohort(job: FederatedJob | None, setting: Setting, records: int) -> int:
    """The job's own, as far as there are rows that are nobody's: clients of the membership game share none."""
    if job is None:
        return 10
    return max(2, min(job.rounds.thresholds.uploads_floor, 100, setting.others // records))


def _protections(
    job: FederatedJob | None,
    mechanisms: Sequence[str] | None,
    epsilons: Sequence[float] | None,
    sign_epsilons: Sequence[float] | None,
    noise: float,
    delta: float,
) -> tuple[tuple[PrivacySection, ...], SecureAggregationSection]:
    """The sections to attack, and whether sums are masked."""
    from federated.privacy.section import LOCAL, Mechanism, PrivacySection, SecureAggregationSection

    if job is not None:
        sections = () if job.privacy.mechanism == "none" else (job.privacy,)
        return sections, job.secure_aggregation
    chosen = list(mechanisms or _MECHANISMS)
    known = {*get_args(Mechanism), "secagg"} - {"none"}
    for name in chosen:
        if name not in known:
            raise CommandFailed(Exit.USAGE, f"--mechanism {name} is none of {', '.join(sorted(known))}")
    found: list[PrivacySection] = []
    for mechanism in get_args(Mechanism):
        if mechanism not in chosen:
            continue
        base = PrivacySection(mechanism=mechanism, delta=delta, noise_multiplier=noise)
        if mechanism == "signds":
            found += [replace(base, sign_eps=value) for value in sign_epsilons or (1.0, 100.0)]
        elif mechanism in LOCAL:
            found += [replace(base, epsilon=value) for value in epsilons or (1.0, 8.0)]
        else:
            found.append(base)
    protocol: Any = "secagg" if "secagg" in chosen else "none"
    return tuple(found), SecureAggregationSection(protocol=protocol)


def _schemes(job: FederatedJob | None) -> tuple[str, ...]:
    if job is None:
        return ("top_k:0.03,quantise:1,deflate",)
    return (job.compression.upload,) if job.compression.upload else ()


def _attacks(names: Sequence[str] | None) -> tuple[Any, ...]:
    from federated.attacks.contest import ATTACKS

    for name in names or ():
        if name not in ATTACKS:
            raise CommandFailed(Exit.USAGE, f"--attack {name} is none of {', '.join(ATTACKS)}")
    return tuple(names or ATTACKS)


def _setting(
    job: FederatedJob | None,
    seed: int,
    dataset: str | None,
    candidates: int,
    hidden: int,
    steps: int | None,
    rate: float | None,
) -> Setting:
    import os

    from federated.attacks.contest import make_setting
    from federated.device import LocalTraining
    from federated.models import make_model
    from services.cli.output import note
    from services.datasets.download import user_cache
    from services.datasets.federations import open_federation

    name = dataset or ("digits" if job is None else job.data.name)
    federation, notes = open_federation(name, user_cache(os.environ), seed=seed)
    for text in notes:
        note(text)
    training = LocalTraining(steps=1, batch_size=0) if job is None else job.training
    if steps is not None:
        training = replace(training, steps=steps, epochs=None)
    if rate is not None:
        training = replace(training, rate=rate)
    if job is not None:
        model = job.make_model(federation.features, federation.classes)
    else:
        kind: dict[str, Any] = {"name": "perceptron", "hidden": [hidden]} if hidden else {"name": "softmax"}
        model = make_model(kind.pop("name"), features=federation.features, classes=federation.classes, **kind)
    return make_setting(federation, model, training, candidates, seed)


def _settings(setting: Setting, plan: Plan) -> dict[str, Any]:
    return {
        "model": setting.model.name,
        "weights": int(setting.start.size),
        "candidates": setting.candidates,
        "training": asdict(setting.training),
        "cohort": plan.clients,
        "trials": plan.trials,
        "worlds": plan.federations.worlds,
        "rounds": plan.federations.rounds,
        "audited": plan.audited,
        "delta": plan.delta,
        "seed": plan.seed,
    }


def _show(rows: Sequence[Row]) -> None:
    from services.attacks.report import notes, tables
    from services.cli.output import print_table

    for title, columns, cells in tables(rows):
        print_table(columns, cells, title)
        print()
    for text in notes(rows):
        print(text)


def _write(rows: Sequence[Row], found: dict[str, Any], folder: Path) -> None:
    import json

    from services.attacks.picture import draw
    from services.attacks.report import SIMULATED, as_csv

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(Exit.USAGE, f"{folder} cannot be written to: {error.strerror}") from error
    (folder / FIGURES).write_text(json.dumps(found, indent=2, allow_nan=False))
    (folder / ROWS).write_text(as_csv(rows))
    draw(rows, f"Attacks on updates ({SIMULATED})", folder / PICTURE)


@contextmanager
def _refusals() -> Iterator[None]:
    """What cannot be played, with the exit code that says what to do."""
    from federated.attacks.contest import TooFewRows
    from federated.job_sections import JobRefused

    try:
        yield
    except JobRefused as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), f"Mend the job's file; {KEYS_STEP}") from error
    except TooFewRows as error:
        raise CommandFailed(Exit.USAGE, str(error), "Lower --candidates, --cohort or --records.") from error
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, str(error)) from error
