"""s3kv's messages in the wrappers vLLM wants them in."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from s3kv.messages import StepPlan, StepReport


@dataclass(frozen=True, slots=True)
class PlanMetadata(KVConnectorMetadata):
    """Scheduler to every worker, once a step."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once, when it is ready to serve."""

    namespace: str
    slot_count: int
    slot_bytes: int


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to the scheduler. vLLM folds the reports of all ranks into one.

    hellos: where nobody has asked for them before the first step.
    """

    report: StepReport
    hellos: tuple[WorkerHello, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        self.report.merge(other.report)
        self.hellos += other.hellos
        return self
