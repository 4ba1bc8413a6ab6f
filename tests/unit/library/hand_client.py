"""An I/O client whose jobs end when a test says so: no process, no bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.tier import Tier, introduce
from s3kv.messages import BucketJob, JobEnd
from s3kv.types import Outcome


@dataclass
class HandClient:
    """sent: the jobs under way, by id."""

    sent: dict[int, BucketJob] = field(default_factory=dict)
    ended: list[JobEnd] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def submit(self, job: BucketJob) -> None:
        self.sent[job.job_id] = job

    def cancel(self, job_id: int) -> None:
        self.end(job_id, Outcome.CANCELLED)

    def flush(self) -> None:
        self.told.append("flush")

    def poll(self) -> list[JobEnd]:
        ended, self.ended = self.ended, []
        return ended

    def drain(self, timeout_s: float) -> int:
        self.told.append(f"drain {timeout_s:g}")
        for job_id in list(self.sent):
            self.end(job_id, Outcome.CANCELLED)
        return 0

    def close(self) -> None:
        self.told.append("close")

    def end(self, job_id: int, outcome: Outcome, nbytes: int = 0, **more: Any) -> None:
        """End a job; the next poll tells of it."""
        if job_id in self.sent:
            self.ended.append(JobEnd(job_id, self.sent.pop(job_id).kind, outcome, nbytes, **more))


def tier_of(client: HandClient, nbytes: int, **settings: Any) -> Tier:
    config = Config(bucket="bkt", **settings)
    handshake = introduce(config, {"model": "test"}, "encoder", item_dtype="BF16")
    return Tier(handshake, Slab.create(nbytes), cast(IoClient, client), None)
