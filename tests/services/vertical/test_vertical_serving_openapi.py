"""The OpenAPI document of joint inference in the repository is the one that the code describes."""

from __future__ import annotations

import json
from typing import Any, get_args

from services.api.assembled import rendered
from services.vertical.serving.bodies import Outcome
from services.vertical.serving.guest import OUTCOMES
from services.vertical.serving.openapi import PATH, document


def test_the_document_in_the_repository_is_current() -> None:
    assert PATH.read_text(encoding="utf-8") == rendered(document()), (
        "the REST of joint inference changed: run `headwater fl vertical openapi --write` if it was meant to"
    )


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


def test_it_tells_of_problems_keys_and_every_outcome() -> None:
    found = document()
    names = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= names
    predict = found["paths"]["/v1/predictions"]["post"]
    assert {"200", "400", "401", "408", "413", "422", "429", "503"} <= set(predict["responses"])
    assert predict["security"]
    assert set(get_args(Outcome)) == set(OUTCOMES)
    assert set(OUTCOMES) <= set(json.dumps(found).split('"'))
    assert set(found["paths"]) == {"/v1/predictions", "/health/live", "/health/ready", "/metrics"}
