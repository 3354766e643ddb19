"""What clients of joint inference send and get: the types of the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from services.api.health import Dependency

Outcome = Literal[
    "answered",
    "late",
    "away",
    "not-asked",
    "malformed",
    "unusable",
    "another-model",
    "too-many",
    "busy",
    "refused",
]
_Id = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": 256})]
_Ids = Annotated[
    list[_Id],
    msgspec.Meta(
        description="Ids of the guest's table, at most `serve.most_ids` (1,000 unless set otherwise). White space at"
        " the ends does not count. One may stand several times.",
        extra_json_schema={"minItems": 1},
    ),
]
_Deadline = Annotated[
    int,
    msgspec.Meta(
        description="For the hosts, at most. Without it, and at most, `serve.deadline`.",
        extra_json_schema={"minimum": 1},
    ),
]


class PredictionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A question about ids."""

    ids: _Ids
    deadline_ms: _Deadline | None = None


class Prediction(msgspec.Struct):
    """The answer for one id. ``not_found``: the guest has no such row. ``score``: a probability or a value; ``scores``
    in its place where there are more than two classes. ``degraded``: by the guest's part of the model alone."""

    id: str
    status: Literal["present", "not_found"]
    score: float | msgspec.UnsetType = msgspec.UNSET
    scores: list[float] | msgspec.UnsetType = msgspec.UNSET
    degraded: bool | msgspec.UnsetType = msgspec.UNSET


class Predictions(msgspec.Struct):
    """One prediction for each id asked for, in the order of asking. ``model_version``: the training run. ``degraded``:
    some are by the guest's part alone. ``hosts``: what became of the question to each host."""

    request_id: str
    job: str
    model_version: str
    degraded: bool
    took_ms: float
    hosts: dict[str, Outcome]
    predictions: list[Prediction]


class Live(msgspec.Struct):
    """The process answers."""

    status: Literal["live"] = "live"


class Ready(msgspec.Struct):
    """``ready``: all hosts are reached and have the same model. ``degraded``: some are not, so answers are the guest's
    alone. ``not_ready`` (503): hosts have not been looked at yet."""

    status: Literal["ready", "degraded", "not_ready"]
    job: str
    model_version: str
    dependencies: dict[str, Dependency]
