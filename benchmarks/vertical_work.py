"""One joint job as the vertical benchmark runs it: every party's role in one process, on real data, split as published
figures are.

The sets lie beside the repository (``../shared/data``): a guest's and a host's file each. Rows are aligned by id
before; rows of test and training are those of scikit-learn's ``train_test_split(test_size=.3, random_state=0,
stratify=y)``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from federated.vertical.evaluation import measures
from federated.vertical.kinds import Kind, Setup
from federated.vertical.parties import Alone, Checkpoint, Incoming, Role, Workers, run_local
from federated.vertical.tables import Table, read_table

DATA: Final = Path(__file__).parents[2] / "shared" / "data"
GUEST: Final = "guest"
HOST: Final = "host"
KEEPER: Final = "coordinator"
SEED: Final = 7

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class SetMissing(RuntimeError):
    """A data set is not there; the message names its files."""


@dataclass(frozen=True, slots=True)
class Split:
    """Aligned tables; ``train`` and ``test`` are rows of both."""

    name: str
    guest: Table
    host: Table
    train: Ints
    test: Ints

    @property
    def labels(self) -> Floats:
        """[N]."""
        assert self.guest.labels is not None
        return self.guest.labels

    @property
    def pooled(self) -> Floats:
        """All columns, the guest's first: [N, F]."""
        return np.hstack([self.guest.features, self.host.features])

    def auc(self, scores: Floats) -> float:
        """Of scores of the test rows [n]."""
        return measures(self.labels[self.test], scores)["auc"]


def load(name: str, data: Path = DATA) -> Split:
    """The set of this name. Raises SetMissing."""
    guest_file, host_file = (data / f"{name}_hetero_{role}.csv" for role in (GUEST, HOST))
    if not (guest_file.exists() and host_file.exists()):
        raise SetMissing(f"{guest_file.name} and {host_file.name} are not in ../shared/data")
    guest = read_table(guest_file, label_column="y")
    host = read_table(host_file).align(guest.ids)
    train, test = train_test_split(
        np.arange(len(guest)), test_size=0.3, random_state=0, stratify=guest.labels
    )
    return Split(name, guest, host, train, test)


@dataclass(slots=True)
class Job:
    """``scores`` of the test rows by joint inference; ``alone`` those of the guest's part without the hosts. ``marks``:
    seconds at the guest's checkpoints, 0 the beginning. ``sent``: bytes by sender. ``models``: parts by party."""

    seconds: float
    scores: Floats
    alone: Floats
    marks: list[float]
    sent: Mapping[str, int]
    figures: Mapping[str, float | int | str]
    models: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all parties."""
        return sum(self.sent.values())

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds between checkpoints: of an epoch, or of a tree."""
        return tuple(np.diff([0.0, *self.marks]).tolist())


def train(
    kind: Kind[Any], options: Any, split: Split, *, coordinator: bool = False, workers: Workers | None = None
) -> Job:
    """Train jointly, and answer for the test rows."""
    parties = {GUEST: "guest", HOST: "host"} | ({KEEPER: "coordinator"} if coordinator else {})
    tables = {GUEST: split.guest.take(split.train), HOST: split.host.take(split.train)}
    marks: list[float] = []
    began_s = time.perf_counter()
    roles: dict[str, Role[Any]] = {}
    for name in parties:
        setup = Setup(name, parties, tables.get(name), SEED, len(split.train), workers or Alone())
        role = kind.make(options, setup)(None)
        roles[name] = _timed(role, marks, began_s) if name == GUEST else role
    outcome = run_local(roles)
    seconds = time.perf_counter() - began_s
    assert kind.load is not None
    parts: dict[str, Any] = {name: kind.load(outcome.results[name].model) for name in tables}
    rows = split.guest.features[split.test]
    share = parts[HOST].partial(split.host.features[split.test])
    sent: Counter[str] = Counter()
    for one in outcome.transcript.messages:
        sent[one.sender] += one.size
    figures = outcome.results[GUEST].figures
    scores = parts[GUEST].combine(rows, {HOST: share})
    return Job(seconds, scores, parts[GUEST].alone(rows), marks, sent, figures, parts)


def _timed(role: Role[Any], marks: list[float], began_s: float) -> Role[Any]:
    """``role``, with the time of each of its checkpoints."""
    answer: Incoming | None = None
    try:
        while True:
            effect = role.send(answer)
            if isinstance(effect, Checkpoint):
                marks.append(time.perf_counter() - began_s)
            answer = yield effect
    except StopIteration as end:
        return end.value
    finally:
        role.close()


def logistic_auc(split: Split, features: Floats) -> float:
    """Of scikit-learn's regression of ``features`` [N, F], standardised on the training rows."""
    scaler = StandardScaler().fit(features[split.train])
    model = LogisticRegression(max_iter=1_000)
    model.fit(scaler.transform(features[split.train]), split.labels[split.train])
    return split.auc(np.asarray(model.predict_proba(scaler.transform(features[split.test])))[:, 1])
