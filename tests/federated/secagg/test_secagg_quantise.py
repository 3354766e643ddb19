"""The masked sum is the plain sum of the same quantised inputs; the error of quantising is what it is said to be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federated.privacy.section import SecureAggregationSection
from federated.secagg.quantise import Quantiser, RingLayout, ValuesRefused
from federated.secagg.settings import make_plan
from federated.sums import Bounds, Contribution, Sum, add_all

SIZE, CLIENTS, WEIGHT = 25, 20, 64


def quantiser(
    step_bits: int = 10,
    clip: float = 2.0,
    names: tuple[str, ...] = ("difference",),
    scalars: tuple[str, ...] = (),
    weight: int = WEIGHT,
    bound: int = 0,
) -> Quantiser:
    section = SecureAggregationSection(protocol="secagg", step_bits=step_bits, clip=clip, max_weight=weight)
    steps = bound or int(np.ceil(clip * 2**step_bits))
    layout = RingLayout(SIZE, names, scalars, Bounds(CLIENTS, max(weight, 1)), weight, steps, step_bits)
    return Quantiser(layout, make_plan(section, CLIENTS, layout.length, bound=steps))


def contributions(
    of: Quantiser, seed: int, clients: int = CLIENTS, spread: float = 0.8
) -> list[Contribution]:
    draws = np.random.default_rng(seed)
    return [
        Contribution(
            {name: draws.normal(0, spread, SIZE).astype(np.float32) for name in of.layout.names},
            float(draws.integers(1, of.plan.max_weight, endpoint=True)),
            int(draws.integers(1, 500)),
            7,
            float(draws.normal(2, 1)),
            {name: float(draws.normal(0, 100)) for name in of.layout.scalars},
        )
        for _ in range(clients)
    ]


def plain(of: Quantiser, given: list[Contribution]) -> Sum:
    total = Sum(SIZE, of.layout.bounds, of.layout.names)
    add_all(total, [of.plain(contribution) for contribution in given])
    return total


def masked(of: Quantiser, given: list[Contribution]) -> Sum:
    ring = of.plan.ring
    total = ring.zeros(of.plan.length)
    for contribution in given:
        ring.add_into(total, ring.of(of.values(contribution).values))
    return of.to_sum(ring.signed(total), len(given))


@given(
    seed=st.integers(0, 10_000),
    step_bits=st.sampled_from([0, 1, 7, 16, 22]),
    clients=st.integers(1, CLIENTS),
    two=st.booleans(),
    spread=st.sampled_from([0.01, 1.0, 50.0]),
)
def test_bit_for_bit_the_sum_of_a_plain_job(
    seed: int, step_bits: int, clients: int, two: bool, spread: float
) -> None:
    names = ("control", "difference") if two else ("difference",)
    of = quantiser(step_bits, names=names, scalars=("effective", "squared") if two else ())
    given = contributions(of, seed, clients, spread)
    ours, theirs = masked(of, given), plain(of, given)
    assert ours.to_bytes() == theirs.to_bytes()


def test_the_mean_is_off_by_half_a_step_and_what_was_clipped() -> None:
    of = quantiser(step_bits=6, clip=1.0)
    given = contributions(of, 3, spread=0.7)
    exact = np.array([c.vectors["difference"] for c in given], np.float64)
    weights = np.array([c.weight for c in given])
    beyond = np.maximum(np.abs(exact) - 1.0, 0.0)
    assert (beyond > 0).any()
    assert (beyond == 0).all(axis=0).any()
    error = np.abs(masked(of, given).mean() - weights @ exact / weights.sum())
    bound = 2.0**-7 + weights @ beyond / weights.sum()
    assert (error <= bound + 1e-12).all()
    unclipped = (beyond == 0).all(axis=0)
    assert error[unclipped].max() <= 2.0**-7
    assert error[unclipped].max() > 2.0**-10  # the bound is not idle


def test_an_error_of_half_a_step_is_reached() -> None:
    of = quantiser(step_bits=4, weight=1)
    half = Contribution({"difference": np.full(SIZE, 1.5 / 16, np.float32)}, 1.0, 1, 1, 0.0)
    assert abs(masked(of, [half]).mean() - 1.5 / 16).max() == 2.0**-5


def test_clipped_values_are_counted() -> None:
    of = quantiser(step_bits=4, clip=1.0)
    vector = np.zeros(SIZE, np.float32)
    vector[:5] = [1.0, -1.0, 1.04, -7.0, 1.02]  # 1.02 rounds to the clip itself
    found = of.values(Contribution({"difference": vector}, 2.0, 1, 1, 0.0))
    assert found.clipped == 2
    assert found.values[:5].tolist() == [32, -32, 32, -32, 32]


def test_noise_is_added_within_the_bound_and_weighs_one() -> None:
    of = quantiser(step_bits=4, clip=1.0, weight=1, bound=40)
    contribution = Contribution({"difference": np.ones(SIZE, np.float32)}, 1.0, 1, 1, 0.0)
    found = of.values(contribution, lambda q: q + np.arange(SIZE))
    assert found.values[:SIZE].tolist() == [16 + k for k in range(SIZE)]
    assert of.values(contribution, lambda q: q + 1000).values[:SIZE].max() == 40
    with pytest.raises(ValuesRefused, match="weighs 1"):
        quantiser(weight=2).values(replace(contribution, weight=2.0), lambda q: q)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"weight": 1.5}, "whole"),
        ({"weight": 65.0}, "1 to 64"),
        ({"weight": 0.0}, "1 to 64"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"loss": 1e30}, "beyond its limit"),
        ({"scalars": {"bit": 1.0}}, "scalars"),
        ({"vectors": {"other": np.zeros(SIZE, np.float32)}}, "are summed"),
        ({"vectors": {"difference": np.zeros(3, np.float32)}}, "shape"),
        ({"vectors": {"difference": np.full(SIZE, np.inf, np.float32)}}, "NaN or infinite"),
    ],
)
def test_what_cannot_be_quantised_is_refused(changed: dict[str, object], says: str) -> None:
    of = quantiser()
    good = Contribution({"difference": np.zeros(SIZE, np.float32)}, 1.0, 1, 1, 0.0)
    with pytest.raises(ValuesRefused, match=says):
        of.values(replace(good, **changed))  # type: ignore[arg-type]


def test_a_sum_that_no_honest_clients_made_is_refused() -> None:
    of = quantiser()
    good = sum(of.values(c).values for c in contributions(of, 1, 5))
    assert of.to_sum(good, 5).clients == 5
    far = good.copy()
    far[3] = of.plan.ring.largest
    with pytest.raises(ValuesRefused, match="larger"):
        of.to_sum(far, 5)
    for name in ("weight", "examples", "steps"):
        wrong = good.copy()
        at = SIZE
        for scalar, digits in of.layout.digits().items():
            if scalar == name:
                wrong[at : at + digits] = 0
            at += digits
        with pytest.raises(ValuesRefused):
            of.to_sum(wrong, 5)
    with pytest.raises(ValuesRefused, match="shape"):
        of.to_sum(good[:-1], 5)


def test_the_most_steps_are_the_mean_rounded_up() -> None:
    of = quantiser()
    given = [replace(c, steps=steps) for c, steps in zip(contributions(of, 1, 3), (1, 1, 9), strict=True)]
    assert masked(of, given).most_steps == 4


def test_a_layout_that_sums_or_the_plan_do_not_hold_is_refused() -> None:
    with pytest.raises(ValuesRefused, match="above the"):
        RingLayout(SIZE, ("difference",), (), Bounds(CLIENTS, WEIGHT), WEIGHT, 2**40, 10)
    with pytest.raises(ValuesRefused, match="weight 65"):
        RingLayout(SIZE, ("difference",), (), Bounds(CLIENTS, 64), 65, 100, 10)
    of = quantiser()
    with pytest.raises(ValueError, match="where the plan says"):
        Quantiser(replace(of.layout, size=SIZE + 1), of.plan)
