"""A device as it is in the field: a process that has Python, some packages and our `federated`, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
# What is neither Python's own, nor of the packages named first, nor ours cannot be imported.
_BARE = """
import runpy, sys
allowed = set(sys.stdlib_module_names) | {"federated", "__main__", *sys.argv.pop(1).split(",")}
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{name} is not on this device")
sys.meta_path.insert(0, Bare())
sys.argv[0] = "federated.client"
runpy.run_module("federated.client", run_name="__main__")
"""


def bare_device(
    folder: Path,
    client: str,
    urls: Sequence[str],
    rows: tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]],
    *,
    packages: str = "numpy",
) -> subprocess.Popen[bytes]:
    """``client`` of the job "job" at ``urls``, with its own ``rows`` (inputs, labels) and its state in ``folder``."""
    data = folder / f"{client}.npz"
    np.savez(data, inputs=rows[0], labels=rows[1])
    servers = [word for url in urls for word in ("--server", url)]
    return subprocess.Popen(
        [sys.executable, "-c", _BARE, packages, *servers, "--job", "job", "--client", client,
         "--data", str(data), "--state", str(folder / client), "--budget-seconds", "100"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
