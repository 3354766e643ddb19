"""openmined-psi's ECDH on request, in its own environment (``requirements.lock``).

    python -m benchmarks.peers.psi.openmined

Each line on standard input is a JSON object {"first", "second", "common"}: sizes of both sets and of what they share.
Each line on standard output: the seconds of a whole intersection on one thread, from texts to the common rows, with
the messages written and read as bytes; how many were common; the bytes that travelled. The first set asks, the second
serves, with the elements as they are (``RAW``: no false matches; its filters send less and find ids that are not
there).
"""

from __future__ import annotations

import json
import sys
import time

import private_set_intersection.python as psi

from benchmarks.psi_sets import make_pair


def intersect(first: list[str], second: list[str]) -> tuple[float, int, int]:
    """Seconds, how many are common, bytes."""
    began_s = time.perf_counter()
    asker, server = psi.client.CreateWithNewKey(True), psi.server.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(1e-9, len(first), second, psi.DataStructure.RAW).SerializeToString()
    request = asker.CreateRequest(first).SerializeToString()
    received = psi.Request()
    received.ParseFromString(request)
    response = server.ProcessRequest(received).SerializeToString()
    answer, offered = psi.Response(), psi.ServerSetup()
    answer.ParseFromString(response)
    offered.ParseFromString(setup)
    common = asker.GetIntersection(offered, answer)
    return time.perf_counter() - began_s, len(common), len(setup) + len(request) + len(response)


def main() -> None:
    """Until the end of input."""
    for line in sys.stdin:
        pair = make_pair(**json.loads(line))
        print(json.dumps(intersect(pair.first, pair.second)), flush=True)


if __name__ == "__main__":
    main()
