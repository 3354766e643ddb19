"""One intersection by openmined-psi in this process: both parties in turn, on one thread.

    python intersect.py CLIENT_IDS SERVER_IDS COMMON     prints {"seconds", "cpu_seconds", "found", "bytes"}

The client's ids are user-0 on, the server's overlap with the last COMMON of them. Its Diffie-Hellman is on P-256; the
server's set travels as a Golomb-coded filter with a false positive rate of 1e-9.
"""

from __future__ import annotations

import json
import sys
import time

import private_set_intersection.python as psi

FALSE_POSITIVES = 1e-9


def main() -> None:
    """Run once, print one object."""
    clients, servers, common = (int(argument) for argument in sys.argv[1:])
    mine = [f"user-{at}" for at in range(clients)]
    theirs = [f"user-{at}" for at in range(clients - common, clients - common + servers)]
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    client, server = psi.client.CreateWithNewKey(True), psi.server.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(FALSE_POSITIVES, clients, theirs, psi.DataStructure.GCS)
    request = client.CreateRequest(mine)
    response = server.ProcessRequest(request)
    found = client.GetIntersection(setup, response)
    figures = {
        "seconds": time.perf_counter() - began_s,
        "cpu_seconds": time.process_time() - cpu_began_s,
        "found": len(found),
        "bytes": sum(one.ByteSize() for one in (setup, request, response)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
