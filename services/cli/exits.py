"""The catalogue of exit codes: what ended a command, and what to do about it."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of ``headwater``. Their numbers never change meaning."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    SETTINGS = 3
    NOT_RUNNING = 4
    ALREADY_RUNNING = 5
    NOT_READY = 6
    REFUSED = 7
    DATA_UNAVAILABLE = 8
    BAD_INPUT = 9
    BACKEND_UNAVAILABLE = 10
    NOT_PROCESSED = 11
    DECLINED = 12
    CHECK_FAILED = 13
    ADDRESS_IN_USE = 14
    INTERRUPTED = 130


HELP: dict[Exit, str] = {
    Exit.OK: "The command did what was asked.",
    Exit.UNEXPECTED: "A fault of Headwater's own; the traceback above says where. Please report it.",
    Exit.USAGE: "The command line is wrong; `-h` after any command shows how it is used.",
    Exit.SETTINGS: "A setting is wrong or unknown. The message names it, its origin and what is allowed; "
    "`headwater config show` prints all.",
    Exit.NOT_RUNNING: "Nothing runs that could answer. Start it with `headwater up`, or name it with --url.",
    Exit.ALREADY_RUNNING: "This data folder is in use. Stop its owner with `headwater down`, or choose "
    "another with --set data.dir=FOLDER.",
    Exit.NOT_READY: "A process did not become ready. Its log, below `run/` in the data folder, says why.",
    Exit.REFUSED: "The API refused the request; the message carries its code and the fields that are wrong.",
    Exit.DATA_UNAVAILABLE: "The data set could not be reached or is damaged. Check the network, or import "
    "a folder of your own.",
    Exit.BAD_INPUT: "An input file has wrong rows, named by file and line; nothing was written. Mend them, "
    "or pass --skip-bad.",
    Exit.BACKEND_UNAVAILABLE: "A backend (log, features, coordination) cannot be reached. Check that it runs "
    "and that its address in the settings is right.",
    Exit.NOT_PROCESSED: "What was written has not been processed in time. `headwater status` shows what runs "
    "and how far behind it is.",
    Exit.DECLINED: "You answered no. Nothing was changed; --yes answers in advance.",
    Exit.CHECK_FAILED: "A check failed; the line that says FAIL names it.",
    Exit.ADDRESS_IN_USE: "Another program listens at that address. Stop it, or choose another with "
    "--set api.listen=HOST:PORT or, of `headwater fl serve`, --port (0 lets the system choose).",
    Exit.INTERRUPTED: "Interrupted by Ctrl-C.",
}
