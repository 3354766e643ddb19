"""``headwater demo`` and ``headwater evaluate``: what it gives, on real data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from services.cli.context import Options
from services.cli.recommend import Key, Url


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("demo")(demo)
    app.command("evaluate")(evaluate)


def demo(
    context: typer.Context,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Keep the demo's data in this folder.")
    ] = None,
) -> None:
    """Learn from MovieLens-100K through the real pipeline and show what that gives."""
    from rich.console import Console

    from services.cli.output import print_json
    from services.datasets.download import user_cache
    from services.demo.main import run
    from services.demo.report import as_json, print_report

    options: Options = context.obj
    outcome = run(user_cache(os.environ), Console(stderr=True), keep)
    if options.json:
        print_json(as_json(outcome))
    else:
        print_report(outcome, Console())


def evaluate(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="NAME|FOLDER", help="The data set that was imported.")
    ] = "ml-100k",
    split: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="The fraction, in time order, that was imported.")
    ] = 0.9,
    url: Url = None,
    key: Key = None,
) -> None:
    """Measure the running API on held-back interactions, beside popular and random.

    Import the first part before: `headwater import NAME --until 0.9 --shift-to-now --wait`.
    """
    from dataclasses import asdict

    from services.cli.client import api_of
    from services.cli.data import open_source
    from services.cli.output import print_json, print_table, progress, warn
    from services.demo.baselines import hold_out
    from services.demo.quality import measure
    from services.demo.rest import Rest

    options: Options = context.obj
    settings = options.settings()
    dataset, notes = open_source(source, settings, skip_bad=False)
    for text in notes:
        warn(text)
    before, after = dataset.split(split)
    liked = (settings.processor.positive_actions, settings.processor.rating_threshold)
    holdout = hold_out(before, after, *liked)
    api = api_of(settings, url, key)
    with Rest(api.url, api.key) as rest, progress("held-back users", len(holdout.users)) as advance:
        quality = measure(rest, before, holdout, settings, advance)
    if options.json:
        print_json({"dataset": dataset.name, "generated": dataset.generated, "quality": asdict(quality)})
        return
    print(f"{dataset.name}: {quality.users} users with held-back likes, {quality.known_users} with history")
    rows = [
        (
            name,
            *(f"{value:.3f}" for value in (score.recall, score.ndcg, score.recall_known, score.ndcg_known)),
        )
        for name, score in quality.scores.items()
    ]
    print_table(("", "Recall@10", "NDCG@10", "Recall@10, known", "NDCG@10, known"), rows)
