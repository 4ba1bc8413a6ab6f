"""Jobs of a step's plan, by kind."""

from __future__ import annotations

from s3kv.messages import BucketJob, JobKind, StepPlan


def fetches_of(plan: StepPlan) -> tuple[BucketJob, ...]:
    return tuple(job for job in plan.jobs if job.kind is JobKind.FETCH)


def uploads_of(plan: StepPlan) -> tuple[BucketJob, ...]:
    return tuple(job for job in plan.jobs if job.kind is JobKind.UPLOAD)


def uses_of(plan: StepPlan) -> tuple[BucketJob, ...]:
    return tuple(job for job in plan.jobs if job.kind is JobKind.USE)
