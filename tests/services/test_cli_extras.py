"""A command whose package is not installed says which extra brings it."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
from services.cli.app import main
main(sys.argv[2:])
"""


POISSON = ["--epsilon", "8", "--rounds", "9", "--rate", ".2", "--clients", "99"]


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("dp_accounting", ["fl", "epsilon", *POISSON], "privacy"),
        ("cryptography", ["fl", "registrar", "registrar.key"], "privacy"),
        ("rbcl", ["fl", "psi", "run", "ids.csv", "ids.csv"], "vertical"),
    ],
)  # fmt: skip
def test_a_missing_package_is_told_with_its_extra(
    package: str, command: list[str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ids.csv").write_text("id\nana\nbob\n")
    monkeypatch.chdir(tmp_path)
    ended = subprocess.run([sys.executable, "-c", WITHOUT, package, *command], capture_output=True, text=True)
    assert ended.returncode == 3 or ended.returncode > 0
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr
    assert f"pip install 'headwater[{extra}]'" in ended.stderr
