"""What lets a time count in the comparison with other connectors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from benchmarks.peers.bench import Passes
from benchmarks.peers.proof import faults
from lab.engine import Answer

HIT = Answer(tokens=[5, 6, 7], cached_tokens=1_536, ttft_s=0.2, seconds=0.4, finish_reason="length")
REFERENCE = [HIT, dataclasses.replace(HIT, tokens=[8, 9])]
HIT_TOKENS = 2 * 1_536


def changed(**changes: object) -> list[Answer]:
    return [REFERENCE[0], dataclasses.replace(REFERENCE[1], **changes)]  # type: ignore[arg-type]


def test_answers_like_the_reference_with_all_hits_in_the_connector_are_sound() -> None:
    slower = changed(seconds=9.0, ttft_s=8.0)
    assert faults(slower, REFERENCE, HIT_TOKENS) == []


def test_a_shorter_hit_does_not_count() -> None:
    assert faults(changed(cached_tokens=1_408), REFERENCE, HIT_TOKENS) == [
        "prompt 1: 1408 tokens hit, not 1536"
    ]


def test_another_token_does_not_count() -> None:
    assert faults(changed(tokens=[8, 10]), REFERENCE, HIT_TOKENS) == [
        "prompt 1: other tokens than without a connector"
    ]


def test_an_answer_that_ended_early_does_not_count() -> None:
    assert faults(changed(finish_reason="error"), REFERENCE, HIT_TOKENS) == [
        "prompt 1: ended by 'error'"
    ]


def test_a_hit_in_a_cache_of_the_engine_does_not_count() -> None:
    assert faults(REFERENCE, REFERENCE, 1_536) == ["1536 tokens hit in the connector, not 3072"]


def test_a_pass_with_a_fault_is_told_without_a_time() -> None:
    passes = Passes(seconds=[0.3], ttft_s=[0.1], cpu_s=[{"engine": 0.2}, {"engine": 0.3}])
    passes.cpu_s[0]["s3kv.io"] = 0.1
    assert passes.told()["median_ms"] == 300.0
    assert passes.told()["cpu_ms_per_prompt"] == 300.0
    assert passes.told()["cpu_ms_by_process"] == {"engine": 250.0, "s3kv.io": 50.0}
    passes.faults.append("prompt 0: other tokens than without a connector")
    assert passes.told() == {"failed": ["prompt 0: other tokens than without a connector"]}


def test_a_pass_that_never_was_is_told_as_failed() -> None:
    assert Passes().told() == {"failed": ["no pass"]}


def test_the_program_explains_itself() -> None:
    command = [sys.executable, "-m", "benchmarks", "peers", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert "--lmcache-python" in done.stdout
