"""A file of rows scored jointly by the guest and its serving hosts (``headwater fl vertical predict``)."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from federated.psi.ids import IdsRefused, normalise
from federated.vertical.tables import Table, TableRefused, read_table
from services.listening import cancel
from services.vertical.config import ConfigRefused, PartyConfig
from services.vertical.keys import load_party_keys
from services.vertical.party import MODEL
from services.vertical.serving.audited import answer_audited
from services.vertical.serving.bulk import Bulk, HostRefuses, Manner, Tally
from services.vertical.serving.guest import Answer, ServingGuest
from services.vertical.serving.opening import hosts_of, id_rule, load_part, open_audit, open_part
from services.vertical.serving.parts import Loaded, Parts
from services.vertical.serving.scores import Scores
from services.vertical.session import job_fingerprint


@dataclass(frozen=True, slots=True)
class Predicted:
    """What became of the rows. ``resumed``: of them there before."""

    run: str
    rows: int
    resumed: int
    tally: Tally


def predict_file(
    config: PartyConfig,
    data: Path,
    output: Path,
    manner: Manner,
    *,
    fresh: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predicted:
    """Score the rows of ``data`` (the guest's columns; others in it are passed over) into ``output``.

    Each batch is written down in the audit log, here as at the hosts, before its lines are written. ``progress`` is
    told how many of how many rows are done. ``fresh``: what an earlier try left is not gone on with.

    Raises ConfigRefused, StateDamaged, KeysError, TableRefused, ScoresRefused, HostRefuses, HostsGone, OSError.
    """
    if config.party.role != "guest" or config.data is None:
        raise ConfigRefused(f"{config.party.name} is no guest: joint predictions are asked for by the guest")
    if manner.batch > config.serve.most_ids:
        raise ConfigRefused(f"{manner.batch} rows at a time; serve.most_ids is {config.serve.most_ids}")
    job = job_fingerprint(config.agreed())
    part = open_part(config.party.state / job / MODEL)
    table = read_table(data, id_column=config.data.id, features=part.features)
    values = _values(table, config, data)
    belongs = {"table": table.fingerprint().hex(), "model": part.run, "job": job}
    loaded = load_part(config, part)
    scores = Scores(output, table.ids, belongs, fresh=fresh)
    try:
        asyncio.run(_score(config, loaded, table, values, manner, scores, progress))
        scores.finish()
    finally:
        scores.close()
    return Predicted(part.run, len(table), scores.resumed, scores.tally)


def _values(table: Table, config: PartyConfig, data: Path) -> list[bytes]:
    """The normalised ids. Raises TableRefused: two rows of one id would both be scored as one of them."""
    try:
        ids = normalise(table.ids, id_rule(config))
    except IdsRefused as error:
        raise TableRefused(f"{data}: {error}") from error
    if ids.complaint:
        raise TableRefused(f"{data}: {ids.complaint}")
    return ids.values


async def _score(
    config: PartyConfig,
    loaded: Loaded,
    table: Table,
    values: Sequence[bytes],
    manner: Manner,
    scores: Scores,
    progress: Callable[[int, int], None],
) -> None:
    hosts, audit = hosts_of(config), open_audit(config)
    who = f"predict, by user {os.getuid()}"
    guest = ServingGuest(
        load_party_keys(config.party.keys),
        hosts,
        Parts(loaded),
        table,
        id_rule(config),
        longest_s=manner.deadline_s,
    )
    try:
        await asyncio.gather(*(guest.look(name) for name in hosts))
        for name, reach in guest.reach.items():
            if reach.runs is not None and loaded.run not in reach.runs:
                raise HostRefuses(name, reach.trouble(loaded.run))

        async def ask(some: Sequence[bytes], request_id: str) -> Answer:
            return await answer_audited(guest, audit, who, some, manner.deadline_s, request_id)

        def took(start: int, answer: Answer) -> None:
            scores.write(start, answer)
            progress(scores.done, len(values))

        progress(scores.done, len(values))
        watching = asyncio.create_task(guest.watch(), name="watch-hosts")
        try:
            await Bulk(ask, manner, secrets.token_hex(8)).run(values, scores.done, took)
        finally:
            await cancel(watching)
    finally:
        guest.close()
        audit.close()
