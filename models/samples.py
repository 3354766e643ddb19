"""Micro-batches of training samples: their form in memory and on the samples topic.

One message of the topic is one micro-batch is one training step. Its bytes are a format byte, then
safetensors: the arrays, and in the metadata what is not an array.

Exceptions::

    SampleFormatError    the bytes (or arrays) are not a micro-batch that this version reads
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from featurestore.encoded import Encoded, Ragged

FORMAT: Final = b"\x01"
MAX_SAMPLES: Final = 65_536
MAX_NEGATIVES: Final = 4_096
MAX_LISTS: Final = 64

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[np.generic]]


class SampleFormatError(ValueError):
    """The data is not a micro-batch of a format that this version reads."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """Up to which event the work went: a position in the events log and when it was accepted (Unix ms)."""

    log: str
    partition: int
    offset: int
    accepted_at_ms: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B samples of one partition, each with K negatives. B may be 0: then only the watermark counts.

    Shapes: users ``[B]``, items ``[M]`` (each item of the batch once), positive ``[B]`` and negatives
    ``[B, K]`` indices into items, log_q ``[B, K + 1]`` the log of the rate at which sampling proposes each
    candidate (column 0: the positive; +inf marks a negative to be left out), label ``[B]`` 1 liked or 0 not
    liked, weight ``[B]`` at least 0 (0: worked like any other, and nothing is learned from it), event_time_ms ``[B]``
    Unix ms. ``marked``: there is a probe among the events, by which freshness is measured.

    Raises SampleFormatError on construction where shapes, index ranges or values do not fit.
    """

    users: Encoded
    items: Encoded
    positive: Ints
    negatives: Ints
    log_q: Floats
    label: Floats
    weight: Floats
    event_time_ms: Longs
    watermark: Watermark
    model: str
    fingerprint: str
    marked: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.positive)

    def take(self, samples: npt.NDArray[np.integer]) -> MicroBatch:
        """The micro-batch of some of its samples, with the items that they use."""
        used, index = np.unique(
            np.concatenate([self.positive[samples, None], self.negatives[samples]], axis=1),
            return_inverse=True,
        )
        index = index.reshape(len(samples), 1 + self.negatives.shape[1])
        return MicroBatch(
            self.users.take(samples),
            self.items.take(used),
            index[:, 0].astype(np.int32),
            index[:, 1:].astype(np.int32),
            self.log_q[samples],
            self.label[samples],
            self.weight[samples],
            self.event_time_ms[samples],
            self.watermark,
            self.model,
            self.fingerprint,
            self.marked,
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise SampleFormatError(message)


def _check_encoded(name: str, encoded: Encoded) -> None:
    rows = len(encoded.categorical)
    _require(encoded.categorical.ndim == 2, f"{name}: categorical keys have two axes")
    _require(encoded.categorical.dtype == np.uint64, f"{name}: categorical keys are uint64")
    _require(encoded.numeric.ndim == 2 and len(encoded.numeric) == rows, f"{name}: numbers [{rows}, D]")
    _require(encoded.numeric.dtype == np.float32, f"{name}: numbers are float32")
    _require(bool(np.isfinite(encoded.numeric).all()), f"{name}: numbers are finite")
    for ragged in encoded.lists:
        offsets = ragged.offsets
        _require(ragged.values.ndim == 1, f"{name}: list keys have one axis")
        _require(ragged.values.dtype == np.uint64, f"{name}: list keys are uint64")
        _require(offsets.shape == (rows + 1,) and offsets.dtype == np.int64, f"{name}: offsets [{rows + 1}]")
        _require(
            offsets[0] == 0 and offsets[-1] == len(ragged.values) and bool((np.diff(offsets) >= 0).all()),
            f"{name}: offsets ascend from 0 to the number of values",
        )


def _check(batch: MicroBatch) -> None:
    _require(batch.positive.ndim == 1 and batch.negatives.ndim == 2, "positive [B], negatives [B, K]")
    samples, drawn = batch.negatives.shape
    _require(samples <= MAX_SAMPLES, f"at most {MAX_SAMPLES} samples, not {samples}")
    _require(drawn <= MAX_NEGATIVES, f"at most {MAX_NEGATIVES} negatives, not {drawn}")
    _check_encoded("users", batch.users)
    _check_encoded("items", batch.items)
    _require(len(batch.users) == samples, f"{len(batch.users)} users for {samples} samples")
    columns: dict[str, tuple[npt.NDArray[np.generic], tuple[int, ...], type[np.generic]]] = {
        "positive": (batch.positive, (samples,), np.int32),
        "negatives": (batch.negatives, (samples, drawn), np.int32),
        "log_q": (batch.log_q, (samples, drawn + 1), np.float32),
        "label": (batch.label, (samples,), np.float32),
        "weight": (batch.weight, (samples,), np.float32),
        "event_time_ms": (batch.event_time_ms, (samples,), np.int64),
    }
    for name, (array, shape, dtype) in columns.items():
        _require(array.shape == shape, f"{name} has shape {array.shape}, not {shape}")
        _require(array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}")
    for name, index in (("positive", batch.positive), ("negatives", batch.negatives)):
        inside = index.size == 0 or (int(index.min()) >= 0 and int(index.max()) < len(batch.items))
        _require(inside, f"{name} points outside the {len(batch.items)} items")
    _require(bool(np.isfinite(batch.log_q[:, 0]).all()), "log_q of a positive is finite")
    _require(bool((batch.log_q > -np.inf).all()), "log_q is a number or +inf")
    _require(bool(((batch.label == 0) | (batch.label == 1)).all()), "label is 0 or 1")
    _require(bool(((batch.weight >= 0) & (batch.weight < np.inf)).all()), "weight is finite, at least 0")
    _require(batch.watermark.partition >= 0 and batch.watermark.offset >= -1, "watermark is a position")


def _encoded_arrays(name: str, encoded: Encoded) -> dict[str, npt.NDArray[np.generic]]:
    arrays: dict[str, npt.NDArray[np.generic]] = {
        f"{name}.categorical": encoded.categorical,
        f"{name}.numeric": encoded.numeric,
    }
    for number, ragged in enumerate(encoded.lists):
        arrays[f"{name}.list{number}.values"] = ragged.values
        arrays[f"{name}.list{number}.offsets"] = ragged.offsets
    return arrays


def encode_batch(batch: MicroBatch) -> bytes:
    """The topic's form of ``batch``."""
    arrays = {
        **_encoded_arrays("users", batch.users),
        **_encoded_arrays("items", batch.items),
        "positive": batch.positive,
        "negatives": batch.negatives,
        "log_q": batch.log_q,
        "label": batch.label,
        "weight": batch.weight,
        "event_time_ms": batch.event_time_ms,
    }
    metadata = {
        "watermark": json.dumps(asdict(batch.watermark)),
        "model": batch.model,
        "fingerprint": batch.fingerprint,
        "lists": f"{len(batch.users.lists)} {len(batch.items.lists)}",
        **({"marked": "1"} if batch.marked else {}),
    }
    return FORMAT + save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, metadata)


def _metadata(body: bytes) -> dict[str, str]:
    """The free-text part of a safetensors header, which the library's reader of bytes leaves out."""
    length = int.from_bytes(body[:8], "little")
    metadata: dict[str, str] = json.loads(body[8 : 8 + length])["__metadata__"]
    return metadata


def _decode_encoded(name: str, lists: int, arrays: Arrays) -> Encoded:
    # Dtypes are proved by the checks of MicroBatch; `astype` without a copy only narrows the static type.
    ragged = tuple(
        Ragged(
            arrays[f"{name}.list{number}.values"].astype(np.uint64, casting="no", copy=False),
            arrays[f"{name}.list{number}.offsets"].astype(np.int64, casting="no", copy=False),
        )
        for number in range(lists)
    )
    return Encoded(
        arrays[f"{name}.categorical"].astype(np.uint64, casting="no", copy=False),
        arrays[f"{name}.numeric"].astype(np.float32, casting="no", copy=False),
        ragged,
    )


def _decode(body: bytes) -> MicroBatch:
    arrays: Arrays = load(body)
    metadata = _metadata(body)
    user_lists, item_lists = (min(int(count), MAX_LISTS) for count in metadata["lists"].split())
    return MicroBatch(
        users=_decode_encoded("users", user_lists, arrays),
        items=_decode_encoded("items", item_lists, arrays),
        positive=arrays["positive"].astype(np.int32, casting="no", copy=False),
        negatives=arrays["negatives"].astype(np.int32, casting="no", copy=False),
        log_q=arrays["log_q"].astype(np.float32, casting="no", copy=False),
        label=arrays["label"].astype(np.float32, casting="no", copy=False),
        weight=arrays["weight"].astype(np.float32, casting="no", copy=False),
        event_time_ms=arrays["event_time_ms"].astype(np.int64, casting="no", copy=False),
        watermark=Watermark(**json.loads(metadata["watermark"])),
        model=metadata["model"],
        fingerprint=metadata["fingerprint"],
        marked="marked" in metadata,
    )


def decode_batch(data: bytes) -> MicroBatch:
    """Read the topic's form back; its arrays are fresh and writable. Raises SampleFormatError."""
    if data[:1] != FORMAT:
        raise SampleFormatError(f"unknown sample format {data[:1].hex() or 'empty'}; this version reads 01")
    try:
        return _decode(data[1:])
    except SampleFormatError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise SampleFormatError(f"not a micro-batch: {error}") from error
