"""s3kv's messages of items in the wrappers vLLM wants them in."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.ec_transfer.ec_connector import base

from s3kv.messages import ItemPlan, ItemReport

# Since vLLM 0.28.
_WorkerMetadata = getattr(base, "ECConnectorWorkerMetadata", object)


@dataclass(frozen=True, slots=True)
class ItemPlanMetadata(base.ECConnectorMetadata):
    """Scheduler to every worker, once a step."""

    plan: ItemPlan


@dataclass(slots=True)
class ItemWorkerReport(_WorkerMetadata):  # type: ignore[misc, valid-type]
    """Workers to the scheduler. vLLM folds the reports of all ranks into one."""

    report: ItemReport

    def aggregate(self, other: ItemWorkerReport) -> ItemWorkerReport:
        self.report.merge(other.report)
        return self
