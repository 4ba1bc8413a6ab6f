"""A KV connector that saves wrong KV under valid digests: S3KVConnector, which swaps the first and
the last block of each chunk on their way from the device. It proves that `s3kv prove` can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from s3kv.connectors.kv import S3KVConnector
from s3kv.messages import SaveJob
from s3kv.worker.rank import RankWorker

_save = RankWorker.save


def _swapped(self: RankWorker, jobs: Sequence[SaveJob], **options: Any) -> None:
    def swap(job: SaveJob) -> SaveJob:
        first, *middle, last = job.block_ids
        return replace(job, block_ids=(last, *middle, first))

    _save(self, [swap(job) for job in jobs], **options)


class SwappingConnector(S3KVConnector):
    """As S3KVConnector, and wrong."""


RankWorker.save = _swapped  # type: ignore[method-assign]
