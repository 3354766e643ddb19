"""One table cut into those of a guest and hosts, for a trial: columns to each, and rows that only some have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from federated.vertical.tables import Table, TableRefused, read_table, write_csv

SKLEARN: Final = "sklearn:"
BUNDLED: Final = ("breast_cancer", "digits", "wine", "iris", "diabetes")
"""What scikit-learn brings along, without a download."""


def split_table(
    table: Table, hosts: Mapping[str, Sequence[str]], *, overlap: float = 1.0, seed: int = 0
) -> dict[str, Table]:
    """``table`` as a guest's (labels and whatever columns no host has) and hosts' by name.

    ``overlap``: the part of rows that all have; of the others each party has about half. Every party's rows are in an
    order of their own. Raises TableRefused for columns that are not there, or given twice.
    """
    given = [column for columns in hosts.values() for column in columns]
    missing = [column for column in given if column not in table.names]
    if missing or len(set(given)) != len(given):
        raise TableRefused(f"columns that are not there, or given twice: {missing or given}")
    if not 0.0 < overlap <= 1.0:
        raise TableRefused(f"an overlap of {overlap}; it is above 0 and at most 1")
    generator = np.random.default_rng(seed)
    joint = generator.permutation(len(table))
    cut = max(1, round(overlap * len(table)))
    common, others = joint[:cut], joint[cut:]
    own = [column for column in table.names if column not in given]
    found: dict[str, Table] = {}
    for name, columns in {"guest": own, **hosts}.items():
        rows = np.concatenate([common, others[generator.random(len(others)) < 0.5]])
        part = table.take(generator.permutation(rows).astype(np.int64))
        places = [table.names.index(column) for column in columns]
        labels = part.labels if name == "guest" else None
        found[name] = replace(part, features=part.features[:, places], names=tuple(columns), labels=labels)
    return found


def open_whole(source: str, *, id_column: str | None, label_column: str) -> Table:
    """The undivided table of a file, or of ``sklearn:NAME`` (scikit-learn's ``load_NAME``). Raises TableRefused.

    Without ``id_column``, and in scikit-learn's tables, rows are numbered.
    """
    if source.startswith(SKLEARN):
        return _of_sklearn(source.removeprefix(SKLEARN))
    return read_table(Path(source), id_column=id_column, label_column=label_column)


def is_whole(source: str) -> bool:
    """Whether ``source`` names an undivided table: a file, or one of scikit-learn's."""
    return source.startswith(SKLEARN) or Path(source).is_file()


def _of_sklearn(name: str) -> Table:
    if name not in BUNDLED:
        raise TableRefused(f"{SKLEARN}{name} is none of {', '.join(f'{SKLEARN}{one}' for one in BUNDLED)}")
    try:
        from sklearn import datasets
    except ImportError as error:
        raise TableRefused(
            f"{SKLEARN}{name} comes with scikit-learn; `pip install headwater[datasets]` brings it"
        ) from error
    found = getattr(datasets, f"load_{name}")()
    features = np.asarray(found.data, np.float64)
    names = tuple(str(one).replace(" ", "_") for one in found.feature_names)
    ids = tuple(str(row + 1) for row in range(len(features)))
    return Table(ids, features, names, np.asarray(found.target, np.float64))


def write_split(
    table: Table, out: Path, hosts: Mapping[str, Sequence[str]], *, overlap: float, seed: int
) -> dict[str, tuple[Path, int, int]]:
    """Split ``table``, and write ``out``/NAME.csv each: path, rows and columns by name. Raises TableRefused."""
    found: dict[str, tuple[Path, int, int]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for name, part in split_table(table, hosts, overlap=overlap, seed=seed).items():
        target = out / f"{name}.csv"
        write_csv(part, target)
        found[name] = target, len(part), len(part.names)
    return found


def halves(names: Sequence[str], hosts: int) -> dict[str, list[str]]:
    """Columns for ``hosts`` hosts where nobody said which: the guest keeps the first part."""
    parts = np.array_split(np.arange(len(names)), hosts + 1)[1:]
    if any(not len(part) for part in parts):
        raise TableRefused(f"{len(names)} columns are too few for a guest and {hosts} hosts")
    called = ["host"] if hosts == 1 else [f"host{place + 1}" for place in range(hosts)]
    return {name: [names[place] for place in part.tolist()] for name, part in zip(called, parts, strict=True)}
