"""One table cut into those of a guest and hosts, for a trial: columns to each, and rows that only some have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from federated.vertical.tables import Table, TableRefused, read_table, write_csv


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


def split_file(
    path: Path,
    out: Path,
    hosts: Mapping[str, Sequence[str]],
    *,
    id_column: str | None,
    label_column: str,
    overlap: float,
    seed: int,
) -> dict[str, tuple[Path, int, int]]:
    """Read ``path``, split it, and write ``out``/NAME.csv each: path, rows and columns by name.

    Without ``id_column`` rows are numbered. Raises TableRefused.
    """
    if id_column is None:
        table = _numbered(path, label_column)
    else:
        table = read_table(path, id_column=id_column, label_column=label_column)
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


def columns_of(path: Path, id_column: str | None, label_column: str) -> list[str]:
    """The feature columns of ``path``. Raises TableRefused."""
    table = (
        _numbered(path, label_column)
        if id_column is None
        else read_table(path, id_column=id_column, label_column=label_column)
    )
    return list(table.names)


def _numbered(path: Path, label_column: str) -> Table:
    """A table without ids, its rows numbered from 1."""
    import tempfile

    if path.suffix == ".parquet":
        raise TableRefused(f"{path}: rows of Parquet are numbered by a column of its own; name it with --id")
    try:
        text = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TableRefused(f"{path} cannot be read: {error}") from error
    lines = [line for line in text if line]
    if not lines:
        raise TableRefused(f"{path} is empty: a header is expected")
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / path.name
        numbered = [f"__row__,{lines[0]}", *(f"{row},{line}" for row, line in enumerate(lines[1:], 1))]
        beside.write_text("\n".join(numbered) + "\n", encoding="utf-8")
        return read_table(beside, id_column="__row__", label_column=label_column)
