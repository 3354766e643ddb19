"""What a report's figures alone do not say aloud: a joint model that does not pay, measures on too few rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

HELD_OUT: Final = "held-out rows"
FEW_ROWS: Final = 100
"""On fewer an AUC moves by several hundredths from one draw of rows to the next."""
CLEARLY: Final = 0.01
"""By how much a measure has to be worse to be worth a remark; of errors, a part of them."""
_HIGHER_IS_BETTER: Final = ("auc", "accuracy")
_LOWER_IS_BETTER: Final = ("rmse",)


def remarks(parties: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of the parties' own reports, by name, in sentences."""
    for name, one in parties.items():
        figures: Mapping[str, Any] = one["figures"]
        measured = any(figure.startswith("test ") for figure in figures)
        rows = figures.get(HELD_OUT)
        if measured and isinstance(rows, int) and 0 < rows < FEW_ROWS:
            yield (
                f"{rows} held-out rows: measures on so few say little; give more joint rows, or hold out a larger part"
            )
        if (worse := _below_alone(figures, one.get("alone", {}))) is not None:
            measure, model, joint, alone = worse
            yield (
                f"joint is worse than {name} alone, {model} ({measure} {joint:.4f} against {alone:.4f}): the other "
                "parties' columns, or the way they are learned from, do not pay here"
            )


def _below_alone(
    figures: Mapping[str, Any], alone: Mapping[str, Mapping[str, float]]
) -> tuple[str, str, float, float] | None:
    """Measure, model, joint and alone of the party's own best model, where that one is clearly better."""
    for measure in (*_HIGHER_IS_BETTER, *_LOWER_IS_BETTER):
        joint = figures.get(f"test {measure}")
        own = {model: values[measure] for model, values in alone.items() if measure in values}
        if joint is None or not own:
            continue
        lower = measure in _LOWER_IS_BETTER
        model = (min if lower else max)(own, key=lambda one: own[one])
        worse = own[model] < joint * (1 - CLEARLY) if lower else own[model] > joint + CLEARLY
        return (measure, model, float(joint), own[model]) if worse else None
    return None
