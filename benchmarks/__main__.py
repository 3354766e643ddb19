"""``python -m benchmarks NAME [--quick] [--json]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.report import Row, as_json, print_table

NAMES: Final = {
    "federated": "clients a second, rounds and bytes to an accuracy, uploads a second, federated recommendation",
    "link": "what an emulated link costs by itself, and how well it keeps its delay and its rate",
    "parameters": "rows a second of parameter servers, in process and over loopback, and an epoch of training",
    "pipeline": "events a second and freshness, from POST to visible in recommendations",
    "straggler": "time to a fixed AUC in each training mode, one of four trainers ten times slower",
    "privacy": "what secure aggregation costs beside Flower's, accuracy against epsilon, bytes, accounting",
    "psi": "seconds, bytes and memory of private set intersection, beside openmined-psi's",
    "serve": "requests a second and latency of /v1/recommendations",
    "sync": "how changes are found and reach all regions: what each part is worth, other ways, many replicas",
    "vertical": "joint models beside pooled ones and the guest's alone: quality, seconds, bytes; joint inference",
}
PICTURED: Final = ("federated", "privacy", "sync", "vertical")


def main() -> int:
    """Run one benchmark and print its rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        epilog="\n".join(f"  {name:10} {what}" for name, what in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="end within 60 seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="of federated, privacy, sync and vertical: write the picture as PNG",
    )
    options = parser.parse_args()
    if options.plot is not None and options.name not in PICTURED:
        parser.error(f"{options.name} has no picture")
    run: Callable[..., list[Row]] = importlib.import_module(f"benchmarks.{options.name}").run
    more = {"plot": options.plot} if options.plot is not None else {}
    rows = run(options.quick, Console(stderr=True), **more)
    if options.json:
        json.dump(as_json(options.name, rows), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_table(options.name, rows, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
