"""What happens to an iteration's counted uploads: cohorts train, bodies are coded, sums are integers, the strategy
steps. The same modules as on devices and servers, in the same order, so the same bits with the reference engine.

A body that a real server would have refused on arrival (NaN, infinity, too large) is left out and counted; the rest
goes on. Its client keeps neither control nor residual of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from federated.compression import Scheme
from federated.compression.download import Grid
from federated.compression.scheme import MAX_MAGNITUDE
from federated.device import (
    COMPRESSION,
    INITIAL,
    RELEASE,
    REPORT,
    LocalTraining,
    Update,
    device_generator,
)
from federated.frames import UPLOAD_OVERHEAD
from federated.layout import Layout
from federated.models import Model
from federated.payload import EVERYONE, shared_seed
from federated.privacy.protection import Protection, Unprotected, without_diverged
from federated.privacy.randomness import SeededRandomness
from federated.privacy.server import apply_sum, first_state, instructions_of
from federated.rounds import RoundSettings
from federated.secagg.updates import MaskedUpdates
from federated.simulator.cohort import Clients, Cohort, Engine, Rows, Trained
from federated.simulator.downloads import Downloads, Published
from federated.simulator.masked import MaskedSum, MasksStay
from federated.simulator.states import ClientStates, Slots
from federated.simulator.world import Counted
from federated.strategies import ServerState, StateRefused, Strategy, sum_for
from federated.sums import Contribution, ContributionRefused, Sum, add_all, check
from federated.weights import Array

Columns = dict[str, npt.NDArray[Any]]


class NothingToApply(RuntimeError):
    """An iteration has no new version: every upload was ``refused`` (by rule), or there is no next state. ``bytes_up``
    were sent for nothing."""

    def __init__(self, why: str, refused: dict[str, int], bytes_up: int) -> None:
        super().__init__(why)
        self.refused, self.bytes_up = refused, bytes_up


@dataclass(frozen=True, slots=True)
class Learned:
    """An iteration in numbers: ``loss`` is the clients' weighted mean while they trained (None under a privacy
    mechanism, where they do not say); ``bytes_up`` of whole bodies; ``refused`` uploads by rule; ``clipped`` the
    share of updates that were longer than the clip, which no real server would know."""

    clients: int
    examples: int
    loss: float | None
    bytes_up: int
    staleness: float
    refused: dict[str, int]
    clipped: float | None = None


class Learning:
    """The model's side of a job. ``folder`` keeps what clients remember, at most ``state_bytes`` of each kind."""

    def __init__(
        self,
        model: Model,
        data: Rows,
        strategy: Strategy,
        training: LocalTraining,
        rounds: RoundSettings,
        engine: Engine,
        seed: int,
        *,
        folder: Path,
        scheme: Scheme | None = None,
        grid: Grid | None = None,
        state_bytes: int = 2**32,
        initial: Array | None = None,
        protection: Protection | None = None,
        masked: MaskedUpdates | None = None,
        messages: bool = False,
    ) -> None:
        self._model, self._data, self._strategy, self._training = model, data, strategy, training
        self._rounds, self._engine, self._seed, self._scheme = rounds, engine, seed, scheme
        self._folder, self._state_bytes = folder, state_bytes
        self._protection: Protection = protection or Unprotected()
        self._private = self._protection.section.mechanism != "none"
        self._clipped = (
            0  # reports of the iteration at hand that were too long for the clip, where there is one
        )
        self._clips = False
        self._masked, self._messages = masked, messages
        self.layout: Layout = model.layout()
        if any(field.kind == "local" for field in self.layout.fields):
            raise ValueError("fields that stay on the device are not simulated; keep them out of the layout")
        weights = model.initial(device_generator(seed, 0, 0, INITIAL)) if initial is None else initial
        self.state = first_state(strategy, self._protection, self.layout, weights)
        self.downloads = Downloads(self.layout.size, grid)
        self.states: dict[str, ClientStates] = {}
        wanted = ["control"] if "control" in strategy.summed else []
        if scheme is not None and scheme.feedback:
            wanted += [f"residual.{name}" for name in strategy.summed]
        for name in wanted:
            self.states[name] = self._open(name, None)
        vectors = len(strategy.summed)
        whole = 4 * self.layout.size if scheme is None else scheme.most_bytes(self.layout.size)
        self.body_bytes = vectors * whole + 4 * (vectors - 1) + UPLOAD_OVERHEAD + self._protection.answers
        if masked is not None:
            self.body_bytes = masked.plan.masked_bytes + UPLOAD_OVERHEAD
        self._publish(0, 0)

    def _open(self, name: str, slots: Slots | None) -> ClientStates:
        path = self._folder / f"{name}.rows"
        return ClientStates(path, len(self._data.counts), self.layout.size, self._state_bytes, slots)

    @property
    def weights(self) -> Array:
        """The newest model [D], as clients get it."""
        return self.downloads.published[max(self.downloads.published)].weights

    def training(self, version: int) -> LocalTraining:
        """What clients that start at ``version`` do."""
        return self.downloads.published[version].training

    def _publish(self, version: int, oldest_wanted: int) -> None:
        instructions = instructions_of(self._strategy, self._protection, self.state)
        control = self.state.vectors["control"] if "control" in instructions.vectors else None
        self.downloads.publish(
            version,
            self.state.weights,
            instructions.adapt(self._training),
            control,
            oldest_wanted,
            instructions.threshold,
        )

    def learn(
        self, uploads: list[Counted], version: int, oldest_in_flight: int | None, started: int = 0
    ) -> Learned:
        """Train and apply the uploads that ``uploads`` stand for, of ``started`` clients, on the way from ``version``
        to the next. Raises NothingToApply when all were refused, or the model diverged."""
        ring = None
        if self._masked is not None:
            ring = MaskedSum(
                self._masked,
                self._protection,
                self._seed,
                uploads[0].started,
                messages=self._messages,
                started=max(started, len(uploads)),
            )
        total = sum_for(self._strategy, self.layout, self._rounds.most_uploads)
        kept: list[tuple[int, int, Contribution]] = []
        refused: dict[str, int] = {}
        bytes_up = self._clipped = 0
        for cohort, published, factors in self._cohorts(uploads, version):
            for trained in self._engine.train(cohort, self._data):
                sound, more = self._sound(trained)
                for rule, count in more.items():
                    refused[rule] = refused.get(rule, 0) + count
                if len(sound.clients) == 0:
                    continue
                reported = self._reported(sound, cohort, published.threshold)
                sent, size, commit = self._coded(reported, cohort.iteration)
                bytes_up += size
                if ring is not None:
                    commit(_mask(ring, sent, refused))
                    continue
                if self._private:
                    sent = sent.with_vectors(self._protection.admit(sent.vectors, self.layout))
                contributions = [
                    self._strategy.contribution(self.layout, update).scaled(factors[client])
                    for client, update in zip(sent.clients.tolist(), _updates(sent), strict=True)
                ]
                accepted = self._add(total, kept, sent.clients, published.version, contributions, refused)
                # At once: a client may stand in a buffer twice, and its second upload builds on its first.
                commit(accepted)
        if ring is not None:
            try:
                total = ring.total()
            except MasksStay as error:
                raise NothingToApply(str(error), refused, bytes_up) from error
        if total.clients == 0 and not kept:
            raise NothingToApply(f"all {len(uploads)} uploads were refused", refused, bytes_up)
        staleness = sum(slot.staleness for slot in uploads) / len(uploads)
        try:
            clipped = self._clipped / len(uploads) if self._clips else None
            self.state, learned = self._next(
                total, kept, Learned(0, 0, None, bytes_up, staleness, refused, clipped)
            )
        except StateRefused as error:
            raise NothingToApply(str(error), refused, bytes_up) from error
        oldest = version + 1
        if self._rounds.mode == "buffered" and oldest_in_flight is not None:
            oldest = min(
                oldest, oldest_in_flight
            )  # elsewhere who still trains on an older one will be refused
        self._publish(version + 1, oldest)
        self.body_bytes = -(-bytes_up // learned.clients)
        return learned

    def _next(
        self, total: Sum, kept: list[tuple[int, int, Contribution]], learned: Learned
    ) -> tuple[ServerState, Learned]:
        """The next state, and ``learned`` with what the uploads say of themselves. Raises StateRefused."""
        if self._strategy.needs == "sum":
            generator = device_generator(self._seed, EVERYONE, self.state.iteration, RELEASE)
            state, total = apply_sum(
                self._strategy, self._protection, self.state, total, SeededRandomness(generator)
            )
            return state, replace(
                learned,
                clients=total.clients,
                examples=total.scalars["examples"],
                loss=None if self._private else total.mean_scalar("loss"),
            )
        contributions = [contribution for _, _, contribution in sorted(kept, key=lambda one: one[:2])]
        weight = sum(c.weight for c in contributions)
        return self._strategy.apply_updates(self.state, contributions), replace(
            learned,
            clients=len(contributions),
            examples=sum(c.examples for c in contributions),
            loss=None if self._private else sum(c.loss * c.weight for c in contributions) / weight,
        )

    def _cohorts(
        self, uploads: list[Counted], version: int
    ) -> Iterator[tuple[Cohort, Published, dict[int, float]]]:
        """The uploads by the iteration in which their clients started, oldest first."""
        groups: dict[int, list[Counted]] = {}
        for slot in uploads:
            groups.setdefault(slot.started, []).append(slot)
        for started, group in sorted(groups.items()):
            published = self.downloads.published[version - group[0].staleness]
            controls = self.states.get("control")
            cohort = Cohort(
                np.array(sorted(slot.client for slot in group), np.int64),
                started,
                published.weights,
                published.training,
                self._seed,
                published.control,
                None if controls is None else controls.get,
            )
            factors = {slot.client: self._rounds.weight(1, slot.staleness) for slot in group}
            yield cohort, published, factors

    def _sound(self, trained: Trained) -> tuple[Trained, dict[str, int]]:
        """Without the clients whose vectors or loss are not finite, or too large for the scheme: they cannot be coded,
        a device would not send. Under a mechanism of privacy it would, a report of zeros."""
        if self._private:
            return self._tame(trained), {}
        finite, small = np.isfinite(trained.losses), np.ones(len(trained.clients), np.bool_)
        with np.errstate(invalid="ignore"):
            for vector in trained.vectors.values():
                finite &= np.isfinite(vector.sum(axis=1, dtype=np.float64))
                if (
                    self._scheme is not None
                ):  # half of what it codes: residuals are added, and are far smaller
                    ends = np.maximum(vector.max(axis=1), -vector.min(axis=1))
                    small &= ends <= MAX_MAGNITUDE / 2
        if (finite & small).all():
            return trained, {}
        counts = {"not_finite": np.count_nonzero(~finite), "magnitude": np.count_nonzero(finite & ~small)}
        return trained.at(np.flatnonzero(finite & small)), {rule: int(n) for rule, n in counts.items() if n}

    def _tame(self, trained: Trained) -> Trained:
        """With zeros for whoever diverged, whose update is longer than any clip."""
        vectors, diverged = without_diverged(trained.vectors)
        self._clipped += int(np.count_nonzero(diverged))
        return trained.with_vectors(vectors) if diverged.any() else trained

    def _reported(self, trained: Trained, cohort: Cohort, threshold: float | None) -> Trained:
        """What devices may send of what they learned, with noise from the simulation's seed."""
        if not self._private:
            return trained
        sources = [
            SeededRandomness(device_generator(self._seed, client, cohort.iteration, REPORT))
            for client in trained.clients.tolist()
        ]
        reported = self._protection.report(trained.vectors, self.layout, sources, cohort.start, threshold)
        if reported.clipped is not None:
            self._clips = True
            self._clipped += int(np.count_nonzero(reported.clipped))
        return replace(trained.quiet(), vectors=reported.vectors, bits=reported.bits)

    def _coded(
        self, trained: Trained, iteration: int
    ) -> tuple[Trained, int, Callable[[npt.NDArray[np.bool_]], None]]:
        """What the server reads from the clients' bodies, the bytes of those, and what to do once they are accepted
        (by flags [B])."""
        clients, decoded = trained.clients, dict(trained.vectors)
        size = len(clients) * (UPLOAD_OVERHEAD + 4 * (len(decoded) - 1) + (trained.bits is not None))
        residuals: dict[str, Array] = {}
        if self._scheme is None:
            size += sum(4 * vector.size for vector in decoded.values())
        else:
            generators = [
                device_generator(self._seed, client, iteration, COMPRESSION) for client in clients.tolist()
            ]
            shared = shared_seed(self._seed, iteration)
            for name in sorted(trained.vectors):
                memory = self.states.get(f"residual.{name}")
                encoded = self._scheme.encode_batch(
                    trained.vectors[name], generators, None if memory is None else memory.get(clients), shared
                )
                decoded[name] = encoded.decoded
                size += sum(map(len, encoded.bodies))
                if encoded.residuals is not None:
                    residuals[f"residual.{name}"] = encoded.residuals

        if self._masked is not None:
            size = len(clients) * (UPLOAD_OVERHEAD + self._masked.plan.masked_bytes)

        def commit(accepted: npt.NDArray[np.bool_]) -> None:
            for name, rows in residuals.items():
                self.states[name].put(clients[accepted], rows[accepted])
            if "control" in self.states:
                # A control moves by what the server reads, so that both sides' stay the same (as ``client`` does).
                own = self.states["control"]
                own.put(clients[accepted], own.get(clients[accepted]) + decoded["control"][accepted])

        return trained.with_vectors(decoded), size, commit

    def _add(
        self,
        total: Sum,
        kept: list[tuple[int, int, Contribution]],
        clients: Clients,
        version: int,
        contributions: list[Contribution],
        refused: dict[str, int],
    ) -> npt.NDArray[np.bool_]:
        """Add what the rules allow; which of them it was [B]."""
        accepted = np.ones(len(contributions), np.bool_)
        if self._strategy.needs == "sum":
            try:
                add_all(total, contributions)
            except ContributionRefused:
                pass  # one by one, to find which
            else:
                return accepted
        for place, (client, contribution) in enumerate(zip(clients.tolist(), contributions, strict=True)):
            try:
                if self._strategy.needs == "sum":
                    total.add(contribution)
                else:
                    check(contribution, total.size, total.bounds, self._strategy.summed)
                    kept.append((client, version, contribution))
            except ContributionRefused as error:
                refused[error.rule] = refused.get(error.rule, 0) + 1
                accepted[place] = False
        return accepted

    def save(self) -> tuple[dict[str, Any], Columns]:
        """Numbers and columns from which ``restore`` goes on; call ``committed`` once they are stored."""
        values, columns = self.downloads.save()
        columns = {f"downloads.{name}": column for name, column in columns.items()}
        columns["state"] = np.frombuffer(self.state.to_bytes(), np.uint8)
        for name, rows in self.states.items():
            columns[f"slots.{name}"] = rows.checkpoint()
        return {"downloads": values, "body_bytes": self.body_bytes}, columns

    def committed(self) -> None:
        """What ``save`` gave is stored durably."""
        for rows in self.states.values():
            rows.committed()

    def restore(self, values: dict[str, Any], columns: Columns) -> None:
        """Go on where ``save`` was."""
        self.state = ServerState.from_bytes(columns["state"].tobytes(), self.layout)
        prefix = "downloads."
        self.downloads.restore(
            values["downloads"],
            {
                name.removeprefix(prefix): column
                for name, column in columns.items()
                if name.startswith(prefix)
            },
        )
        self.body_bytes = int(values["body_bytes"])
        for name in list(self.states):
            self.states[name].close()
            self.states[name] = self._open(name, columns[f"slots.{name}"])

    def close(self) -> None:
        """Close the files of client state and the engine."""
        for rows in self.states.values():
            rows.close()
        self._engine.close()


def _mask(ring: MaskedSum, sent: Trained, refused: dict[str, int]) -> npt.NDArray[np.bool_]:
    """Take what can be masked; which of them it was [B]. What a control moves by is what servers read in the sum."""
    accepted = np.ones(len(sent.clients), np.bool_)
    controls = sent.vectors.get("control")
    if controls is not None:
        sent.vectors["control"] = controls = controls.copy()
    for place, read in enumerate(ring.add(sent.clients.tolist(), list(_updates(sent)))):
        if read is None:
            refused["values"] = refused.get("values", 0) + 1
            accepted[place] = False
        elif controls is not None:
            controls[place] = read["control"]
    return accepted


def _updates(trained: Trained) -> Iterator[Update]:
    for place in range(len(trained.clients)):
        yield Update(
            {name: vector[place] for name, vector in trained.vectors.items()},
            int(trained.examples[place]),
            int(trained.steps[place]),
            float(trained.losses[place]),
            None if trained.bits is None else int(trained.bits[place]),
        )
