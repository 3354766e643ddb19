"""The OpenAPI document of the repository is the one that the code describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.api import Harness

from services.api.assembled import rendered, write_openapi
from services.api.openapi import PATH, document


def test_the_document_in_the_repository_is_current() -> None:
    assert PATH.read_text(encoding="utf-8") == rendered(document()), (
        "the API changed: run `headwater openapi --write` if it was meant to"
    )


def test_writing_tells_whether_something_changed(tmp_path: Path) -> None:
    path = tmp_path / "openapi.json"
    assert write_openapi({"paths": {}}, path)
    assert not write_openapi({"paths": {}}, path)
    path.write_text("{}")
    assert write_openapi({"paths": {}}, path)


def test_the_server_serves_it(api: Harness) -> None:
    assert api.get("/openapi.json").json() == json.loads(rendered(document()))


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


def test_every_reference_leads_somewhere() -> None:
    found = document()
    names = {f"#/components/schemas/{name}" for name in found["components"]["schemas"]}
    assert references(found) <= names


@pytest.mark.parametrize("method", ["get", "post", "put", "patch", "delete"])
def test_every_operation_is_named_once_and_below_v1_tells_its_problems(method: str) -> None:
    operations = [
        (path, methods[method]) for path, methods in document()["paths"].items() if method in methods
    ]
    names = [operation["operationId"] for _, operation in operations]
    assert operations
    assert len(set(names)) == len(names)
    for path, operation in operations:
        if path.startswith("/v1/"):
            assert {"401", "403"} <= set(operation["responses"])
            assert operation["security"]
