"""Everything that is counted is exported."""

from __future__ import annotations

from typing import get_args

from s3kv.connectors.metrics import COUNTERS
from s3kv.objects.codec import Refusal


def test_there_is_a_counter_for_every_reason_to_refuse_an_object() -> None:
    for reason in (*get_args(Refusal), "quarantined"):
        assert COUNTERS[f"fetch_corrupt_{reason}"]
