"""The I/O process's log, which its worker writes."""

from __future__ import annotations

import json
import logging
import os
import time

import pytest

from s3kv.host.slab import Slab
from s3kv.io.child import Child
from s3kv.io.process_log import LOGGER, LogPipe, _LineFormatter, record_of


def line_of(record: logging.LogRecord) -> str:
    return _LineFormatter("%(message)s").format(record)


def record(name: str = LOGGER, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": name, "levelno": logging.INFO, "msg": "a %s", "args": ("b",), **more}
    )


def test_a_record_arrives_with_its_level_time_and_place() -> None:
    got = record_of(line_of(record(created=1234.5, pathname="/x/keeping.py", lineno=7)), pid=11)
    assert (got.levelname, got.created, got.filename, got.lineno) == (
        "INFO",
        1234.5,
        "keeping.py",
        7,
    )
    assert got.getMessage() == "I/O process 11: a b"
    assert got.name == LOGGER


def test_a_traceback_comes_with_its_record() -> None:
    line = line_of(record(exc_info=(KeyError, KeyError("a bug"), None)))
    assert "\n" not in line
    assert record_of(line, 1).getMessage().endswith("KeyError: 'a bug'")


def test_a_record_has_the_fields_that_the_workers_own_records_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Named(logging.LogRecord):
        process_name = "EngineCore"

    monkeypatch.setattr(logging, "_logRecordFactory", Named)
    assert getattr(record_of("a line", 1), "process_name", None) == "EngineCore"


def test_a_name_that_is_no_utf_8_is_escaped() -> None:
    got = record_of(line_of(record(msg="file \udcff", args=())), 1)
    assert got.getMessage() == "I/O process 1: file \\udcff"


def test_another_librarys_record_says_whose_it_is() -> None:
    assert record_of(line_of(record("asyncio")), 1).getMessage() == "I/O process 1: asyncio: a b"


@pytest.mark.parametrize(
    "line", ["Segmentation fault", '{"levelno": 20}', "[1]", "7", '{"levelno": "x"}', ""]
)
def test_a_line_that_is_no_record_is_a_warning(line: str) -> None:
    got = record_of(line + "\n", 11)
    assert got.levelno == logging.WARNING
    assert got.getMessage() == f"I/O process 11: {line}"


def test_every_line_is_logged_before_the_end(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    lines = [json.loads(line_of(record())) for _ in range(3)]
    lines[1]["levelno"] = logging.DEBUG
    with caplog.at_level(logging.INFO, LOGGER):
        pipe = LogPipe(os.fdopen(reader), 5)
        with os.fdopen(writer, "w") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        pipe.finish(10.0)
    assert caplog.messages == ["I/O process 5: a b"] * 2, "DEBUG is not wanted"


def test_what_a_process_prints_at_its_end_is_logged_here(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A module that is not there: the interpreter says so, on stderr."""
    slab = Slab.create(4096)
    child = Child(slab.fd, "s3kv.io.nothing")
    slab.close()
    while not child.is_dead():
        time.sleep(0.01)
    child.end(5.0)
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "No module named s3kv.io.nothing" in said.getMessage()
    assert capfd.readouterr() == ("", ""), "stdout and stderr are the worker's"
