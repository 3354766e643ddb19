"""What `headwater fl vertical check` finds, each with a next step."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cli.app import main
from services.cli.exits import Exit
from services.psi.budget import FileBudget
from services.vertical.checks import Check, check_party
from services.vertical.config import load_party
from services.vertical.keys import load_party_keys, make_party_keys
from services.vertical.network import Network, Peer
from services.vertical.session import Session
from services.vertical.store import StateFolder
from tests.support.vertical import party_files


@pytest.fixture(autouse=True)
def sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_VERTICAL_KINDS", "sums=tests.support.vertical_sums:KIND")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    roles = {"bank": "guest", "shop": "host"}
    return party_files(tmp_path, roles, listening=("bank", "shop"), options={})


def checks(file: Path) -> dict[str, Check]:
    return {one.name: one for one in check_party(load_party(file), answer_s=1.0).checks}


def change(file: Path, pattern: str, text: str) -> None:
    changed, count = re.subn(pattern, text, file.read_text(), count=1)
    assert count == 1
    file.write_text(changed)


@contextmanager
def runs(file: Path) -> Iterator[Session]:
    """The party of ``file`` answers, as its process would before it begins."""
    config = load_party(file)
    me = config.party.name
    session = Session(list(config.peers), config.agreed(), me=me)
    peers = {name: Peer(bytes.fromhex(peer.key), None) for name, peer in config.peers.items()}
    network = Network(session, me, load_party_keys(config.party.keys), peers, config.party.listen)
    try:
        yield session
    finally:
        network.close()


def test_all_is_well_and_the_peers_session_does_not_notice(files: dict[str, Path]) -> None:
    with runs(files["shop"]) as session:
        found = checks(files["bank"])
        assert session.silent_s("bank", 0.0) == float("inf")
    assert {one.result for one in found.values()} == {"PASS"}
    assert found["ids"].detail == "12 different ids"
    assert not (files["bank"].parent / "state").exists()


def test_a_peer_that_does_not_run_yet_may_come(files: dict[str, Path]) -> None:
    found = checks(files["bank"])["peers.shop"]
    assert (found.result, "start shop" in found.step) == ("LATER", True)


def test_a_peer_with_another_key_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    other = make_party_keys(tmp_path / "other").public.hex()
    change(files["bank"], r"(\[peers.shop\]\nrole = .*\nkey = ).*", rf'\1"{other}"')
    with runs(files["shop"]):
        found = checks(files["bank"])["peers.shop"]
    assert found.result == "FAIL"
    assert "compare peers.shop.key with shop's party.public" in found.step


def test_a_peer_that_does_not_know_us_is_named(files: dict[str, Path], tmp_path: Path) -> None:
    other = make_party_keys(tmp_path / "other").public.hex()
    change(files["shop"], r"(\[peers.bank\]\nrole = .*\nkey = ).*", rf'\1"{other}"')
    with runs(files["shop"]):
        found = checks(files["bank"])["peers.shop"]
    assert found.result == "FAIL"
    assert "what shop has for this party" in found.step


def test_something_else_at_a_peers_address_is_named(files: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        change(
            files["bank"],
            r'address = "127.0.0.1:\d+"',
            f'address = "127.0.0.1:{listener.getsockname()[1]}"',
        )
        assert checks(files["bank"])["peers.shop"].result == "FAIL"


def _secret_for_all(folder: Path) -> None:
    (folder / "keys" / "party.secret").chmod(0o644)


def _no_keys(folder: Path) -> None:
    (folder / "keys" / "party.public").unlink()


def _own_key_of_a_peer(folder: Path) -> None:
    own = (folder / "keys" / "party.public").read_text().strip()
    change(folder / "party.toml", r"(\[peers.shop\]\nrole = .*\nkey = ).*", rf'\1"{own}"')


def _no_table(folder: Path) -> None:
    (folder / "rows.csv").unlink()


def _ids_with_control_characters(folder: Path) -> None:
    table = folder / "rows.csv"
    table.write_text(table.read_text().replace("\n3,", "\n3\x01,"))


def _unknown_option(folder: Path) -> None:
    change(folder / "party.toml", r"\[job.options\]", "[job.options]\nturn = 3")


def _folder_for_all(folder: Path) -> None:
    (folder / "kept").mkdir(mode=0o755)
    _psi(folder, 'keep = "kept"')


def _folder_below_a_file(folder: Path) -> None:
    _psi(folder, 'disk = "rows.csv/disk"')


def _spent(folder: Path) -> None:
    _psi(folder, 'keep = "kept"\nmost_ids_of_a_peer = 5')
    config = load_party(folder / "party.toml")
    FileBudget(folder / "kept", 5, {"shop": config.peers["shop"].key}).spend("shop", 5)


def _damaged_count(folder: Path) -> None:
    _spent(folder)
    (folder / "kept" / "asked").write_bytes(b"{}")


def _state_below_a_file(folder: Path) -> None:
    change(folder / "party.toml", r'name = "bank"', 'name = "bank"\nstate = "rows.csv/state"')


def _address_of_nobody(folder: Path) -> None:
    change(folder / "party.toml", r'listen = "[^"]*"', 'listen = "192.0.2.1:7400"')


def _no_brackets(folder: Path) -> None:
    change(folder / "party.toml", r'address = "[^"]*"', 'address = "::1:7400"')


def _psi(folder: Path, text: str) -> None:
    file = folder / "party.toml"
    file.write_text(f"{file.read_text()}[psi]\n{text}\n")


@pytest.mark.parametrize(
    ("breaks", "name", "told"),
    [
        (_secret_for_all, "keys", "open to every user"),
        (_no_keys, "keys", "party.public"),
        (_own_key_of_a_peer, "keys", "this party's own key"),
        (_no_table, "table", "rows.csv"),
        (_ids_with_control_characters, "ids", "holds a control character"),
        (_unknown_option, "job", "did you mean 'turns'"),
        (_folder_for_all, "psi.keep", "readable by others"),
        (_folder_below_a_file, "psi.disk", "no folder that can be written to"),
        (_spent, "psi.most_ids_of_a_peer", "shop may ask 0 more ids"),
        (_damaged_count, "psi.most_ids_of_a_peer", "not known what peers asked"),
        (_state_below_a_file, "state", "no folder that can be written to"),
        (_address_of_nobody, "party.listen", "Cannot assign requested address"),
        (_no_brackets, "peers.shop", "an IPv6 host needs brackets"),
    ],
)
def test_what_is_wrong_is_named_with_a_next_step(
    files: dict[str, Path], breaks: Callable[[Path], None], name: str, told: str
) -> None:
    breaks(files["bank"].parent)
    found = checks(files["bank"])
    assert {one.name for one in found.values() if one.result == "FAIL"} == {name}
    assert found[name].result == "FAIL"
    assert told in found[name].detail
    assert found[name].step


def test_a_port_in_use_is_ours_while_we_run(files: dict[str, Path]) -> None:
    with runs(files["bank"]):
        found = checks(files["bank"])
        assert (found["party.listen"].result, found["state"].result) == ("FAIL", "PASS")
        prepared = check_party(load_party(files["bank"]), answer_s=0.1).prepared
        assert prepared is not None
        store = StateFolder(prepared.folder)
        found = checks(files["bank"])
        store.close()
    assert (found["party.listen"].result, found["state"].result) == ("LATER", "LATER")


def test_the_command(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fl", "vertical", "check", "--config", str(files["bank"])])
    assert end.value.code == Exit.OK
    assert "PASS  keys: public key" in capsys.readouterr().out
    _secret_for_all(files["bank"].parent)
    with pytest.raises(SystemExit) as end:
        main(["fl", "vertical", "check", "--config", str(files["bank"]), "--format", "json"])
    assert end.value.code == Exit.CHECK_FAILED
    (keys,) = [one for one in json.loads(capsys.readouterr().out)["checks"] if one["check"] == "keys"]
    assert keys["result"] == "FAIL"
    assert keys["next"]
