"""What a party has in the end, as JSON: the ``columns`` it keeps ``among`` its own, ``tables`` for people, and the
``bins`` of each column.

At the guest a host's column is ``HOST[NUMBER]``, and its bins have neither edges nor an order. At the host the same
column has its name, and that number beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from federated.vertical.binning.columns import Columns, Cut
from federated.vertical.binning.evidence import Evidence
from federated.vertical.binning.telling import Told

TITLE: Final = "Columns by IV"
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def guest_findings(
    names: Sequence[str],
    cuts: Sequence[Sequence[Cut]],
    hosts: Sequence[str],
    values: npt.NDArray[np.float64],
    counts: Sequence[Sequence[Ints]],
    found: Sequence[Sequence[Evidence]],
    chosen: Sequence[Bools],
) -> bytes:
    """``counts``, ``found`` and ``chosen`` by party, the guest first, then ``hosts``. ``values``: classes [C]."""
    classes = [_label(value) for value in values.tolist()]
    weighed = classes[1:] if len(classes) == 2 else classes
    called = [list(names)] + [
        [f"{host}[{place}]" for place in range(len(one))] for host, one in zip(hosts, found[1:], strict=True)
    ]
    rows: list[tuple[float, dict[str, Any]]] = []
    bins: dict[str, list[dict[str, Any]]] = {}
    for party, (columns, tallies, evidence, keeps) in enumerate(
        zip(called, counts, found, chosen, strict=True)
    ):
        for place, (column, tally, one, kept) in enumerate(
            zip(columns, tallies, evidence, keeps.tolist(), strict=True)
        ):
            best = one.best
            row: dict[str, Any] = {"column": column, "bins": len(tally), "iv": float(one.iv[best])}
            row["ks"] = float(one.ks[best])
            if len(weighed) > 1:
                row["best class"] = weighed[best]
            row["kept"] = kept
            rows.append((float(one.iv[best]), row))
            where = _cuts(cuts[place]) if party == 0 else [{} for _ in tally]
            bins[column] = [
                {**cut, "rows": dict(zip(classes, counted, strict=True))}
                | {"woe": dict(zip(weighed, weights, strict=True))}
                for cut, counted, weights in zip(where, tally.tolist(), one.woe.tolist(), strict=True)
            ]
    kept_names = [name for name, kept in zip(names, chosen[0].tolist(), strict=True) if kept]
    return _document(names, kept_names, rows, bins)


def host_findings(names: Sequence[str], columns: Columns, places: Ints, told: Told, me: str) -> bytes:
    """``told`` in this party's own order; ``places``: the columns' numbers at the guest."""
    rows: list[tuple[float, dict[str, Any]]] = []
    bins: dict[str, list[dict[str, Any]]] = {}
    counts, first = columns.rows().tolist(), np.cumsum(columns.bins) - columns.bins
    for place, name in enumerate(names):
        row: dict[str, Any] = {"column": name, "at the guest": f"{me}[{int(places[place])}]"}
        row["bins"] = int(columns.bins[place])
        if len(told.iv):
            row["iv"] = float(told.iv[place])
        row["kept"] = bool(told.kept[place])
        rows.append((row.get("iv", 0.0), row))
        start = int(first[place])
        bins[name] = [
            {**cut, "rows": counts[start + code]}
            | ({"woe": told.woe[start + code].tolist()} if len(told.woe) else {})
            for code, cut in enumerate(_cuts(columns.cuts[place]))
        ]
    kept_names = [name for name, kept in zip(names, told.kept.tolist(), strict=True) if kept]
    return _document(names, kept_names, rows, bins)


def read_findings(body: bytes) -> dict[str, Any]:
    """What a party's result has."""
    found: dict[str, Any] = json.loads(body)
    return found


def _document(
    names: Sequence[str],
    kept: Sequence[str],
    rows: Iterable[tuple[float, Mapping[str, Any]]],
    bins: Mapping[str, Any],
) -> bytes:
    # Of equal value, as the parties have them: sorted() keeps their order.
    table = [row for _, row in sorted(rows, key=lambda one: -one[0])]
    document = {"columns": kept, "among": list(names), "tables": {TITLE: table}, "bins": bins}
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()


def _cuts(cuts: Sequence[Cut]) -> list[dict[str, Any]]:
    return [
        {"missing": True}
        if cut.missing
        else {"after": cut.after, "upto": cut.upto, "with missing": cut.joined}
        for cut in cuts
    ]


def _label(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
