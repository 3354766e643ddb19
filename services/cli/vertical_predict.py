"""``headwater fl vertical predict``: a file of rows, scored by all parties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from services.vertical.config import PartyConfig


def register(
    app: typer.Typer,
    config: Callable[[typer.Context], PartyConfig],
    refusals: Callable[[], AbstractContextManager[None]],
) -> None:
    """Add the command to ``app``. ``config``: the party's file of --config. ``refusals``: exit codes of failures."""

    @app.command("predict")
    def predict(
        context: typer.Context,
        data: Annotated[
            Path,
            typer.Option(metavar="FILE", help="Ids and the guest's columns: CSV with a header, or Parquet."),
        ],
        output: Annotated[
            Path, typer.Option(metavar="FILE", help="For the scores (CSV), in the same order.")
        ],
        batch: Annotated[
            int | None,
            typer.Option(min=1, help="Rows at a time; 1,000, or serve.most_ids where that is less."),
        ] = None,
        in_flight: Annotated[
            int, typer.Option(min=1, max=64, help="Batches that are asked for at once.")
        ] = 4,
        deadline: Annotated[str, typer.Option(help="For hosts to answer a batch.")] = "10s",
        patience: Annotated[
            str,
            typer.Option(help="For how long hosts that are late, away or asked too much are asked again."),
        ] = "90s",
        strict: Annotated[
            bool, typer.Option("--strict", help="Then stop, rather than score by the guest's part alone.")
        ] = False,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Begin anew what an earlier try left half done.")
        ] = False,
        yes: Annotated[bool, typer.Option("--yes", help="Replace a file of scores without asking.")] = False,
    ) -> None:
        """Score new rows together with the hosts that serve (--config FILE of the guest, --data, --output).

        Rows that a host does not know, or for which it did not answer, are scored by the guest's part of the model
        alone and say so. A try that was stopped goes on where it was when the same command is given again. Every party
        writes down what was asked (`headwater fl vertical audit`).
        """
        import os

        from services.processes import limit_threads

        limit_threads(os.environ)
        from services.cli.output import Advance, note, print_json, progress
        from services.vertical.serving.bulk import Manner
        from services.vertical.serving.predict import predict_file

        if output.exists() and not yes and not typer.confirm(f"{output} exists. Replace it?", err=True):
            raise CommandFailed(Exit.DECLINED, f"{output} stays as it is")
        with refusals(), _refused():
            own = config(context)
            manner = Manner(
                min(1_000, own.serve.most_ids) if batch is None else batch,
                in_flight,
                _seconds("--deadline", deadline),
                _seconds("--patience", patience),
                strict,
            )
            with ExitStack() as shown:
                done, bars = [0], list[Advance]()

                def told(count: int, total: int) -> None:
                    # How many there are is known when the table is read.
                    if not bars:
                        bars.append(shown.enter_context(progress("rows", total)))
                    bars[0](count - done[0])
                    done[0] = count

                found = predict_file(own, data, output, manner, fresh=fresh, progress=told)
        summary: dict[str, Any] = {
            "output": str(output),
            "model_version": found.run,
            "rows": found.rows,
            "resumed": found.resumed,
            "joint": found.tally.joint,
            "degraded": found.tally.degraded,
            "why": dict(found.tally.reasons.most_common()),
        }
        if context.obj.json:
            print_json(summary)
            return
        if found.resumed:
            note(f"{found.resumed} rows were there from an earlier try")
        why = ", ".join(f"{count} {reason}" for reason, count in summary["why"].items())
        alone = f", {found.tally.degraded} by the guest alone ({why})" if why else ""
        print(f"{output}: {found.rows} rows, {found.tally.joint} scored by all parties{alone}")


def _seconds(option: str, text: str) -> float:
    from services.settings.units import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise CommandFailed(Exit.USAGE, f"{option}: {error}") from error
    if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise CommandFailed(Exit.USAGE, f"{option}: {text} is no time above 0")
    return float(seconds)


@contextmanager
def _refused() -> Iterator[None]:
    """What a bulk prediction may meet with, each with the exit code that says what to do."""
    from services.vertical.serving.bulk import TOO_MANY, HostRefuses, HostsGone
    from services.vertical.serving.scores import ScoresRefused

    try:
        yield
    except ScoresRefused as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), "Choose another --output, or --fresh.") from error
    except HostRefuses as error:
        step = (
            "Take a smaller --batch, or agree on a larger serve.most_rows_a_minute there"
            if error.outcome == TOO_MANY
            else "That host's log says why; parts of one run are needed at all parties"
        )
        raise CommandFailed(Exit.REFUSED, str(error), f"{step}. Then the same command goes on.") from error
    except HostsGone as error:
        raise CommandFailed(Exit.NOT_READY, str(error), "Start it; then the same command goes on.") from error
    except OSError as error:
        raise CommandFailed(
            Exit.BAD_INPUT,
            f"{error.filename or 'a file'} cannot be written: {error.strerror or error}",
            "Make room; then the same command goes on.",
        ) from error
