"""``deploy/compose.companies.yml`` and the parties' files, by reading and by what its shell lines make of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from services.vertical.config import ConfigRefused, PartyConfig, load_party
from services.vertical.jobs import find_kind, parse_options
from tests.services import test_compose as base

DEPLOY: Final = base.ROOT / "deploy"
TEXT: Final = (DEPLOY / "compose.companies.yml").read_text(encoding="utf-8")
FILE: Final[Mapping[str, Any]] = yaml.safe_load(TEXT)
EVERY: Final[Mapping[str, Mapping[str, Any]]] = FILE["services"]
COMPANIES: Final = ("bank", "shop")
KEYS: Final = {"BANK_KEY": "0" * 64, "SHOP_KEY": "1" * 64}


def started(name: str, folder: Path, shell: Mapping[str, str]) -> tuple[list[str], Path]:
    """What the container ``name`` runs in the end, and the file that it wrote into ``folder``."""
    words = [*EVERY[name]["entrypoint"], *EVERY[name]["command"]]
    script = words[2].replace("$$", "$").replace("/jobs/", f"{DEPLOY}/companies/")
    script = script.replace("/party/", f"{folder}/").replace("exec headwater", "exec printf '%s\\n'")
    environment = {key: base.interpolated(value, shell) for key, value in EVERY[name]["environment"].items()}
    done = subprocess.run(
        [*words[:2], script, *words[3:]],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split(), folder / "party.toml"


@pytest.fixture
def parties(tmp_path: Path) -> dict[str, PartyConfig]:
    found = {}
    for name in COMPANIES:
        (tmp_path / name).mkdir()
        run, file = started(name, tmp_path / name, KEYS)
        assert run == ["--config", str(file), "fl", "vertical", "party"]
        found[name] = load_party(file)
    return found


def test_the_parties_agree_and_know_each_other(parties: dict[str, PartyConfig]) -> None:
    bank, shop = parties["bank"], parties["shop"]
    assert bank.agreed() == shop.agreed()
    assert (bank.party.name, shop.party.name) == COMPANIES
    assert (bank.peers["shop"].key, shop.peers["bank"].key) == (KEYS["SHOP_KEY"], KEYS["BANK_KEY"])
    kind = find_kind(bank.job.what)
    assert parse_options(kind, bank.job.options) == kind.options()


def test_one_listens_where_the_other_calls(parties: dict[str, PartyConfig]) -> None:
    listen, address = parties["bank"].party.listen, parties["shop"].peers["bank"].address
    assert listen is not None
    assert address == f"bank:{listen.split(':')[1]}"
    assert parties["shop"].party.listen is None


def test_each_has_the_table_that_it_is_given(parties: dict[str, PartyConfig]) -> None:
    script = EVERY["tables"]["entrypoint"][2]
    for name, config in parties.items():
        assert config.data is not None
        assert f"cp /tmp/tables/{config.data.path.name} /{name}/" in script
        assert f"{name}:/{name}" in EVERY["tables"]["volumes"]


def test_without_the_others_key_it_is_told_which(tmp_path: Path) -> None:
    _, file = started("bank", tmp_path, {})
    with pytest.raises(ConfigRefused, match=r"peers\.shop\.key"):
        load_party(file)


def test_nothing_is_shared_and_nothing_published() -> None:
    own = {name: EVERY[name]["volumes"][0] for name in COMPANIES}
    assert own == {name: f"{name}:/party" for name in COMPANIES}
    assert set(FILE["volumes"]) == set(COMPANIES)
    assert not any("ports" in service for service in EVERY.values())
    assert re.search(r"install -d -o headwater .*/party\b", base.TestImage.TEXT)
    assert not re.search(r"[0-9a-f]{64}", TEXT)


@pytest.mark.parametrize("name", EVERY)
def test_it_is_our_image_and_may_do_no_more_than_it_needs(name: str) -> None:
    assert EVERY[name]["image"] == "headwater:dev"
    assert (EVERY[name]["cap_drop"], EVERY[name]["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert set(EVERY[name]["logging"]["options"]) == {"max-size", "max-file"}
    # Whoever was killed goes on; a table is cut once, and only when asked for.
    assert EVERY[name]["restart"] == ("no" if name == "tables" else "on-failure")
    assert ("profiles" in EVERY[name]) == (name == "tables")
