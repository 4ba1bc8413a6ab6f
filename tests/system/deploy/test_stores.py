"""The table of object stores: its settings are valid, and it claims no test there is not."""

from __future__ import annotations

import json
import re

import pytest

from s3kv.config import Config
from tests.project import ROOT
from tests.unit.stores import test_stores as suite

ROWS = {
    name.strip(): (tested.strip(), settings.strip(" `"))
    for name, tested, settings, _ in re.findall(
        r"^\| (.+?) \| (yes|no) \| (`\{.*?\}`) \| (.*) \|$",
        (ROOT / "docs" / "stores.md").read_text(),
        re.M,
    )
}

SUITES = {"moto": suite.TestS3StoreOnMoto, "Ceph RADOS Gateway": suite.TestS3StoreOnCeph}


def test_all_of_the_table_is_read() -> None:
    assert len(ROWS) == 7


@pytest.mark.parametrize("store", ROWS)
def test_the_settings_of_a_store_are_valid(store: str) -> None:
    config = Config.parse(json.loads(ROWS[store][1]))
    # Only AWS is found without being told where it is.
    assert (config.endpoint_url is None) == store.startswith("AWS")


def test_stores_are_called_tested_that_the_suite_runs_on() -> None:
    assert {name for name, (tested, _) in ROWS.items() if tested == "yes"} == set(SUITES)
