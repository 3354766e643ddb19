"""A joint regression's pieces: surrogates, batches in slots, scaling, steps, models."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

pytest.importorskip("tenseal", reason="the extra `vertical` is not installed")

from federated.vertical.ckks import FLOOR, Opener, Scheme, Sealer
from federated.vertical.linear.batches import Batches, check_batches, check_labels, label_bits
from federated.vertical.linear.circuit import Circuit
from federated.vertical.linear.model import GuestModel, HostModel, fit_alone, load
from federated.vertical.linear.options import LinearOptions
from federated.vertical.linear.outsourced import Owner, epoch, epoch_plain
from federated.vertical.linear.plan import Plan
from federated.vertical.linear.solver import Scaling, Solver, ends
from federated.vertical.linear.steps import told_loss
from federated.vertical.linear.surrogate import surrogate_of
from federated.vertical.parties import PeerFault

ALL = [
    LinearOptions(),
    LinearOptions(surrogate="taylor"),
    LinearOptions(family="linear"),
]
NAMES = ["degree5", "taylor", "linear"]


class TestSurrogate:
    @pytest.mark.parametrize("options", ALL, ids=NAMES)
    def test_the_residual_is_the_losses_derivative(self, options: LinearOptions) -> None:
        surrogate = surrogate_of(options)
        at, step, labels = np.linspace(-6, 6, 41), 1e-5, np.tile([0.0, 1.0], 41)[:41]
        slope = (surrogate.loss(at + step, labels) - surrogate.loss(at - step, labels)) / (2 * step)
        assert slope == pytest.approx(surrogate.residual(at, labels), abs=1e-6)

    def test_the_polynomial_is_near_the_sigmoid_where_taylors_is_not(self) -> None:
        at = np.linspace(-8, 8, 201)
        sigmoid, none = 1 / (1 + np.exp(-at)), np.zeros(201)
        assert np.abs(surrogate_of(ALL[0]).residual(at, none) - sigmoid).max() < 0.07
        assert np.abs(surrogate_of(ALL[1]).residual(at, none) - sigmoid).max() > 1

    def test_hardys_form_of_the_same_loss(self) -> None:
        at, signs = np.linspace(-3, 3, 11), np.tile([-1.0, 1.0], 11)[:11]
        surrogate = surrogate_of(ALL[1])
        labels = (signs + 1) / 2
        assert surrogate.residual(at, labels) == pytest.approx(at / 4 - signs / 2)
        hardy = math.log(2) - signs * at / 2 + at**2 / 8
        assert surrogate.loss(at, labels) == pytest.approx(hardy)

    @pytest.mark.parametrize("options", ALL, ids=NAMES)
    def test_encrypted_as_in_the_clear_within_the_stated_error(self, options: LinearOptions) -> None:
        surrogate = surrogate_of(options)
        scheme = Scheme(surrogate.parameters)
        opener, circuit = Opener(scheme), Circuit(scheme, surrogate)
        sealer = Sealer(scheme, opener.public())
        slots, rng = scheme.parameters.slots, np.random.default_rng(1)
        theirs, own = rng.uniform(-4, 4, (2, slots))
        # Of a linear regression: labels that are all the mean.
        labels = np.zeros(slots) if options.family == "linear" else rng.integers(0, 2, slots).astype(float)
        parameters = scheme.parameters
        share = sealer.seal(surrogate.factor * theirs, parameters.top, parameters.scale)
        predictor = circuit.predictor([share], surrogate.factor * own)
        found = circuit.compute(predictor, surrogate.offset - labels, opener.relinearisation())
        for cipher, scale in (
            (found.residual, circuit.residual_scale),
            (found.loss, circuit.loss_scale),
        ):
            assert scheme.level(cipher) == FLOOR
            assert math.isclose(cipher.scale, scale, rel_tol=1e-12)
        truth = surrogate.residual(theirs + own, labels)
        error = np.abs(opener.open(found.residual) - truth).max()
        # Not below a thousandth either: a bound so wide would say nothing.
        assert circuit.error(1) / 1_000 < error < circuit.error(1)
        loss = surrogate.constant + surrogate.loss_factor * opener.open(found.loss)
        assert loss == pytest.approx(surrogate.loss(theirs + own, labels), abs=1e-3)


class TestBatches:
    @given(count=st.integers(2, 90), most=st.integers(2, 40), width=st.integers(1, 9), seed=st.integers(0, 5))
    @settings(max_examples=60, deadline=None)
    def test_slots_give_each_features_sum(self, count: int, most: int, width: int, seed: int) -> None:
        batches = Batches.of(count, most, 64, seed)
        assert sorted(np.concatenate(batches.rows).tolist()) == list(range(count))
        assert max(map(len, batches.rows)) <= most
        assert batches.stride * batches.copies <= 64
        rng = np.random.default_rng(seed)
        features = rng.integers(-9, 9, (count, width)).astype(float)
        residual = rng.integers(-9, 9, count).astype(float)
        for rows in batches.rows:
            columns = batches.columns(features[rows])
            assert len(columns) == batches.ciphertexts(width)
            terms = [(column * batches.spread(residual[rows])).astype(np.int64) for column in columns]
            assert batches.sums(terms, width).tolist() == (features[rows].T @ residual[rows]).tolist()

    def test_sums_wrap_as_masks_need(self) -> None:
        batches = Batches.of(2, 2, 2, 0)
        top = np.array([2**63 - 1, 1], np.int64)
        assert batches.sums([top], 1).tolist() == [-(2**63)]

    def test_the_same_at_every_party_and_in_every_epoch(self) -> None:
        one, other = Batches.of(50, 20, 64, 3), Batches.of(50, 20, 64, 3)
        assert all((a == b).all() for a, b in zip(one.rows, other.rows, strict=True))

    def test_a_batch_no_larger_than_the_features_is_refused(self) -> None:
        batches = Batches.of(40, 20, 64, 0)
        check_batches(batches, 19)
        with pytest.raises(ValueError, match="tell all its labels"):
            check_batches(batches, 20)

    def test_why_it_is_refused(self) -> None:
        # As many equations as rows: the gradient alone gives every residual, whose sign is the label.
        rng = np.random.default_rng(0)
        features, labels = rng.standard_normal((6, 6)), np.array([0, 1, 1, 0, 1, 0.0])
        gradient = features.T @ surrogate_of(ALL[0]).residual(0.1 * rng.standard_normal(6), labels)
        assert (np.linalg.solve(features.T, gradient) < 0).tolist() == (labels == 1).tolist()

    @pytest.mark.parametrize(("rows", "width"), [(36, 20), (28, 10)])
    def test_more_rows_than_features_are_not_enough_for_labels(self, rows: int, width: int) -> None:
        # At weights of zero the residual is 1/2 less the label, and labels are 0 or 1.
        options, rng = LinearOptions(), np.random.default_rng(width)
        features = np.clip(rng.standard_normal((rows, width)), -options.clip, options.clip)
        labels = (rng.random(rows) < 0.4).astype(float)
        gradient = features.T @ (0.5 - labels) / rows + options.noise * rng.standard_normal(width)
        sums, off = features.T @ np.full(rows, 0.5) - gradient * rows, 4 * options.noise * rows
        found = milp(
            np.zeros(rows),
            constraints=LinearConstraint(features.T, sums - off, sums + off),
            integrality=np.ones(rows),
            bounds=Bounds(0, 1),
            options={"time_limit": 20},
        )
        assert np.rint(found.x).tolist() == labels.tolist()
        batches = Batches.of(rows, rows, 64, 0)
        check_batches(batches, width)
        with pytest.raises(ValueError, match="enough to tell all its labels; take larger batches"):
            check_labels(batches, width, options.noise, 1)

    def test_bits_of_labels_in_gradients(self) -> None:
        batches = Batches.of(4_000, 4_000, 8_192, 0)
        # Signal 1/4 / 4000 over noise 1e-8 is 6,250: 6.3 bits a feature.
        assert label_bits(batches, 10, 1e-4, 1) == pytest.approx(63.05, abs=0.05)
        assert label_bits(batches, 10, 1e-4, 16) == pytest.approx(63.05 + 20, abs=0.05)
        check_labels(batches, 10, 1e-4, 20)


class TestPlan:
    def test_noise_below_the_error_or_none_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be at least"):
            Plan.of(LinearOptions(noise=1e-9), 100, 0, 1)
        with pytest.raises(ValueError, match="reveals its key"):
            Plan.of(LinearOptions(noise=0.0), 100, 0, 1)

    def test_what_is_left_of_the_masks_is_small_and_grows_with_the_job(self) -> None:
        plan = Plan.of(LinearOptions(), 21_000, 0, 1)
        # 21,000 rows, 13 features, 20 epochs, terms up to 6 under masks of 2^41.
        assert plan.masks.reach == 2.0**41
        assert plan.slot_distance(13) == pytest.approx(21_000 * 13 * 20 * 6 / 2.0**42)
        assert plan.slot_distance(26) == pytest.approx(2 * plan.slot_distance(13))
        assert plan.flooding > 100

    def test_a_loss_is_told_with_noise(self) -> None:
        plan = Plan.of(LinearOptions(surrogate="taylor", noise=0.01), 100, 0, 1)
        told = np.array([told_loss(plan, 0.5, os.urandom) for _ in range(2_000)])
        assert abs(told.mean() - 0.5) < 0.001
        assert abs(told.std() - 0.01) < 0.001

    @pytest.mark.parametrize(
        "wrong", [{"epochs": 0}, {"batch": 1}, {"rate": 0.0}, {"clip": math.nan}, {"momentum": 1.0}]
    )
    def test_options_that_cannot_be(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LinearOptions(**wrong)  # type: ignore[arg-type]


class TestScaling:
    def test_missing_constant_and_far_values(self) -> None:
        column = np.concatenate([np.zeros(50), [1_000.0, np.nan]])
        features = np.stack([column, np.full(52, 7.0)], axis=1)
        scaling = Scaling.of(features, 3.0)
        found = scaling.apply(features)
        assert found[-1].tolist() == [0.0, 0.0]
        assert found[-2].tolist() == [3.0, 0.0]
        # A constant column stays out also where a later value differs.
        assert scaling.apply(np.array([[0.0, 9.0]]))[0, 1] == 0.0
        with pytest.raises(ValueError, match="2 columns"):
            scaling.apply(np.zeros((1, 3)))

    @pytest.mark.parametrize("power", [-1_000, -40, 40, 510, 1_000])
    def test_a_columns_unit_does_not_matter(self, power: int) -> None:
        column = np.random.default_rng(0).standard_normal((60, 1)) + 5
        column[3] = np.nan
        plain, other = Scaling.of(column, 3.0), Scaling.of(np.ldexp(column, power), 3.0)
        found = other.apply(np.ldexp(column, power))
        assert found.tolist() == plain.apply(column).tolist()
        assert found.std() == pytest.approx(1, abs=0.05)

    def test_constant_columns_of_any_size_and_far_values_in_them(self) -> None:
        features = np.tile([0.1, 1e-200, 1e300, -1e308, np.nan], (50, 1))
        scaling = Scaling.of(features, 3.0)
        assert not scaling.apply(features).any()
        assert not scaling.apply(-features).any()


class TestSolver:
    def test_a_restored_solver_goes_on_alike(self) -> None:
        rng = np.random.default_rng(0)
        features, options = rng.standard_normal((30, 3)), LinearOptions()
        one = Solver.of(features, options, 0.25, None, intercept=True)
        one.step(np.array([0.1, -0.2, 0.3]))
        state = one.end_epoch(0.5, False)
        other = Solver.of(features, options, 0.25, state, intercept=True)
        for solver in (one, other):
            solver.step(np.array([0.3, 0.1, 0.0]))
        assert one.weights.tolist() == other.weights.tolist()
        assert (other.epoch, other.losses, other.done) == (1, [0.5], False)
        with pytest.raises(ValueError, match="3 weights"):
            Solver.of(features[:, :2], options, 0.25, state, intercept=True)

    def test_the_intercept_is_not_penalised(self) -> None:
        solver = Solver.of(np.ones((10, 2)), LinearOptions(curvature=False, momentum=0.0), 1.0, None, True)
        solver.weights = np.array([1.0, 1.0])
        assert solver.penalty_loss == pytest.approx(0.05)
        solver.step(np.zeros(2))
        assert solver.weights[0] < 1.0
        assert solver.weights[1] == 1.0

    def test_when_training_ends(self) -> None:
        options = LinearOptions(epochs=3, tolerance=0.1)
        assert not ends([0.9], options)
        assert not ends([0.9, 0.7], options)
        assert ends([0.9, 0.7, 0.65], LinearOptions(epochs=9, tolerance=0.1))
        assert ends([0.9, 0.7, 0.5], options)


class TestModel:
    SCALING = Scaling(np.array([1.0, 2.0]), np.array([2.0, np.inf]), 3.0)

    def guest(self, family: str = "logistic") -> GuestModel:
        return GuestModel(
            family, self.SCALING, np.array([1.0, 5.0, 0.5]), np.array([2.0, 0.0, 0.0]), 10.0, 3.0, ("h", "i")
        )

    def test_parts_survive_their_files(self) -> None:
        rows = np.array([[3.0, 2.0], [np.nan, 7.0]])
        host = load(HostModel(self.SCALING, np.array([0.5, 1.0])).dump())
        guest = load(self.guest().dump())
        assert isinstance(host, HostModel)
        assert isinstance(guest, GuestModel)
        assert host.partial(rows).tolist() == [0.5, 0.0]
        shares = {"h": host.partial(rows), "i": np.array([1.0, -1.0])}
        truth = 1 / (1 + np.exp(-np.array([1.5 + 0.5 + 1.0, 0.5 - 1.0])))
        assert guest.combine(rows, shares) == pytest.approx(truth)
        assert guest.alone(rows) == pytest.approx(1 / (1 + np.exp(-np.array([2.0, 0.0]))))

    def test_linear_answers_are_in_the_labels_units(self) -> None:
        zeros = np.zeros(1)
        found = self.guest("linear").combine(np.array([[1.0, 2.0]]), {"h": zeros, "i": zeros})
        assert found.tolist() == [11.5]

    @pytest.mark.parametrize(
        "share", [np.zeros(3), np.zeros(2, np.float32), np.array([0.0, np.nan]), np.zeros((2, 1))]
    )
    def test_shares_that_no_honest_host_has(self, share: np.ndarray) -> None:
        with pytest.raises(PeerFault, match="i: malformed"):
            self.guest().combine(np.zeros((2, 2)), {"h": np.zeros(2), "i": share})

    def test_a_missing_share(self) -> None:
        with pytest.raises(ValueError, match="no share of i"):
            self.guest().combine(np.zeros((2, 2)), {"h": np.zeros(2)})

    def test_rubbish_is_no_model(self) -> None:
        body = self.guest().dump()
        for wrong in (b"", body[:-1], body.replace(b"linear guest 1", b"linear guest 9")):
            with pytest.raises((PeerFault, ValueError)):
                load(wrong)

    def test_the_guests_own_regression_is_the_optimum(self) -> None:
        rng = np.random.default_rng(0)
        features = np.hstack([rng.standard_normal((300, 2)), np.ones((300, 1))])
        labels = (features @ [1.0, -2.0, 0.5] + rng.logistic(size=300) > 0).astype(float)
        weights = fit_alone(features, labels, LinearOptions(l2=1.0))
        value = 1 / (1 + np.exp(-features @ weights))
        gradient = features.T @ (value - labels) / 300 + weights * np.array([1, 1, 0]) / 300
        assert np.abs(gradient).max() < 1e-8


class TestOutsourced:
    def test_an_encrypted_epoch_is_the_plain_one(self) -> None:
        rng = np.random.default_rng(2)
        features, weights = rng.standard_normal((60, 3)), np.array([0.4, -0.3, 0.2, 0.1])
        labels = (features[:, 0] + rng.logistic(size=60) > 0).astype(float)
        owner = Owner()
        data = owner.encrypt(features, labels)
        for _ in range(2):
            truth = epoch_plain(features, labels, weights, 1.0, 0.05)
            found = owner.decrypt_weights(
                epoch(owner.scheme, data, owner.encrypt_weights(weights), 1.0, 0.05)
            )
            assert np.abs(truth - weights).max() > 0.05
            assert found == pytest.approx(truth, abs=2e-4)
            weights = truth

    def test_more_rows_than_slots(self) -> None:
        with pytest.raises(ValueError, match="4097 rows"):
            Owner().encrypt(np.zeros((4_097, 1)), np.zeros(4_097))
