"""What a device does in a round: train on its own data, send back the difference. NumPy alone.

Everything that a device draws is a pure function of (seed, client, iteration, stream): see ``device_generator``.
Which examples make which batch is one function, ``batch_schedule``, so that an engine which trains whole cohorts at
once takes the same steps as a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from federated.layout import Layout
from federated.models.model import Inputs, Labels, Model
from federated.weights import Array

BATCHES, COMPRESSION, INITIAL, REPORT, RELEASE, NOISE = 0, 1, 2, 3, 4, 5
"""Streams of ``device_generator``; further ones are free from 16 on."""

Schedule = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Local stochastic gradient descent.

    Exactly one of ``epochs`` (passes over the data, E in McMahan et al. 2017; 1 when neither is given) and ``steps``;
    ``batch_size`` 0 means all examples at once; ``proximal`` is μ of FedProx (Li et al. 2020); ``momentum`` is heavy
    ball, starting at zero in every round; ``clip_norm`` bounds each step's gradient, 0 leaves it.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    rate: float = 0.1
    proximal: float = 0.0
    momentum: float = 0.0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        if self.epochs is not None and self.steps is not None:
            raise ValueError("local training counts epochs or steps, not both")
        if (self.epochs or self.steps or 0) < 1 or self.batch_size < 0:
            raise ValueError(f"epochs or steps must be at least 1 and batch_size at least 0: {self}")
        if not (
            0.0 < self.rate < np.inf and 0.0 <= self.proximal < np.inf and 0.0 <= self.clip_norm < np.inf
        ):
            raise ValueError(f"rate must be positive, proximal and clip_norm not negative: {self}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and below 1: {self}")

    def steps_for(self, examples: int) -> int:
        """How many steps a device with ``examples`` examples takes."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-examples // self.batch_for(examples))

    def batch_for(self, examples: int) -> int:
        """The size of its batches."""
        return min(self.batch_size or examples, examples)


@dataclass(frozen=True, slots=True)
class Instructions:
    """What a strategy asks of the devices in this iteration, beside the weights.

    ``proximal`` and ``steps`` replace those of the job's ``LocalTraining`` (``steps`` its epochs too);
    ``full_batch`` asks for one gradient over all examples; ``vectors`` names the server's vectors that travel with the
    weights ("control"). Under a privacy mechanism that wants it, devices answer by one bit how what they learned
    compares with ``threshold``.
    """

    proximal: float | None = None
    steps: int | None = None
    full_batch: bool = False
    vectors: tuple[str, ...] = ()
    threshold: float | None = None

    def adapt(self, training: LocalTraining) -> LocalTraining:
        """The job's local training as this iteration wants it."""
        if self.full_batch:
            training = replace(training, epochs=None, steps=1, batch_size=0, momentum=0.0)
        elif self.steps is not None:
            training = replace(training, epochs=None, steps=self.steps)
        return training if self.proximal is None else replace(training, proximal=self.proximal)


@dataclass(frozen=True, slots=True)
class ControlVariates:
    """SCAFFOLD's c of the server and c_i of this device, both [D]."""

    server: Array
    client: Array


@dataclass(frozen=True, slots=True)
class Update:
    """What a device learned: ``vectors["difference"]`` [D], new weights less old ones, and with SCAFFOLD
    ``vectors["control"]`` [D], new control less old one, which the device adds to its own once the server has accepted;
    the examples behind them, the steps taken, and the mean loss over those steps; and the ``bit`` by which the device
    answers the instructions' threshold, if it is asked."""

    vectors: dict[str, Array]
    examples: int
    steps: int
    loss: float
    bit: int | None = None


def device_generator(seed: int, client: int, iteration: int, stream: int = BATCHES) -> np.random.Generator:
    """The generator of ``client`` in ``iteration``: Philox with key (seed, client) and counter (stream, iteration), so
    no two of them ever overlap. All four are unsigned 64-bit integers; raises ValueError otherwise."""
    if not all(0 <= number < 2**64 for number in (seed, client, iteration, stream)):
        raise ValueError(f"a generator's numbers need 64 bits: {(seed, client, iteration, stream)}")
    return np.random.Generator(
        np.random.Philox(key=seed | client << 64, counter=stream << 128 | iteration << 192)
    )


def batch_schedule(
    generator: np.random.Generator, examples: int, training: LocalTraining
) -> tuple[Schedule, Schedule]:
    """Which examples make which batch: indices [S, B] and the sizes [S] of the batches.

    One permutation is drawn per pass over the data. By epochs, each pass is cut into batches, the last one may be
    short (its rows end with zeros beyond its size). By steps, the passes are one endless row, cut into full batches.
    B is at most the number of examples.
    """
    size, steps = training.batch_for(examples), training.steps_for(examples)
    if training.steps is None:
        assert training.epochs is not None
        per_pass = -(-examples // size)
        padded = np.zeros((training.epochs, per_pass * size), np.int64)
        for row in padded:
            row[:examples] = generator.permutation(examples)
        sizes = np.full((training.epochs, per_pass), size, np.int64)
        sizes[:, -1] = examples - (per_pass - 1) * size
        return padded.reshape(steps, size), sizes.reshape(steps)
    passes = -(-steps * size // examples)
    order = np.concatenate([generator.permutation(examples) for _ in range(passes)])
    return order[: steps * size].reshape(steps, size), np.full(steps, size, np.int64)


def local_update(
    model: Model,
    layout: Layout,
    start: Array,
    inputs: Inputs,
    labels: Labels,
    training: LocalTraining,
    generator: np.random.Generator,
    control: ControlVariates | None = None,
) -> Update:
    """Train from ``start`` [D] on ``inputs`` [N, ...] and ``labels`` [N].

    A step is w ← w − rate · v with v ← momentum · v + g, where g is the batch's gradient, clipped, plus
    proximal · (w − start), plus c − c_i with SCAFFOLD, whose new control is its option II: c_i⁺ = c_i − c +
    (start − w) / (steps · rate). Raises ValueError when there is no example, the lengths differ, a label is
    negative, or SCAFFOLD is asked for with momentum (the option takes plain steps for granted).
    """
    examples = len(labels)
    if examples == 0 or len(inputs) != examples:
        raise ValueError(f"{len(inputs)} inputs and {examples} labels: need as many of both, at least one")
    if labels.min() < 0:
        raise ValueError("a label is negative")
    if control is not None and training.momentum:
        raise ValueError("SCAFFOLD's controls are measured on plain steps: momentum must be 0")
    layout.require_vector(start, "start")
    indices, sizes = batch_schedule(generator, examples, training)
    correction = None if control is None else control.server - control.client
    rate, momentum = np.float32(training.rate), np.float32(training.momentum)
    weights, gradient = start.copy(), np.empty_like(start)
    velocity = np.zeros_like(start) if training.momentum else None
    total_loss = 0.0
    for batch, size in zip(indices, sizes.tolist(), strict=True):
        rows = batch[:size]
        loss, _ = model.loss_and_gradient(weights, inputs.take(rows, 0), labels.take(rows), gradient)
        total_loss += loss * size
        if training.clip_norm:
            clip(gradient, training.clip_norm)
        if training.proximal:
            gradient += np.float32(training.proximal) * (weights - start)
        if correction is not None:
            gradient += correction
        if velocity is not None:
            velocity *= momentum
            velocity += gradient
            weights -= rate * velocity
        else:
            gradient *= rate
            weights -= gradient
    steps = len(sizes)
    vectors = {"difference": layout.conceal(weights - start)}
    if control is not None:
        vectors["control"] = control_change(vectors["difference"], control, steps, training.rate, layout)
    return Update(vectors, examples, steps, total_loss / int(sizes.sum()))


def control_change(
    difference: Array, control: ControlVariates, steps: int, rate: float, layout: Layout
) -> Array:
    """SCAFFOLD's c_i⁺ − c_i [D] by option II (Karimireddy et al. 2020): −c − difference / (steps · rate), and zero
    where the field is not a weight."""
    change: Array = -control.server - difference / np.float32(steps * rate)
    if not layout.only_weights:
        change[~layout.mask("weight")] = 0.0
    return change


def clip(gradient: Array, largest_norm: float) -> None:
    """Scale ``gradient`` in place to an L2 norm of at most ``largest_norm``."""
    norm = float(np.sqrt(np.square(gradient, dtype=np.float64).sum()))
    if norm > largest_norm:
        gradient *= np.float32(largest_norm / norm)
