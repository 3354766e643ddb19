"""Secure aggregation between real devices and servers: the sum is that of plain rounds on the same quantised values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.federation import Fleet, ask, create, job, model, reference, servers, wait_for

from federated.job import FederatedJob

CLIENTS = [str(number) for number in range(5)]


def secure_job(protocol: str = "secagg", iterations: int = 2, **sections: dict[str, Any]) -> FederatedJob:
    """A job of five clients whose updates travel under masks."""
    told = {
        "protocol": protocol,
        "dropouts": 0.2,
        "stage_window_s": 20.0,
        **sections.pop("secure_aggregation", {}),
    }
    return job(clients=len(CLIENTS), iterations=iterations, secure_aggregation=told, **sections)


def test_two_servers_learn_the_sum_of_five_devices_and_no_more(tmp_path: Path) -> None:
    made = secure_job(iterations=2)
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        done = Fleet("job", urls, tmp_path / "devices").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}, done
        wait_for(urls[1], phase="finished", valid=2, invalid=0)
        for url in urls:
            np.testing.assert_array_equal(model(url, "job", 2, made), reference(made, CLIENTS, 2))
        rows = ask(urls[0], "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        masked = made.make_masked(made.make_model().layout())
        assert masked is not None
        assert [row["upload_bytes"] for row in rows] == [len(CLIENTS) * masked.plan.masked_bytes] * 2
