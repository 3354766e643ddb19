"""Real parameter servers of two and three regions: what is learned in one is served in all."""

from __future__ import annotations

import re
from pathlib import Path

from support.parameters import SOURCE, SPECS
from support.service_process import eventually
from support.sync_regions import Region, gradients, running, same, seen

from services.parameter_server import ModelUnknown, ParameterClient
from services.settings.model import SyncSettings
from sync.pushes import Watermark


class Trainer:
    """Pushes recorded micro-batches, one after the other."""

    def __init__(self, client: ParameterClient) -> None:
        self._client = client
        self.offset = -1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            found = self._client.applied("main", SOURCE)
            offset = self.offset + 1
            self._client.push(
                "main",
                SOURCE,
                offset,
                {shard: min(one.applied, offset - 1) for shard, one in found.items()},
                1_000 + offset,
                Watermark("events", 0, offset, 1_000 + offset),
                gradients(offset),
            )
            self.offset = offset


def counted(client: ParameterClient, pattern: str) -> float:
    """The sum over a region's servers of the metrics that fit ``pattern``."""
    told = "\n".join(client.metrics().values())
    return sum(float(found) for found in re.findall(rf"^{pattern} (\S+)$", told, re.MULTILINE))


def eventually_declared(client: ParameterClient) -> None:
    def known() -> bool:
        try:
            seen(client)
        except ModelUnknown:
            return False
        return True

    eventually(known)


def test_what_is_pushed_at_home_is_served_in_another_region_bit_for_bit(tmp_path: Path) -> None:
    home = Region(tmp_path, "home", 0)
    region = Region(tmp_path, "eu", 1, SyncSettings(upstreams=tuple(home.addresses.values())))
    with running(home, region), home.client() as trainer_client, region.client() as reader:
        trainer_client.declare("main", SPECS, "fp-1")
        trainer = Trainer(trainer_client)
        trainer.step(20)
        eventually_declared(reader)
        same(trainer_client, reader)
        for _ in range(10):
            trainer.step()
            assert same(trainer_client, reader) < 2.0
