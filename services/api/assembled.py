"""What every REST of ours is: a FastAPI app that answers with problem documents and serves its own OpenAPI document."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.api.bodies import json_response
from services.api.documents import Documented, Json
from services.api.problems import Problem


@dataclass(frozen=True)
class Assembled:
    """The ASGI app to serve, and the FastAPI app inside it with its documented types."""

    asgi: ASGIApp
    fastapi: FastAPI
    documented: Documented

    def document(self) -> Json:
        """The OpenAPI document."""
        return self.documented.document(self.fastapi)


def problem_app(title: str, version: str, description: str) -> FastAPI:
    """An app without routes, and without FastAPI's own pages, whose failures are problem documents."""
    app = FastAPI(
        title=title,
        version=version,
        description=description,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(Problem, _answer_problem)
    app.add_exception_handler(HTTPException, _answer_http)
    return app


def serving_document(app: FastAPI, documented: Documented, asgi: ASGIApp) -> Assembled:
    """``app``, whose outermost layer is ``asgi``, with its document at ``/openapi.json``."""
    assembled = Assembled(asgi, app, documented)

    async def openapi(request: Request) -> Response:
        return json_response(assembled.document())

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    return assembled


def rendered(document: Json) -> str:
    """``document`` as text: sorted and indented, so that differences read well."""
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_openapi(document: Json, path: Path) -> bool:
    """Write ``document`` to ``path``; tells whether the file changed."""
    text = rendered(document)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


async def _answer_problem(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return problem.response(request.scope["request_id"])


async def _answer_http(request: Request, error: Exception) -> Response:
    """The router's own refusals."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    response = Problem(code).response(request.scope["request_id"])
    if error.headers and "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
