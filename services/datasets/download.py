"""Gets MovieLens-100K: from the cache, from GroupLens, or else from inside a wheel of the Python index.

The archive is kept as it was received and checked each time it is read, so a damaged cache is noticed and
fetched anew. Nothing is unpacked to disk, and the wheel is never installed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.datasets.dataset import Dataset
from services.datasets.errors import DatasetDamaged, DatasetUnavailable
from services.datasets.movielens import DIGEST, read_grouplens, read_wheel

GROUPLENS_URL: Final = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
WHEEL: Final = "recbole==1.2.1"
_CONNECT_S: Final = 4.0
_READ_S: Final = 30.0
_PIP_S: Final = 120.0
_MAX_BYTES: Final = 64 * 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """One way to get the archive: how to fetch it, what its checksum must be, how to read it.

    ``fetch`` raises OSError or DatasetUnavailable where the source cannot be reached.
    """

    name: str
    file: str
    checksum: str
    """``algorithm:hex``."""
    fetch: Callable[[], bytes]
    read: Callable[[bytes], Dataset]

    def checked(self, archive: bytes) -> Dataset:
        """The data set in ``archive``. Raises DatasetDamaged if it is not the published one."""
        algorithm, _, expected = self.checksum.partition(":")
        found = hashlib.new(algorithm, archive, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DatasetDamaged(f"{self.file}: {algorithm} is {found}, not {expected}")
        dataset = self.read(archive)
        if dataset.digest() != DIGEST:
            raise DatasetDamaged(f"{self.file}: the records have digest {dataset.digest()}, not {DIGEST}")
        return dataset


def fetch_grouplens() -> bytes:
    """Download GroupLens' archive. Raises DatasetUnavailable."""
    import httpx

    timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
    try:
        with httpx.stream("GET", GROUPLENS_URL, timeout=timeout, follow_redirects=True) as reply:
            reply.raise_for_status()
            body = bytearray()
            for chunk in reply.iter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise DatasetUnavailable(f"{GROUPLENS_URL} sent more than {_MAX_BYTES} bytes")
            return bytes(body)
    except httpx.HTTPError as error:
        raise DatasetUnavailable(f"{GROUPLENS_URL}: {error or type(error).__name__}") from error


def fetch_wheel() -> bytes:
    """Let pip download the wheel without installing it. Raises DatasetUnavailable."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        options = ("--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--no-input")
        command = [sys.executable, "-m", "pip", "download", *options, "-d", folder, WHEEL]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise DatasetUnavailable(f"pip did not get {WHEEL} within {_PIP_S:g} s") from error
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise DatasetUnavailable(f"pip did not get {WHEEL}: {lines[-1]}")
        return wheels[0].read_bytes()


SOURCES: Final[tuple[Source, ...]] = (
    # GroupLens publishes an MD5; the records are then held against the SHA-256 of their canonical form.
    Source(
        "GroupLens", "ml-100k.zip", "md5:0e33842e24a9c977be4e0107933c0723", fetch_grouplens, read_grouplens
    ),
    Source(
        "the wheel of recbole 1.2.1",
        "recbole-1.2.1-py3-none-any.whl",
        "sha256:9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
        fetch_wheel,
        read_wheel,
    ),
)


def user_cache(environ: Mapping[str, str]) -> Path:
    """Where this user's downloads are kept: ``$XDG_CACHE_HOME/headwater``, or ``~/.cache/headwater``."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "headwater"


def obtain_movielens(cache: Path, sources: Sequence[Source] = SOURCES) -> Dataset:
    """MovieLens-100K from ``cache``, or else from the first source that has it, which is then cached.

    Raises DatasetUnavailable naming each source's reason.
    """
    for source in sources:
        found = _cached(cache, source)
        if found is not None:
            return found
    reasons: list[str] = []
    for source in sources:
        try:
            archive = source.fetch()
            dataset = source.checked(archive)
        except (OSError, DatasetDamaged, DatasetUnavailable) as error:
            reasons.append(f"{source.name}: {error}")
            continue
        _keep(cache / source.file, archive)
        return dataset
    raise DatasetUnavailable(
        "MovieLens-100K cannot be had:\n" + "\n".join(f"  {reason}" for reason in reasons)
    )


def _cached(cache: Path, source: Source) -> Dataset | None:
    path = cache / source.file
    try:
        return source.checked(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, DatasetDamaged) as error:
        log.warning("the cached %s is of no use (%s) and is fetched anew", path, error)
        return None


def _keep(path: Path, archive: bytes) -> None:
    """Write so that a reader sees the whole file or none. A cache that cannot be written is no failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(archive)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("%s cannot be cached: %s", path.name, error)
