"""A scheme: steps that turn a vector into few bytes at the client, and back into a vector at the server.

A scheme is written as its steps in order, separated by commas or bars, options after colons:

    rotate | random_mask:0.5 | quantise:1:drive    half a bit a coordinate; the mean is right, no memory at the client
    top_k:0.05 | quantise:2:nearest | deflate      the largest 5 %, with error feedback
    rotate | quantise:4 | deflate                  nearly as good as float32
    random_mask:0.4:unscaled | quantise:8          what MindSpore Federated does

The first kind suits cohorts of ten and more, whose noise averages out, and clients that are seldom asked, since what
they remember grows old; the second suits few clients that take part in every iteration, and vectors of which most
hardly move.

| step | options |
|---|---|
| ``feedback`` | first; the client remembers what was not sent. Implied by any step that skews the mean |
| ``top_k:SHARE`` | |
| ``random_mask:SHARE`` | ``shared`` (one mask for the round), ``unscaled`` |
| ``rotate`` | |
| ``sketch:SHARE`` | ``rows=R`` |
| ``quantise:BITS`` | ``stochastic``, ``nearest``, ``sign``, ``drive``; ``chunk=N`` |
| ``deflate`` | last |

A body is a mark of the scheme (1 byte), flags (1 byte) and the steps' sections. Nothing else is stated: the server
knows the scheme and D, so a body cannot ask for more memory than that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from federated.compression.errors import BodyRefused, UnsoundScheme
from federated.compression.quantise import CHUNKS, Quantise
from federated.compression.rotation import Rotate
from federated.compression.sections import Section, SectionRule, join, split
from federated.compression.sketch import Sketch
from federated.compression.soundness import require_sound
from federated.compression.sparse import RandomMask, TopK
from federated.compression.step import Dice, Step
from federated.compression.streams import SEED_BITS, Floats, Indices, support

# Sums of squares of a whole chunk stay finite in float32 below it.
MAX_MAGNITUDE = 2.0**50
MAX_DIMENSION = 1 << 31


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of bodies, what the server will decode from them ``[B, D]``, and, with error feedback, what each
    client is to remember once the server has accepted its body ``[B, D]``."""

    bodies: list[bytes]
    decoded: Floats
    residuals: Floats | None


@dataclass(frozen=True, slots=True)
class Scheme:
    """Sound steps in order; see ``make_scheme``. ``shared`` in the methods is a seed of 32 bits that all clients
    of a round know; only ``random_mask:…:shared`` and ``sketch`` use it."""

    steps: tuple[Step, ...]
    feedback: bool
    coded: bool

    def __post_init__(self) -> None:
        require_sound(self.steps, self.feedback, self.coded)

    @property
    def mark(self) -> int:
        """A byte that tells a body of this scheme from most bodies of another."""
        return zlib.crc32(repr((self.steps, self.feedback, self.coded)).encode()) & 0xFF

    @property
    def shared_support(self) -> bool:
        """Whether all clients of a round send the same coordinates as plain numbers, so that sums of bodies are bodies
        of sums: what masks need."""
        return not self.coded and all(isinstance(step, RandomMask) and step.shared for step in self.steps)

    def shared_places(self, dimension: int, shared: int) -> Indices:
        """The coordinates of D that all clients of the round send, ascending ``[W]``. Raises UnsoundScheme unless the
        scheme has a ``shared_support``."""
        if not self.shared_support:
            raise UnsoundScheme("each client sends other coordinates")
        places = np.arange(dimension)
        for step in self.steps:
            places = places[support(shared, len(places), step.width(len(places)))]
        return places

    def most_bytes(self, dimension: int) -> int:
        """The longest body for a vector of D: what a server need accept."""
        return 2 + sum(rule.most + 5 for rule in self._plan(dimension)[1])

    def encode(
        self, vector: Floats, generator: np.random.Generator, residual: Floats | None = None, shared: int = 0
    ) -> tuple[bytes, Floats | None]:
        """The body of ``vector [D]`` and the residual ``[D]`` to keep once the server has accepted it (None without
        error feedback). Until then the old residual stands. Raises ValueError on what is not finite."""
        known = None if residual is None else residual[None]
        encoded = self.encode_batch(vector[None], [generator], known, shared)
        return encoded.bodies[0], None if encoded.residuals is None else encoded.residuals[0]

    def encode_batch(
        self,
        vectors: Floats,
        generators: Sequence[np.random.Generator],
        residuals: Floats | None = None,
        shared: int = 0,
    ) -> Encoded:
        """``vectors [B, D]``, a generator for each; the same bits as one by one. Raises ValueError on what is not
        finite or of the wrong shape."""
        if vectors.ndim != 2 or not len(vectors) or len(generators) != len(vectors):
            raise ValueError(f"{vectors.shape} vectors and {len(generators)} generators: need [B, D] and B")
        if residuals is not None and (not self.feedback or residuals.shape != vectors.shape):
            raise ValueError(f"residuals {residuals.shape} for {vectors.shape}, feedback {self.feedback}")
        wanted = np.ascontiguousarray(vectors, np.float32)
        if residuals is not None:
            wanted = wanted + residuals
        # The negated test also finds NaN.
        if not np.abs(wanted).max() <= MAX_MAGNITUDE:
            raise ValueError(f"a value is NaN or beyond {MAX_MAGNITUDE:.0e}")
        widths, rules = self._plan(wanted.shape[1])
        dice, values, sections = Dice(shared, generators), wanted, list[Section]()
        for step in self.steps:
            values, found = step.encode(values, dice, self.feedback)
            sections += found
        sections.append(Section.of_rows(np.ascontiguousarray(values, "<f4").view(np.uint8)))
        decoded = self._decode(sections, widths, dice)
        head = bytes([self.mark])
        bodies = [head + body for body in join(sections, rules, self.coded)]
        return Encoded(bodies, decoded, wanted - decoded if self.feedback else None)

    def decode(self, body: bytes, dimension: int, shared: int = 0) -> Floats:
        """The vector ``[D]`` that ``body`` stands for, all finite. Raises BodyRefused on any other bytes."""
        widths, rules = self._plan(dimension)
        if body[:1] != bytes([self.mark]):
            raise BodyRefused("the body is not of this scheme")
        sections = split(body[1:], rules, self.coded)
        decoded: Floats = self._decode(sections, widths, Dice(shared))[0]
        return decoded

    def _plan(self, dimension: int) -> tuple[list[int], list[SectionRule]]:
        """How many numbers enter each step and leave the last, and the rules of all sections."""
        if not 1 <= dimension <= MAX_DIMENSION:
            raise ValueError(f"a vector of 1 to {MAX_DIMENSION} numbers, not {dimension}")
        widths, rules = [dimension], list[SectionRule]()
        for step in self.steps:
            rules += step.rules(widths[-1])
            widths.append(step.width(widths[-1]))
        return widths, [*rules, SectionRule(4 * widths[-1], noise=True)]

    def _decode(self, sections: Sequence[Section], widths: Sequence[int], dice: Dice) -> Floats:
        rows = len(sections[-1].ends)
        values = sections[-1].body.view("<f4").astype(np.float32, copy=False).reshape(rows, widths[-1])
        end = len(sections) - 1
        # A peer's numbers may overflow; what comes of it is refused below.
        with np.errstate(over="ignore", invalid="ignore"):
            for step, count in zip(reversed(self.steps), reversed(widths[:-1]), strict=True):
                start = end - len(step.rules(count))
                values = step.decode(values, sections[start:end], count, dice, self.feedback)
                end = start
        if not np.isfinite(values).all():
            raise BodyRefused("a value is not finite")
        return values


def make_scheme(written: str) -> Scheme:
    """The scheme that ``written`` names, as the module describes. Raises UnsoundScheme with the reason."""
    parts = [part.strip() for part in written.replace("|", ",").split(",")]
    feedback = parts[0] == "feedback"
    if feedback:
        parts = parts[1:]
    coded = bool(parts) and parts[-1] == "deflate"
    if coded:
        parts = parts[:-1]
    if "deflate" in parts:
        raise UnsoundScheme("deflate comes last, and once: it makes bytes, and no other step works on bytes")
    if "feedback" in parts:
        raise UnsoundScheme("feedback comes first, and once: the memory is of the whole chain")
    if not parts and not coded:
        raise UnsoundScheme("a scheme needs at least one step")
    steps = tuple(_make_step(part) for part in parts)
    return Scheme(steps, feedback or any(step.skews for step in steps), coded)


def draw_shared(generator: np.random.Generator) -> int:
    """A seed for all clients of a round."""
    return int(generator.integers(1 << SEED_BITS))


def _make_step(part: str) -> Step:
    name, *options = part.split(":")
    maker = _MAKERS.get(name)
    if maker is None:
        raise UnsoundScheme(f"no step {name!r}: there are feedback, {', '.join(_MAKERS)}, deflate")
    try:
        return maker(options)
    except UnsoundScheme:
        raise
    except (ValueError, IndexError) as error:
        raise UnsoundScheme(f"step {part!r}: write it like {_EXAMPLES[name]}") from error


def _top_k(options: Sequence[str]) -> Step:
    (share,) = options
    return TopK(float(share))


def _random_mask(options: Sequence[str]) -> Step:
    flags = set(options[1:])
    if flags - {"shared", "unscaled"}:
        raise ValueError(options)
    return RandomMask(float(options[0]), shared="shared" in flags, scaled="unscaled" not in flags)


def _rotate(options: Sequence[str]) -> Step:
    () = options
    return Rotate()


def _sketch(options: Sequence[str]) -> Step:
    rows = [int(_after("rows=", option)) for option in options[1:]] or [1]
    (count,) = rows
    return Sketch(float(options[0]), count)


def _quantise(options: Sequence[str]) -> Step:
    bits = int(options[0])
    chunks = [int(_after("chunk=", option)) for option in options[1:] if "=" in option]
    roundings = [option for option in options[1:] if "=" not in option]
    (chunk,), (rounding,) = chunks or [CHUNKS.get(bits, 1)], roundings or [""]
    return Quantise(bits, rounding, chunk)


def _after(prefix: str, option: str) -> str:
    if not option.startswith(prefix):
        raise ValueError(option)
    return option.removeprefix(prefix)


_MAKERS: dict[str, Callable[[Sequence[str]], Step]] = {
    "top_k": _top_k,
    "random_mask": _random_mask,
    "rotate": _rotate,
    "sketch": _sketch,
    "quantise": _quantise,
}
_EXAMPLES = {
    "top_k": "top_k:0.05",
    "random_mask": "random_mask:0.4 or random_mask:0.4:shared:unscaled",
    "rotate": "rotate",
    "sketch": "sketch:0.2 or sketch:0.2:rows=5",
    "quantise": "quantise:8, quantise:4:nearest or quantise:1:sign:chunk=1024",
}
