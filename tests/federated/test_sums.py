"""Integer sums: no order, grouping or chunking changes a bit, nothing overflows, nothing bad gets in."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated import Bounds, Contribution, ContributionRefused, Sum, add_all, add_batch
from federated.sums import SCALE_BITS, SumMismatch, check

BOUNDS = Bounds(uploads=64, examples=1_000)
NAMES = ("control", "difference")


def make_contributions(count: int, size: int, seed: int, spread: float = 1.0) -> list[Contribution]:
    generator = np.random.default_rng(seed)

    def vector() -> np.ndarray:
        scale = np.exp(generator.normal(0.0, spread, size))
        return np.clip(generator.normal(size=size) * scale, -BOUNDS.magnitude, BOUNDS.magnitude).astype(
            np.float32
        )

    return [
        Contribution(
            {name: vector() for name in NAMES},
            float(generator.integers(1, 1_000)) / float(generator.choice([1.0, 3.0, 1.7])),
            int(generator.integers(1, 2_000)),
            int(generator.integers(1, 50)),
            float(generator.exponential()),
            {"squared_norm": float(generator.exponential(100.0))},
        )
        for _ in range(count)
    ]


def one_by_one(contributions: list[Contribution], size: int) -> Sum:
    total = Sum(size, BOUNDS, NAMES)
    for contribution in contributions:
        total.add(contribution)
    return total


def assert_same_bits(left: Sum, right: Sum) -> None:
    assert left.to_bytes() == right.to_bytes()


def exact(contributions: list[Contribution], name: str) -> list[int]:
    """The decided meaning, straight: round half to even of value · weight · 2**30 in double precision, added up."""
    return [
        sum(
            round(Fraction(float(np.float64(c.vectors[name][place]) * c.weight)) * 2**SCALE_BITS)
            for c in contributions
        )
        for place in range(len(contributions[0].vectors[name]))
    ]


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 24),
    size=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    data=st.data(),
)
def test_any_order_grouping_and_merge_tree_gives_the_same_bits(
    count: int, size: int, seed: int, spread: float, data: st.DataObject
) -> None:
    contributions = make_contributions(count, size, seed, spread)
    total = one_by_one(contributions, size)
    for name in NAMES:
        assert total.vectors[name].tolist() == exact(contributions, name)
    order = data.draw(st.permutations(contributions))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    parts = []
    for start, end in pairwise([0, *cuts, count]):
        part = Sum(size, BOUNDS, NAMES)
        add_all(part, order[start:end])
        parts.append(Sum.from_bytes(part.to_bytes(), size, BOUNDS, NAMES))
    while len(parts) > 1:
        left = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts[data.draw(st.integers(0, len(parts) - 1))].merge(left)
    assert_same_bits(parts[0], total)


def batch_of(contributions: list[Contribution]) -> Callable[[Sum], None]:
    def add(total: Sum) -> None:
        add_batch(
            total,
            {name: np.stack([c.vectors[name] for c in contributions]) for name in NAMES},
            np.array([c.weight for c in contributions]),
            np.array([c.examples for c in contributions]),
            [c.steps for c in contributions],
            [c.loss for c in contributions],
            {"squared_norm": np.array([c.scalars["squared_norm"] for c in contributions])},
        )

    return add


@pytest.mark.parametrize("size", [1, 1_000, 8_192, 20_001])
@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_a_batch_is_a_loop(size: int, spread: float) -> None:
    contributions = make_contributions(12, size, size, spread)
    total = Sum(size, BOUNDS, NAMES)
    batch_of(contributions)(total)
    assert_same_bits(total, one_by_one(contributions, size))


def test_groups_of_large_values_do_not_pass_what_float64_adds_exactly() -> None:
    size = 5
    biggest = np.full(size, np.float32(BOUNDS.magnitude))
    odd = np.full(size, np.float32(2.0**-SCALE_BITS))
    rows = [biggest, odd, -biggest, odd, biggest, odd]
    total = Sum(size, BOUNDS)
    add_all(total, [Contribution({"difference": row}, 1.0, 1, 1, 0.0) for row in rows])
    assert total.vectors["difference"].tolist() == [int(BOUNDS.magnitude) * 2**SCALE_BITS + 3] * size


@pytest.mark.parametrize(
    ("uploads", "examples"),
    [(1, 1), (100, 500), (1_000, 10_000), (2**20, 2**12), (7, 999_983), (2**16, 2**16 - 1)],
)
def test_the_largest_sum_that_the_bounds_allow_does_not_overflow(uploads: int, examples: int) -> None:
    bounds = Bounds(uploads, examples)
    assert bounds.magnitude >= 1.0
    assert np.log2(bounds.magnitude) == int(np.log2(bounds.magnitude))
    one = round(Fraction(bounds.magnitude) * examples * 2**SCALE_BITS)
    assert uploads * (one + 1) < 2**63
    total = Sum(2, bounds)
    extreme = np.array([bounds.magnitude, -bounds.magnitude], np.float32)
    total.add(Contribution({"difference": extreme}, float(examples), 1, 1, 0.0))
    assert total.vectors["difference"].tolist() == [one, -one]


def test_bounds_that_cannot_be_proved_are_refused_at_the_start() -> None:
    Bounds(2**16, 2**16 - 1)
    with pytest.raises(ValueError, match="do not fit into 63 bits"):
        Bounds(2**17, 2**17)
    for uploads, examples in ((0, 1), (1, 0), (-1, 5)):
        with pytest.raises(ValueError, match="at least 1"):
            Bounds(uploads, examples)


def changed(**changes: object) -> Contribution:
    values: dict[str, object] = {
        "vectors": {"difference": np.ones(4, np.float32)},
        "weight": 10.0,
        "examples": 10,
        "steps": 5,
        "loss": 0.5,
    }
    return Contribution(**{**values, **changes})  # type: ignore[arg-type]


def holding(value: float) -> dict[str, np.ndarray]:
    return {"difference": np.array([0.0, 1.0, value, 0.0], np.float32)}


REFUSED = [
    ("not_finite", {"vectors": holding(np.nan)}),
    ("not_finite", {"vectors": holding(np.inf)}),
    ("not_finite", {"vectors": holding(-np.inf)}),
    ("magnitude", {"vectors": holding(BOUNDS.magnitude * 1.001)}),
    ("magnitude", {"vectors": holding(-BOUNDS.magnitude * 1.001)}),
    ("length", {"vectors": {"difference": np.ones(5, np.float32)}}),
    ("length", {"vectors": {"difference": np.ones((1, 4), np.float32)}}),
    ("type", {"vectors": {"difference": np.ones(4)}}),
    ("names", {"vectors": {"control": np.ones(4, np.float32)}}),
    ("names", {"vectors": {}}),
    ("weight", {"weight": 0.0}),
    ("weight", {"weight": -1.0}),
    ("weight", {"weight": np.nan}),
    ("weight", {"weight": np.inf}),
    ("weight", {"weight": 1_000.5}),
    ("weight", {"weight": 2.0**-31}),
    ("examples", {"examples": 0}),
    ("steps", {"steps": 0}),
    ("steps", {"steps": 2**40}),
    ("loss", {"loss": np.nan}),
    ("loss", {"loss": np.inf}),
    ("loss", {"loss": 1e300}),
    ("scalars", {"scalars": {"squared_norm": np.nan}}),
    ("scalars", {"scalars": {"squared_norm": 1e300}}),
]


@pytest.mark.parametrize(("rule", "change"), REFUSED)
def test_what_breaks_a_rule_is_refused_by_its_name_and_nothing_is_added(
    rule: str, change: dict[str, object]
) -> None:
    total = Sum(4, BOUNDS)
    total.add(changed())
    before = total.to_bytes()
    bad = changed(**change)
    for attempt in (
        lambda: total.add(bad),
        lambda: add_all(total, [changed(scalars=bad.scalars), bad]),
        lambda: check(bad, 4, BOUNDS),
    ):
        with pytest.raises(ContributionRefused) as refused:
            attempt()
        assert refused.value.rule == rule
        assert total.to_bytes() == before
    check(changed(), 4, BOUNDS)


def test_a_batch_with_one_bad_row_adds_nothing_and_a_full_sum_takes_no_more() -> None:
    total = Sum(4, Bounds(3, 10))
    batch = np.ones((3, 4), np.float32)
    batch[2, 1] = np.nan
    columns: tuple[list[float], list[int], list[int], list[float]] = ([1.0] * 3, [1] * 3, [1] * 3, [0.0] * 3)
    with pytest.raises(ContributionRefused, match="not_finite"):
        add_batch(total, {"difference": batch}, *columns)
    with pytest.raises(ContributionRefused, match="length"):
        add_batch(total, {"difference": np.ones((2, 4), np.float32)}, *columns)
    assert total.clients == 0
    assert not total.vectors["difference"].any()
    add_batch(total, {"difference": np.ones((3, 4), np.float32)}, *columns)
    with pytest.raises(ContributionRefused, match="uploads"):
        total.add(changed(weight=1.0))
    with pytest.raises(SumMismatch, match="more than 3"):
        total.merge(total)
    assert total.clients == 3


def test_means_are_weighted_and_reported_values_add_up() -> None:
    contributions = make_contributions(9, 30, 4)
    total = one_by_one(contributions, 30)
    weights = np.array([c.weight for c in contributions])
    for name in NAMES:
        straight = np.average(
            [c.vectors[name].astype(np.float64) for c in contributions], axis=0, weights=weights
        )
        np.testing.assert_allclose(total.mean(name), straight, rtol=1e-9, atol=1e-9)
    loss = np.average([c.loss for c in contributions], weights=weights)
    assert total.mean_scalar("loss") == pytest.approx(loss, rel=1e-9)
    norm = np.average([c.scalars["squared_norm"] for c in contributions], weights=weights)
    assert total.mean_scalar("squared_norm") == pytest.approx(norm, rel=1e-9)
    assert total.scalars["examples"] == sum(c.examples for c in contributions)
    assert total.scalars["steps"] == sum(c.steps for c in contributions)
    assert total.most_steps == max(c.steps for c in contributions)
    with pytest.raises(ZeroDivisionError):
        Sum(3, BOUNDS).mean()


def test_a_weight_scaled_by_staleness_counts_less() -> None:
    total = Sum(1, BOUNDS)
    for value, factor in ((1.0, 1.0), (4.0, 0.5)):
        total.add(changed(vectors={"difference": np.array([value], np.float32)}).scaled(factor))
    assert total.mean().tolist() == [2.0]


@settings(deadline=None, max_examples=200)
@given(cut=st.integers(0, 400), at=st.integers(0, 400), value=st.integers(0, 255))
def test_bytes_that_were_cut_or_changed_are_refused_or_still_keep_the_bounds(
    cut: int, at: int, value: int
) -> None:
    body = one_by_one(make_contributions(3, 4, 1), 4).to_bytes()
    cut, at = min(cut, len(body) - 1), min(at, len(body) - 1)
    with pytest.raises(SumMismatch):
        Sum.from_bytes(body[:cut], 4, BOUNDS, NAMES)
    with pytest.raises(SumMismatch):
        Sum.from_bytes(body + b"x", 4, BOUNDS, NAMES)
    damaged = body[:at] + bytes([value]) + body[at + 1 :]
    try:
        total = Sum.from_bytes(damaged, 4, BOUNDS, NAMES)
    except SumMismatch:
        return
    assert total.clients <= BOUNDS.uploads
    limit = total.clients * (int(BOUNDS.magnitude) * BOUNDS.examples * 2**SCALE_BITS + 1)
    assert all(np.abs(vector).max() <= limit for vector in total.vectors.values())


def test_sums_of_other_jobs_are_refused() -> None:
    total = one_by_one(make_contributions(2, 4, 1), 4)
    body = total.to_bytes()
    for size, bounds, names in (
        (5, BOUNDS, NAMES),
        (4, Bounds(63, 1_000), NAMES),
        (4, Bounds(64, 999), NAMES),
        (4, BOUNDS, ("difference",)),
    ):
        with pytest.raises(SumMismatch):
            Sum.from_bytes(body, size, bounds, names)
        with pytest.raises(SumMismatch):
            total.merge(Sum(size, bounds, names))
    large = Sum.from_bytes(body, 4, BOUNDS, NAMES)
    large.vectors["control"][0] = 2**62
    with pytest.raises(SumMismatch, match="larger than 2 uploads"):
        Sum.from_bytes(large.to_bytes(), 4, BOUNDS, NAMES)
    light = Sum.from_bytes(body, 4, BOUNDS, NAMES)
    light.scalars["weight"] = 1
    with pytest.raises(SumMismatch, match="of this weight"):
        Sum.from_bytes(light.to_bytes(), 4, BOUNDS, NAMES)


def test_a_sum_at_its_very_bounds_survives_its_bytes() -> None:
    bounds = Bounds(3, 7)
    for weight in (7.0, 1.0 / 3.0, 2.0**-30):
        total = Sum(2, bounds)
        extreme = np.array([bounds.magnitude, -bounds.magnitude], np.float32)
        add_all(total, [Contribution({"difference": extreme}, weight, 1, 1, bounds.magnitude)] * 3)
        again = Sum.from_bytes(total.to_bytes(), 2, bounds)
        assert_same_bits(again, total)
        assert np.abs(again.mean()).max() == pytest.approx(bounds.magnitude, rel=1e-6)
