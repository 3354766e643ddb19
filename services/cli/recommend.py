"""``headwater recommend`` over REST, and the API's document."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.context import Options

Url = Annotated[str | None, typer.Option("--url", help="The API's address (or HEADWATER_URL).")]
Key = Annotated[str | None, typer.Option("--key", help="An API key (or HEADWATER_API_KEY).")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("recommend")(recommend)
    app.command("openapi")(openapi)


def recommend(
    context: typer.Context,
    user: Annotated[
        str | None, typer.Argument(help="A user's id; without it, for nobody in particular.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many items.")] = 10,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="Only of these categories.")
    ] = None,
    include_seen: Annotated[bool, typer.Option("--include-seen", help="Also what the user knows.")] = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Ask the running API for recommendations."""
    from services.cli.client import api_of
    from services.cli.output import note, print_json, print_table
    from services.cli.replies import read_recommendations

    options: Options = context.obj
    api = api_of(options.settings(), url, key)
    body: dict[str, object] = {"n": n, "exclude_seen": not include_seen, "include_attributes": ["title"]}
    if user is not None:
        body["user_id"] = user
    if category:
        body["categories"] = category
    answer = api.post("/v1/recommendations", body)
    if options.json:
        print_json(answer)
        return
    reply = read_recommendations(answer)
    rows = [
        (rank, item.title, item.item_id, item.shown_score, item.source, "; ".join(item.reasons))
        for rank, item in enumerate(reply.items, 1)
    ]
    print_table(("", "title", "item", "score", "source", "reasons"), rows)
    note(
        f"model {reply.model_version}, parameters as of {reply.parameters_as_of}, took {reply.took_ms} ms"
        f"{', degraded' if reply.degraded else ''}"
    )


def openapi(
    write: Annotated[
        bool, typer.Option("--write", help="Write it to services/api/openapi.json instead.")
    ] = False,
) -> None:
    """Print the OpenAPI document."""
    from services.api.assembled import rendered, write_openapi
    from services.api.openapi import PATH, document

    if not write:
        print(rendered(document()), end="")
        return
    print(f"{PATH} {'written' if write_openapi(document(), PATH) else 'is as it was'}")
