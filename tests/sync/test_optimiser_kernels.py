"""Optimisers: the kernels and their NumPy twins pass the same tests, and agree bit for bit. Torch's optimisers
agree to float tolerance."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sync import optimisers, reference
from sync.optimisers import MAX_ACCUMULATED, MAX_STEPS, settings_of
from sync.placement import shard_of
from sync.spec import Optimiser, OptimiserKind, TableSpec

Rows = npt.NDArray[np.float32]
INFINITE = np.float32(np.inf)
KINDS: list[OptimiserKind] = ["sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"]


@pytest.fixture(params=[optimisers, reference], ids=["kernels", "reference"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    found: ModuleType = request.param
    return found


def usual(kind: OptimiserKind) -> Optimiser:
    return Optimiser(kind, 0.5, l1=0.01, l2=0.1) if kind == "ftrl" else Optimiser(kind, 0.5)


def fresh_state(optimiser: Optimiser, rows: int, dim: int) -> Rows:
    return np.zeros((rows, TableSpec("t", dim, optimiser=optimiser).state_dim), np.float32)


def step(
    module: ModuleType, optimiser: Optimiser, values: Rows, state: Rows, slots: list[int], gradients: Rows
) -> None:
    squares = np.empty(len(gradients), np.float32)
    assert module.measure(gradients, INFINITE, squares) == -1
    apply = module.APPLY[optimiser.kind]
    apply(values, state, np.array(slots, np.int32), gradients, squares, settings_of(optimiser))


def trained(module: ModuleType, optimiser: Optimiser, start: Rows, gradients: Rows) -> Rows:
    """``start`` [N, d] after each of ``gradients`` [T, N, d]."""
    values, state = start.copy(), fresh_state(optimiser, *start.shape)
    for gradient in gradients:
        step(module, optimiser, values, state, list(range(len(start))), gradient)
    return values


def test_sgd_moves_only_its_rows(module: ModuleType) -> None:
    values = np.ones((3, 2), np.float32)
    step(module, usual("sgd"), values, np.zeros((3, 0), np.float32), [2], np.array([[2, -4]], np.float32))
    assert values.tolist() == [[1, 1], [1, 1], [0, 3]]


def test_rowwise_adagrad_by_hand(module: ModuleType) -> None:
    values, state = np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)
    step(module, usual("rowwise_adagrad"), values, state, [1], np.array([[3, -5]], np.float32))
    assert state.tolist() == [[0], [17]]
    assert values[1] == pytest.approx([-1.5 / 17**0.5, 2.5 / 17**0.5], rel=1e-6)
    step(module, usual("rowwise_adagrad"), values, state, [1], np.array([[4, 0]], np.float32))
    assert state.tolist() == [[0], [25]]
    assert values[1] == pytest.approx([-1.5 / 17**0.5 - 0.4, 2.5 / 17**0.5], rel=1e-6)


def test_adagrad_by_hand(module: ModuleType) -> None:
    values, state = np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)
    step(module, usual("adagrad"), values, state, [0], np.array([[3, 0]], np.float32))
    step(module, usual("adagrad"), values, state, [0], np.array([[4, -2]], np.float32))
    assert state.tolist() == [[25, 4]]
    assert values[0] == pytest.approx([-0.5 - 0.4, 0.5], rel=1e-6)


def test_adam_by_hand(module: ModuleType) -> None:
    values, state = np.zeros((1, 2), np.float32), np.zeros((1, 5), np.float32)
    adam = Optimiser("adam", 0.5, beta1=0.5, beta2=0.75)
    step(module, adam, values, state, [0], np.array([[3, -0.5]], np.float32))
    assert state.tolist() == [[1.5, -0.25, 2.25, 0.0625, 1]]
    assert values[0] == pytest.approx([-0.5, 0.5])  # The first step has the length of the rate.
    step(module, adam, values, state, [0], np.array([[1, 0]], np.float32))
    assert state.tolist() == [[1.25, -0.125, 1.9375, 0.046875, 2]]
    unbiased = [1.25 / 0.75, -0.125 / 0.75], [1.9375 / 0.4375, 0.046875 / 0.4375]
    moves = [0.5 * mean / variance**0.5 for mean, variance in zip(*unbiased, strict=True)]
    assert values[0] == pytest.approx([-0.5 - moves[0], 0.5 - moves[1]])


def test_adam_counts_each_row_for_itself(module: ModuleType) -> None:
    rng = np.random.default_rng(3)
    gradients = rng.standard_normal((10, 2, 3)).astype(np.float32)
    adam = Optimiser("adam", 0.1)
    values, state = np.ones((2, 3), np.float32), fresh_state(adam, 2, 3)
    for number, gradient in enumerate(gradients):
        slots = [1, 0] if number % 3 == 0 else [1]
        step(module, adam, values, state, slots, gradient[: len(slots)])
    assert state[:, 6].tolist() == [4, 10]
    rare = trained(module, adam, np.ones((1, 3), np.float32), gradients[::3, 1:])
    assert values[:1].tobytes() == rare.tobytes()


def test_adams_count_stops_where_float32_does(module: ModuleType) -> None:
    adam = Optimiser("adam", 0.5)
    values, state = np.zeros((1, 1), np.float32), np.array([[0, 0, MAX_STEPS - 1]], np.float32)
    step(module, adam, values, state, [0], np.ones((1, 1), np.float32))
    assert values[0, 0] == pytest.approx(-0.5 * 0.1 / 0.001**0.5, rel=1e-4)  # Nothing is left to correct.
    step(module, adam, values, state, [0], np.ones((1, 1), np.float32))
    assert state[0, 2] == MAX_STEPS


def test_ftrl_by_hand(module: ModuleType) -> None:
    values, state = np.zeros((1, 2), np.float32), np.zeros((1, 4), np.float32)
    ftrl = Optimiser("ftrl", 0.5, beta=1.0, l1=0.5, l2=1.0)
    step(module, ftrl, values, state, [0], np.array([[3, -0.25]], np.float32))
    assert state.tolist() == [[3, -0.25, 9, 0.0625]]
    assert values[0] == pytest.approx([-2.5 / 9, 0])  # ((1 + 3) / .5 + 1); -.25 is within l1.
    step(module, ftrl, values, state, [0], np.array([[4, -1]], np.float32))
    z = 3 + 4 + (5 - 3) / 0.5 * 2.5 / 9
    assert state[0] == pytest.approx([z, -1.25, 25, 1.0625])
    assert values[0] == pytest.approx([-(z - 0.5) / 13, 0.75 / ((1 + 1.0625**0.5) / 0.5 + 1)])


def test_ftrl_starts_from_an_initial_value(module: ModuleType) -> None:
    values, state = np.full((1, 3), 0.75, np.float32), np.zeros((1, 6), np.float32)
    step(module, Optimiser("ftrl", 0.5), values, state, [0], np.array([[4, -4, 0]], np.float32))
    # (|g|·w - rate·g) / (beta + |g|); an element without a gradient is left alone.
    assert values[0] == pytest.approx([(3 - 2) / 5, (3 + 2) / 5, 0.75])


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_ftrl_minimises_what_its_paper_says(module: ModuleType, start: float) -> None:
    """w minimises Σg·w + ½Σσ(w - w_s)² + ½(beta/rate + l2)·w² + l1·|w|, so 0 is a subgradient there."""
    rng = np.random.default_rng(7)
    ftrl = Optimiser("ftrl", 0.2, beta=0.5, l1=1.5, l2=0.3)
    values = np.full((1, 40), start, np.float32)
    state = fresh_state(ftrl, 1, 40)
    slope, weight, squares = np.zeros(40), np.zeros(40), np.zeros(40)
    for _ in range(6):
        gradient = rng.standard_normal((1, 40)).astype(np.float32)
        sigma = (np.sqrt(squares + gradient[0] ** 2) - np.sqrt(squares)) / 0.2
        slope += gradient[0] - sigma * values[0]
        weight += sigma
        squares += gradient[0] ** 2
        step(module, ftrl, values, state, [0], gradient)
    rest = slope + (weight + 0.5 / 0.2 + 0.3) * values[0]
    zero = values[0] == 0
    assert 5 < zero.sum() < 35
    assert np.abs(rest[zero]).max() <= 1.5 + 1e-5
    assert rest[~zero] == pytest.approx(-1.5 * np.sign(values[0][~zero]), abs=1e-4)


def test_ftrl_survives_the_largest_gradients(module: ModuleType) -> None:
    ftrl = Optimiser("ftrl", 0.5)
    values, state = np.zeros((1, 1), np.float32), np.array([[0, MAX_ACCUMULATED]], np.float32)
    for gradient in (1e18, -1e18, 1.0):
        step(module, ftrl, values, state, [0], np.full((1, 1), gradient, np.float32))
        assert state[0, 1] == np.float32(MAX_ACCUMULATED)
        assert np.isfinite(values).all()


def by_torch(optimiser: Optimiser, start: Rows, gradients: Rows) -> Rows:
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    rate, epsilon = optimiser.rate, optimiser.epsilon
    peer: torch.optim.Optimizer
    if optimiser.kind == "sgd":
        peer = torch.optim.SGD([parameter], lr=rate)
    elif optimiser.kind == "adagrad":
        peer = torch.optim.Adagrad([parameter], lr=rate, eps=epsilon)
    elif optimiser.kind == "ftrl":
        # Without l1 and l2 and from 0, FTRL-proximal is gradient descent with a rate of α / (β + √n).
        peer = torch.optim.Adagrad([parameter], lr=rate, eps=optimiser.beta)
    else:
        peer = torch.optim.Adam([parameter], lr=rate, betas=(optimiser.beta1, optimiser.beta2), eps=epsilon)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        peer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize(
    "optimiser",
    [
        Optimiser("sgd", 0.05),
        Optimiser("adagrad", 0.1, 1e-6),
        Optimiser("adam", 0.05),
        Optimiser("adam", 0.05, 1e-3, beta1=0.5, beta2=0.9),
        Optimiser("ftrl", 0.3, beta=2.0),
    ],
    ids=lambda optimiser: optimiser.kind,
)
def test_equals_torchs(module: ModuleType, optimiser: Optimiser) -> None:
    rng = np.random.default_rng(11)
    start = (rng.standard_normal((5, 12)) * (optimiser.kind != "ftrl")).astype(np.float32)
    gradients = (rng.standard_normal((200, 5, 12)) * 10.0 ** rng.integers(-3, 3, 12)).astype(np.float32)
    expected = by_torch(optimiser, start, gradients)
    assert np.abs(expected - start).mean() > 0.1
    assert trained(module, optimiser, start, gradients) == pytest.approx(expected, rel=2e-4, abs=2e-5)


def test_lazy_adam_is_torchs_sparse_adam_where_every_push_has_the_row(module: ModuleType) -> None:
    rng = np.random.default_rng(12)
    start = rng.standard_normal((2, 4)).astype(np.float32)
    gradients = rng.standard_normal((50, 2, 4)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    peer = torch.optim.SparseAdam([parameter], lr=0.05, eps=1e-8)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy()).to_sparse(1)
        peer.step()  # type: ignore[no-untyped-call]
    expected = parameter.detach().numpy()
    assert trained(module, Optimiser("adam", 0.05), start, gradients) == pytest.approx(
        expected, rel=1e-4, abs=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_gradient_of_zero_changes_nothing(module: ModuleType, kind: OptimiserKind) -> None:
    values, state = np.ones((1, 2), np.float32), fresh_state(usual(kind), 1, 2)
    step(module, usual(kind), values, state, [0], np.zeros((1, 2), np.float32))
    assert values.tolist() == [[1, 1]]


def regularised(
    module: ModuleType, values: Rows, slots: list[int], gradients: Rows, clip: float, l2: float
) -> tuple[Rows, Rows]:
    squares, results = np.empty(len(gradients), np.float32), np.empty_like(gradients)
    module.measure(gradients, INFINITE, squares)
    before, new_squares = squares.copy(), np.empty_like(squares)
    module.regularise(
        values,
        np.array(slots, np.int32),
        gradients,
        squares,
        np.float32(clip),
        np.float32(l2),
        results,
        new_squares,
    )
    assert squares.tobytes() == before.tobytes()
    measured = np.empty_like(squares)
    module.measure(results, INFINITE, measured)
    assert measured.tobytes() == new_squares.tobytes()
    return results, new_squares


def test_clips_long_gradients_and_no_others(module: ModuleType) -> None:
    gradients = np.array([[30, 40], [3, 4], [0, 0]], np.float32)
    values = np.full((3, 2), 7, np.float32)
    results, squares = regularised(module, values, [0, 1, 2], gradients, 5.0, 0.0)
    assert results == pytest.approx(np.array([[3, 4], [3, 4], [0, 0]]))
    assert results[1:].tobytes() == gradients[1:].tobytes()
    assert squares == pytest.approx([25, 25, 0])
    assert regularised(module, values, [0, 1, 2], gradients, 0.0, 0.0)[0].tobytes() == gradients.tobytes()


def test_decays_its_own_row_after_clipping(module: ModuleType) -> None:
    values = np.array([[100, 100], [10, -20]], np.float32)
    results, squares = regularised(module, values, [1], np.array([[30, 40]], np.float32), 5.0, 0.5)
    assert results == pytest.approx(np.array([[3 + 5, 4 - 10]]))
    assert squares == pytest.approx([100])


def test_decay_is_torchs_weight_decay(module: ModuleType) -> None:
    rng = np.random.default_rng(13)
    start = rng.standard_normal((3, 5)).astype(np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    peer = torch.optim.Adam([parameter], lr=0.05, weight_decay=0.3)
    values, state = start.copy(), fresh_state(Optimiser("adam"), 3, 5)
    for gradient in rng.standard_normal((40, 3, 5)).astype(np.float32):
        parameter.grad = torch.from_numpy(gradient.copy())
        peer.step()
        added, _ = regularised(module, values, [0, 1, 2], gradient, 0.0, 0.3)
        step(module, Optimiser("adam", 0.05), values, state, [0, 1, 2], added)
    assert values == pytest.approx(parameter.detach().numpy(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 11.0])
def test_measure_names_the_first_row_above_the_limit(module: ModuleType, bad: float) -> None:
    gradients = np.zeros((4, 11), np.float32)
    gradients[0] = 3.0  # 11 · 9 = 99
    gradients[2, 10] = gradients[3, 0] = bad
    squares = np.empty(4, np.float32)
    assert module.measure(gradients, np.float32(100), squares) == 2
    assert squares[:2].tolist() == [99, 0]
    assert module.measure(gradients[:2], np.float32(100), squares[:2]) == -1


def test_repeated_keys_are_summed_in_order(module: ModuleType) -> None:
    keys = np.array([7, 2**64 - 1, 7, 0, 7], np.uint64)
    gradients = np.array([[1e8], [1], [1], [-0.0], [-1e8]], np.float32)
    groups = np.empty(5, np.int32)
    assert module.group(keys, groups) == 3
    assert groups.tolist() == [0, 1, 0, 2, 0]
    unique, sums = np.empty(3, np.uint64), np.empty((3, 1), np.float32)
    module.sum_groups(keys, gradients, groups, unique, sums)
    assert unique.tolist() == [7, 2**64 - 1, 0]
    # In float32 1e8 + 1 is 1e8, so another order would give 1.
    assert sums.tolist() == [[0], [1], [0]]
    assert np.signbit(sums[2, 0])


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(1, 40),
    rows=st.integers(0, 12),
    exponent=st.integers(-20, 12),
    clip=st.sampled_from([0.0, 0.01, 3.0]),
    l2=st.sampled_from([0.0, 0.1]),
)
def test_kernels_equal_their_twins_bit_for_bit(
    kind: OptimiserKind, seed: int, dim: int, rows: int, exponent: int, clip: float, l2: float
) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 8, rows).astype(np.uint64)
    gradients = (rng.standard_normal((rows, dim)) * 10.0**exponent).astype(np.float32)
    gradients[rng.random((rows, dim)) < 0.2] = 0.0
    results = []
    for module in (optimisers, reference):
        groups = np.empty(rows, np.int32)
        distinct = module.group(keys, groups)
        unique, sums = np.empty(distinct, np.uint64), np.empty((distinct, dim), np.float32)
        module.sum_groups(keys, gradients, groups, unique, sums)
        values, state = np.ones((distinct, dim), np.float32), fresh_state(usual(kind), distinct, dim)
        slots = list(range(distinct))[::-1]
        squares = np.empty(distinct, np.float32)
        for _ in range(4):
            cared, squares = regularised(module, values, slots, sums, clip, l2)
            step(module, usual(kind), values, state, slots, cared)
        results.append([array.tobytes() for array in (groups, unique, sums, squares, values, state)])
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), dim=st.integers(1, 20), rows=st.integers(1, 30), shards=st.integers(1, 5))
def test_a_batch_does_what_its_rows_do_one_by_one_and_in_any_shards(
    kind: OptimiserKind, seed: int, dim: int, rows: int, shards: int
) -> None:
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((rows, dim)).astype(np.float32)
    gradients = rng.standard_normal((3, rows, dim)).astype(np.float32)
    pushed = rng.random((3, rows)) < 0.7
    homes = shard_of(np.arange(rows, dtype=np.uint64), shards)

    def after(groups: list[list[int]]) -> tuple[bytes, bytes]:
        values, state = start.copy(), fresh_state(usual(kind), rows, dim)
        for number in range(3):
            for group in groups:
                slots = [slot for slot in group if pushed[number, slot]]
                cared, _ = regularised(optimisers, values, slots, gradients[number, slots], 2.0, 0.1)
                step(optimisers, usual(kind), values, state, slots, cared)
        return values.tobytes(), state.tobytes()

    whole = after([list(range(rows))])
    assert after([[slot] for slot in range(rows)]) == whole
    assert after([np.flatnonzero(homes == shard).tolist() for shard in range(shards)]) == whole
