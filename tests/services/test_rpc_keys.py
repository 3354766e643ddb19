"""``headwater keys`` as people meet it, and a deployment that runs on what it makes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.parameters import DECLARATION, EVERYTHING, make_settings, threads
from support.rpc import until

from services.cli.app import main
from services.coordination.sqlite import SqliteCoordination
from services.parameter_server import AsyncParameterClient, ParameterClient
from services.parameter_server.types import ParametersUnavailable
from services.rpc import KeysError, Security
from services.rpc.keys import create_keys, load_security
from services.settings.model import RpcSettings

Ran = tuple[int, str, str]
Command = Callable[..., Ran]


@pytest.fixture
def keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs ``headwater keys`` in an empty folder: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("HEADWATER")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        printed = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), printed.out, printed.err

    return run


def secrets_in(folder: Path) -> list[str]:
    return [file.read_text().strip() for file in folder.glob("*.secret")]


class TestCommand:
    def test_create_says_what_to_do_next_and_shows_no_secret(self, keys: Command, tmp_path: Path) -> None:
        for arguments in (("create", "a"), ("create", "b", "--format", "json")):
            code, out, err = keys(*arguments)
            folder = tmp_path / arguments[1]
            assert code == 0
            assert len(secrets_in(folder)) == 2
            assert not any(secret in out + err for secret in secrets_in(folder))
            assert (folder / "server.public").read_text().strip() in out
        assert 'rpc.keys = "c"' in keys("create", "c")[1]
        assert json.loads(out).keys() == {"folder", "server", "client"}

    def test_create_refuses_what_is_there(self, keys: Command, tmp_path: Path) -> None:
        keys("create", "a")
        before = secrets_in(tmp_path / "a")
        code, _, err = keys("create", "a")
        assert code == 9
        assert "never overwritten" in err
        assert secrets_in(tmp_path / "a") == before

    def test_a_machine_of_its_own_is_added_listed_and_removed(self, keys: Command, tmp_path: Path) -> None:
        keys("create", "ours")
        server = (tmp_path / "ours" / "server.public").read_text().strip()
        _, out, _ = keys("create", "laptop", "--server", server)
        public = (tmp_path / "laptop" / "client.public").read_text().strip()
        assert f"keys add FOLDER NAME {public}" in out
        assert not (tmp_path / "laptop" / "server.secret").exists()
        assert keys("add", "ours", "laptop", public)[0] == 0
        assert json.loads(keys("list", "ours", "--format", "json")[1])["laptop"] == public
        assert "laptop" in keys("list", "ours")[1]
        assert keys("add", "ours", "again", public)[0] == 9
        assert keys("remove", "ours", "laptop", "--yes")[0] == 0
        assert "laptop" not in keys("list", "ours")[1]
        assert keys("remove", "ours", "laptop", "--yes")[0] == 9

    def test_remove_asks(self, keys: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        keys("create", "ours")
        monkeypatch.setattr("typer.confirm", lambda *_arguments, **_options: False)
        assert keys("remove", "ours", "client")[0] == 12
        assert "client" in keys("list", "ours")[1]

    @pytest.mark.parametrize(
        "arguments",
        [("list", "nowhere"), ("add", "nowhere", "x", "0" * 64), ("create", "x", "--server", "short")],
    )
    def test_what_cannot_be_done_names_the_next_step(self, keys: Command, arguments: tuple[str, ...]) -> None:
        code, out, err = keys(*arguments)
        assert (code, out) == (9, "")
        assert "(9)" in err


@contextmanager
def parameters(folder: Path, security: Security | None, deadline_s: float) -> Iterator[ParameterClient]:
    with (
        closing(SqliteCoordination(folder / "coordination.db")) as store,
        closing(ParameterClient(store, deadline_s=deadline_s, security=security)) as client,
    ):
        yield client


def _established(client: ParameterClient) -> int:
    found = re.search(r"connections_established_total (\d+)", client.metrics()["parameter-server-0"])
    assert found is not None
    return int(found[1])


class TestDeployment:
    def test_parameter_servers_answer_only_who_has_keys(self, tmp_path: Path) -> None:
        folder = tmp_path / "keys"
        chosen = make_settings(tmp_path, servers=2, shards=4).model_copy(
            update={"rpc": RpcSettings(keys=folder, create_keys=True)}
        )
        create_keys(tmp_path / "strange")
        with threads(chosen):
            with parameters(tmp_path, load_security(folder), 20.0) as client:
                client.declare("main", DECLARATION.tables, DECLARATION.fingerprint)
                rows = client.pull("main", EVERYTHING).rows["items"]
                assert rows.shape == (200, 4)
                assert np.isfinite(rows).all()
                until(lambda: _established(client) >= 1)
            for stranger in (None, load_security(tmp_path / "strange")):
                with parameters(tmp_path, stranger, 0.5) as client, pytest.raises(ParametersUnavailable):
                    client.pull("main", EVERYTHING)

    def test_the_asyncio_client_likewise(self, tmp_path: Path) -> None:
        import asyncio

        folder = tmp_path / "keys"
        create_keys(folder)
        chosen = make_settings(tmp_path, servers=1, shards=1).model_copy(
            update={"rpc": RpcSettings(keys=folder)}
        )

        async def pull(security: Security | None, deadline_s: float) -> int:
            with closing(SqliteCoordination(tmp_path / "coordination.db")) as store:
                client = AsyncParameterClient(store, deadline_s=deadline_s, security=security)
                try:
                    return len((await client.pull("main", EVERYTHING)).rows["items"])
                finally:
                    await client.close()

        with threads(chosen):
            with parameters(tmp_path, load_security(folder), 20.0) as client:
                client.declare("main", DECLARATION.tables, DECLARATION.fingerprint)
            assert asyncio.run(pull(load_security(folder), 20.0)) == 200
            with pytest.raises(ParametersUnavailable):
                asyncio.run(pull(None, 0.5))

    def test_a_server_without_its_keys_does_not_start(self, tmp_path: Path) -> None:
        chosen = make_settings(tmp_path, servers=1, shards=1).model_copy(
            update={"rpc": RpcSettings(keys=tmp_path / "nowhere")}
        )
        with pytest.raises(KeysError, match="headwater keys create"), threads(chosen):
            pass


class TestFullQueue:
    """A client that finds its queue to a server full tries again, at random moments."""

    def test_it_is_tried_again_with_jitter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from services.rpc.client import RpcClient
        from services.rpc.errors import QueueFull

        exchange, refused, slept = RpcClient.exchange, [0], list[float]()

        def full_at_first(self: RpcClient, *arguments: object, **options: object) -> object:
            if refused[0] < 3:
                refused[0] += 1
                raise QueueFull("full")
            return exchange(self, *arguments, **options)  # type: ignore[arg-type]

        with (
            threads(make_settings(tmp_path, servers=1, shards=1)),
            closing(SqliteCoordination(tmp_path / "coordination.db")) as store,
            closing(
                ParameterClient(store, deadline_s=20.0, sleep=slept.append, jitter=lambda: 0.5)
            ) as client,
        ):
            client.declare("main", DECLARATION.tables, DECLARATION.fingerprint)
            monkeypatch.setattr(RpcClient, "exchange", full_at_first)
            assert len(client.pull("main", EVERYTHING).rows["items"]) == 200
        assert refused == [3]
        assert slept == pytest.approx([0.015, 0.03, 0.06])
