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
    encoder_start_line,
    join_vllm_log,
    leave_to_first_rank,
    start_line,
)
from s3kv.messages import JobEnd, JobKind, StepReport
from s3kv.planning.breaker import BreakerState
from s3kv.planning.group_kinds import Coverage, SlidingWindow, States
from s3kv.types import ENGINE_LOG, Outcome
from tests.project import ROOT

OURS = logging.getLogger("s3kv")
FULL = Coverage(16, 256)
UP = BreakerState.CLOSED


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(OURS, "handlers", [])
    monkeypatch.setattr(OURS, "propagate", True)
    level = OURS.level
    OURS.setLevel(logging.NOTSET)
    yield
    OURS.setLevel(level)


@pytest.fixture
def printed(unconfigured: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a handler of vLLM's logger prints. vLLM gives its logger one like it."""
    theirs, stream = logging.getLogger("vllm"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    monkeypatch.setattr(theirs, "handlers", [handler])
    monkeypatch.setattr(theirs, "propagate", False)
    level = theirs.level
    theirs.setLevel(logging.INFO)
    yield stream
    theirs.setLevel(level)


def test_a_line_goes_where_vllms_lines_go_and_goes_there_once(printed: io.StringIO) -> None:
    join_vllm_log()
    join_vllm_log()
    logging.getLogger("s3kv.io").info("a line of %s", "ours")
    assert printed.getvalue() == "INFO [test_log.py] a line of ours\n"


def test_handlers_that_vllm_gets_later_count(
    printed: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_vllm_log()
    later = io.StringIO()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [logging.StreamHandler(later)])
    OURS.info("a line")
    assert (printed.getvalue(), later.getvalue()) == ("", "a line\n")


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
    logging.getLogger("vllm").setLevel(logging.WARNING)
    join_vllm_log()
    OURS.info("no")
    OURS.warning("yes")
    assert printed.getvalue() == "WARNING [test_log.py] yes\n"


def test_a_logger_that_somebody_has_configured_is_left_alone(unconfigured: None) -> None:
    theirs = logging.NullHandler()
    OURS.addHandler(theirs)
    join_vllm_log()
    assert OURS.handlers == [theirs]
    assert OURS.propagate


@pytest.mark.parametrize(("rank", "lines"), [(0, ["for all", "its own"]), (3, ["its own"])])
def test_what_all_ranks_would_say_alike_is_said_by_the_first(
    printed: io.StringIO, rank: int, lines: list[str]
) -> None:
    join_vllm_log()
    leave_to_first_rank(rank)
    logging.getLogger(ENGINE_LOG).info("for all")
    OURS.info("its own")
    leave_to_first_rank(0)
    assert printed.getvalue() == "".join(f"INFO [test_log.py] {line}\n" for line in lines)


def handshake(**more: Any) -> WorkerHandshake:
    return WorkerHandshake("ab12", 1024, 2**20, **{"known": False, **more})


def told(
    *handshakes: WorkerHandshake, coverages: tuple[Coverage, ...] = (FULL,), **more: Any
) -> str:
    config = Config(bucket="my-bucket", **{"endpoint_url": "http://127.0.0.1:9000", **more})
    return start_line(config, handshakes, coverages, may_load=True, may_save=True)[1]


def test_the_line_of_a_start() -> None:
    assert told(handshake()) == (
        f"s3kv {s3kv.__version__} reads and writes bucket my-bucket under s3kv/ at "
        "http://127.0.0.1:9000: namespace ab12 (new), 1.0 GiB of host memory on 1 rank, chunks of "
        "256 tokens, KV of full attention"
    )


def test_it_counts_all_ranks_and_names_all_kinds_of_attention() -> None:
    windows = Coverage(16, 256, SlidingWindow(1024), 1)
    states = Coverage(256, 256, States(), 2)
    line = told(handshake(pinned=True), handshake(pinned=True), coverages=(FULL, windows, states))
    assert "2.0 GiB of pinned host memory on 2 ranks, chunks" in line
    assert line.endswith("KV of full attention and windows of 1,024 tokens and states")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([True, True], "known"),
        ([True, False], "new"),  # the second rank was there first
        ([None], "the bucket does not answer yet"),
        ([True, None], "the bucket does not answer yet"),
    ],
)
def test_it_says_whether_the_namespace_is_known(answers: list[bool | None], said: str) -> None:
    assert f": namespace ab12 ({said}), " in told(*(handshake(known=known) for known in answers))


def test_memory_that_is_not_pinned_is_a_warning() -> None:
    handshakes = [handshake(pinned=True), handshake(pinned=False)]
    slow, fast = (
        start_line(Config(bucket="bucket"), of, [FULL], may_load=True, may_save=False)
        for of in (handshakes, handshakes[:1])
    )
    assert slow[0] == logging.WARNING
    assert "host memory on 2 ranks, not all of it pinned" in slow[1]
    assert fast[0] == logging.INFO
    assert " reads bucket bucket " in fast[1]


def test_the_endpoint_is_the_one_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    assert " at the default endpoint: " in told(handshake(), endpoint_url=None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all")
    assert " at http://all: " in told(handshake(), endpoint_url=None)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3")
    assert " at http://s3: " in told(handshake(), endpoint_url=None)


def test_encoder_outputs_have_a_line_too() -> None:
    config = Config(bucket="bucket", prefix="p")
    for known, word in ((True, "known"), (False, "new"), (None, "the bucket does not answer yet")):
        line = encoder_start_line(config, "cd34", known, 2**30, may_save=True)
        assert " reads and writes bucket bucket under p/ at " in line
        assert line.endswith(f": namespace cd34 ({word}), 1.0 GiB of host memory, encoder outputs")


# --- the line of a minute --------------------------------------------------------------------


def report(*ends: JobEnd) -> StepReport:
    whole = StepReport()
    for end in ends:
        whole.add(end)
    return whole


def test_the_first_request_is_told_of_as_soon_as_it_has_finished() -> None:
    traffic = PromptTraffic()
    traffic.looked_up("r", 1000, 5.0, waits=True)
    traffic.looked_up("r", 1000, 5.2, waits=True)
    traffic.looked_up("r", 1000, 5.5, waits=False)
    traffic.reported(report(JobEnd(1, JobKind.FETCH, Outcome.OK, 3 * 2**20, 0.1)))
    traffic.scheduled("r", 768)
    traffic.scheduled("r", 900)  # preempted
    counters = {"hit_tokens_bucket": 512, "hit_tokens_host": 256, "deadline_cuts": 1}
    assert traffic.line(counters, UP, 6.0) is None
    assert traffic.line(counters, UP, 7.0, finished=True) == (
        "s3kv: Hit rate: 76.8% (bucket: 512 tokens, host memory: 256 tokens, computed: 232 "
        "tokens), Fetched: 3.0 MiB, Uploaded: 0 B, Waits: 1 (mean: 0.50 s, cut short: 1), "
        "Bucket: answers"
    )


def test_after_that_there_is_a_line_a_minute_while_something_happens() -> None:
    traffic, counters = PromptTraffic(), {"hit_tokens_bucket": 256}
    assert traffic.line(counters, UP, 0.0, finished=True)
    traffic.reported(report(JobEnd(1, JobKind.UPLOAD, Outcome.OK, 2**20, 0.1)))
    assert traffic.line(counters, UP, INTERVAL_S - 0.1, finished=True) is None
    line = traffic.line(counters, BreakerState.OPEN, INTERVAL_S)
    assert line is not None
    assert "Hit rate: 0.0% (bucket: 0 tokens, " in line, "what the first line said is not repeated"
    assert "Uploaded: 1.0 MiB" in line
    assert line.endswith("Bucket: down (circuit open)")
    assert traffic.line(counters, UP, 9 * INTERVAL_S, finished=True) is None, "nothing happened"


def test_a_request_that_is_aborted_while_it_waits_has_waited() -> None:
    traffic = PromptTraffic()
    traffic.looked_up("r", 100, 1.0, waits=True)
    traffic.finished("r", 4.0)
    line = traffic.line({}, UP, 4.0, finished=True)
    assert line is not None
    assert "Waits: 1 (mean: 3.00 s, cut short: 0)" in line
    assert "computed: 0 tokens" in line
    traffic.scheduled("r", 0)
    assert traffic.line({}, UP, 100.0, finished=True) is None, "it is forgotten"


def test_chunks_that_are_not_saved_are_mentioned() -> None:
    line = PromptTraffic().line({"saves_dropped": 7}, UP, 0.0, finished=True)
    assert line is not None
    assert line.endswith(", Chunks not saved: 7")


def test_one_of_a_kind_is_not_several() -> None:
    line = PromptTraffic().line({"hit_tokens_bucket": 1}, UP, 0.0, finished=True)
    assert line is not None
    assert "(bucket: 1 token, host memory: 0 tokens, " in line


# --- the same for encoder outputs --------------------------------------------------------------


def test_encoder_outputs_have_a_line_on_traffic_as_soon_as_a_request_has_finished() -> None:
    traffic = EncoderTraffic()
    counters = {
        "hit_rows_bucket": 300,
        "hit_rows_host": 1,
        "encoded_rows": 100,
        "fetch_bytes": 3 * 2**20,
        "upload_bytes": 2**20,
        "deadline_cuts": 2,
    }
    assert traffic.line(counters, UP, 1.0) is None
    assert traffic.line(counters, UP, 2.0, finished=True) == (
        "s3kv: Encoder outputs: Hit rate: 75.1% (bucket: 300 embeddings, host memory: 1 "
        "embedding, encoded: 100 embeddings), Fetched: 3.0 MiB, Uploaded: 1.0 MiB, Waits cut "
        "short: 2, Bucket: answers"
    )


def test_that_line_comes_once_a_minute_and_tells_what_is_new() -> None:
    traffic, counters = EncoderTraffic(), {"encoded_rows": 100}
    assert traffic.line(counters, UP, 0.0, finished=True)
    counters = {"encoded_rows": 150, "saves_dropped": 1}
    assert traffic.line(counters, UP, INTERVAL_S - 0.1, finished=True) is None
    line = traffic.line(counters, BreakerState.OPEN, INTERVAL_S)
    assert line is not None
    assert "encoded: 50 embeddings)" in line
    assert line.endswith("Bucket: down (circuit open), Items not saved: 1")
    assert traffic.line(counters, UP, 9 * INTERVAL_S) is None, "nothing happened"
