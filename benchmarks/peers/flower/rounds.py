"""FedAvg in Flower's simulator, in an environment of its own (``requirements.lock``), a round whenever it is told to.

    python -m benchmarks.peers.flower.rounds CORES

The folder that the environment variable names (``clients.FOLDER``) holds the work. Each line on standard input is a
round; each line on standard output is the seconds that it took, from choosing the clients to the mean of their
weights. At the end of input the last weights go to ``weights.npy`` in that folder. The clients train by the same loop
as the peer without Flower, ``benchmarks.federated_loop``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.flower.clients import FOLDER, app, work

MOST_ROUNDS = 1_000_000


class Ended(Exception):
    """No further round is wanted."""


class Told(FedAvg):
    """FedAvg that begins a round when it is told to, and says how long it took."""

    _began = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: object, grid: Grid
    ) -> Iterable[Message]:
        """Wait for the next line, then choose all clients."""
        if not sys.stdin.readline():
            np.save(Path(os.environ[FOLDER]) / "weights.npy", arrays["weights"].numpy())
            raise Ended
        self._began = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The weighted mean of the clients' weights."""
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        found = super().aggregate_train(server_round, replies)
        if failed or len(replies) != clients():
            raise RuntimeError(f"{len(replies)} replies, {len(failed)} failed: {failed[:1]}")
        print(time.perf_counter() - self._began, flush=True)
        return found


def clients() -> int:
    """How many there are."""
    return len(work()["offsets"]) - 1


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Rounds until the end of input."""
    strategy = Told(fraction_evaluate=0.0, min_train_nodes=clients(), min_available_nodes=clients())
    try:
        strategy.start(grid, ArrayRecord({"weights": Array(work()["weights"])}), num_rounds=MOST_ROUNDS)
    except Ended:
        return


if __name__ == "__main__":
    run_simulation(
        server_app,
        app,
        num_supernodes=clients(),
        backend_config={
            "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0},
            "init_args": {"num_cpus": int(sys.argv[1]), "log_to_driver": False},
        },
    )
