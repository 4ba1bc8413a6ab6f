"""A KV connector that saves wrong KV under valid digests: S3KVConnector, which saves the last block
of each chunk in place of the first, too. It proves that `s3kv prove` can fail.

Two blocks that change places would prove nothing: keys carry their positions, and attention does
not depend on the order in which it reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from s3kv.connectors.kv import S3KVConnector
from s3kv.messages import SaveJob
from s3kv.worker.rank import RankWorker

_save = RankWorker.save


def _spoiled(self: RankWorker, jobs: Sequence[SaveJob], **options: Any) -> None:
    spoiled = [replace(job, block_ids=(job.block_ids[-1], *job.block_ids[1:])) for job in jobs]
    _save(self, spoiled, **options)


class SpoilingConnector(S3KVConnector):
    """As S3KVConnector, and wrong."""


RankWorker.save = _spoiled  # type: ignore[method-assign]
