"""Plays and dialogues as clients: everyone who speaks is one, and learns to continue what it says.

A line begins a speech by ``SPEAKER:`` (with or without words behind it), or by a name in capitals and a full stop
alone on its line, as Project Gutenberg prints plays.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np

from services.datasets.errors import DatasetError
from services.datasets.federations.owned import Owned

_SPEECH: Final = re.compile(r"(?P<name>[^\W\d_][\w .,'’&-]{0,40}):(?:\s+(?P<words>\S.*))?\s*")
_CAPITALS: Final = re.compile(r"(?P<name>[A-Z][A-Z '’-]{1,40})\.\s*")
_MAX_BYTES: Final = 256 * 2**20
_MOST_CHARACTERS: Final = 256
_LEAST_WINDOWS: Final = 10
_HELD_OUT: Final = 0.2


def text_files(path: Path) -> list[Path]:
    """The file itself, or the ``.txt`` files of a folder in order of name."""
    return [path] if path.is_file() else sorted(path.glob("*.txt"))


def speeches(text: str) -> dict[str, str]:
    """What each speaker says in all, speeches joined by a line break; what nobody says is left out."""
    said: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        match = _SPEECH.fullmatch(line) or _CAPITALS.fullmatch(line)
        if match is not None:
            current = said.setdefault(" ".join(match["name"].split()), [])
            words = match.groupdict().get("words")
            if words:
                current.append(words.rstrip())
        elif current is not None and line.strip():
            current.append(line.rstrip())
    return {name: "\n".join(lines) + "\n" for name, lines in said.items() if lines}


def read_text(path: Path, context: int) -> Owned:
    """Windows of ``context`` character numbers [N, context] and the next one [N], by speaker.

    Characters beyond the 255 most frequent share the number 0. The end of what each says is held out, so that no
    character to be guessed was trained on. Speakers with fewer than 10 windows are left out. Raises DatasetError.
    """
    if context < 1:
        raise DatasetError(f"a window holds at least one character, not {context}")
    files = text_files(path)
    if not files:
        raise DatasetError(f"{path} has no .txt file")
    said: dict[str, str] = {}
    for file in files:
        for name, words in speeches(_read(file)).items():
            # The same name in two plays is two people.
            said[name if len(files) == 1 else f"{file.stem}/{name}"] = words
    said = {name: words for name, words in said.items() if len(words) - context >= _LEAST_WINDOWS}
    if not said:
        raise DatasetError(
            f"{path}: nobody says {context + _LEAST_WINDOWS} characters; a speech begins by a line 'SPEAKER:'"
        )
    everything = "".join(said.values())
    frequent = [character for character, _ in Counter(everything).most_common(_MOST_CHARACTERS - 1)]
    # Number 0 is every other character, so a character met later on has one too.
    number = {character: code for code, character in enumerate(sorted(frequent), 1)}
    codes = np.fromiter((number.get(character, 0) for character in everything), np.uint8, len(everything))
    windows = np.lib.stride_tricks.sliding_window_view(codes, context)[:-1]
    owners = np.full(len(windows), -1, np.int64)
    held = np.zeros(len(windows), bool)
    start = 0
    for client, words in enumerate(said.values()):
        count = len(words) - context
        owners[start : start + count] = client
        held[start + count - int(_HELD_OUT * count) : start + count] = True
        start += len(words)
    return Owned(
        path.stem,
        windows,
        codes[context:].astype(np.int64),
        len(number) + 1,
        owners,
        tuple(said),
        held_out=held,
        divisible=False,
        source=str(path),
    )


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DatasetError(f"{path} is larger than {_MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8: {error}; convert it first") from error
