"""Tables are described once, checked at once, and read back from their plain form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sync.errors import BadSpec
from sync.spec import Initialiser, Optimiser, OptimiserKind, Segment, TableSpec

DENSE = TableSpec(
    "dense",
    64,
    Initialiser((Segment(0, 0.25), Segment(3, 0.0, 1.0)), seed=9),
    Optimiser("adagrad", 0.01, 1e-6),
    placement="single",
    rows=12,
    max_norm=50.0,
)
ITEMS = TableSpec(
    "items",
    16,
    optimiser=Optimiser("ftrl", 0.5, beta1=0.8, beta2=0.99, beta=2.0, l1=0.125, l2=0.25),
    l2=0.0625,
    clip=3.0,
    guard=20.0,
    admission=3,
    expiry_s=86_400,
)
FIRST_VERSION = {
    "format", "name", "dim", "seed", "segments", "optimiser", "rate", "epsilon", "placement", "rows", "max_norm",
}  # fmt: skip
"""What a plain form must have; whatever was added since may be absent."""


@pytest.mark.parametrize("spec", [TableSpec("retrieval", 32), DENSE, ITEMS])
def test_survives_json(spec: TableSpec) -> None:
    assert TableSpec.from_plain(json.loads(json.dumps(spec.to_plain()))) == spec


def test_state_floats_per_row() -> None:
    kinds: list[OptimiserKind] = ["sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"]
    widths = [TableSpec("t", 7, optimiser=Optimiser(kind)).state_dim for kind in kinds]
    assert widths == [0, 1, 7, 15, 14]


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
        ({"optimiser": "newton"}, "newton"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": "fast"}, "rate"),
        ({"epsilon": 1e-60}, "epsilon"),
        ({"placement": "everywhere"}, "everywhere"),
        ({"rows": 0}, "rows"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": 1e19}, "max_norm"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta1": -0.1}, "beta1"),
        ({"beta2": float("nan")}, "beta2"),
        ({"beta2": 1 - 1e-12}, "beta2"),
        ({"beta2": "slow"}, "beta2"),
        ({"ftrl_beta": -1.0}, "beta"),
        ({"ftrl_l1": float("inf")}, "l1"),
        ({"ftrl_l2": -1.0}, "l2"),
        ({"optimiser": "ftrl", "rate": 1e-9}, "rate"),
        ({"optimiser": "ftrl", "ftrl_beta": 0.0}, "beta"),
        ({"optimiser": "adam", "epsilon": 0.0}, "epsilon"),
        ({"l2": -0.5}, "l2"),
        ({"optimiser": "sgd", "rate": 0.5, "l2": 2.5}, "l2"),
        ({"clip": -1.0}, "clip"),
        ({"clip": 1e-60}, "clip"),
        ({"guard": float("nan")}, "guard"),
        ({"guard": 0.5}, "guard"),
        ({"admission": 2.0}, "admission"),
        ({"expiry_s": True}, "expiry_s"),
        ({"admission": 2}, "single"),
        ({"expiry_s": 60}, "single"),
    ],
)
def test_names_what_is_wrong(change: dict[str, Any], named: str) -> None:
    with pytest.raises(BadSpec, match=named):
        TableSpec.from_plain({**DENSE.to_plain(), **change})


@pytest.mark.parametrize(
    "change", [{"admission": 0}, {"admission": 256}, {"expiry_s": -1}, {"expiry_s": 2**31}]
)
def test_names_what_is_wrong_with_a_hashed_table(change: dict[str, Any]) -> None:
    with pytest.raises(BadSpec, match=next(iter(change))):
        TableSpec.from_plain({**ITEMS.to_plain(), **change})


@pytest.mark.parametrize("name", sorted(FIRST_VERSION))
def test_names_what_is_missing(name: str) -> None:
    plain = DENSE.to_plain()
    del plain[name]
    with pytest.raises(BadSpec, match=name):
        TableSpec.from_plain(plain)


def test_reads_the_first_version_with_the_defaults_of_what_was_added_since() -> None:
    plain = TableSpec("items", 16, max_norm=50.0).to_plain()
    old = {name: value for name, value in plain.items() if name in FIRST_VERSION}
    assert len(old) < len(plain)
    assert TableSpec.from_plain(old) == TableSpec("items", 16, max_norm=50.0)


def test_ignores_fields_of_later_versions() -> None:
    assert TableSpec.from_plain({**DENSE.to_plain(), "of_a_later_version": 5}) == DENSE
