"""Tables are described once, checked at once, and read back from their plain form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sync.errors import BadSpec
from sync.spec import Initialiser, Optimiser, Segment, TableSpec

DENSE = TableSpec(
    "dense",
    64,
    Initialiser((Segment(0, 0.25), Segment(3, 0.0, 1.0)), seed=9),
    Optimiser("adagrad", 0.01, 1e-6),
    placement="single",
    rows=12,
    max_norm=50.0,
)


@pytest.mark.parametrize("spec", [TableSpec("retrieval", 32), DENSE])
def test_survives_json(spec: TableSpec) -> None:
    assert TableSpec.from_plain(json.loads(json.dumps(spec.to_plain()))) == spec


def test_state_floats_per_row() -> None:
    widths = {
        kind: TableSpec("t", 7, optimiser=Optimiser(kind)).state_dim
        for kind in ("sgd", "rowwise_adagrad", "adagrad")
    }
    assert widths == {"sgd": 0, "rowwise_adagrad": 1, "adagrad": 7}


def test_the_seed_is_fixed_by_name_and_seed() -> None:
    assert TableSpec("retrieval", 2, Initialiser.uniform(1, seed=7)).seed == 16675520721505858012
    assert DENSE.seed != TableSpec("dense", 64).seed != TableSpec("other", 64).seed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 2}, "format"),
        ({"name": "Bad name"}, "Bad name"),
        ({"name": 3}, "name"),
        ({"dim": 0}, "dim"),
        ({"dim": 1.5}, "dim"),
        ({"dim": True}, "dim"),
        ({"seed": -1}, "seed"),
        ({"segments": []}, "segment"),
        ({"segments": [[1, 0.1, 0.0]]}, "key 0"),
        ({"segments": [[0, 0.1, 0.0], [0, 0.1, 0.0]]}, "ascending"),
        ({"segments": [[0, -0.1, 0.0]]}, "scale"),
        ({"segments": [[0, float("nan"), 0.0]]}, "scale"),
        ({"segments": [[0, 0.1, float("inf")]]}, "constant"),
        ({"segments": [[0, 0.1]]}, "unpack"),
        ({"segments": 5}, "table"),
        ({"optimiser": "adam"}, "adam"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": "fast"}, "rate"),
        ({"epsilon": 1e-60}, "epsilon"),
        ({"placement": "everywhere"}, "everywhere"),
        ({"rows": 0}, "rows"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": 1e19}, "max_norm"),
    ],
)
def test_names_what_is_wrong(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpec, match=named):
        TableSpec.from_plain({**DENSE.to_plain(), **change})


@pytest.mark.parametrize("name", list(DENSE.to_plain()))
def test_names_what_is_missing(name: str) -> None:
    plain = DENSE.to_plain()
    del plain[name]
    with pytest.raises(BadSpec, match=name):
        TableSpec.from_plain(plain)


def test_ignores_fields_of_later_versions() -> None:
    assert TableSpec.from_plain({**DENSE.to_plain(), "expiry_s": 5}) == DENSE
