"""Report of a proof: one document from the arms' facts and the judgement. Pure.

`--json` writes it; the terminal and the HTML page show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from typing import Any

from s3kv import __version__
from s3kv.metrics import NAMESPACE
from s3kv.prove import judge

_REQUESTS = f"{NAMESPACE}io_requests_total|"


def document(
    arms: Mapping[str, judge.ArmFacts],
    judgement: judge.Judgement,
    *,
    model: str,
    seed: int,
    skipped: Sequence[str],
) -> dict[str, Any]:
    """The report as JSON. skipped: why some arms did not run."""
    return {
        "verdict": _verdict(arms, judgement),
        "proven": judgement.proven,
        "model": model,
        "seed": seed,
        "s3kv": __version__,
        "margins": {
            "near_tie": judge.NEAR_TIE,
            "move": judgement.margin,
            "noise": judgement.noise,
            "other_shape": max(judge.OTHER_SHAPE_MOVE, judgement.margin),
            "most_noise": judge.MOST_NOISE,
        },
        "findings": [asdict(finding) for finding in judgement.findings],
        "skipped": list(skipped),
        "arms": {
            name: _row(facts, judgement.comparisons.get(name, ())) for name, facts in arms.items()
        },
    }


def margins_text(report: Mapping[str, Any]) -> str:
    """The sentence about the margins, for the page and the terminal."""
    margins = report["margins"]
    return (
        f"Margins, in nats: a near tie is a preference of at most {margins['near_tie']}; logprobs "
        f"may move by {margins['move']:.3f} on average, {judge.NOISE_FACTOR:g} times the noise "
        f"between off and engine ({margins['noise']:.3f}) and at least {judge.LEAST_MOVE}; where "
        f"another length of the prompt was served, by {margins['other_shape']:.3f}; engine itself "
        f"by {margins['most_noise']}."
    )


def _verdict(arms: Mapping[str, judge.ArmFacts], judgement: judge.Judgement) -> str:
    if failed := {finding.arm: None for finding in judgement.findings if finding.failed}:
        is_wrong = any(finding.wrong for finding in judgement.findings)
        return f"{'WRONG' if is_wrong else 'NOT PROVEN'}: {', '.join(failed)}"
    served = [name for name in arms if name in judge.LOADING]
    gain = ""
    if "restart" in arms:
        off, restart = (_percentile(arms[name], 50) for name in ("off", "restart"))
        gain = f"; the first token after a restart came {off / restart:.1f} times as fast (p50)"
    served_text = f" as {', '.join(served)} served them" if served else ""
    return f"PROVEN: {len(arms['off'].answers)} answers are the same{served_text}{gain}"


def _row(facts: judge.ArmFacts, comparisons: Sequence[judge.Comparison]) -> dict[str, Any]:
    counters = facts.counters
    requests = sum(value for key, value in counters.items() if key.startswith(_REQUESTS))
    served = facts.engine_tokens + facts.connector_tokens
    return {
        "error": facts.error,
        "answers": len(facts.answers),
        "found": sum(answer.found for answer in facts.answers),
        "same_tokens": sum(each.diverged is None for each in comparisons) if comparisons else None,
        "move": max((each.move for each in comparisons), default=None),
        "ttft_p50_ms": _percentile(facts, 50),
        "ttft_p95_ms": _percentile(facts, 95),
        "prompt_tokens": facts.prompt_tokens,
        "engine_tokens": facts.engine_tokens,
        "connector_tokens": facts.connector_tokens,
        "computed_tokens": max(0, facts.prompt_tokens - served),
        "read_bytes": int(counters.get(f"{NAMESPACE}fetch_bytes_total", 0)),
        "written_bytes": int(counters.get(f"{NAMESPACE}upload_bytes_total", 0)),
        "requests": int(requests),
        "usd": counters.get(f"{NAMESPACE}cost_usd_total", 0.0),
        "cpu_s": round(facts.cpu_s, 2),
    }


def _percentile(facts: judge.ArmFacts, percent: int) -> float:
    """A percentile of the TTFT, in milliseconds, by the nearest rank; 0 without answers."""
    times = sorted(answer.ttft_s * 1e3 for answer in facts.answers)
    return round(times[ceil(len(times) * percent / 100) - 1], 1) if times else 0.0
