"""What a device agreed to: how a job protects it must not become less behind its back.

Servers tell a device what its job is. A device that was given the job's file compares. Any other goes by what it was
told first, and keeps that in its folder: servers of a job that protected it once, and that name other terms when it
joins again, are refused.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from typing import Final

from federated.client_folder import DeviceFolder
from federated.job import FederatedJob, read_job
from federated.job_sections import JobRefused

_SECTIONS: Final = ("privacy", "secure_aggregation", "rounds")


def require_terms(job: FederatedJob, folder: DeviceFolder, agreed: FederatedJob | None = None) -> None:
    """Raise JobRefused unless ``job``, as the servers tell it, protects this device as the file it ``agreed`` to; None:
    as it did when the device first joined. A server could else leave the masks or the noise out, or name a weaker
    threshold."""
    how, before = "not the one agreed to", folder.agreed()
    if agreed is None and before is not None:
        how = "not the one that this device joined under"
        try:
            agreed = read_job(tomllib.loads(before))
        except (tomllib.TOMLDecodeError, JobRefused) as error:
            raise JobRefused(
                f"what this device agreed to ({folder.place('agreed')}) cannot be read: {error}"
            ) from error
    for section in _SECTIONS if agreed is not None else ():
        theirs, ours = asdict(getattr(job, section)), asdict(getattr(agreed, section))
        others = [
            f"{name} = {value!r} where it was {ours[name]!r}"
            for name, value in theirs.items()
            if value != ours[name]
        ]
        if others:
            raise JobRefused(
                f"the servers' [{section}] is {how}: {', '.join(others)}; whoever agrees to the new one says so by "
                "--agreed and the job's file"
            )


def keep_terms(job: FederatedJob, folder: DeviceFolder) -> None:
    """The device takes part in ``job``: how that protects it is what it goes by from now on."""
    before = folder.agreed()
    protected = job.privacy.mechanism != "none" or job.secure_aggregation.protocol != "none"
    if (protected or before is not None) and job.to_toml() != before:
        folder.keep_agreed(job.to_toml())
