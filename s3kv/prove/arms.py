"""Arms of a proof: their engines, run one after another, and the facts they yield.

off       no connector, no prefix cache: everything is computed
engine    no connector; the second pass is served by the engine's prefix cache
cold      the connector with an empty prefix: computes and saves
host      the second pass is served from host memory, after the engine's prefix cache was reset
restart   a new process, served from the bucket
tp        as restart, with another tensor-parallel size
away      a new process, whose bucket accepts connections and never answers
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3kv.metrics import NAMESPACE
from s3kv.prove.arm_process import ArmFailed, ArmProcess
from s3kv.prove.judge import ArmAnswer, ArmFacts

ANSWER_TOKENS = 24
_BY_SOURCE = "vllm:prompt_tokens_by_source_total|"
OnProgress = Callable[[str, int, int], None]
"""Progress report: an arm, its answers so far, and the number of all its answers."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm. connects: whether it has the connector. passes: only the last one is measured.
    resets: whether the engine's prefix cache is emptied between them."""

    connects: bool = True
    caches: bool = True
    passes: int = 1
    resets: bool = False


ARMS: Mapping[str, Arm] = {
    "off": Arm(connects=False, caches=False),
    "engine": Arm(connects=False, passes=2),
    "cold": Arm(),
    "host": Arm(passes=2, resets=True),
    "restart": Arm(),
    "tp": Arm(),
    "away": Arm(),
}
USUAL = ("off", "engine", "cold", "host", "restart", "away")
NEEDED = ("off", "engine", "cold")
"""The arms that others are compared with, and the arm that fills the bucket."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The inputs of all arms. argv: vLLM's options, including the model. connector: the value of
    kv_transfer_config. other_size: the tensor-parallel size of `tp`. logs: a folder."""

    argv: Sequence[str]
    connector: dict[str, Any]
    other_size: int
    logs: Path
    longest_tokens: int
    prompts: int
    seed: int


def settings_of(
    connector: dict[str, Any], around: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """The settings of s3kv inside a transfer config: of our connector, of our tier, or of either in
    a MultiConnector. It is the part itself, so changes reach the connector; None if there is none.
    around: receives the options of the connectors around it."""
    extra = extra_of(connector)
    for parts in (extra.get("connectors"), extra.get("secondary_tiers")):
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and (held := settings_of(part, around)) is not None:
                if around is not None:
                    around.update(extra)
                return held
    return extra if "bucket" in extra or extra.get("type") == "s3kv" else None


def extra_of(connector: dict[str, Any]) -> dict[str, Any]:
    """The options of a connector inside a transfer config; all of it if they are not nested."""
    nested = (connector.get(f"{kind}_connector_extra_config") for kind in ("kv", "ec"))
    return next((held for held in nested if isinstance(held, dict)), connector)


def with_settings(connector: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with other settings of s3kv; unchanged if it has none."""
    changed = copy.deepcopy(connector)
    held = settings_of(changed)
    if held is not None:
        held.update(changes)
    return changed


def run_arms(
    names: Sequence[str], plan: RunInputs, report: OnProgress
) -> Iterator[tuple[str, ArmFacts]]:
    """Run the arms in the order of `ARMS`; each is yielded when its processes are gone. Raises
    `ArmFailed` if an engine does not start. A later failure is recorded as a fact."""
    prompts: list[dict[str, Any]] = []
    for name, arm in ARMS.items():
        if name in names:
            with ExitStack() as stack:
                settings = {
                    "argv": _argv(name, arm, plan),
                    "kv_transfer_config": _connector(name, plan, stack) if arm.connects else None,
                    "answer_tokens": ANSWER_TOKENS,
                }
                report(name, 0, plan.prompts)
                facts = _run(name, arm, plan, settings, prompts, report)
            yield name, facts


def _argv(name: str, arm: Arm, plan: RunInputs) -> list[str]:
    argv = [*plan.argv, "--enable-prefix-caching" if arm.caches else "--no-enable-prefix-caching"]
    return [*argv, "--tensor-parallel-size", str(plan.other_size)] if name == "tp" else argv


def _connector(name: str, plan: RunInputs, stack: ExitStack) -> dict[str, Any]:
    if name != "away":
        return dict(plan.connector)
    # The kernel accepts connections, but no process answers.
    server = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=4096)))
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    silent = {"endpoint_url": url, "on_unavailable": "serve", "drain_timeout_s": 1.0}
    return with_settings(plan.connector, **silent)


def _run(
    name: str,
    arm: Arm,
    plan: RunInputs,
    settings: Mapping[str, Any],
    prompts: list[dict[str, Any]],
    report: OnProgress,
) -> ArmFacts:
    """Run one arm. prompts: generated by the first arm, which has the tokenizer."""
    begun = False
    try:
        with ArmProcess(settings, plan.logs / f"{name}.log") as child:
            if not prompts:
                sizes = {"longest_tokens": plan.longest_tokens, "count": plan.prompts}
                prompts += child.ask("make_prompts", seed=plan.seed, **sizes)["prompts"]
            begun = True
            for number in range(1, arm.passes + 1):
                if number > 1 and arm.resets:
                    _reset(child)
                facts = _pass(name, child, prompts, report)
            return facts
    except ArmFailed as error:
        if not begun:
            raise ArmFailed(f"arm {name} did not start: {error}") from error
        return ArmFacts(error=str(error))


def _reset(child: ArmProcess) -> None:
    if not child.ask("reset")["reset"]:
        raise ArmFailed("the engine's prefix cache could not be reset: its blocks stay in use")


def _pass(
    name: str, child: ArmProcess, prompts: Sequence[dict[str, Any]], report: OnProgress
) -> ArmFacts:
    before, cpu_s = child.ask("counters")["counters"], child.cpu_s()
    replies = child.answers("serve", prompts=[prompt["tokens"] for prompt in prompts])
    answers = []
    for number, prompt in enumerate(prompts, 1):
        answers.append(_answer(next(replies), prompt["code"]))
        report(name, number, len(prompts))
    after = next(replies)["counters"]
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    of = {key.removeprefix(_BY_SOURCE): int(value) for key, value in grown.items()}
    from_bucket = grown.get(f"{NAMESPACE}fetch_bytes_total")
    return ArmFacts(
        answers=answers,
        prompt_tokens=sum(len(prompt["tokens"]) for prompt in prompts),
        engine_tokens=of.get("local_cache_hit", 0),
        connector_tokens=of.get("external_kv_transfer", 0),
        bucket_bytes=None if from_bucket is None else int(from_bucket),
        counters=grown,
        cpu_s=child.cpu_s() - cpu_s,
    )


def _answer(reply: Mapping[str, Any], code: str) -> ArmAnswer:
    positions = [{int(token): value for token, value in at.items()} for at in reply["logprobs"]]
    return ArmAnswer(
        tokens=reply["tokens"],
        logprobs=positions,
        found=code in reply["text"],
        ttft_s=reply["ttft_s"] or 0.0,
        complete=reply["finish_reason"] == "length",
        cached_tokens=reply["cached_tokens"],
    )
