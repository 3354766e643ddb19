"""A job out of a file, flags and what the data set is like; and the file that says all of it again."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from federated.data import Federation
from federated.job import FederatedJob, load_job, read_job
from federated.job_sections import DataSection, JobRefused, JobSection

Tables = dict[str, dict[str, Any]]

COHORT_SHARE: Final = 0.1
LEAST_COHORT, MOST_COHORT = 10, 100
EPOCHS, BATCH = 5, 10
"""E and B of McMahan et al. (2017) for clients with few rows."""


def read_tables(path: Path | None) -> Tables:
    """The tables of a job's file; none without a file. Raises JobRefused."""
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise JobRefused(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobRefused(f"{path} is not TOML: {error}") from error
    for title, table in tables.items():
        if not isinstance(table, dict):
            raise JobRefused(f"{path}: {title} stands outside any section")
    return tables


def put(tables: Tables, values: Mapping[str, Any]) -> None:
    """Set ``values`` by "section.key" (further dots lead into tables); None is left as it is. A new name of a model,
    strategy or selection forgets the old one's options."""
    for place, value in values.items():
        if value is None:
            continue
        section, _, key = place.partition(".")
        table = tables.setdefault(section, {})
        if key == "name" and section in ("model", "strategy", "selection") and table.get("name") != value:
            table.clear()
        *parents, last = key.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value


def read_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """``section.key=value`` texts, values as TOML writes them, or bare text. Raises JobRefused."""
    found: dict[str, Any] = {}
    for text in texts:
        place, equals, value = text.partition("=")
        if not equals or "." not in place:
            raise JobRefused(f"{text!r} is not SECTION.KEY=VALUE, as in training.rate=0.05")
        found[place.strip()] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass  # bare text, or a number that TOML wants written longer
    try:
        return float(text)
    except ValueError:
        return text


def data_section(tables: Tables) -> DataSection:
    """The data section alone, before the data are there. Raises JobRefused."""
    return _alone(tables, "data").data


def job_section(tables: Tables) -> JobSection:
    """The job section alone. Raises JobRefused."""
    return _alone(tables, "job").job


def _alone(tables: Tables, title: str) -> FederatedJob:
    return read_job({"rounds": {"start_fl_job_threshold": 1}, title: tables.get(title, {})})


def complete(tables: Tables, federation: Federation) -> FederatedJob:
    """The job with what the data decide: how many clients, features and classes there are, and, unless the file or
    a flag says so, the cohort (a tenth of the clients, between 10 and 100), the model and the local work. Raises
    JobRefused."""
    filled = {title: dict(table) for title, table in tables.items()}
    rounds = filled.setdefault("rounds", {})
    if rounds.get("mode") != "buffered" and "members" not in rounds:
        rounds.setdefault("start_fl_job_threshold", cohort(federation.clients))
    training = filled.setdefault("training", {})
    training.setdefault("batch_size", BATCH)
    if not {"epochs", "steps"} & training.keys() and filled.get("strategy", {}).get("name") != "fedsgd":
        training["epochs"] = EPOCHS
    if "name" not in filled.setdefault("model", {}):
        filled["model"]["name"] = "text" if federation.inputs.dtype.kind in "iu" else "perceptron"
    filled.setdefault("strategy", {}).setdefault("name", "fedavg")
    filled.setdefault("selection", {}).setdefault("name", "everyone")
    job = read_job(filled)
    data = replace(
        job.data, clients=federation.clients, features=federation.features, classes=federation.classes
    )
    job = replace(job, data=data)
    job.check()
    return job


def cohort(clients: int) -> int:
    """How many clients start an iteration, unless it is said."""
    return min(clients, max(LEAST_COHORT, min(MOST_COHORT, round(clients * COHORT_SHARE))))


def reread(job: FederatedJob) -> FederatedJob:
    """``job`` as its own file gives it: what is written is what runs."""
    return load_job(tomllib.loads(job.to_toml()))
