"""Jobs of items at the command line: what a stack or a data set gives them, and what one device knows."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.cli.exits import Exit
from services.cli.failures import CommandFailed

if TYPE_CHECKING:
    from federated.job import FederatedJob
    from federated.models import Inputs, Labels
    from federated.weights import Array
    from services.datasets.dataset import Dataset
    from services.settings.model import Settings

_START: Final = (
    "`headwater up` starts a stack and `headwater import ml-100k` gives it films; or name it with --config."
)


def with_items(
    job: FederatedJob, settings: Settings, there: FederatedJob | None
) -> tuple[FederatedJob, Array | None]:
    """``job`` with its items, and the weights [D] that it begins with (None: those that its seed draws).

    Into a stack: the items that it serves, or those of them that the file names, with their vectors of now; else those
    of the data set. ``there`` is the job of this name that is begun already: then they are its. Raises CommandFailed
    and DatasetError.
    """
    if there is not None:
        items = job.data.items or there.data.items
        return replace(job, data=replace(job.data, items=items), model=there.model), None
    if not job.into.model:
        items = job.data.items or _dataset(job.data.name).items.ids
        return replace(job, data=replace(job.data, items=items)), None
    return _served(job, settings)


def _served(job: FederatedJob, settings: Settings) -> tuple[FederatedJob, Array]:
    from services.federation.into import served_items
    from services.federation.outbox import StackAway

    if job.into.model != settings.model.name:
        raise CommandFailed(
            Exit.BAD_INPUT, f"into.model is {job.into.model!r}; the stack serves {settings.model.name!r}"
        )
    if settings.coordination.backend == "sqlite" and not (settings.data.dir / "coordination.db").exists():
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", _START)
    try:
        served = served_items(settings)
    except StackAway as error:
        raise CommandFailed(Exit.NOT_RUNNING, str(error), _START) from error
    except ValueError as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error), _START) from error
    number_of = {item: number for number, item in enumerate(served.ids)}
    items = job.data.items or served.ids
    if unknown := [item for item in items if item not in number_of]:
        raise CommandFailed(Exit.BAD_INPUT, f"data.items: the stack does not serve {unknown[0]!r}")
    vectors = served.vectors[[number_of[item] for item in items]]
    # The devices' loss is the two-tower's own, unless the file says otherwise: of its width and temperature.
    softmax = job.model.options.get("objective", "softmax") == "softmax"
    own = {"temperature": settings.model.temperature} if softmax else {}
    options = {**own, **job.model.options, "dim": vectors.shape[1]}
    shaped = replace(job, data=replace(job.data, items=items), model=replace(job.model, options=options))
    return shaped, vectors.reshape(-1)


def own_rows(job: FederatedJob, client: str, data: str | None, settings: Settings) -> tuple[Inputs, Labels]:
    """What this device knows: of a file of its own (``recommendation.load_known``), or what a data set's user number
    ``client`` likes among the job's items, without the last one, which is held back to judge by. Raises CommandFailed
    and DatasetError."""
    from federated.recommendation import device_rows, load_known
    from services.datasets.federations.liked import likes_of

    items = job.data.items
    try:
        if data is not None and data.endswith((".npz", ".txt")):
            return load_known(Path(data), items, len(items))
        found = _dataset(data or job.data.name)
        if not client.isdecimal() or int(client) >= len(found.users):
            raise CommandFailed(
                Exit.USAGE, f"--client must be a number below {len(found.users)} to be a user of {found.name}"
            )
        wanted = settings.processor
        likes = likes_of(found, items, wanted.positive_actions, wanted.rating_threshold)
        return device_rows(likes.training.of(int(client)), len(items))
    except (OSError, ValueError) as error:
        raise CommandFailed(Exit.BAD_INPUT, str(error)) from error


@cache
def _dataset(name: str) -> Dataset:
    # Kept: the devices of a cohort are one process.
    from services.cli.output import note
    from services.datasets.download import user_cache
    from services.datasets.open import open_dataset

    found, notes = open_dataset(name, user_cache(os.environ))
    for text in notes:
        note(text)
    return found
