"""What the demo prints: one JSON object, or tables and lists for people. Pure, but for the console given."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from services.demo.main import Outcome
from services.demo.rest import Recommendations
from services.freshness.stages import MEANING
from services.freshness.statistics import Quantiles, quantiles


def summary(of: Quantiles | None) -> dict[str, float]:
    """Count, p50, p95, p99 and maximum; the count alone where there are no samples."""
    if of is None:
        return {"count": 0}
    return {"count": of.n, "p50": of.p50_ms, "p95": of.p95_ms, "p99": of.p99_ms, "max": of.max_ms}


def as_json(outcome: Outcome) -> dict[str, object]:
    """The object that ``--format json`` prints."""
    burst = outcome.burst
    return {
        "data": {**asdict(outcome.data), "notes": list(outcome.notes)},
        "before": _list(burst.before, outcome.titles),
        "after": {
            **_list(burst.after.reply, outcome.titles),
            "liked": [{"item_id": item, "title": outcome.titles.get(item)} for item in burst.liked],
            "entered": burst.entered,
            "visible_after_ms": burst.after.after_ms,
        },
        "freshness_ms": summary(outcome.freshness.rows[-1].ms),
        "stages_ms": {row.stage: summary(row.ms) for row in outcome.freshness.rows},
        "response": asdict(outcome.newcomers),
        "api_ms": summary(quantiles(outcome.api_ms)),
        "quality": asdict(outcome.quality),
    }


def _list(reply: Recommendations, titles: dict[str, str]) -> dict[str, object]:
    newest = reply.newest_event
    return {
        "recommendation_id": reply.recommendation_id,
        "model_version": reply.model_version,
        "newest_event": None
        if newest is None
        else {"event_id": newest.event_id, "accepted_at_ms": newest.accepted_at_ms},
        "parameters_as_of_ms": reply.parameters_as_of_ms,
        "items": [
            {
                "item_id": item.item_id,
                "title": titles.get(item.item_id),
                "score": item.score,
                "source": item.source,
            }
            for item in reply.items
        ],
    }


def print_report(outcome: Outcome, console: Console) -> None:
    """The same for people."""
    data = outcome.data
    for note in outcome.notes:
        console.print(note, style="bold red")
    console.print(
        f"\n[bold]{data.name}[/] ({data.source}): {data.users:,} users, {data.items:,} items; "
        f"{data.replayed:,} interactions learned in {data.replay_s:.0f} s through the pipeline, "
        f"{data.held_back:,} held back\n"
    )
    _print_burst(outcome, console)
    _print_newcomers(outcome, console)
    _print_times(outcome, console)
    _print_quality(outcome, console)


def _print_burst(outcome: Outcome, console: Console) -> None:
    burst, titles = outcome.burst, outcome.titles
    table = Table(title=f"User {burst.user_id}: ten films, before and after", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("before")
    table.add_column(f"{burst.after.after_ms:.0f} ms after the last like was accepted")
    after = burst.after.reply.item_ids
    for place in range(max(len(after), len(burst.before.items))):
        old = burst.before.item_ids[place] if place < len(burst.before.items) else ""
        new = after[place] if place < len(after) else ""
        mark = "[green]" if new in burst.entered else ""
        table.add_row(
            str(place + 1), titles.get(old, old), f"{mark}{titles.get(new, new)}{'[/]' if mark else ''}"
        )
    console.print(table)
    console.print("liked: " + "; ".join(titles.get(item, item) for item in burst.liked))
    newest = burst.after.reply.newest_event
    console.print(
        f"the second list names its newest event ({newest.event_id if newest else 'none'}) "
        f"and parameters trained on it (model {burst.after.reply.model_version})\n",
        highlight=False,
    )


def _print_newcomers(outcome: Outcome, console: Console) -> None:
    seen = outcome.newcomers
    table = Table(title="Share of one genre among the unseen films of the top ten", title_justify="left")
    for column in ("", "before", f"{seen.after_ms / 1e3:.1f} s after"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row(
        f"{seen.users} new users who like five", f"{seen.liked_before:.2f}", f"{seen.liked_after:.2f}"
    )
    table.add_row(
        f"{seen.users} new users who like none", f"{seen.control_before:.2f}", f"{seen.control_after:.2f}"
    )
    console.print(table)
    console.print(
        f"each new user took one of {', '.join(seen.categories)}; "
        f"the controls kept {seen.control_kept:.0%} of their lists\n"
    )


def _print_times(outcome: Outcome, console: Console) -> None:
    table = Table(title="Milliseconds", title_justify="left")
    for column in ("", "count", "p50", "p95", "p99", "max"):
        table.add_column(column, justify="right" if column else "left")
    stages = [(f"event sent → {MEANING[row.stage]}", row.ms) for row in outcome.freshness.rows]
    for name, found in (*stages, ("POST /v1/recommendations", quantiles(outcome.api_ms))):
        figures = summary(found)
        table.add_row(name, f"{figures.pop('count'):.0f}", *(f"{value:.1f}" for value in figures.values()))
    console.print(table)


def _print_quality(outcome: Outcome, console: Console) -> None:
    quality = outcome.quality
    table = Table(
        title=f"Held-back likes: {quality.users} users, {quality.known_users} of them with history",
        title_justify="left",
    )
    for column in ("", "Recall@10", "NDCG@10", "Recall@10, known", "NDCG@10, known"):
        table.add_column(column, justify="right" if column else "left")
    for name, score in quality.scores.items():
        table.add_row(name, *(f"{value:.3f}" for value in asdict(score).values()))
    console.print(table)
