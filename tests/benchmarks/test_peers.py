"""What lets a time count in the comparison with other connectors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.peers import defeats
from benchmarks.peers.bench import Passes
from benchmarks.peers.proof import faults, hit_percent
from benchmarks.peers.work import cases
from lab.engine import Answer

HIT = Answer(tokens=[5, 6, 7], cached_tokens=1_536, ttft_s=0.2, seconds=0.4, finish_reason="length")
REFERENCE = [HIT, dataclasses.replace(HIT, tokens=[8, 9])]
HIT_TOKENS = 2 * 1_536
OTHER_TOKENS = "prompt 1: other tokens than without a connector"


@pytest.mark.parametrize(
    ("changes", "hit_tokens", "users", "found"),
    [
        ({"seconds": 9.0, "ttft_s": 8.0}, HIT_TOKENS, 1, []),
        ({"cached_tokens": 1_408}, HIT_TOKENS, 1, ["prompt 1: 1408 tokens hit, not 1536"]),
        ({"tokens": [8, 10]}, HIT_TOKENS, 1, [OTHER_TOKENS]),
        ({"tokens": [1]}, HIT_TOKENS, 4, [OTHER_TOKENS]),
        ({"finish_reason": "error"}, HIT_TOKENS, 1, ["prompt 1: ended by 'error'"]),
        ({}, 1_536, 1, ["1536 tokens hit in the connector, not 3072"]),
    ],
    ids=["slower", "shorter", "other", "other of several", "early", "by the engine"],
)
def test_only_answers_like_the_reference_with_all_hits_in_the_connector_are_sound(
    changes: dict[str, Any], hit_tokens: int, users: int, found: list[str]
) -> None:
    answers = [REFERENCE[0], dataclasses.replace(REFERENCE[1], **changes)]
    assert faults(answers, REFERENCE, hit_tokens, users=users) == found


def test_of_several_users_few_may_have_other_tokens_and_shorter_hits() -> None:
    shorter = [*4 * [HIT], dataclasses.replace(HIT, cached_tokens=0, tokens=[1])]
    assert faults(shorter, 5 * [HIT], 4 * 1_536, users=4) == []
    assert hit_percent(shorter, 5 * [HIT]) == 80.0


def test_the_first_engine_sends_no_prompt_twice_and_many_users_have_their_own() -> None:
    first, many = cases([1, 4, 16], 16)
    assert [(case.name, case.users, case.prompts) for case in first] == [
        ("one user", 1, slice(0, 8)),
        ("one step", 1, slice(8, 12)),
        ("4 users", 4, slice(12, 16)),
    ]
    assert [(case.users, case.prompts) for case in many] == [(16, slice(0, 16))]
    (alone,) = cases([1], 6)
    assert [case.prompts for case in alone] == [slice(0, 4), slice(4, 6)]


def test_whoever_is_better_than_either_of_ours_is_told_first() -> None:
    def told(ms: float) -> dict[str, object]:
        return {"warm": {"median_ms": ms, "cpu_ms_per_prompt": 5.0}}

    failed = {"warm": {"failed": ["no pass"]}}
    names = {"none": told(1), "s3kv": told(30), "offloading-s3kv": told(20)}
    names |= {"offloading-fs": told(25), "lmcache": told(31), "offloading-obj": failed}
    models = {"random": {"cases": {"one user": names}, "saved": {"lmcache": {"seconds": [2.0]}}}}
    (row,) = defeats.of(models)
    assert row["where"] == "random, one user, warm"
    assert (row["connector"], row["ours"]) == ("`offloading-fs` 25 ms", "`s3kv` 30 ms")
    names["another"] = told(10)
    assert defeats.NOT_EXPLAINED in {row["reason"] for row in defeats.of(models)}
    assert row["reason"] != defeats.NOT_EXPLAINED


def test_a_pass_with_a_fault_is_told_without_a_time() -> None:
    passes = Passes(seconds=[0.3], cpu_s=[{"engine": 0.2}, {"engine": 0.3}])
    passes.cpu_s[0]["s3kv.io"] = 0.1
    told = passes.told()
    assert (told["median_ms"], told["cpu_ms_per_prompt"]) == (300.0, 300.0)
    assert told["cpu_ms_by_process"] == {"engine": 250.0, "s3kv.io": 50.0}
    passes.faults.append(OTHER_TOKENS)
    assert passes.told() == {"failed": [OTHER_TOKENS]}
    assert Passes().told() == {"failed": ["no pass"]}, "it never was"


def test_the_program_explains_itself() -> None:
    command = [sys.executable, "-m", "benchmarks", "peers", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert "--lmcache-python" in done.stdout
