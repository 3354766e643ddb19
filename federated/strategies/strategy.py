"""What a strategy is: ``(init, apply)`` over a state that is plain numbers, and what it asks of the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from federated.device import Instructions, Update
from federated.layout import LARGEST_INTEGER, Layout
from federated.packing import BodyMalformed, pack, unpack
from federated.sums import Bounds, Contribution, Sum
from federated.weights import Array

_MAGIC = b"HWf1"

Wide = npt.NDArray[np.float64]
Vector = npt.NDArray[Any]


LARGEST_WEIGHT = 2.0**60
"""What downloads on a grid can hold (``compression.download``)."""


class StateRefused(ValueError):
    """Bytes that are not a server's state of this layout; or there is no next state: the model diverged, or there are
    too few updates."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """The server after ``iteration`` valid iterations: ``vectors["weights"]`` float32 [D], and whatever else [D]
    the strategy keeps (float32 where it travels, else float64)."""

    layout: Layout
    vectors: dict[str, Vector]
    iteration: int = 0
    scalars: dict[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> Array:
        """The global model [D], what devices start from."""
        return self.vectors["weights"]

    def following(
        self, vectors: Mapping[str, Vector], scalars: Mapping[str, float] | None = None
    ) -> ServerState:
        """The state one iteration later, with these vectors and scalars replaced. Raises StateRefused for what is not
        finite and weights of 2**60 or more: nobody could load or download it, so the version before must stay."""
        for name, vector in vectors.items():
            if not np.isfinite(vector).all():
                raise StateRefused(f"the model diverged: {name} is not finite; lower the rates")
        largest = np.abs(vectors["weights"]).max(initial=0.0) if "weights" in vectors else 0.0
        if largest >= LARGEST_WEIGHT:
            raise StateRefused(f"the model diverged: a weight reached {largest:.3g}; lower the rates")
        return replace(
            self,
            vectors={**self.vectors, **vectors},
            iteration=self.iteration + 1,
            scalars={**self.scalars, **(scalars or {})},
        )

    def to_bytes(self) -> bytes:
        """For the store; ``from_bytes`` reads it."""
        values = {
            "layout": self.layout.fingerprint().hex(),
            "iteration": self.iteration,
            "scalars": self.scalars,
        }
        return pack(_MAGIC, values, self.vectors)

    @staticmethod
    def from_bytes(body: bytes, layout: Layout) -> ServerState:
        """The state in ``body``. Raises StateRefused for another layout, a vector that does not fit or is not finite,
        and anything malformed."""
        try:
            values, vectors = unpack(_MAGIC, body)
            if values["layout"] != layout.fingerprint().hex():
                raise StateRefused(
                    f"the state is of layout {values['layout']}, this job's is {layout.fingerprint().hex()}"
                )
            iteration = int(values["iteration"])
            scalars = {str(name): float(value) for name, value in dict(values["scalars"]).items()}
        except (BodyMalformed, KeyError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, StateRefused):
                raise
            raise StateRefused(f"not a server's state: {error}") from error
        if iteration < 0 or not all(np.isfinite(value) for value in scalars.values()):
            raise StateRefused("the state's iteration is negative or a scalar is not finite")
        if "weights" not in vectors or vectors["weights"].dtype != np.float32:
            raise StateRefused("the state has no float32 weights")
        for name, vector in vectors.items():
            if len(vector) != layout.size or not np.isfinite(vector).all():
                raise StateRefused(f"{name} is not {layout.size} finite values")
        return ServerState(layout, vectors, iteration, scalars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The base of all: what is common, with FedAvg's weights. Subclasses say how the weights change.

    ``server_rate`` multiplies the step; ``max_examples`` and ``max_steps`` cap what a client weighs and how many steps
    count for it, whatever it claims.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[Literal["sum", "updates"]] = "sum"
    """"sum": ``apply`` takes a sum, which may be built anywhere. "updates": ``apply_updates`` needs each one."""
    summed: ClassVar[tuple[str, ...]] = ("difference",)
    """The vectors of an update, all of which are summed."""

    server_rate: float = 1.0
    max_examples: int = 10_000
    max_steps: int = 10_000

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError for options out of range."""
        if not 0.0 < self.server_rate < np.inf or self.max_examples < 1 or self.max_steps < 1:
            raise ValueError(
                f"{self.name}: server_rate must be positive, max_examples and max_steps at least 1"
            )

    @property
    def largest_weight(self) -> int:
        """The largest weight of a contribution."""
        return self.max_examples

    def init(self, layout: Layout, weights: Array) -> ServerState:
        """The state before the first iteration, from ``weights`` float32 [D]. Raises WeightsMismatch."""
        layout.require_vector(weights, "weights")
        return ServerState(layout, {"weights": weights.copy(), **self.more_vectors(layout)})

    def more_vectors(self, layout: Layout) -> dict[str, Vector]:
        """What the strategy keeps beside the weights, at its start."""
        return {}

    def instructions(self, state: ServerState) -> Instructions:
        """What devices are asked for in the iteration that begins."""
        return Instructions()

    def contribution(self, layout: Layout, update: Update) -> Contribution:
        """What an update adds to the sum; its bit as the scalar "bit"."""
        weight = float(min(update.examples, self.largest_weight))
        steps = min(update.steps, self.max_steps)
        scalars = {} if update.bit is None else {"bit": float(update.bit)}
        return Contribution(update.vectors, weight, update.examples, steps, update.loss, scalars)

    def apply(self, state: ServerState, total: Sum) -> ServerState:
        """The state after an iteration whose contributions are ``total``. Raises ZeroDivisionError for none, and
        StateRefused where the model diverged."""
        raise NotImplementedError(f"{self.name} needs {self.needs}")

    def apply_updates(self, state: ServerState, contributions: Sequence[Contribution]) -> ServerState:
        """The state after an iteration with these contributions, sorted by client. Raises StateRefused for too
        few, and where the model diverged."""
        raise NotImplementedError(f"{self.name} needs a {self.needs}")


def sum_for(strategy: Strategy, layout: Layout, uploads: int) -> Sum:
    """An empty sum for at most ``uploads`` contributions of ``strategy``. Raises ValueError if it might overflow."""
    return Sum(layout.size, Bounds(uploads, strategy.largest_weight), strategy.summed)


def settle(state: ServerState, change: Wide, mean: Wide, most_steps: int) -> Array:
    """The next weights float32 [D]: ``change`` where a field is trained, and by the layout's rules elsewhere.

    ``mean`` [D] is the mean difference, which moves statistics as it is.
    """
    layout = state.layout
    now = state.weights.astype(np.float64)
    if layout.only_weights:
        now += change
        return _narrowed(now)
    trained, statistics, counters = layout.mask("weight"), layout.mask("statistic"), layout.mask("counter")
    now[trained] += change[trained]
    now[statistics] += mean[statistics]
    now[layout.nonnegative] = np.maximum(now[layout.nonnegative], 0.0)
    now[counters] = np.minimum(now[counters] + most_steps, LARGEST_INTEGER)
    return _narrowed(now)


def _narrowed(vector: Wide) -> Array:
    """As float32; beyond it infinite, which ``following`` refuses."""
    with np.errstate(over="ignore"):
        return vector.astype(np.float32)


def trained_only(layout: Layout, vector: Array) -> Array:
    """``vector`` [D] with zeros where a field is not a weight."""
    return vector if layout.only_weights else np.where(layout.mask("weight"), vector, np.float32(0.0))


def scaled_weights(layout: Layout, vector: Array, factor: float) -> Array:
    """``vector`` [D] times ``factor`` where a field is a weight."""
    scaled = vector * np.float32(factor)
    return scaled if layout.only_weights else np.where(layout.mask("weight"), scaled, vector)


def squared_norm(vector: npt.NDArray[Any]) -> float:
    """The sum of squares, in float64."""
    return float(np.square(vector, dtype=np.float64).sum())
