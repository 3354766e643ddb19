"""Models by name, as a job's file names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from federated.models.model import Model
from federated.models.perceptron import Perceptron, softmax_regression
from federated.models.text import NextCharacter


def _perceptron(features: int, classes: int, hidden: int | Sequence[int] = (64,)) -> Model:
    widths = hidden if isinstance(hidden, (list, tuple)) else (hidden,)
    return Perceptron(features, tuple(_whole("hidden", width) for width in widths), classes)


def _softmax(features: int, classes: int) -> Model:
    return softmax_regression(features, classes)


def _text(features: int, classes: int, embedding: int = 8, hidden: int = 64) -> Model:
    return NextCharacter(classes, features, _whole("embedding", embedding), _whole("hidden", hidden))


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return value


def _items(features: int, classes: int, **options: Any) -> Model:
    # Recommendation builds on models: imported where it is asked for.
    from federated.recommendation.model import item_table

    if features != classes:
        raise ValueError(f"model items has a column for each of its {classes} items, not {features}")
    return item_table(classes, **options)


MODELS: dict[str, Callable[..., Model]] = {
    "perceptron": _perceptron,
    "softmax": _softmax,
    "text": _text,
    "items": _items,
}


def make_model(name: str, *, features: int, classes: int, **options: object) -> Model:
    """The model ``name`` for rows of F features (for text: of F characters) and C classes (characters; items).

    ``options`` are the model's own: ``hidden`` (a width, or several for a perceptron), ``embedding``; of items ``dim``
    and what else ``recommendation.model.item_table`` takes. Raises ValueError for an unknown name or option.
    """
    if name not in MODELS:
        raise ValueError(f"model {name!r} is none of {', '.join(sorted(MODELS))}")
    try:
        return MODELS[name](features=features, classes=classes, **options)
    except TypeError as error:
        raise ValueError(f"model {name}: {error}") from error
