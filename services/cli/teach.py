"""``headwater fl recommend``: devices teach a running stack, and every region serves what they taught."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.recommend import Key, Url

if TYPE_CHECKING:
    from federated.recommendation import Ranking, Rounds
    from services.catalogue import Catalogue
    from services.cli.client import Api
    from services.datasets.dataset import Dataset
    from services.federation.arrival import Shown, Watched
    from services.federation.course import Course, Round
    from services.federation.teaching import FederatedWriter
    from services.parameter_server.client import ParameterClient
    from services.settings.model import Settings

_START = (
    "`headwater up` starts a stack and `headwater import ml-100k` gives it films; or name it with --config."
)
_LIST = 10


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
    from federated.recommendation import Rounds
    from federated.sums import ContributionRefused
    from services.cli.client import api_of
    from services.cli.output import note, print_json, progress, warn
    from services.datasets.open import open_dataset
    from services.federation.teaching import NotTaught

    options: Options = context.obj
    settings = options.settings()
    api = api_of(settings, url, key)
    data, notes = open_dataset(dataset, _cache())
    for text in notes:
        warn(text)
    with _course(settings, api, data, Rounds(rounds, cohort, seed), weight, timeout) as course:
        note(f"{course.devices.able:,} simulated devices, {course.devices.known.catalogue:,} items")
        before, done = course.judge(), []
        try:
            with progress("rounds", rounds) as advance:
                for one in course.run():
                    done.append(one)
                    advance(1)
        except (NotTaught, ContributionRefused) as error:
            raise CommandFailed(Exit.CHECK_FAILED, f"round {len(done) + 1}: {error}") from error
        after = course.judge()
    if options.json:
        print_json(_plain(data, course, done, before, after))
    else:
        _show(course, done, before, after)
    if not all(one.alone for one in done):
        note("something else taught the same items meanwhile: a list may have changed by that, and sooner")
    late = list(_late(done, timeout))
    for text in late:
        note(f"FAIL  {text}")
    if late:
        raise CommandFailed(Exit.CHECK_FAILED, "")


def _late(done: Sequence[Round], timeout: float) -> Iterator[str]:
    for one in done:
        for region, stages in one.after_ms.items():
            for stage, ms in stages.items():
                if ms is None:
                    yield f"round {one.number}: not in the {stage} of {region} within {timeout:g} s"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _cache() -> Path:
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


@contextmanager
def _course(
    settings: Settings, api: Api, data: Dataset, rounds: Rounds, weight: float, timeout_s: float
) -> Iterator[Course]:
    """Everything opened and put together. Raises CommandFailed where there is nothing to teach or to teach to."""
    import numpy as np

    from services.federation.course import Course, devices_of, most_liked
    from services.federation.teaching import Teacher
    from services.modelling import build_model, open_schema

    with _opened(settings, api) as (client, writer, regions):
        catalogue = _catalogue(settings)
        items = np.flatnonzero(catalogue.available(_now_ms())).astype(np.int64)
        devices = devices_of(data, settings.processor, catalogue, items)
        if not devices.able:
            what = f"no item that a user of {data.name} likes is among the stack's {len(items):,}"
            raise CommandFailed(Exit.BAD_INPUT, what, _START)
        model = build_model(open_schema(settings), settings.model)
        try:
            teacher = Teacher(client, writer, model, settings.model.name, catalogue, items, _now_ms())
        except ValueError as error:
            raise CommandFailed(Exit.BAD_INPUT, str(error), _START) from error
        item = catalogue.ids[int(items[most_liked(devices.likes.training)])]
        yield Course(teacher, devices, regions, item, rounds, weight, timeout_s)


@contextmanager
def _opened(settings: Settings, api: Api) -> Iterator[tuple[ParameterClient, FederatedWriter, list[Watched]]]:
    """A client of the home region's parameter servers, a writer to them, and the regions to watch."""
    import numpy as np

    from services.backends import open_coordination, open_security
    from services.federation.arrival import Watched, reached_by
    from services.federation.teaching import SLOTS, FederatedWriter
    from services.parameter_server.client import ParameterClient

    if settings.coordination.backend == "sqlite" and not (settings.data.dir / "coordination.db").exists():
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", _START)
    security, name, any_row = open_security(settings), settings.model.name, np.zeros(1, np.uint64)
    with ExitStack() as stack:

        def client_of(its: Settings) -> ParameterClient:
            coordination = stack.enter_context(closing(open_coordination(its)))
            client = ParameterClient(coordination, deadline_s=its.parameters.deadline, security=security)
            return stack.enter_context(closing(client))

        client = client_of(settings)
        writer = FederatedWriter(client, name, random.randrange(SLOTS))
        regions = [
            Watched(
                region,
                None if its is None else reached_by(client_of(its), name, writer.source, any_row),
                None if there is None else partial(_similar, there),
            )
            for region, its, there in _regions(settings, api)
        ]
        yield client, writer, regions


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


def _plain(
    data: Dataset, course: Course, done: Sequence[Round], before: Ranking | None, after: Ranking | None
) -> dict[str, Any]:
    return {
        "dataset": data.name,
        "source": data.source,
        "simulated": True,
        "item": course.item,
        "rounds": [asdict(one) for one in done],
        "lists": [
            {"region": region, "before": list(first), "after": list(last)}
            for region, (first, last) in course.lists.items()
        ],
        "held_out": [None if ranking is None else asdict(ranking) for ranking in (before, after)],
    }


def _show(course: Course, done: Sequence[Round], before: Ranking | None, after: Ranking | None) -> None:
    from services.cli.output import print_table

    places = [(region, stage) for region, stages in done[0].after_ms.items() for stage in stages]
    columns = ("round", "devices", "loss", "applied", *(f"{region} {stage}" for region, stage in places))
    print_table(columns, [_line(one, places) for one in done])
    print("\nms since the push was sent.")
    for when, ranking in (("before", before), ("after", after)):
        if ranking is not None:
            found = f"HR@10 {ranking.hit_rate:.4f}, NDCG@10 {ranking.ndcg:.4f}"
            print(f"Held-out items of {ranking.devices:,} devices, {when}: {found}")
    print(f"\nItems most like {course.item}:")
    lists = [[item for item, _ in shown] for both in course.lists.values() for shown in both]
    names = [f"{region} {when}" for region in course.lists for when in ("before", "after")]
    longest = max(map(len, lists), default=0)
    print_table(
        ("", *names),
        [(n + 1, *(one[n] if n < len(one) else "" for one in lists)) for n in range(longest)],
    )


def _line(one: Round, places: Sequence[tuple[str, str]]) -> tuple[object, ...]:
    times = [one.applied_ms, *(one.after_ms[region][stage] for region, stage in places)]
    shown = ["missing" if ms is None else f"{ms:,.0f}" for ms in times]
    return one.number, one.devices, f"{one.loss:.4f}", *shown
