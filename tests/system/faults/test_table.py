"""The failure table in docs/operating.md: every fault of the suite has a row, every row a test."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from s3kv.config import Config
from s3kv.metrics import KV_METRICS
from tests.system.faults.cases import CASES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operating.md").read_text()


def rows() -> list[list[str]]:
    section = PAGE.split("\n## ")[1]
    assert section.startswith("Faults and their cost")
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [row for row in cells if row[-1]]


def test_every_fault_has_a_row_and_every_row_a_fault() -> None:
    assert [row[-1].strip("`") for row in rows()] == list(CASES)


def test_rows_name_metrics_and_settings_there_are() -> None:
    settings = {field.name for field in dataclasses.fields(Config)}
    for row in rows():
        assert row[2], f"{row[0]}: nothing tells of it"
        for name in re.findall(r"`(\w+)`", row[2]):
            assert name in KV_METRICS, name
        assert set(re.findall(r"`(\w+)`", row[3])) <= settings, row


def test_rows_name_what_the_matrix_sees_move() -> None:
    harmless = {"fetch_ok", "fetch_missing", "upload_ok"}
    for row, case in zip(rows(), CASES.values(), strict=True):
        seen = {case.lookup, case.fetch, case.upload} - harmless
        assert not seen or seen & set(re.findall(r"`(\w+)`", row[2])), row


def test_rows_on_the_disk_name_tests_settings_and_metrics_there_are() -> None:
    section = PAGE.split("\n## ")[2]
    assert section.startswith("Faults of the disk")
    files = re.findall(r"`(tests/[\w/]+\.py)`", section)
    tests = " ".join((ROOT / path).read_text() for path in files)
    known = {field.name for field in dataclasses.fields(Config)} | KV_METRICS.keys()
    for name in re.findall(r"`(\w+)`", section):
        assert f"def {name}(" in tests if name.startswith("test_") else name in known, name


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", PAGE)
    assert len(set(named)) >= 6
    for path in named:
        assert (ROOT / path).is_file(), path
