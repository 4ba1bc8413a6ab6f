"""The documents name metrics there are."""

from __future__ import annotations

import re

from s3kv.connectors import ec_metrics, metrics
from tests.test_docs import DOCUMENTS


def test_every_metric_named_exists() -> None:
    named = {
        (kind, name)
        for document in DOCUMENTS
        for kind, name in re.findall(
            r"vllm:s3kv_((?:ec_)?)([a-z0-9_]+?)_total\b", document.read_text()
        )
    }
    known = {"": metrics.COUNTERS, "ec_": ec_metrics.COUNTERS}
    missing = {f"{kind}{name}" for kind, name in named if name not in known[kind]}
    assert missing == set()
    assert named
