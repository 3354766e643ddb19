"""``headwater demo``: learns from MovieLens-100K through the real pipeline, then shows what that gives.

It starts a stack of its own in a temporary folder, replays the first 90 % of the interactions in time order
through event log, processor, trainer and parameter servers, and asks the API over REST for all that it shows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.backends import open_log
from services.datasets.dataset import Dataset
from services.datasets.importer import append_events, entity_events, interaction_events, wait_processed
from services.datasets.open import open_dataset
from services.demo.baselines import Holdout, hold_out
from services.demo.experiments import Burst, Newcomers, burst, latencies, newcomers
from services.demo.quality import Quality, measure
from services.demo.rest import Rest
from services.demo.stack import Stack, local_stack
from services.freshness.measure import Plan
from services.freshness.measure import measure as measure_freshness
from services.freshness.report import Report, report
from services.messagelog.contract import MessageLog
from services.topics import EVENTS, PROCESSOR_GROUP, SAMPLES, TRAINER_GROUP

SPLIT: Final = 0.9
_STALL_S: Final = 60.0
_PROBES_PER_S: Final = 20.0
_PROBES_S: Final = 10.0
_REQUESTS: Final = 300
_NEWCOMER_GENRES: Final = ("Sci-Fi", "Children's", "Horror", "War", "Musical")


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What was learned from, and how long that took (seconds)."""

    name: str
    source: str
    generated: bool
    users: int
    items: int
    replayed: int
    held_back: int
    replay_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that the demo found out."""

    data: DataSummary
    notes: tuple[str, ...]
    titles: dict[str, str]
    burst: Burst
    newcomers: Newcomers
    freshness: Report
    api_ms: tuple[float, ...]
    quality: Quality


def run(cache: Path, console: Console, folder: Path | None = None) -> Outcome:
    """Run the demo with progress on ``console``; files go to ``folder``, or to a temporary one.

    Raises DatasetError, StackFailed, NotProcessed, RestError or MeasurementFailed.
    """
    if folder is not None:
        return _run_in(folder, cache, console)
    with tempfile.TemporaryDirectory(prefix="headwater-demo-") as temporary:
        return _run_in(Path(temporary), cache, console)


def _run_in(folder: Path, cache: Path, console: Console) -> Outcome:
    with _progress(console) as progress:
        dataset, notes = open_dataset("ml-100k", cache)
        for note in notes:
            console.print(note, style="bold red")
        dataset = dataset.shift_to(int(time.time() * 1e3), SPLIT)
        before, after = dataset.split(SPLIT)
        starting = progress.add_task("starting the processes", total=None)
        with local_stack(folder, ["parameters.generation_interval=2s"]) as stack:
            progress.update(starting, total=1, completed=1)
            replay_s = _replay(before, stack, progress)
            holdout = hold_out(
                before,
                after,
                stack.settings.processor.positive_actions,
                stack.settings.processor.rating_threshold,
            )
            data = DataSummary(
                name=dataset.name,
                source=dataset.source,
                generated=dataset.generated,
                users=len(dataset.users),
                items=len(dataset.items),
                replayed=len(before.interactions),
                held_back=len(after.interactions),
                replay_s=replay_s,
            )
            with Rest(stack.url) as rest:
                return _ask(rest, stack, before, holdout, progress, data, notes)


def _ask(
    rest: Rest,
    stack: Stack,
    before: Dataset,
    holdout: Holdout,
    progress: Progress,
    data: DataSummary,
    notes: tuple[str, ...],
) -> Outcome:
    """Every question to the API. Quality comes first: later questions post events and change the answers."""
    measuring = progress.add_task("quality on the held-back part", total=len(holdout.users))
    quality = measure(rest, before, holdout, stack.settings, partial(progress.advance, measuring))
    tested = set(holdout.users.tolist())
    known = np.unique(before.interactions.user).tolist()
    users = [before.users.ids[row] for row in known if row not in tested]
    person = _person(before, tested)
    titles = {
        id_: str(attributes.get("title", id_))
        for id_, attributes in zip(before.items.ids, before.items.attributes, strict=True)
    }
    categories = {
        id_: _categories(attributes.get("categories"))
        for id_, attributes in zip(before.items.ids, before.items.attributes, strict=True)
    }
    liked = _to_like(rest, person, categories)
    shown = burst(rest, person, liked)
    asking = progress.add_task("new users beside controls", total=1)
    favourites = {name: _popular_of(before, stack, categories, name) for name in _NEWCOMER_GENRES}
    arrived = newcomers(rest, categories, favourites)
    progress.advance(asking)
    plan = Plan(stack.url, rate=_PROBES_PER_S, seconds=_PROBES_S, kinds=("event",))
    probing = progress.add_task("freshness probes", total=plan.count)
    freshness = report(measure_freshness(plan, (), partial(progress.advance, probing)))
    timing = progress.add_task("recommendation requests", total=_REQUESTS)
    api = tuple(latencies(rest, users, _REQUESTS, partial(progress.advance, timing)))
    return Outcome(data, notes, titles, shown, arrived, freshness, api, quality)


def _replay(before: Dataset, stack: Stack, progress: Progress) -> float:
    """Append the first part to the log and wait until it is processed and learned; returns the seconds."""
    started = time.monotonic()
    log = open_log(stack.settings)
    try:
        producer = log.producer()
        try:
            for title, events, count in (
                ("items and users → log", entity_events(before), len(before.items) + len(before.users)),
                ("interactions → log", interaction_events(before), len(before.interactions)),
            ):
                task = progress.add_task(title, total=count)
                imported = append_events(
                    events,
                    producer,
                    topic=EVENTS,
                    partitions=stack.settings.log.partitions,
                    now_ms=lambda: int(time.time() * 1e3),
                    progress=partial(progress.advance, task),
                )
        finally:
            producer.close()
        task = progress.add_task("log → features, samples", total=sum(imported.ends.values()))
        _wait(log, PROCESSOR_GROUP, EVENTS, imported.ends, progress, task)
        ends = {lag.partition: lag.end for lag in log.lag(TRAINER_GROUP, SAMPLES)}
        task = progress.add_task("samples → parameters", total=sum(ends.values()))
        _wait(log, TRAINER_GROUP, SAMPLES, ends, progress, task)
    finally:
        log.close()
    # One more generation of dense weights, so that lists rest on the end of the replay.
    time.sleep(stack.settings.parameters.generation_interval + 0.5)
    return time.monotonic() - started


def _wait(
    log: MessageLog, group: str, topic: str, ends: Mapping[int, int], progress: Progress, task: TaskID
) -> None:
    wait_processed(log, group, topic, ends, timeout_s=_STALL_S, progress=lambda n: progress.advance(task, n))


def _categories(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _person(before: Dataset, tested: set[int]) -> str:
    """A user to show: of short history, which a burst can move, and not one on whom quality is measured."""
    counts = np.bincount(before.interactions.user, minlength=len(before.users))
    rows: list[int] = np.argsort(counts, kind="stable").tolist()
    usable = [row for row in rows if counts[row] and row not in tested]
    return before.users.ids[usable[len(usable) // 10]]


def _to_like(rest: Rest, user_id: str, categories: dict[str, list[str]], count: int = 5) -> list[str]:
    """Films for the burst: from the user's own list, the category that is rarest at its top."""
    ranked = rest.recommend(user_id, 100).item_ids
    top = [name for item in ranked[:10] for name in categories.get(item, [])]
    choices = {
        name: [item for item in ranked[10:] if name in categories.get(item, [])]
        for name in {name for item in ranked[10:] for name in categories.get(item, [])}
    }
    enough = [name for name, items in choices.items() if len(items) >= count]
    name = min(sorted(enough), key=lambda name: top.count(name)) if enough else None
    return (choices[name] if name else ranked[10:])[:count]


def _popular_of(
    before: Dataset, stack: Stack, categories: dict[str, list[str]], category: str, count: int = 30
) -> list[str]:
    """The most liked items of ``category``, to like from."""
    train = before.interactions
    liked = train.liked(stack.settings.processor.positive_actions, stack.settings.processor.rating_threshold)
    counts = np.bincount(train.item[liked], minlength=len(before.items))
    ids = [before.items.ids[row] for row in np.argsort(-counts, kind="stable")]
    return [item for item in ids if category in categories[item]][:count]


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Bars on a terminal; nothing where there is none."""
    columns: Sequence[TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress
