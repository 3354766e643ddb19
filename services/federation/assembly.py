"""From a job's file to the objects that do what it says."""

from __future__ import annotations

from federated.job import FederatedJob
from federated.job_sections import JobRefused
from services.federation.hosted import HostedJob


def assemble_job(job: FederatedJob, key: bytes) -> HostedJob:
    """The job as a server holds it, with its secret ``key``. Raises JobRefused."""
    if job.into.model and not job.data.items:
        raise JobRefused("into needs data.items: `headwater fl serve --job FILE` on a stack takes its items")
    model = job.make_model()
    return HostedJob(
        job.job.name,
        model,
        job.make_strategy(),
        job.training,
        job.make_rounds(model.layout().trained),
        job.make_selection(),
        job.job.seed,
        key,
        job.make_scheme(),
        job.make_grid(model.layout()),
        job.servers.part_bytes,
        job.into,
        job.data.items,
        job.make_protection(model.layout()),
        job.secure_aggregation,
        job.make_masked(model.layout()),
        job.exposure(model.layout().trained),
    )


def require_fits(job: FederatedJob, max_body: int) -> None:
    """Raise JobRefused unless a part of an update fits into what a server takes as one body."""
    if job.servers.part_bytes > max_body:
        raise JobRefused(
            f"servers.part_bytes is {job.servers.part_bytes}, and the servers take bodies of at most {max_body} bytes "
            "(federation.max_body)"
        )
