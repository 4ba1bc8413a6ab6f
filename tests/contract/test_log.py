"""s3kv's lines in vLLM's log."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import s3kv
from s3kv.config import Config
from s3kv.connectors.kv_translate import WorkerHandshake
from s3kv.connectors.log import (
    INTERVAL_S,
    EncoderTraffic,
    PromptTraffic,
    TrafficLine,
    join_vllm_log,
    leave_to_first_rank,
    start_line,
)
from s3kv.messages import JobEnd, JobKind, StepReport
from s3kv.planning.breaker import BreakerState
from s3kv.planning.group_kinds import Coverage, SlidingWindow, States
from s3kv.types import ENGINE_LOG, Outcome
from tests.project import ROOT

OURS, THEIRS = logging.getLogger("s3kv"), logging.getLogger("vllm")
FULL = Coverage(16, 256)
UP = BreakerState.CLOSED


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The output of a handler of vLLM's logger, while nobody has configured ours."""
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    levels = OURS.level, THEIRS.level
    for logger, handlers, propagate in ((OURS, [], True), (THEIRS, [handler], False)):
        monkeypatch.setattr(logger, "handlers", handlers)
        monkeypatch.setattr(logger, "propagate", propagate)
    OURS.setLevel(logging.NOTSET)
    THEIRS.setLevel(logging.INFO)
    yield stream
    OURS.setLevel(levels[0])
    THEIRS.setLevel(levels[1])


def test_a_line_goes_once_where_vllms_lines_go(
    printed: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_vllm_log()
    join_vllm_log()
    logging.getLogger("s3kv.io").info("a line of %s", "ours")
    assert printed.getvalue() == "INFO [test_log.py] a line of ours\n"
    later = io.StringIO()
    monkeypatch.setattr(THEIRS, "handlers", [logging.StreamHandler(later)])
    OURS.info("a line")
    assert later.getvalue() == "a line\n", "handlers that vLLM gets later count"


@pytest.mark.long
def test_all_lines_have_vllms_format() -> None:
    """In a process of its own, because vLLM configures the logging of all of it."""
    code = (
        "import logging, vllm.logger\n"
        "vllm.logger._configure_vllm_root_logger()\n"
        "from s3kv.connectors.log import join_vllm_log\n"
        "from s3kv.io.process_log import record_of\n"
        "join_vllm_log()\n"
        "logging.getLogger('s3kv').info('a line of a worker')\n"
        "logging.getLogger('s3kv.io').handle(record_of('a line', 7))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "a line" in line]
    place = r"\d\d-\d\d \d\d:\d\d:\d\d \[\S+:\d+\]"
    assert len(lines) == 2, done.stderr
    assert re.search(f"INFO {place} a line of a worker$", lines[0]), lines
    assert re.search(f"WARNING {place} I/O process 7: a line$", lines[1]), lines


def test_a_line_below_vllms_level_is_not_logged(printed: io.StringIO) -> None:
    THEIRS.setLevel(logging.WARNING)
    join_vllm_log()
    OURS.info("no")
    OURS.warning("yes")
    assert printed.getvalue() == "WARNING [test_log.py] yes\n"


def test_a_configured_logger_is_left_alone(printed: io.StringIO) -> None:
    theirs = logging.NullHandler()
    OURS.addHandler(theirs)
    join_vllm_log()
    assert OURS.handlers == [theirs]
    assert OURS.propagate


@pytest.mark.parametrize(("rank", "lines"), [(0, ["for all", "its own"]), (3, ["its own"])])
def test_the_first_rank_logs_for_all(printed: io.StringIO, rank: int, lines: list[str]) -> None:
    join_vllm_log()
    leave_to_first_rank(rank)
    logging.getLogger(ENGINE_LOG).info("for all")
    OURS.info("its own")
    leave_to_first_rank(0)
    assert printed.getvalue() == "".join(f"INFO [test_log.py] {line}\n" for line in lines)


def handshake(**more: Any) -> WorkerHandshake:
    return WorkerHandshake("ab12", 1024, 2**20, **{"known": False, **more})


def line(*handshakes: WorkerHandshake, coverages: Any = (FULL,), **settings: Any) -> str:
    config = Config(bucket="my-bucket", **{"endpoint_url": "http://127.0.0.1:9000", **settings})
    level, text = start_line(config, handshakes, coverages, may_load=True, may_save=True)
    assert (level == logging.WARNING) == ("not all of it pinned" in text)
    return text


def test_the_line_of_a_start() -> None:
    assert line(handshake()) == (
        f"s3kv {s3kv.__version__} reads and writes bucket my-bucket under s3kv/ at "
        "http://127.0.0.1:9000: namespace ab12 (new), 1.0 GiB of host memory on 1 rank, "
        "1,024 chunks of 256 tokens, KV of full attention"
    )
    config = Config(bucket="bucket")
    reads = start_line(config, [handshake()], may_load=True, may_save=False)[1]
    assert " reads bucket bucket " in reads
    assert reads.endswith(": namespace ab12 (new), 1.0 GiB of host memory, encoder outputs")
    neither = start_line(config, [handshake()], may_load=False, may_save=False)[1]
    assert " neither reads nor writes bucket " in neither


def test_the_line_of_a_start_counts_all_ranks_and_names_all_kinds_of_attention() -> None:
    windows = Coverage(16, 256, SlidingWindow(1024), 1)
    states = Coverage(256, 256, States(), 2)
    pinned, not_pinned = handshake(pinned=True), handshake(pinned=False)
    found = line(pinned, pinned, coverages=(FULL, windows, states))
    assert "2.0 GiB of pinned host memory on 2 ranks, chunks" in found
    assert found.endswith("KV of full attention and windows of 1,024 tokens and states")
    assert "host memory on 2 ranks, not all of it pinned" in line(pinned, not_pinned)


@pytest.mark.parametrize(
    ("answers", "novelty"),
    [
        ([True, True], "known"),
        ([True, False], "new"),  # the second rank was there first
        ([None], "the bucket does not answer yet"),
        ([True, None], "the bucket does not answer yet"),
    ],
)
def test_the_start_line_has_the_namespaces_age(answers: list[bool | None], novelty: str) -> None:
    assert f": namespace ab12 ({novelty}), " in line(*(handshake(known=known) for known in answers))


def test_the_endpoint_is_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert " at the default endpoint: " in line(handshake(), endpoint_url=None)
    for name, url in (("AWS_ENDPOINT_URL", "http://all"), ("AWS_ENDPOINT_URL_S3", "http://s3")):
        monkeypatch.setenv(name, url)
        assert f" at {url}: " in line(handshake(), endpoint_url=None)


def moved(kind: JobKind, nbytes: int) -> StepReport:
    report = StepReport()
    report.add(JobEnd(1, kind, Outcome.OK, nbytes, 0.1))
    return report


def test_the_first_line_comes_when_a_request_has_finished() -> None:
    traffic = PromptTraffic()
    for now_s, waits in ((5.0, True), (5.2, True), (5.5, False)):
        traffic.looked_up("r", 1000, now_s, waits=waits)
    traffic.reported(moved(JobKind.FETCH, 3 * 2**20))
    traffic.reported(moved(JobKind.UPLOAD, 2**20))
    traffic.reported(moved(JobKind.USE, 2**30))
    traffic.scheduled("r", 768)
    traffic.scheduled("r", 900)  # preempted
    counters = {"hit_tokens_bucket": 512, "hit_tokens_host": 256, "deadline_cuts": 1}
    assert traffic.line(counters, UP, 6.0) is None
    assert traffic.line(counters, UP, 7.0, finished=True) == (
        "s3kv: Hit rate: 76.8% (bucket: 512 tokens, host memory: 256 tokens, computed: 232 "
        "tokens), Fetched: 3.0 MiB, Uploaded: 1.0 MiB, Waits: 1 (mean: 0.50 s, cut short: 1), "
        "Bucket: answers"
    )
    counters = {
        "hit_rows_bucket": 300,
        "hit_rows_host": 1,
        "encoded_rows": 100,
        "fetch_bytes": 3 * 2**20,
        "upload_bytes": 2**20,
        "deadline_cuts": 2,
    }
    assert EncoderTraffic().line(counters, UP, 2.0, finished=True) == (
        "s3kv: Encoder outputs: Hit rate: 75.1% (bucket: 300 embeddings, host memory: 1 "
        "embedding, encoded: 100 embeddings), Fetched: 3.0 MiB, Uploaded: 1.0 MiB, Waits cut "
        "short: 2, Bucket: answers"
    )


@pytest.mark.parametrize(
    ("traffic", "computed", "dropped"),
    [
        (PromptTraffic(), "hit_tokens_bucket", "Chunks not saved: 7"),
        (EncoderTraffic(), "hit_rows_bucket", "Items not saved: 7"),
    ],
)
def test_there_is_a_line_a_minute_of_new_traffic(
    traffic: TrafficLine, computed: str, dropped: str
) -> None:
    counters = {computed: 256}
    assert traffic.line(counters, UP, 0.0, finished=True)
    counters = {computed: 256, "saves_dropped": 7}
    assert traffic.line(counters, UP, INTERVAL_S - 0.1, finished=True) is None
    line = traffic.line(counters, BreakerState.OPEN, INTERVAL_S)
    assert "Hit rate: 0.0% (bucket: 0 " in line, "the first line is not repeated"
    assert line.endswith(f"Bucket: down (circuit open), {dropped}")
    assert traffic.line(counters, UP, 9 * INTERVAL_S, finished=True) is None, "nothing happened"


def test_a_request_that_is_aborted_while_it_waits_has_waited() -> None:
    traffic = PromptTraffic()
    traffic.looked_up("r", 100, 1.0, waits=True)
    traffic.finished("r", 4.0)
    line = traffic.line({}, UP, 4.0, finished=True)
    assert "Waits: 1 (mean: 3.00 s, cut short: 0)" in line
    assert "computed: 0 tokens" in line
    traffic.scheduled("r", 0)
    assert traffic.line({}, UP, 100.0, finished=True) is None, "it is forgotten"
