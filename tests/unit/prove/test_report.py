"""The report of a proof: its verdict, its rows and the sentence on the margins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from s3kv.metrics import NAMESPACE
from s3kv.prove.judge import ArmAnswer, ArmFacts, judge
from s3kv.prove.report import document, margins_text

COUNTERS = {
    f"{NAMESPACE}io_requests_total|GET|2xx": 1_000.0,
    f"{NAMESPACE}io_requests_total|PUT|2xx": 100.0,
    f"{NAMESPACE}fetch_bytes_total": 4_096.0,
    f"{NAMESPACE}cost_usd_total": 0.0009,
}


def report_of(restart: ArmFacts) -> dict[str, Any]:
    def arm(ttft_s: float, engine_tokens: int = 0) -> ArmFacts:
        return ArmFacts([ArmAnswer((1,), ({1: -0.1},), True, ttft_s)] * 20, 1_000, engine_tokens)

    restart = replace(restart, counters=COUNTERS)
    facts = {"off": arm(2.0), "engine": arm(0.1, 900), "restart": restart}
    return document(facts, judge(facts, 10.0), model="m<b>", seed=3, skipped=["tp did not run"])


def proven() -> dict[str, Any]:
    answers = [ArmAnswer((1,), ({1: -0.1},), True, ttft_s) for ttft_s in [0.5] * 18 + [0.9, 1.0]]
    return report_of(ArmFacts(answers, 1_000, 100, 800, 4_096))


def test_a_proof_names_its_gain() -> None:
    report = proven()
    assert report["verdict"] == (
        "PROVEN: 20 answers are the same as engine, restart served them; the first token after a "
        "restart came 4.0 times as fast (p50)"
    ).replace("engine, ", "")
    row = report["arms"]["restart"]
    assert (row["ttft_p50_ms"], row["ttft_p95_ms"]) == (500.0, 900.0)
    assert (row["found"], row["same_tokens"], row["move"]) == (20, 20, 0.0)
    assert (row["computed_tokens"], row["read_bytes"], row["requests"]) == (100, 4_096, 1_100)
    assert row["usd"] == 0.0009
    assert report["arms"]["off"]["same_tokens"] is None
    assert "move by 0.020 on average, 2 times the noise" in margins_text(report)


def test_an_arm_that_failed_has_a_row_and_the_blame() -> None:
    report = report_of(ArmFacts(error="the engine has ended"))
    assert report["verdict"] == "NOT PROVEN: restart"
    assert report["arms"]["restart"]["ttft_p50_ms"] == 0.0


def test_an_answer_that_changed_is_wrong() -> None:
    other = ArmAnswer((2,), ({2: -0.1},), True, 0.5)
    assert report_of(ArmFacts([other] * 20, 1_000, 100, 800, 4_096))["verdict"] == "WRONG: restart"
