"""Flower's clients: importable by name, so that each worker process reads its work once."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.federated_loop import LoopedClient, Work
from federated.device import LocalTraining

FOLDER = "HEADWATER_FLOWER_WORK"
"""The environment variable that names the folder of ``work.npz``."""

app = ClientApp()


@cache
def work() -> dict[str, Any]:
    """The clients' rows, the first weights and the training."""
    with np.load(Path(os.environ[FOLDER]) / "work.npz") as file:
        return dict(file)


@cache
def _client() -> LoopedClient:
    torch.set_num_threads(1)
    steps, epochs = int(work()["steps"]), int(work()["epochs"])
    training = LocalTraining(
        steps=steps or None,
        epochs=epochs or None,
        batch_size=int(work()["batch_size"]),
        rate=float(work()["rate"]),
    )
    return LoopedClient(Work(tuple(work()["sizes"].tolist()), training))


@app.train()
def train(message: Message, context: Context) -> Message:
    """One client's local training."""
    client, given = int(context.node_config["partition-id"]), work()
    rows = given["rows"][given["offsets"][client] : given["offsets"][client + 1]]
    start = message.content["arrays"]["weights"].numpy()
    iteration = int(message.content["config"]["server-round"])
    change = _client().train(start, given["inputs"][rows], given["labels"][rows], client, iteration)
    content = RecordDict(
        {
            "arrays": ArrayRecord({"weights": Array(start + change)}),
            "metrics": MetricRecord({"num-examples": len(rows)}),
        }
    )
    return Message(content=content, reply_to=message)
