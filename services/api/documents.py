"""How routes with raw handlers are documented: JSON schemas of msgspec types in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from services.api.problems import MEDIA_TYPE, ProblemDocument

Json = dict[str, Any]
_REF: Final = "#/components/schemas/{name}"
COMMON: Final = ("400", "401", "403", "413", "422", "429", "503")
_WHAT: Final = {
    "400": "Not JSON, or a part is missing, unknown or of the wrong type",
    "401": "No key, or an unknown one",
    "403": "The key lacks the scope",
    "404": "Unknown",
    "409": "The token belongs to an event log that is gone",
    "413": "Too large",
    "422": "A value is out of range or means nothing",
    "429": "Too much is waiting; see Retry-After",
    "503": "A dependency cannot be reached",
}


class Documented:
    """Collects the types that routes speak of, and adds their schemas to the OpenAPI document."""

    def __init__(self) -> None:
        self._types: list[Any] = [ProblemDocument]

    def ref(self, type_: Any) -> Json:
        """A reference to the schema of ``type_``."""
        if type_ not in self._types:
            self._types.append(type_)
        (schema,), _ = msgspec.json.schema_components([type_], ref_template=_REF)
        return schema

    def operation(
        self,
        *,
        takes: Any = None,
        gives: Any = None,
        status: int = 200,
        query: Sequence[Json] = (),
        path: Sequence[str] = (),
        missing: bool = False,
        stale: bool = False,
    ) -> Json:
        """The ``openapi_extra`` of a route: its body, reply, parameters and problems."""
        problems = [code for code in COMMON if code != "413" or takes is not None]
        problems += ["404"] * missing + ["409"] * stale
        responses: Json = {
            code: {"description": _WHAT[code], "content": {MEDIA_TYPE: {"schema": self.ref(ProblemDocument)}}}
            for code in sorted(problems)
        }
        if gives is not None:
            responses[str(status)] = {
                "description": "Done" if status == 200 else "Accepted: durable, applied within moments",
                "content": {"application/json": {"schema": self.ref(gives)}},
            }
        operation: Json = {"responses": dict(sorted(responses.items()))}
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path
        ]
        if parameters or query:
            operation["parameters"] = [*parameters, *query]
        if takes is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": self.ref(takes)}},
            }
        return operation

    def document(self, app: FastAPI) -> Json:
        """The whole OpenAPI document of ``app``."""
        from fastapi.openapi.utils import get_openapi

        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, schemas = msgspec.json.schema_components(self._types, ref_template=_REF)
        components = document.setdefault("components", {})
        components["schemas"] = dict(sorted({**schemas}.items()))
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("200", None) if _only_default(operation) else None
                if path.startswith("/v1/"):
                    operation["security"] = [{"bearer": []}, {"key": []}]
        return document


def _only_default(operation: Json) -> bool:
    """Whether FastAPI put its empty 200 beside the status that the route really answers with."""
    given = operation["responses"].get("200", {})
    succeeds = any(code.startswith("2") and code != "200" for code in operation["responses"])
    return succeeds and given.get("description") == "Successful Response"


def query_parameter(name: str, description: str, schema: Json) -> Json:
    """An optional query parameter."""
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}
