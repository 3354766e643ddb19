"""``headwater sync``: how the parameters of other regions reach each region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import typer

from services.cli.context import Options
from services.cli.exits import Exit
from services.cli.failures import CommandFailed
from services.cli.groups import group

if TYPE_CHECKING:
    from services.parameter_server.client.syncs import RegionSync
    from services.parameter_server.syncing.status import StatusReply, UpstreamStatus
    from services.settings.model import Settings

app = group("Show how parameters travel between regions.")
_START = "`headwater up --regions 2` starts two regions; or name the settings of one with --config."
_COLUMNS = (
    "region", "server", "follows", "shards", "behind", "changes", "rate", "rows/s", "round trip", "clock", "faults",
)  # fmt: skip


@app.command("status")
def status(context: typer.Context) -> None:
    """Show, for each region and each address that it follows, how far behind it is and what passes.

    Behind: since everything that the source has was here the last time; a source that has nothing new says so once a
    second; `?` before the first time, and while it does not answer. Changes: what it had still to tell then. Rate,
    rows/s: over the last ten seconds. Clock: the source's before ours. Faults: streams that had to begin anew.

    Second table, each server as a source. Writes: the shards that take pushes here. Not served: shards that nobody
    gives it now. Found by: how it found what a puller lacks: the puller's place in the order of changes (token), a
    copy of what others got (cache), or a look at every row (scan). Rows told: to all pullers since it started.

    Every region that `headwater up` runs here is listed; of one that cannot be asked, `no answer`.
    """
    from services.cli.output import note, print_json, print_table
    from services.parameter_server.syncing.status import to_plain

    options: Options = context.obj
    found = dict(_ask(options.settings()))
    if not any(region.servers for region in found.values()):
        silent = ", ".join(name for region in found.values() for name in region.silent)
        what = f"no answer from {silent}" if silent else "no parameter server runs"
        raise CommandFailed(Exit.NOT_RUNNING, what, _START)
    if options.json:
        regions = [
            {
                "name": name,
                "servers": [to_plain(server) for server in region.servers.values()],
                "silent": list(region.silent),
            }
            for name, region in found.items()
        ]
        print_json({"regions": regions})
        return
    print_table(_COLUMNS, [row for name, region in found.items() for row in _rows(name, region)])
    print()
    columns = (
        "region",
        "server",
        "writes",
        "shards not served",
        "found by token, cache, scan",
        "rows told",
        "pulled by",
    )
    print_table(columns, [row for name, region in found.items() for row in _sources(name, region)])
    for name, region in found.items():
        if region.silent:
            note(f"{name}: no answer from {', '.join(region.silent)}")
        elif not region.servers:
            note(f"{name}: no parameter server runs there now; `headwater status` says why")
        for server in region.servers.values():
            for problem in _problems(server):
                note(f"{name}: {server.server}: {problem}")


def _ask(settings: Settings) -> Iterator[tuple[str, RegionSync]]:
    """Each region with what its servers say: all that ``headwater up`` runs here, else that of the settings."""
    from services.backends import open_coordination, open_security
    from services.cli.output import note
    from services.cli.running import regions_of
    from services.coordination.contract import CoordinationError
    from services.parameter_server.client.directory import SERVICE
    from services.parameter_server.client.syncs import RegionSync, ask_region
    from services.rpc.client import RpcClient
    from services.settings.load import load_settings
    from services.supervisor.folder import RunFolder

    if settings.coordination.backend == "sqlite" and not settings.data.dir.is_dir():
        raise CommandFailed(Exit.NOT_RUNNING, f"nothing runs on {settings.data.dir}", _START)
    folder = RunFolder(settings.data.dir.absolute())
    state = folder.state() if folder.held() else None
    regions: dict[str, Settings | None] = {settings.region.name: settings}
    expected: dict[str, set[str]] = {}
    if state is not None:
        for shown in regions_of(settings, state.children):
            regions.setdefault(shown.name, None)
            if shown.settings is not None:
                regions[shown.name] = load_settings(shown.settings).settings
        for child in state.children:
            if child.service == SERVICE:
                expected.setdefault(child.region, set()).add(child.name)
    with closing(RpcClient(open_security(settings))) as rpc:
        for name, its in regions.items():
            found = RegionSync({}, ())
            if its is not None:
                try:
                    with closing(open_coordination(its)) as store:
                        found = ask_region(store, rpc)
                except CoordinationError as error:
                    if len(regions) == 1:
                        raise
                    note(f"{name}: its coordination store cannot be read: {error}")
            # A server that is gone is registered no more, and is still to be told of.
            silent = {*found.silent, *expected.get(name, set())} - found.servers.keys()
            yield name, RegionSync(found.servers, tuple(sorted(silent)))


def _rows(name: str, region: RegionSync) -> Iterator[tuple[object, ...]]:
    for server in region.servers.values():
        if not server.upstreams:
            yield (name, server.server, "nobody", *[""] * (len(_COLUMNS) - 3))
        for one in server.upstreams:
            yield (name, server.server, _followed(one), *_figures(one))
    for server_name in region.silent or ([] if region.servers else ["none"]):
        yield (name, server_name, "no answer", *[""] * (len(_COLUMNS) - 3))


def _followed(one: UpstreamStatus) -> str:
    return f"{one.region} at {one.address}" if one.region else one.address


def _figures(one: UpstreamStatus) -> tuple[object, ...]:
    from services.cli.parameters import size

    return (
        f"{one.served} of {one.wanted}",
        "?" if one.behind_s is None else f"{one.behind_s:.2f} s",
        f"{one.behind_changes:,}" if one.served else "?",
        f"{size(round(one.bytes_s))}/s",
        f"{one.rows_s:,.0f}",
        f"{one.round_trip_s * 1e3:.0f} ms",
        f"{one.clock_ahead_s * 1e3:+.0f} ms",
        one.faults_total,
    )


def _sources(name: str, region: RegionSync) -> Iterator[tuple[object, ...]]:
    from services.parameter_server.syncing.contests import ranges

    for server in region.servers.values():
        found = [server.found.get(how, 0) for how in ("token", "cache", "scan")]
        total = sum(found) or 1
        ratio = ", ".join(f"{100 * one / total:.1f} %" for one in found) if sum(found) else ""
        unserved = sum(not shard.upstream for shard in server.followed)
        yield (
            name,
            server.server,
            ranges(server.written) or "none",
            unserved or "",
            ratio,
            f"{server.fed_rows_total:,}",
            ", ".join(sorted({one.region for one in server.pullers})) or "nobody",
        )


def _problems(server: StatusReply) -> Iterator[str]:
    from services.parameter_server.syncing.contests import contest, ranges

    if server.refuses:
        yield server.refuses
    for one in server.upstreams:
        if one.contested:
            yield contest(one.contested, server.region, one.region)
        for model in one.unlike:
            yield f"model {model} is declared otherwise in region {one.region}, and not followed"
        if one.last_fault and not one.served and one.wanted:
            yield f"nothing comes from {one.address}: {one.last_fault}"
    unserved: dict[str, list[int]] = {}
    for shard in server.followed:
        if not shard.upstream:
            unserved.setdefault(shard.model, []).append(shard.shard)
    for model, shards in unserved.items():
        yield f"nobody serves {'shard' if len(shards) == 1 else 'shards'} {ranges(sorted(shards))} of {model}"
