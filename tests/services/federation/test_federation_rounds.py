"""Real servers and devices: the same bits as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.federation import Fleet, ask, create, job, model, reference, servers, wait_for

CLIENTS = [str(number) for number in range(4)]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"strategy": {"name": "fedadam"}, "compression": {"upload": "top_k:0.2,quantise:1,deflate"}},
        {"strategy": {"name": "scaffold", "population": 4}},
        {"compression": {"upload": "quantise:4,deflate", "download_bits": 8}},
    ],
    ids=["fedavg", "fedadam, compressed", "scaffold", "compressed both ways"],
)
def test_two_servers_and_their_devices_give_the_bits_of_one_process(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    made = job(iterations=3, **sections)
    with servers(tmp_path, 2) as running:
        urls = [url for _, url in running]
        create(urls[0], made)
        done = Fleet("job", urls, tmp_path / "devices").run(CLIENTS)
        assert {end.why for end in done.values()} == {"finished"}
        found = wait_for(urls[1], phase="finished")
        assert (found["valid"], found["invalid"], found["version"]) == (3, 0, 3)
        rounds = ask(urls[1], "GET", "/v1/fl/jobs/job/rounds")["rounds"]
        assert [row["uploads"] for row in rounds] == [4, 4, 4]
        for url in urls:
            np.testing.assert_array_equal(model(url, "job", 3, made), reference(made, CLIENTS, 3))
