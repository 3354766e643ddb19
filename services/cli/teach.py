"""``headwater fl recommend``: devices teach a running stack, and every region serves what they taught."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.recommend import Key, Url

if TYPE_CHECKING:
    from federated.recommendation import LeaveOneOut, Liked, Ranking
    from services.catalogue import Catalogue
    from services.cli.client import Api
    from services.datasets.dataset import Dataset
    from services.federation.arrival import Arrival, Shown, Watched
    from services.federation.teaching import FederatedWriter, RowNumbers, Taught, Teacher
    from services.settings.model import Settings

_START = (
    "`headwater up` starts a stack and `headwater import ml-100k` gives it films; or name it with --config."
)
_LIST = 10
_NEGATIVES = 99


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("recommend")(recommend)


def recommend(
    context: typer.Context,
    dataset: Annotated[
        str, typer.Option(help="Whose users are the devices: ml-100k, generated-100k or a folder.")
    ] = "ml-100k",
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="How many rounds.")] = 5,
    cohort: Annotated[int, typer.Option(min=1, max=10_000, help="Devices of a round.")] = 100,
    weight: Annotated[
        float, typer.Option(min=1e-6, help="How many samples of a trainer one device counts as.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Which devices take part when.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the regions, a round.")] = 30.0,
    url: Url = None,
    key: Key = None,
) -> None:
    """Let simulated devices teach the running stack, and show how soon every region serves it.

    Each user of the data set is a SIMULATED device: its likes stay with it. In each round a cohort gets the vectors of
    the items that are served now; a device makes a private vector of its own, and answers with a gradient for ALL
    items. Only the cohort's sum goes on: through the item tower to the items' embedding rows, pushed once to the
    parameter servers, and by sync to the other regions. A single gradient would tell what a device likes although it
    has no zero rows: here no server sees one, since devices and summing are one process; real devices need secure
    aggregation for that.

    Each device holds back the last item that it liked: before and after all rounds HR@10 and NDCG@10 say how well the
    served item vectors find it among 99 that the device never saw.

    Measured from the moment the push is sent: `parameters`, every shard of the region has it; `list`, the items most
    like the one that most devices like are served otherwise than before. A region that does not get it in time is a
    failed check (exit code 13).
    """
    import numpy as np

    from federated.recommendation import Rounds, cohort_of
    from services.cli.client import api_of
    from services.cli.output import note, print_json, print_table, warn
    from services.datasets.open import open_dataset
    from services.federation.arrival import await_arrival, lists_before
    from services.federation.teaching import Teacher
    from services.modelling import build_model, open_schema

    options: Options = context.obj
    settings = options.settings()
    api = api_of(settings, url, key)
    data, notes = open_dataset(dataset, _cache())
    for text in notes:
        warn(text)
    with _opened(settings, api) as (client, writer, regions_of_keys):
        catalogue = _catalogue(settings)
        items = np.flatnonzero(catalogue.available(_now_ms())).astype(np.int64)
        split, known = _likes(data, settings, catalogue, items)
        liked = split.training
        if not liked.counts.any():
            what = f"no item that a user of {dataset} likes is among the stack's {len(items):,}"
            raise CommandFailed(Exit.BAD_INPUT, what, _START)
        model = build_model(open_schema(settings), settings.model)
        try:
            teacher = Teacher(client, writer, model, settings.model.name, catalogue, items, _now_ms())
        except ValueError as error:
            raise CommandFailed(Exit.BAD_INPUT, str(error), _START) from error
        regions = regions_of_keys(catalogue.keys[items[:1]])
        note(
            f"{int((liked.counts > 0).sum()):,} simulated devices, {len(items):,} items, {len(regions)} regions"
        )
        judged = _judged(teacher, split, known, seed)
        watched = catalogue.ids[int(items[_most_liked(liked)])]
        first = lists_before(regions, watched)
        rows: list[dict[str, Any]] = []
        last = first
        for number in range(rounds):
            devices = cohort_of(liked, Rounds(rounds, cohort, seed), number)
            others, before = teacher.others(), lists_before(regions, watched)
            taught, total = teacher.round(liked, devices, weight)
            arrivals = await_arrival(regions, taught.number, taught.sent_at_ms, watched, before, timeout)
            last = {name: arrivals[name].shown or before[name] for name in before}
            alone = teacher.others() == others
            rows.append(_row(number, len(devices), total.mean_scalar("loss"), taught, arrivals, alone))
            if not options.json:
                note(_line(rows[-1]))
        rankings = judged, _judged(teacher, split, known, seed)
    changed = [_change(name, first[name], last[name]) for name in first]
    if options.json:
        print_json({"dataset": data.name, "source": data.source, "simulated": True, "item": watched, "rounds": rows,
                    "lists": changed, "held_out": [_plain(ranking) for ranking in rankings]})  # fmt: skip
    else:
        print_table(*_table(rows))
        for when, ranking in zip(("before", "after"), rankings, strict=True):
            if ranking is not None:
                found = f"HR@10 {ranking.hit_rate:.4f}, NDCG@10 {ranking.ndcg:.4f}"
                print(f"\nheld-out items of {ranking.devices:,} devices {when}: {found}", end="")
        print(f"\n\nms since the push was sent. Items most like {watched}, before and after:")
        columns = ("", *(f"{one['region']} {when}" for one in changed for when in ("before", "after")))
        listed = [[item for item, _ in one[when]] for one in changed for when in ("before", "after")]
        print_table(
            columns, [(n + 1, *(part[n] if n < len(part) else "" for part in listed)) for n in range(_LIST)]
        )
    if not all(row["alone"] for row in rows):
        note(
            "trainers taught the same items meanwhile: a list may have changed by them, and earlier than by devices"
        )
    missing = [
        f"round {row['round']}: {name} did not have it within {timeout:g} s ({', '.join(late)})"
        for row in rows
        for name, stages in row["after_ms"].items()
        if (late := [stage for stage, ms in stages.items() if ms is None])
    ]
    for text in missing:
        note(f"FAIL  {text}")
    if missing:
        raise CommandFailed(Exit.CHECK_FAILED, "")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _cache() -> Any:
    import os

    from services.datasets.download import user_cache

    return user_cache(os.environ)


def _catalogue(settings: Settings) -> Catalogue:
    """The items of the stack, from its feature store."""
    from featurestore.encoder import Encoder
    from services.backends import open_store
    from services.catalogue import Catalogue
    from services.modelling import open_schema

    catalogue = Catalogue(Encoder(open_schema(settings)))
    with closing(open_store(settings)) as store:
        catalogue.refresh(store, _now_ms())
    return catalogue


def _likes(
    data: Dataset, settings: Settings, catalogue: Catalogue, items: RowNumbers
) -> tuple[LeaveOneOut, Liked]:
    """What each user of ``data`` likes among the stack's ``items``, numbered as those are, with the last one held
    back; and all that each has had to do with."""
    import numpy as np

    from federated.recommendation import by_device, leave_last_out

    seen = data.interactions
    place = np.full(len(catalogue) + 1, -1, np.int64)
    place[items] = np.arange(len(items))
    number = place[catalogue.rows(list(data.items.ids))]  # -1, an unknown one, is the last: no place
    labels = settings.processor
    owners, named, times = seen.user.astype(np.int64), number[seen.item], seen.timestamp_ms
    there = named >= 0
    kept = seen.liked(labels.positive_actions, labels.rating_threshold) & there
    split = leave_last_out(owners[kept], named[kept], times[kept], len(data.users), len(items))
    return split, by_device(owners[there], named[there], len(data.users), len(items))


def _judged(teacher: Teacher, split: LeaveOneOut, known: Liked, seed: int) -> Ranking | None:
    """How well the served vectors find what devices hold back, among 99 items that they never saw; None where the
    catalogue is too small for that."""
    import numpy as np

    from federated.recommendation import draw_negatives, evaluate

    if known.catalogue - int(known.counts.max(initial=0)) < _NEGATIVES or not (split.held_out >= 0).any():
        return None
    negatives = draw_negatives(known, _NEGATIVES, np.random.default_rng(seed))
    return evaluate(teacher.objective, teacher.vectors()[0], split, negatives)


def _most_liked(liked: Liked) -> int:
    import numpy as np

    return int(np.bincount(liked.items, minlength=liked.catalogue).argmax())


@contextmanager
def _opened(settings: Settings, api: Api) -> Iterator[tuple[Any, FederatedWriter, Any]]:
    """A client of the home region's parameter servers, a writer, and what makes the watched regions."""
    from services.backends import open_coordination, open_security
    from services.federation.arrival import Watched, reached_by
    from services.federation.teaching import SLOTS, FederatedWriter
    from services.parameter_server.client import ParameterClient

    if settings.coordination.backend == "sqlite" and not (settings.data.dir / "coordination.db").exists():
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", _START)
    security, name = open_security(settings), settings.model.name
    with ExitStack() as stack:

        def client_of(its: Settings) -> ParameterClient:
            coordination = stack.enter_context(closing(open_coordination(its)))
            client = ParameterClient(coordination, deadline_s=its.parameters.deadline, security=security)
            return stack.enter_context(closing(client))

        client = client_of(settings)
        writer = FederatedWriter(client, name, random.randrange(SLOTS))

        def watched(keys: Any) -> list[Watched]:
            return [
                Watched(
                    region,
                    None if its is None else reached_by(client_of(its), name, writer.source, keys),
                    None if there is None else partial(_similar, there),
                )
                for region, its, there in _regions(settings, api)
            ]

        yield client, writer, watched


def _regions(settings: Settings, api: Api) -> Iterator[tuple[str, Settings | None, Api | None]]:
    """Each region with its settings and its API: all that ``headwater up`` runs here, else that of the settings and
    those it names for freshness."""
    from services.cli.client import Api
    from services.cli.freshness import read_regions
    from services.cli.running import regions_of
    from services.settings.load import load_settings
    from services.supervisor.folder import RunFolder

    yield settings.region.name, settings, api
    folder = RunFolder(settings.data.dir.absolute())
    state = folder.state() if folder.held() else None
    if state is None:
        for name, url in read_regions(settings.freshness.regions).items():
            yield name, None, Api(url, api.key)
        return
    for shown in regions_of(settings, state.children)[1:]:
        its = None if shown.settings is None else load_settings(shown.settings).settings
        yield shown.name, its, Api(shown.url, api.key) if shown.url else None


def _similar(api: Api, item: str) -> Shown:
    from urllib.parse import quote

    from services.cli.replies import read_recommendations

    reply = read_recommendations(api.request("GET", f"/v1/items/{quote(item, safe='')}/similar?n={_LIST}"))
    return tuple((one.item_id, one.score) for one in reply.items)


def _row(
    number: int, devices: int, loss: float, taught: Taught, arrivals: dict[str, Arrival], alone: bool
) -> dict[str, Any]:
    after = {name: one.after_ms for name, one in arrivals.items()}
    applied_ms = taught.applied_at_ms - taught.sent_at_ms
    return {
        "round": number + 1,
        "devices": devices,
        "loss": loss,
        "applied_ms": applied_ms,
        "after_ms": after,
        "alone": alone,
    }


def _plain(ranking: Ranking | None) -> dict[str, float] | None:
    if ranking is None:
        return None
    return {"hit_rate": ranking.hit_rate, "ndcg": ranking.ndcg, "devices": ranking.devices}


def _ms(value: float | None) -> str:
    return "missing" if value is None else f"{value:,.0f}"


def _line(row: dict[str, Any]) -> str:
    places = "; ".join(
        f"{name} " + ", ".join(f"{stage} {_ms(ms)} ms" for stage, ms in stages.items())
        for name, stages in row["after_ms"].items()
    )
    return f"round {row['round']}: {row['devices']} devices, loss {row['loss']:.4f}; {places}"


def _table(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    places = [(region, stage) for region, stages in rows[0]["after_ms"].items() for stage in stages]
    columns = ("round", "devices", "loss", "applied", *(f"{region} {stage}" for region, stage in places))
    lines: list[tuple[object, ...]] = [
        (
            row["round"],
            row["devices"],
            f"{row['loss']:.4f}",
            _ms(row["applied_ms"]),
            *(_ms(row["after_ms"][region][stage]) for region, stage in places),
        )
        for row in rows
    ]
    return columns, lines


def _change(region: str, before: Shown, after: Shown) -> dict[str, Any]:
    return {"region": region, "before": [list(one) for one in before], "after": [list(one) for one in after]}
