"""Each strategy against a straight computation in float64, its state as bytes, and that it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from federated import (
    Contribution,
    ContributionRefused,
    ControlVariates,
    Field,
    Layout,
    LocalTraining,
    NextCharacter,
    Perceptron,
    ServerState,
    Strategy,
    Update,
    device_generator,
    layout_of,
    local_update,
    make_strategy,
    softmax_regression,
    sum_for,
)
from federated.strategies import STRATEGIES, FedNova, MultiKrum, StateRefused
from federated.sums import check

SIZE = 6
LAYOUT = Layout((Field("weight", (2, 3)),))
START = np.array([0.5, -1.0, 2.0, 0.0, 3.0, -0.25], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {"scaffold": {"population": 20}, "norm_bound": {"bound": 5.0}}


def make_updates(count: int, seed: int, names: tuple[str, ...] = ("difference",)) -> list[Update]:
    generator = np.random.default_rng(seed)
    return [
        Update(
            {name: generator.normal(size=SIZE).astype(np.float32) for name in names},
            int(generator.integers(1, 40)),
            int(generator.integers(1, 12)),
            float(generator.exponential()),
        )
        for _ in range(count)
    ]


def step(strategy: Strategy, state: ServerState, updates: list[Update]) -> ServerState:
    if strategy.name == "signds":
        updates = [replace(update, bit=0) for update in updates]
    contributions = [strategy.contribution(state.layout, update) for update in updates]
    if strategy.needs == "updates":
        return strategy.apply_updates(state, contributions)
    total = sum_for(strategy, state.layout, 100)
    for contribution in contributions:
        total.add(contribution)
    return strategy.apply(state, total)


def run(strategy: Strategy, iterations: list[list[Update]]) -> list[np.ndarray]:
    state = strategy.init(LAYOUT, START)
    found = []
    for place, updates in enumerate(iterations):
        state = step(strategy, state, updates)
        assert state.iteration == place + 1
        assert state.weights.dtype == np.float32
        found.append(state.weights.astype(np.float64))
        # What is stored is what goes on.
        state = ServerState.from_bytes(state.to_bytes(), LAYOUT)
    return found


def mean_of(updates: list[Update], cap: int = 10_000, name: str = "difference") -> np.ndarray:
    return np.average(
        [update.vectors[name].astype(np.float64) for update in updates],
        axis=0,
        weights=[min(update.examples, cap) for update in updates],
    )


ITERATIONS = [make_updates(5, seed) for seed in (1, 2, 3, 4)]


def averaging(rate: float, cap: int) -> list[np.ndarray]:
    weights, found = START.astype(np.float64), []
    for updates in ITERATIONS:
        weights = weights + rate * mean_of(updates, cap)
        found.append(weights)
    return found


def server_momentum(rate: float, momentum: float) -> list[np.ndarray]:
    weights, velocity, found = START.astype(np.float64), np.zeros(SIZE), []
    for updates in ITERATIONS:
        velocity = momentum * velocity + mean_of(updates)
        weights = weights + rate * velocity
        found.append(weights)
    return found


def adaptive_optimiser(
    rate: float, beta: float, adaptivity: float, second: Callable[[float, float], float]
) -> list[np.ndarray]:
    """Coordinate by coordinate, as algorithm 2 is printed."""
    weights, found = START.astype(np.float64), []
    first, squares = [0.0] * SIZE, [adaptivity**2] * SIZE
    for updates in ITERATIONS:
        mean = mean_of(updates)
        weights = weights.copy()
        for place in range(SIZE):
            first[place] = beta * first[place] + (1.0 - beta) * mean[place]
            squares[place] = second(squares[place], mean[place] ** 2)
            weights[place] += rate * first[place] / (squares[place] ** 0.5 + adaptivity)
        found.append(weights)
    return found


def yogi(before: float, squared: float) -> float:
    return before - 0.1 * squared if before > squared else before + 0.1 * squared


STRAIGHT: list[tuple[str, dict[str, Any], list[np.ndarray]]] = [
    ("fedavg", {}, averaging(1.0, 10_000)),
    ("fedavg", {"server_rate": 0.5, "max_examples": 10}, averaging(0.5, 10)),
    ("fedsgd", {}, averaging(1.0, 10_000)),
    ("fedprox", {"proximal": 0.3}, averaging(1.0, 10_000)),
    ("fedavgm", {"server_rate": 0.7, "momentum": 0.8}, server_momentum(0.7, 0.8)),
    (
        "fedadam",
        {"server_rate": 0.1, "second_beta": 0.9, "adaptivity": 0.01},
        adaptive_optimiser(0.1, 0.9, 0.01, lambda before, squared: 0.9 * before + 0.1 * squared),
    ),
    (
        "fedyogi",
        {"server_rate": 0.1, "second_beta": 0.9, "adaptivity": 0.01},
        adaptive_optimiser(0.1, 0.9, 0.01, yogi),
    ),
    (
        "fedadagrad",
        {"server_rate": 0.1, "adaptivity": 0.01},
        adaptive_optimiser(0.1, 0.0, 0.01, lambda before, squared: before + squared),
    ),
    ("adaptive", {}, averaging(1.0, 10_000)),
    ("norm_bound", {"bound": 1e6}, averaging(1.0, 10_000)),
]


@pytest.mark.parametrize(("name", "options", "expected"), STRAIGHT, ids=lambda value: str(value)[:30])
def test_iterations_are_what_the_formula_says(
    name: str, options: dict[str, Any], expected: list[np.ndarray]
) -> None:
    for found, straight in zip(run(make_strategy(name, **options), ITERATIONS), expected, strict=True):
        np.testing.assert_allclose(found, straight, rtol=2e-6, atol=2e-6)


def test_a_client_that_lies_about_its_examples_weighs_no_more_than_the_cap() -> None:
    strategy = make_strategy("fedavg", max_examples=10)
    honest, liar = make_updates(2, 9)
    honest = Update(honest.vectors, 10, 1, 0.0)
    liar = Update(liar.vectors, 10**9, 1, 0.0)
    (found,) = run(strategy, [[honest, liar]])
    equal = (honest.vectors["difference"] + liar.vectors["difference"]) / 2.0
    np.testing.assert_allclose(found, START + equal, rtol=1e-6)
    for name in STRATEGIES:
        strategy = make_strategy(name, **{"max_examples": 10, "max_steps": 12, **OPTIONS.get(name, {})})
        update = Update({"difference": START, "control": START}, 10**9, 10**9, 0.0)
        contribution = strategy.contribution(LAYOUT, update)
        assert contribution.weight == (1.0 if name in ("scaffold", "signds") else 10.0)
        assert contribution.steps == 12


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("not_finite", {"value": np.nan}),
        ("not_finite", {"value": np.inf}),
        ("not_finite", {"value": -np.inf}),
        ("magnitude", {"value": 1e30}),
        ("steps", {"steps": 0}),
        ("steps", {"steps": -5}),
        ("examples", {"examples": 0}),
        ("loss", {"loss": np.nan}),
    ],
    ids=str,
)
def test_a_hostile_update_is_refused_by_rule_under_every_strategy(
    name: str, rule: str, change: dict[str, Any]
) -> None:
    strategy = make_strategy(name, **OPTIONS.get(name, {}))
    told = {"value": 1.0, "examples": 5, "steps": 3, "loss": 0.5, **change}
    vectors = {vector: START.copy() for vector in strategy.summed}
    vectors["difference"][2] = told["value"]
    update = Update(vectors, told["examples"], told["steps"], told["loss"])
    total = sum_for(strategy, LAYOUT, 10)
    if (name, rule) == ("norm_bound", "magnitude"):
        shortened = strategy.contribution(LAYOUT, update).vectors["difference"]
        assert np.linalg.norm(shortened) == pytest.approx(5.0)
        return
    with pytest.raises(ContributionRefused) as refused:
        check(strategy.contribution(LAYOUT, update), SIZE, total.bounds, strategy.summed)
    assert refused.value.rule == rule
    good = Update(dict.fromkeys(strategy.summed, START), 5, 3, 0.5)
    check(strategy.contribution(LAYOUT, good), SIZE, total.bounds, strategy.summed)


def test_what_devices_are_asked_for() -> None:
    asked = {
        name: kind.instructions(kind.init(LAYOUT, START))
        for name in STRATEGIES
        if (kind := make_strategy(name, **OPTIONS.get(name, {})))
    }
    assert asked["fedsgd"].full_batch
    assert asked["fedprox"].proximal == 0.01
    assert asked["scaffold"].vectors == ("control",)
    assert asked["adaptive"].steps == 10
    plain = LocalTraining(epochs=2)
    for name in set(STRATEGIES) - {"fedsgd", "fedprox", "scaffold", "adaptive"}:
        assert asked[name].adapt(plain) == plain
        assert asked[name].vectors == ()


def test_scaffold_follows_option_two() -> None:
    strategy = make_strategy("scaffold", population=20)
    iterations = [make_updates(5, seed, ("difference", "control")) for seed in (1, 2, 3)]
    state = strategy.init(LAYOUT, START)
    weights, control = START.astype(np.float64), np.zeros(SIZE)
    for updates in iterations:
        state = step(strategy, state, updates)
        weights = weights + np.mean([u.vectors["difference"] for u in updates], axis=0, dtype=np.float64)
        control = control + 5 / 20 * np.mean(
            [u.vectors["control"] for u in updates], axis=0, dtype=np.float64
        )
        np.testing.assert_allclose(state.weights, weights, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(state.vectors["control"], control, rtol=2e-6, atol=2e-6)


def test_scaffolds_server_control_stays_the_mean_of_the_clients() -> None:
    """With all clients in every iteration c is the mean of the c_i, as the algorithm's invariant says."""
    model = Perceptron(4, (5,), 3)
    layout = model.layout()
    strategy = make_strategy("scaffold", population=4)
    state = strategy.init(layout, model.initial(np.random.default_rng(0)))
    data = blobs(4, 3, 4)
    controls = [np.zeros(layout.size, np.float32) for _ in range(4)]
    for iteration in range(3):
        updates = []
        for client, (inputs, labels) in enumerate(data):
            control = ControlVariates(state.vectors["control"], controls[client])
            update = local_update(
                model,
                layout,
                state.weights,
                inputs,
                labels,
                LocalTraining(steps=4, batch_size=8),
                device_generator(0, client, iteration),
                control,
            )
            controls[client] = controls[client] + update.vectors["control"]
            updates.append(update)
        state = step(strategy, state, updates)
        np.testing.assert_allclose(state.vectors["control"], np.mean(controls, axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("local", [{}, {"momentum": 0.6}, {"proximal": 0.5, "rate": 0.2}], ids=str)
def test_fednova_normalises_by_the_effective_steps(local: dict[str, float]) -> None:
    strategy = make_strategy("fednova", server_rate=0.9, **local)
    assert isinstance(strategy, FedNova)

    def effective(steps: int) -> float:
        """The accumulated coefficients of the gradients, added up one by one."""
        if "momentum" in local:
            return sum(sum(local["momentum"] ** k for k in range(steps - taken)) for taken in range(steps))
        if "proximal" in local:
            return sum((1.0 - local["rate"] * local["proximal"]) ** k for k in range(steps))
        return float(steps)

    weights = START.astype(np.float64)
    for found, updates in zip(run(strategy, ITERATIONS), ITERATIONS, strict=True):
        shares = np.array([update.examples for update in updates], np.float64)
        shares /= shares.sum()
        efforts = [effective(update.steps) for update in updates]
        pulled = sum(
            share / effort * update.vectors["difference"].astype(np.float64)
            for share, effort, update in zip(shares, efforts, updates, strict=True)
        )
        weights = weights + 0.9 * float(shares @ efforts) * pulled
        np.testing.assert_allclose(found, weights, rtol=5e-6, atol=5e-6)


def test_fednova_finds_the_optimum_that_fedavg_misses() -> None:
    """Quadratics ½ (w − a_i)² and unequal steps: the mean of the a_i is right; FedAvg leans to the busy client."""
    layout = Layout((Field("weight", (1,)),))
    goals, steps, rate = (0.0, 10.0), (1, 20), 0.01

    def settled(name: str) -> float:
        strategy = make_strategy(name)
        state = strategy.init(layout, np.zeros(1, np.float32))
        for _ in range(400):
            updates = []
            for goal, taken in zip(goals, steps, strict=True):
                weight = float(state.weights[0])
                moved = goal + (weight - goal) * (1.0 - rate) ** taken - weight
                updates.append(Update({"difference": np.array([moved], np.float32)}, 10, taken, 0.0))
            state = step(strategy, state, updates)
        return float(state.weights[0])

    assert settled("fednova") == pytest.approx(5.0, abs=0.3)
    assert settled("fedavg") > 9.0


def test_local_work_grows_while_devices_agree_and_shrinks_when_they_diverge() -> None:
    strategy = make_strategy("adaptive", steps=10, min_steps=4, max_steps=18, growth=1.25, memory=0.5)

    def update_of(*values: float) -> Update:
        return Update({"difference": np.array(values, np.float32)}, 10, 1, 0.0)

    same = [update_of(1, 0, 0, 0, 0, 0)] * 3
    opposed = [update_of(1, 0, 0, 0, 0, 0), update_of(-1, 0, 0, 0, 0, 0)]
    state = strategy.init(LAYOUT, START)
    steps, divergences = [], []
    for updates in [same] * 4 + [opposed] * 12:
        state = step(strategy, state, updates)
        divergences.append(state.scalars["divergence"])
        steps.append(strategy.instructions(state).steps)
    assert steps[:4] == [12, 16, 18, 18]
    assert divergences[:4] == [0.0] * 4
    assert divergences[4:7] == pytest.approx([0.5, 0.75, 0.875])
    assert steps[4:8] == [18, 18, 14, 12]
    assert steps[-1] == 4
    quiet = step(strategy, strategy.init(LAYOUT, START), [update_of(0, 0, 0, 0, 0, 0)])
    assert quiet.scalars["divergence"] == 0.0


def test_a_norm_bound_shortens_long_differences_alone() -> None:
    strategy = make_strategy("norm_bound", bound=2.0)
    long, short = np.full(SIZE, 10.0, np.float32), np.full(SIZE, 0.1, np.float32)
    updates = [Update({"difference": vector}, 5, 1, 0.0) for vector in (long, short)]
    (found,) = run(strategy, [updates])
    np.testing.assert_allclose(found, START + (long * (2.0 / np.linalg.norm(long)) + short) / 2.0, rtol=1e-6)


def test_median_and_trimmed_mean_are_taken_per_coordinate() -> None:
    for count in (1, 2, 7, 10):
        updates = make_updates(count, count)
        columns = np.array([update.vectors["difference"] for update in updates], np.float64).T
        (median,) = run(make_strategy("median"), [updates])
        np.testing.assert_allclose(
            median, START + [np.median(column) for column in columns], rtol=1e-5, atol=1e-6
        )
        (trimmed,) = run(make_strategy("trimmed_mean", trim=0.2), [updates])
        cut = {1: 0, 2: 0, 7: 2, 10: 2}[count]
        means = [np.mean(sorted(column)[cut : count - cut]) for column in columns]
        np.testing.assert_allclose(trimmed, START + means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_krum_keeps_the_updates_nearest_to_their_neighbours(seed: int) -> None:
    updates = make_updates(9, seed)
    differences = [update.vectors["difference"].astype(np.float64) for update in updates]
    scores = []
    for place, own in enumerate(differences):
        others = sorted(float(np.sum((own - o) ** 2)) for at, o in enumerate(differences) if at != place)
        scores.append(sum(others[: 9 - 2 - 2]))
    best = sorted(range(9), key=scores.__getitem__)
    for keep in (1, 2, 3, 5, 0):
        strategy = make_strategy("krum", bad=2, keep=keep)
        assert isinstance(strategy, MultiKrum)
        kept = sorted(best[: keep or 7])
        assert strategy.chosen([update.vectors["difference"] for update in updates]) == kept
        (found,) = run(strategy, [updates])
        mean = np.mean([differences[place] for place in kept], axis=0)
        np.testing.assert_allclose(found, START + mean, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="needs 7 updates"):
        run(make_strategy("krum", bad=2), [updates[:6]])


@pytest.mark.parametrize(
    ("name", "options"), [("median", {}), ("trimmed_mean", {"trim": 0.3}), ("krum", {"bad": 2})], ids=str
)
def test_a_minority_of_attackers_cannot_steer(name: str, options: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    honest = [
        Update({"difference": (1.0 + generator.normal(0.0, 0.1, SIZE)).astype(np.float32)}, 10, 1, 0.0)
        for _ in range(7)
    ]
    attackers = [Update({"difference": np.full(SIZE, -1_000.0, np.float32)}, 10_000, 1, 0.0)] * 2
    (found,) = run(make_strategy(name, **options), [honest + attackers])
    np.testing.assert_allclose(found - START, 1.0, atol=0.25)
    (steered,) = run(make_strategy("fedavg"), [honest + attackers])
    assert (steered < -100.0).all()


def test_only_trained_fields_are_normalised_clipped_and_controlled() -> None:
    layout = layout_of({"weight": np.zeros(2, np.float32), "running_mean": np.zeros(2, np.float32)})
    start = np.zeros(4, np.float32)
    moved = np.array([30.0, 40.0, 5.0, 6.0], np.float32)
    update = Update({"difference": moved}, 10, 4, 0.0)
    for strategy, factor in ((make_strategy("fednova"), 1.0), (make_strategy("norm_bound", bound=5.0), 0.1)):
        after = step(strategy, strategy.init(layout, start), [update]).weights
        np.testing.assert_allclose(after, moved * [factor, factor, 1.0, 1.0], rtol=1e-6)
    model = softmax_regression(1, 1)
    control = ControlVariates(np.ones(2, np.float32), np.zeros(2, np.float32))
    kept = model.layout().localise(lambda name: name == "output.bias")
    trained = local_update(
        model,
        kept,
        np.zeros(2, np.float32),
        np.ones((3, 1), np.float32),
        np.zeros(3, np.int64),
        LocalTraining(),
        device_generator(0, 0, 0),
        control,
    )
    assert trained.vectors["difference"][1] == 0.0
    assert trained.vectors["control"][1] == 0.0
    assert trained.vectors["difference"][0] != 0.0


def test_a_state_survives_its_bytes_and_foreign_ones_are_refused() -> None:
    for name in STRATEGIES:
        strategy = make_strategy(name, **OPTIONS.get(name, {}))
        state = strategy.init(LAYOUT, START).following({}, {"mark": 0.1 + 0.2})
        again = ServerState.from_bytes(state.to_bytes(), LAYOUT)
        assert again.iteration == 1
        assert again.scalars == state.scalars
        assert again.vectors.keys() == state.vectors.keys()
        for vector, other in zip(state.vectors.values(), again.vectors.values(), strict=True):
            assert vector.dtype == other.dtype
            assert (vector == other).all()
        assert again.to_bytes() == state.to_bytes()
    body = state.to_bytes()
    with pytest.raises(StateRefused, match="is of layout"):
        ServerState.from_bytes(body, Layout((Field("weight", (3, 2)),)))
    for wrong in (b"", body[:-1], body + b"x", b"PK" + body[2:], body[:4] + b"\xff\xff\xff\xff" + body[8:]):
        with pytest.raises(StateRefused):
            ServerState.from_bytes(wrong, LAYOUT)
    state.weights[2] = np.nan
    with pytest.raises(StateRefused, match="finite"):
        ServerState.from_bytes(state.to_bytes(), LAYOUT)
    nested = b"HWf1" + (60_000).to_bytes(4, "little") + b"[" * 60_000
    with pytest.raises(StateRefused):
        ServerState.from_bytes(nested, LAYOUT)


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 400), value=st.binary(min_size=1, max_size=9))
def test_a_damaged_state_is_refused_or_still_finite_and_of_the_layout(at: int, value: bytes) -> None:
    state = make_strategy("scaffold", population=3).init(LAYOUT, START).following({}, {"mark": 1.5})
    body = state.to_bytes()
    at = min(at, len(body) - 1)
    try:
        found = ServerState.from_bytes(body[:at] + value + body[at + len(value) :], LAYOUT)
    except StateRefused:
        return
    assert found.iteration >= 0
    assert found.weights.shape == (SIZE,)
    assert all(np.isfinite(vector).all() for vector in found.vectors.values())


@pytest.mark.parametrize(
    "number", [b"Infinity", b"NaN", b"1e999", b"-1", b"9" * 5_000, b"[1]"], ids=lambda b: b[:9]
)
def test_a_state_whose_numbers_are_no_numbers_is_refused(number: bytes) -> None:
    state = make_strategy("fedavg").init(LAYOUT, START)
    body = state.to_bytes()
    length = int.from_bytes(body[4:8], "little")
    header = body[8 : 8 + length]
    for key in (b'"iteration":0', b'"weights","<f4",6'):
        wrong = header.replace(key, key[:-1] + number)
        assert wrong != header
        with pytest.raises(StateRefused):
            ServerState.from_bytes(
                body[:4] + len(wrong).to_bytes(4, "little") + wrong + body[8 + length :], LAYOUT
            )


def test_unknown_names_options_and_values_are_refused_with_the_nearest_known() -> None:
    for wrong, message in (
        (lambda: make_strategy("fedavgg"), "did you mean 'fedavg'"),
        (lambda: make_strategy("zzz"), "there are fedavg, "),
        (lambda: make_strategy("fedprox", proximall=1.0), "did you mean 'proximal'"),
        (lambda: make_strategy("scaffold"), "population"),
        (lambda: make_strategy("scaffold", population=0), "population"),
        (lambda: make_strategy("fedavg", server_rate=0.0), "server_rate"),
        (lambda: make_strategy("fedavg", max_examples=0), "max_examples"),
        (lambda: make_strategy("fedprox", proximal=-1.0), "proximal"),
        (lambda: make_strategy("fedavgm", momentum=1.0), "momentum"),
        (lambda: make_strategy("fedadam", second_beta=1.0), "second_beta"),
        (lambda: make_strategy("fedyogi", adaptivity=0.0), "adaptivity"),
        (lambda: make_strategy("fednova", proximal=0.5), "local rate"),
        (lambda: make_strategy("adaptive", low=0.9, high=0.1), "low"),
        (lambda: make_strategy("adaptive", steps=200), "max_steps"),
        (lambda: make_strategy("trimmed_mean", trim=0.5), "trim"),
        (lambda: make_strategy("krum", bad=-1), "bad"),
        (lambda: make_strategy("norm_bound", bound=0.0), "bound"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_no_contribution_is_no_iteration() -> None:
    for name in STRATEGIES:
        strategy = make_strategy(name, **OPTIONS.get(name, {}))
        state = strategy.init(LAYOUT, START)
        with pytest.raises((ZeroDivisionError, ValueError)):
            step(strategy, state, [])
    nothing = Contribution({"difference": START}, 1.0, 0, 1, 0.0)
    total = sum_for(make_strategy("fedavg"), LAYOUT, 3)
    with pytest.raises(ContributionRefused, match="examples"):
        total.add(nothing)


def blobs(clients: int, classes: int, features: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Clients with rows of mostly two of the classes, whose centres are apart."""
    generator = np.random.default_rng(3)
    centres = generator.normal(0.0, 1.6, (classes, features))
    data = []
    for client in range(clients):
        own = [client % classes, (client + 1) % classes]
        rows = int(generator.integers(20, 60))
        labels = np.where(
            generator.random(rows) < 0.8, generator.choice(own, rows), generator.integers(0, classes, rows)
        )
        inputs = (centres[labels] + generator.normal(size=(rows, features))).astype(np.float32)
        data.append((inputs, labels))
    return data


LEARNING: dict[str, tuple[int, dict[str, Any]]] = {
    "fedsgd": (60, {"server_rate": 5.0}),
    "fedadam": (25, {"server_rate": 0.05}),
    "fedyogi": (25, {"server_rate": 0.05}),
    "fedadagrad": (25, {"server_rate": 0.1}),
    "fedavgm": (25, {"server_rate": 0.5, "momentum": 0.5}),
    "scaffold": (25, {"population": 12}),
    "norm_bound": (25, {"bound": 1.0}),
}


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"signds"}))  # which learns from signs alone
def test_every_strategy_learns_from_clients_that_differ(name: str) -> None:
    iterations, options = LEARNING.get(name, (25, {}))
    strategy = make_strategy(name, **options)
    model = Perceptron(8, (16,), 5)
    layout, data = model.layout(), blobs(12, 5, 8)
    pooled = np.concatenate([d[0] for d in data]), np.concatenate([d[1] for d in data])
    state = strategy.init(layout, model.initial(np.random.default_rng(0)))
    controls: dict[int, np.ndarray] = {}

    def accuracy() -> float:
        counted = model.metrics(state.weights, *pooled)
        return counted.right / counted.seen

    before = accuracy()
    training = LocalTraining(epochs=2, batch_size=10, rate=0.1)
    for iteration in range(iterations):
        asked = strategy.instructions(state)
        updates = []
        for client in np.random.default_rng(iteration).choice(12, 8, replace=False).tolist():
            control = None
            if "control" in asked.vectors:
                own = controls.setdefault(client, np.zeros(layout.size, np.float32))
                control = ControlVariates(state.vectors["control"], own)
            update = local_update(
                model,
                layout,
                state.weights,
                *data[client],
                asked.adapt(training),
                device_generator(1, client, iteration),
                control,
            )
            if control is not None:
                controls[client] = controls[client] + update.vectors["control"]
            updates.append(update)
        state = step(strategy, state, updates)
    assert before < 0.5
    assert accuracy() > 0.85, accuracy()


def test_a_text_model_learns_federatedly() -> None:
    model = NextCharacter(4, context=3, embedding=4, hidden=12)
    strategy = make_strategy("fedavg")
    state = strategy.init(model.layout(), model.initial(np.random.default_rng(0)))
    rows = np.lib.stride_tricks.sliding_window_view(np.tile([0, 1, 2, 3, 1], 12), 4)
    for iteration in range(30):
        updates = [
            local_update(
                model,
                model.layout(),
                state.weights,
                rows[client::4, :3],
                rows[client::4, 3],
                LocalTraining(epochs=2, batch_size=5, rate=0.3),
                device_generator(2, client, iteration),
            )
            for client in range(4)
        ]
        state = step(strategy, state, updates)
    counted = model.metrics(state.weights, rows[:, :3], rows[:, 3])
    assert counted.right == counted.seen


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {"norm_bound"}))
def test_a_diverging_model_is_refused_where_it_is_made_not_where_it_is_loaded(name: str) -> None:
    strategy = make_strategy(name, **OPTIONS.get(name, {}), server_rate=1e30)
    state = strategy.init(LAYOUT, START)
    updates = make_updates(7, 3, strategy.summed)
    with pytest.raises(StateRefused, match="diverged"):
        step(strategy, state, updates)
    assert ServerState.from_bytes(state.to_bytes(), LAYOUT).weights.tolist() == START.tolist()


def test_a_next_state_beyond_float32_is_refused_by_name() -> None:
    state = make_strategy("fedavg", server_rate=1e300).init(LAYOUT, START)
    with pytest.raises(StateRefused, match="weights is not finite"):
        step(make_strategy("fedavg", server_rate=1e300), state, make_updates(3, 3))
