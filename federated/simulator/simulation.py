"""A whole run: the world's rounds, what is learned of them, evaluation, history and checkpoints.

Same settings and seed, same bits: on one machine, with one engine, chunk size and version of the libraries. A run that
was killed goes on from its last checkpoint and ends with the weights of an undisturbed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from federated.rounds import Closed, MemoryStore
from federated.simulator.checkpoints import Columns, read_checkpoint, write_checkpoint
from federated.simulator.learning import Learning, NothingToApply
from federated.simulator.world import Ready, World
from federated.weights import Array

CHECKPOINT = "checkpoint.npz"


@dataclass(frozen=True, slots=True)
class Row:
    """One iteration as it ended. Times are virtual seconds but for ``wall_s``, which is this machine's and differs
    from run to run. ``bytes_up`` and ``bytes_down`` are those since the row before; ``metrics`` of the model after
    it, where it was evaluated; uploads that were ``refused``, by rule; and the ``failure`` to make a version.
    ``epsilon`` is what the job's privacy mechanism has cost after it (local ones: at the client that sent the most),
    ``clipped`` the share of updates that were too long for its clip."""

    iteration: int
    version: int
    valid: bool
    why: str
    starts: int
    uploads: int
    opened_s: float
    closed_s: float
    trained: int = 0
    loss: float | None = None
    staleness: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    dropped: int = 0
    late: int = 0
    refused: dict[str, int] | None = None
    metrics: dict[str, Any] | None = None
    wall_s: float = 0.0
    failure: str = ""
    epsilon: float | None = None
    clipped: float | None = None


Evaluate = Callable[[Array], dict[str, Any]]


class Simulation:
    """``world`` and ``learning`` of one job, whose rounds are kept in ``store``.

    ``evaluate`` is called with the weights after every ``evaluate_every``-th version and after the last. With a
    ``folder`` a checkpoint is written every ``checkpoint_every`` iterations and at the end (0: never);
    ``fingerprint`` names the settings. ``epsilon`` says what the job has cost its clients so far.
    """

    def __init__(
        self,
        store: MemoryStore,
        world: World,
        learning: Learning,
        *,
        evaluate: Evaluate | None = None,
        evaluate_every: int = 1,
        folder: Path | None = None,
        checkpoint_every: int = 10,
        fingerprint: str = "",
        epsilon: Callable[[World], float | None] = lambda world: None,
    ) -> None:
        if evaluate_every < 0 or checkpoint_every < 0:
            raise ValueError("evaluate_every and checkpoint_every must not be negative")
        self.store, self.world, self.learning = store, world, learning
        self._evaluate, self._evaluate_every = evaluate, evaluate_every
        self._folder, self._checkpoint_every, self._fingerprint = folder, checkpoint_every, fingerprint
        self._epsilon = epsilon
        self.rows: list[Row] = []
        self._told = (0, 0, 0)  # of the world's tally, in the rows so far

    @property
    def weights(self) -> Array:
        """The newest model [D], as clients get it."""
        return self.learning.weights

    def run(self) -> Iterator[Row]:
        """Go on to the job's end and give each iteration as it ends. Raises NobodyComes, StatesFull. A run from the
        beginning writes over what the clients of an earlier one in this folder remember, whose checkpoint goes."""
        if not self.rows and self._folder is not None:
            (self._folder / CHECKPOINT).unlink(missing_ok=True)
        since = time.perf_counter()
        while (happened := self.world.advance()) is not None:
            new = list(self._ended(happened if isinstance(happened, Ready) else None, since))
            since = time.perf_counter()
            self.rows += new
            yield from new
            if self._checkpoint_every and any(row.iteration % self._checkpoint_every == 0 for row in new):
                self.checkpoint()
        if self._checkpoint_every:
            self.checkpoint()

    def _ended(self, ready: Ready | None, since: float) -> Iterator[Row]:
        learned, refused, failure, up = None, None, "", 0
        if ready is not None:
            try:
                learned = self.learning.learn(
                    ready.uploads, ready.header.version, self.world.oldest_in_flight, ready.header.starts
                )
                refused, up = learned.refused, learned.bytes_up
            except NothingToApply as error:
                refused, failure, up = error.refused, str(error), error.bytes_up
                self.world.failed()
            else:
                self.world.applied()
        metrics = None
        if learned is not None and ready is not None and self._evaluate is not None:
            due = self._evaluate_every and (ready.header.version + 1) % self._evaluate_every == 0
            metrics = self._evaluate(self.weights) if due or self.world.finished else None
        tally = self.world.tally
        now = (tally.bytes_down, tally.dropped, tally.late)
        down, dropped, late = (new - old for new, old in zip(now, self._told, strict=True))
        for closed in self._log():
            mine = learned is not None and closed.valid
            yield Row(
                closed.iteration,
                closed.version,
                closed.valid,
                closed.why.value,
                closed.starts,
                closed.uploads,
                closed.opened_at,
                closed.closed_at,
                learned.clients if mine and learned else 0,
                learned.loss if mine and learned else None,
                learned.staleness if mine and learned else 0.0,
                up,
                down,
                dropped,
                late,
                refused,
                metrics if mine else None,
                time.perf_counter() - since,
                failure,
                self._epsilon(self.world),
                learned.clipped if mine and learned else None,
            )
            self._told = now
            down = dropped = late = 0
            refused, failure, up = None, "", 0

    def _log(self) -> Iterator[Closed]:
        """The iterations that ended since the last row."""
        return self.world.desk.log(self.rows[-1].iteration + 1 if self.rows else 1)

    # Checkpoints.

    def checkpoint(self) -> None:
        """Write one, if there is a folder."""
        if self._folder is None:
            return
        world, world_columns = self.world.save()
        learning, learning_columns = self.learning.save()
        records = self.store.records()
        values = {
            "world": world,
            "learning": learning,
            "rows": [asdict(row) for row in self.rows],
            "told": list(self._told),
            "records": {key: body.hex() for key, body in records.items()},
        }
        columns: Columns = {f"world.{name}": column for name, column in world_columns.items()}
        columns |= {f"learning.{name}": column for name, column in learning_columns.items()}
        write_checkpoint(self._folder / CHECKPOINT, self._fingerprint, values, columns)
        self.learning.committed()

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; False when there is none. Raises CheckpointRefused."""
        found = None
        if self._folder is not None:
            found = read_checkpoint(self._folder / CHECKPOINT, self._fingerprint)
        if found is None:
            return False
        values, columns = found
        for key in self.store.records():
            self.store.delete(key)
        records = {key: bytes.fromhex(body) for key, body in values["records"].items()}
        self.store.transact([], lambda _: (records, None))
        self.world.restore(values["world"], _under("world.", columns))
        self.learning.restore(values["learning"], _under("learning.", columns))
        self.rows = [Row(**row) for row in values["rows"]]
        down, dropped, late = values["told"]
        self._told = (down, dropped, late)
        return True

    def close(self) -> None:
        """Give back threads and files."""
        self.learning.close()


def _under(prefix: str, columns: Columns) -> Columns:
    return {
        name.removeprefix(prefix): np.asarray(column)
        for name, column in columns.items()
        if name.startswith(prefix)
    }
