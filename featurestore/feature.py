"""One declared feature: where its value comes from, how it is encoded, and which values it accepts.

Exceptions::

    SchemaError              a schema, or a name looked up in one, is wrong (defined here)
    └── SchemaMismatch       two parties encode by different schemas (``schema.py``)
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["categorical", "number", "list", "counter"]
Transform = Literal["none", "log1p"]
Default = str | float | tuple[str, ...] | None

ENTITIES: Final = ("user", "item", "context")
KINDS: Final = ("categorical", "number", "list", "counter")
TRANSFORMS: Final = ("none", "log1p")
ID_SOURCE: Final = "@id"
"""As a feature's source: the entity's own id, whatever its attributes."""
MAX_TEXT_BYTES: Final = 4_096
MAX_LIST_VALUES: Final = 1_024
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


class SchemaError(Exception):
    """A schema is not usable, or something was looked up that it does not declare."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word closest to ``word``, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of one entity, declared once for everyone who encodes it.

    - ``categorical``: one value, hashed to a key under the feature's key space. With ``buckets`` [B]
      (ascending), the attribute is a number and its bucket out of B + 1 is the value.
    - ``number``: standardised as ``(transform(value) - mean) / std``.
    - ``list``: several categorical values, the last ``max_values`` of them, pooled by the model.
    - ``counter``: an exponentially decayed count of likes with a half-life in seconds (0: never decays),
      kept by the processor; transformed and standardised like a number.

    ``source`` names the attribute to read (the feature's own name if None). ``table`` names another
    feature whose key space is used, so that both look up the same embedding. ``ttl_s`` 0 means for ever.
    A ``default`` of None stands for the mean, the empty text or the empty list. ``managed`` features are
    computed here and refused from clients. Raises SchemaError naming the key, its value and what is legal.
    """

    entity: str
    name: str
    kind: Kind
    default: Default = None
    ttl_s: float = 0.0
    table: str | None = None
    mean: float = 0.0
    std: float = 1.0
    transform: Transform = "none"
    source: str | None = None
    buckets: tuple[float, ...] = ()
    half_life_s: float = 0.0
    max_values: int = 64
    managed: bool = False

    def __post_init__(self) -> None:
        self._check_words()
        self._check_quantities()
        self._check_kind()

    @property
    def attribute(self) -> str:
        """The attribute that the value is read from."""
        return self.source or self.name

    @property
    def key_space(self) -> str:
        """The name that values are hashed under."""
        return self.table or self.name

    @property
    def is_numeric(self) -> bool:
        return self.kind in ("number", "counter")

    def _fail(self, key: str, value: object, legal: str) -> SchemaError:
        return SchemaError(f"{self.entity}.{self.name}: {key} = {value!r} {legal}")

    def _check_words(self) -> None:
        legal = "must start with a letter and have at most 64 letters, digits or _ . -"
        if self.entity not in ENTITIES:
            raise self._fail("entity", self.entity, f"is not one of {', '.join(ENTITIES)}")
        if not _NAME.fullmatch(self.name):
            raise self._fail("name", self.name, legal)
        if self.source not in (None, ID_SOURCE) and not _NAME.fullmatch(str(self.source)):
            raise self._fail("source", self.source, legal)
        choices: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("kind", self.kind, KINDS),
            ("transform", self.transform, TRANSFORMS),
        )
        for key, word, words in choices:
            if word not in words:
                raise self._fail(key, word, f"is not one of {', '.join(words)}{suggestion(word, words)}")

    def _check_quantities(self) -> None:
        if not math.isfinite(self.mean):
            raise self._fail("mean", self.mean, "must be finite")
        if not (math.isfinite(self.std) and self.std > 0):
            raise self._fail("std", self.std, "must be finite and above 0")
        for key, seconds in (("ttl", self.ttl_s), ("half_life", self.half_life_s)):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise self._fail(key, seconds, "must be finite and at least 0 seconds")
        if not 1 <= self.max_values <= MAX_LIST_VALUES:
            raise self._fail("max_values", self.max_values, f"must lie in 1..{MAX_LIST_VALUES}")
        ascending = all(a < b for a, b in zip(self.buckets, self.buckets[1:], strict=False))
        if not ascending or not all(map(math.isfinite, self.buckets)):
            raise self._fail("buckets", list(self.buckets), "must be finite and ascending")

    def _check_kind(self) -> None:
        keyed = self.kind in ("categorical", "list")
        if self.buckets and self.kind != "categorical":
            raise self._fail("buckets", list(self.buckets), "only suit a categorical feature")
        if self.table is not None and not keyed:
            raise self._fail("table", self.table, "only suits a categorical or list feature")
        if keyed and (self.transform, self.mean, self.std) != ("none", 0.0, 1.0):
            raise self._fail("transform", self.transform, "and mean, std only suit a number or counter")
        if self.half_life_s and self.kind != "counter":
            raise self._fail("half_life", self.half_life_s, "only suits a counter")
        if self.source == ID_SOURCE and (self.kind != "categorical" or self.buckets):
            raise self._fail("source", self.source, "only suits a categorical feature without buckets")
        legal: dict[str, tuple[type, ...]] = {
            "categorical": (str,),
            "number": (int, float),
            "list": (tuple,),
            "counter": (),
        }
        if self.default is not None and not isinstance(self.default, legal[self.kind]):
            raise self._fail("default", self.default, f"does not suit a {self.kind}")
        if isinstance(self.default, int | float) and not math.isfinite(self.default):
            raise self._fail("default", self.default, "must be finite")


def value_problems(feature: Feature | None, value: object) -> list[tuple[str, str]]:
    """What is wrong with ``value`` as the attribute of ``feature`` (None: of no declared feature).

    Returns (path below the attribute, message) pairs: ``("", ...)`` or ``("[2]", ...)``.
    """
    if value is None:
        return []
    if feature is None:
        return _list_problems(value) if isinstance(value, list) else _scalar_problems(value)
    if feature.kind == "number" or feature.buckets:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return [("", f"must be a number, not {_kind_of(value)}")]
        return _scalar_problems(value)
    if feature.kind == "list":
        if not isinstance(value, list):
            return [("", f"must be a list of texts, not {_kind_of(value)}")]
        return _list_problems(value)
    if isinstance(value, list | dict):
        return [("", f"must be one text, number or true/false, not {_kind_of(value)}")]
    return _scalar_problems(value)


def _kind_of(value: object) -> str:
    names: dict[type, str] = {
        str: "a text", bool: "true/false", int: "a number", float: "a number",
        list: "a list", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def _scalar_problems(value: object) -> list[tuple[str, str]]:
    match value:
        case bool():
            return []
        case str():
            if len(value) > MAX_TEXT_BYTES or len(value.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
                return [("", f"is longer than {MAX_TEXT_BYTES} bytes")]
            return [("", "is not valid Unicode")] if any("\ud800" <= c <= "\udfff" for c in value) else []
        case int():
            return [] if -(2**63) <= value < 2**63 else [("", "does not fit 64 bits")]
        case float():
            return [] if math.isfinite(value) else [("", "must be a finite number")]
        case _:
            return [("", f"must be a text, a number, true/false or a list of these, not {_kind_of(value)}")]


def _list_problems(values: list[object]) -> list[tuple[str, str]]:
    if len(values) > MAX_LIST_VALUES:
        return [("", f"has {len(values)} values, more than {MAX_LIST_VALUES}")]
    problems = []
    for n, value in enumerate(values):
        if value is None or isinstance(value, bool | list | dict):
            problems.append((f"[{n}]", f"must be a text or a number, not {_kind_of(value)}"))
        else:
            problems.extend((f"[{n}]{path}", message) for path, message in _scalar_problems(value))
    if not problems and len({str if isinstance(value, str) else float for value in values}) > 1:
        return [("", "mixes texts and numbers")]
    return problems
