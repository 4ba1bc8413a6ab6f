"""`lab.constants`: every name has its places, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lab.constants import PLACES, changed, environment, split_connector
from s3kv.planning.index import BucketIndex
from tests.project import ROOT

SEEN = """
from s3kv.io.sources import bucket
from s3kv.planning.kv import KVPlannerSettings
print(bucket.MAX_ATTEMPTS, KVPlannerSettings.__init__.__kwdefaults__["probe_chunks"])
"""


@pytest.mark.parametrize("name", [name for name in PLACES if name != "max_item_bytes"])
def test_every_name_has_its_places(name: str) -> None:
    """Without that of a module that imports vLLM."""
    with changed(**{name: 7}):
        pass


def test_this_process_has_them_for_the_block() -> None:
    before = BucketIndex(capacity=2)._miss_ttl_s
    with changed(miss_ttl_s=7.0):
        assert BucketIndex(capacity=2)._miss_ttl_s == 7.0
    assert BucketIndex(capacity=2)._miss_ttl_s == before


def test_another_process_has_them_too() -> None:
    env = os.environ | environment({"max_attempts": 7, "probe_chunks": 5}, str(ROOT))
    seen = subprocess.check_output([sys.executable, "-c", SEEN], env=env, text=True)
    assert seen.split() == ["7", "5"]


def test_they_are_taken_out_of_a_connectors_settings() -> None:
    one = {"kv_connector_extra_config": {"bucket": "b", "miss_ttl_s": 0.1}}
    several = {"kv_connector_extra_config": {"connectors": [one, one]}}
    clean = {"kv_connector_extra_config": {"bucket": "b"}}
    assert split_connector(one) == (clean, {"miss_ttl_s": 0.1})
    expected = {"kv_connector_extra_config": {"connectors": [clean, clean]}}
    assert split_connector(several) == (expected, {"miss_ttl_s": 0.1})
