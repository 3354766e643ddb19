"""What a table is: name, width, initial values, optimiser and placement. Plain values, no behaviour.

The plain form (``to_plain``, ``from_plain``) goes into snapshots and messages. It carries a format version;
fields may be added with defaults, never renamed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import numpy as np
import xxhash

from sync.errors import BadSpec

FORMAT: Final = 1
MAX_DIM: Final = 65_536
MAX_NORM: Final = 1e18
"""Above it a squared norm may not fit a float32."""
MAX_ADMISSION: Final = 255
"""What one byte counts to."""
MAX_EXPIRY_S: Final = 2**31 - 1
MIN_FTRL: Final = 1e-6
"""Of FTRL's rate and beta: it divides by both where a square is zero in float32."""

OptimiserKind = Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl"]
Placement = Literal["hashed", "single"]
Plain = Mapping[str, object]

_KINDS: Final = ("sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl")
_NEED_EPSILON: Final = ("rowwise_adagrad", "adagrad", "adam")
_PLACEMENTS: Final = ("hashed", "single")
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def _finite(name: str, value: float, minimum: float = -math.inf) -> None:
    # Float32 is what the kernels compute in, so a value must be finite there.
    if not (abs(value) <= 3e38 and value >= minimum):
        raise BadSpec(
            f"{name} {value} is not a finite number" + ("" if minimum < 0 else f" of at least {minimum:g}")
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Initial values of the keys from ``first_key`` up to the next segment: ``constant`` ± ``scale``."""

    first_key: int
    scale: float
    constant: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.first_key < 2**64:
            raise BadSpec(f"segment: first_key {self.first_key} is not an unsigned 64-bit number")
        _finite("segment: scale", self.scale, minimum=0.0)
        _finite("segment: constant", self.constant)


@dataclass(frozen=True, slots=True)
class Initialiser:
    """The values of a row that was never pushed: a pure function of (table, key), see ``initial.py``.

    Uniform in ``constant ± scale``, by segments of the key range. The first segment starts at key 0.
    """

    segments: tuple[Segment, ...] = (Segment(0, 0.0),)
    seed: int = 0

    def __post_init__(self) -> None:
        firsts = [segment.first_key for segment in self.segments]
        if not firsts or firsts[0] != 0:
            raise BadSpec("initialiser: the first segment must start at key 0")
        if any(after <= before for before, after in itertools.pairwise(firsts)):
            raise BadSpec("initialiser: segments must have ascending first keys")
        if not 0 <= self.seed < 2**63:
            raise BadSpec(f"initialiser: seed {self.seed} is not in [0, 2^63)")

    @staticmethod
    def uniform(scale: float, seed: int = 0) -> Initialiser:
        """Every row uniform in ±``scale``."""
        return Initialiser((Segment(0, scale),), seed)


@dataclass(frozen=True, slots=True)
class Optimiser:
    """How a gradient changes a row.

    ``sgd``: w -= rate·g. ``rowwise_adagrad``: one s per row, s += mean(g²), w -= rate·g / (√s + epsilon).
    ``adagrad``: one s per element, s += g², same step. ``adam``: with ``beta1``, ``beta2`` and the count of the
    row's own pushes as t, so a row that is not pushed does not move (lazy Adam). ``ftrl``: FTRL-proximal with
    ``rate`` as α, ``beta`` and its own ``l1`` and ``l2``, which pull towards 0; see ``optimisers.ftrl`` on what
    it makes of an initial value.
    """

    kind: OptimiserKind = "rowwise_adagrad"
    rate: float = 0.1
    epsilon: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise BadSpec(f"optimiser: kind {self.kind!r} is not one of {', '.join(_KINDS)}")
        least = MIN_FTRL if self.kind == "ftrl" else 0.0
        _finite("optimiser: rate", self.rate, minimum=least)
        _finite("optimiser: epsilon", self.epsilon, minimum=0.0)
        if self.kind in _NEED_EPSILON and float(np.float32(self.epsilon)) == 0.0:
            raise BadSpec(
                f"optimiser: epsilon {self.epsilon} is zero in float32; a first gradient of 0 divides"
            )
        for name, share in (("beta1", self.beta1), ("beta2", self.beta2)):
            # Adam divides by 1 - share^t, so what float32 rounds up to 1 is as wrong as 1.
            if not (share >= 0.0 and float(np.float32(share)) < 1.0):
                raise BadSpec(f"optimiser: {name} {share} is not in [0, 1) in float32")
        _finite("optimiser: beta", self.beta, minimum=least)
        _finite("optimiser: l1", self.l1, minimum=0.0)
        _finite("optimiser: l2", self.l2, minimum=0.0)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of parameters.

    ``dim``: floats per row. ``placement``: ``hashed`` spreads keys over all shards; ``single`` keeps the
    whole table in one shard, with keys 0 .. ``rows`` - 1 (dense weights in chunks). ``max_norm``: a push
    with a row whose gradient has a larger Euclidean norm is refused as exploded. ``guard``: so is one above
    this many times the table's running mean of such norms (0: off; see ``guard.py``). ``clip``: a row's
    gradient longer than this is scaled to this length (0: none). ``l2``: weight decay, l2·w is added to the
    gradient after clipping (``ftrl`` has another of its own). ``admission``: pushes that a key needs before
    it costs a row. ``expiry_s``: rows that were not pushed for so long are deleted (0: never).
    """

    name: str
    dim: int
    initialiser: Initialiser = Initialiser()
    optimiser: Optimiser = Optimiser()
    placement: Placement = "hashed"
    rows: int = 0
    max_norm: float = 1e6
    l2: float = 0.0
    clip: float = 0.0
    guard: float = 1_000.0
    admission: int = 1
    expiry_s: int = 0

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise BadSpec(f"table: name {self.name!r} does not match {_NAME.pattern}")
        if not 1 <= self.dim <= MAX_DIM:
            raise BadSpec(f"table {self.name}: dim {self.dim} is not in [1, {MAX_DIM}]")
        if self.placement not in _PLACEMENTS:
            raise BadSpec(f"table {self.name}: placement {self.placement!r} is not hashed or single")
        if (self.placement == "single") != (self.rows > 0):
            raise BadSpec(f"table {self.name}: rows is {self.rows}; a single table has some, a hashed one 0")
        if not 0.0 < self.max_norm <= MAX_NORM:
            raise BadSpec(f"table {self.name}: max_norm {self.max_norm} is not in (0, {MAX_NORM:g}]")
        self._check_upkeep()

    @property
    def seed(self) -> int:
        """The table's share of the initial values: a hash of its name under the initialiser's seed."""
        return xxhash.xxh3_64_intdigest(self.name.encode(), self.initialiser.seed)

    @property
    def state_dim(self) -> int:
        """Floats of optimiser state per row."""
        return {
            "sgd": 0,
            "rowwise_adagrad": 1,
            "adagrad": self.dim,
            "adam": 2 * self.dim + 1,
            "ftrl": 2 * self.dim,
        }[self.optimiser.kind]

    def to_plain(self) -> dict[str, object]:
        """Strings, numbers, lists and dicts that JSON and MessagePack carry."""
        return {
            "format": FORMAT,
            "name": self.name,
            "dim": self.dim,
            "seed": self.initialiser.seed,
            "segments": [[s.first_key, float(s.scale), float(s.constant)] for s in self.initialiser.segments],
            "optimiser": self.optimiser.kind,
            "rate": float(self.optimiser.rate),
            "epsilon": float(self.optimiser.epsilon),
            "placement": self.placement,
            "rows": self.rows,
            "max_norm": float(self.max_norm),
            "beta1": float(self.optimiser.beta1),
            "beta2": float(self.optimiser.beta2),
            "ftrl_beta": float(self.optimiser.beta),
            "ftrl_l1": float(self.optimiser.l1),
            "ftrl_l2": float(self.optimiser.l2),
            "l2": float(self.l2),
            "clip": float(self.clip),
            "guard": float(self.guard),
            "admission": self.admission,
            "expiry_s": self.expiry_s,
        }

    @staticmethod
    def from_plain(plain: Plain) -> TableSpec:
        """Read ``to_plain``'s form back; fields of later versions than the first may be absent and have their
        defaults. Raises BadSpec naming what is missing or wrong."""
        if plain.get("format") != FORMAT:
            raise BadSpec(f"table: format {plain.get('format')!r}; this version reads {FORMAT}")
        try:
            segments = cast("Sequence[Sequence[float]]", plain["segments"])
            return TableSpec(
                name=_text(plain, "name"),
                dim=_integer(plain, "dim"),
                initialiser=Initialiser(
                    tuple(
                        Segment(int(first), float(scale), float(constant))
                        for first, scale, constant in segments
                    ),
                    _integer(plain, "seed"),
                ),
                optimiser=Optimiser(
                    cast("OptimiserKind", _text(plain, "optimiser")),
                    _number(plain, "rate"),
                    _number(plain, "epsilon"),
                    _number(plain, "beta1", 0.9),
                    _number(plain, "beta2", 0.999),
                    _number(plain, "ftrl_beta", 1.0),
                    _number(plain, "ftrl_l1", 0.0),
                    _number(plain, "ftrl_l2", 0.0),
                ),
                placement=cast("Placement", _text(plain, "placement")),
                rows=_integer(plain, "rows"),
                max_norm=_number(plain, "max_norm"),
                l2=_number(plain, "l2", 0.0),
                clip=_number(plain, "clip", 0.0),
                guard=_number(plain, "guard", 1_000.0),
                admission=_integer(plain, "admission", 1),
                expiry_s=_integer(plain, "expiry_s", 0),
            )
        except KeyError as error:
            raise BadSpec(f"table: {error.args[0]} is missing") from error
        except (TypeError, ValueError) as error:
            raise BadSpec(f"table: {error}") from error

    def _check_upkeep(self) -> None:
        """What keeps rows sound and memory bounded: decay, clipping, guard, admission, expiry."""
        _finite(f"table {self.name}: l2", self.l2, minimum=0.0)
        # A step of sgd multiplies w by 1 - rate·l2; beyond 1 it would jump over 0, beyond 2 it explodes.
        if self.optimiser.kind == "sgd" and self.optimiser.rate * self.l2 > 1.0:
            raise BadSpec(
                f"table {self.name}: l2 {self.l2} times sgd's rate {self.optimiser.rate} is above 1"
            )
        _finite(f"table {self.name}: clip", self.clip, minimum=0.0)
        if self.clip > 0.0 and float(np.float32(self.clip)) == 0.0:
            raise BadSpec(f"table {self.name}: clip {self.clip} is zero in float32, which means none")
        _finite(f"table {self.name}: guard", self.guard, minimum=0.0)
        if 0.0 < self.guard < 1.0:
            raise BadSpec(f"table {self.name}: guard {self.guard} refuses ordinary rows; 0 or at least 1")
        if not 1 <= self.admission <= MAX_ADMISSION:
            raise BadSpec(f"table {self.name}: admission {self.admission} is not in [1, {MAX_ADMISSION}]")
        if not 0 <= self.expiry_s <= MAX_EXPIRY_S:
            raise BadSpec(f"table {self.name}: expiry_s {self.expiry_s} is not in [0, {MAX_EXPIRY_S}]")
        if self.placement == "single" and (self.admission, self.expiry_s) != (1, 0):
            raise BadSpec(f"table {self.name}: a single table keeps all its rows; no admission, no expiry")


def _text(plain: Plain, name: str) -> str:
    value = plain[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value


def _integer(plain: Plain, name: str, default: int | None = None) -> int:
    value = plain[name] if default is None else plain.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is not an integer")
    return value


def _number(plain: Plain, name: str, default: float | None = None) -> float:
    value = plain[name] if default is None else plain.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is not a number")
    return float(value)
