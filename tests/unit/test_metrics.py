"""The table of metrics is sound, and has an entry for every way a job can end."""

from __future__ import annotations

import pytest

from s3kv.metrics import EC_METRICS, KV_METRICS, MISSES, Metric, labels_of, name_of
from s3kv.types import Outcome

TABLES = {"kv": KV_METRICS, "ec": EC_METRICS}


def test_every_way_a_job_can_end_has_a_metric() -> None:
    never = {"fetch_exists", "upload_missing", "upload_corrupt"}
    for outcome in Outcome:
        for job in ("fetch", "upload"):
            name = f"{job}_{outcome.name.lower()}"
            assert name in never or name in KV_METRICS, name
            assert name in never or name in EC_METRICS, name


@pytest.mark.parametrize("kind", TABLES)
def test_reasons_of_misses_are_those_of_the_table(kind: str) -> None:
    assert set(MISSES.values()) == set(TABLES[kind]["misses"].labels["reason"])


def test_tables_are_sound() -> None:
    for table in TABLES.values():
        for name, metric in table.items():
            assert isinstance(metric, Metric)
            assert name_of(name) == name, "a bar in a name would cut it short"
            assert metric.doc.endswith("."), name
            assert (metric.kind == "histogram") == bool(metric.buckets), name
            assert list(metric.buckets) == sorted(metric.buckets), name


@pytest.mark.parametrize("kind", TABLES)
def test_a_key_is_the_name_and_the_labels(kind: str) -> None:
    keys = [key for name, metric in TABLES[kind].items() for key in metric.keys(name)]
    assert len(keys) == len(set(keys))
    assert all(name_of(key) in TABLES[kind] for key in keys)
    assert labels_of("io_requests|GET|2xx") == ("GET", "2xx")
    assert "io_requests|GET|2xx" in keys
