"""The process of an arm's engine: `python -m s3kv.prove.engine`, driven over its stdin and stdout.

The first line of stdin has the settings. Every further line is a command, and answers are lines of
JSON. All other output goes to stderr, the log. The end of stdin means that the driver is gone: the
process group is killed. This is the only module besides the connectors that imports vLLM.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

from s3kv.prove.prompts import make_prompts

Message = dict[str, Any]
LOGPROBS = 5
"""Candidates whose logprobs are reported at each position, besides the sampled token."""
_PATIENCE_S = 60.0


class ArmEngine:
    """One engine, and its commands: methods that yield their answers. settings: `argv`, the options
    of vLLM; `kv_transfer_config` or None; `answer_tokens`."""

    def __init__(self, settings: Message) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.llm_engine import LLMEngine

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args(settings["argv"]))
        args.disable_log_stats = False
        args.shutdown_timeout = max(args.shutdown_timeout, int(_PATIENCE_S))
        if settings["kv_transfer_config"] is not None:
            from vllm.config import KVTransferConfig

            args.kv_transfer_config = KVTransferConfig(**settings["kv_transfer_config"])
        self._answer_tokens = settings["answer_tokens"]
        self._engine = LLMEngine.from_engine_args(args)
        self._requests = 0

    def make_prompts(self, longest_tokens: int, count: int, seed: int) -> Iterator[Message]:
        """The prompts for this model, as long as they fit."""
        tokenizer: Any = self._engine.get_tokenizer()
        fitting = self._engine.model_config.max_model_len - self._answer_tokens

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        prompts = make_prompts(encode, min(longest_tokens, fitting), count, seed)
        yield {"prompts": [asdict(prompt) for prompt in prompts]}

    def serve(self, prompts: list[list[int]]) -> Iterator[Message]:
        """Serve prompts one after another: an answer for each, and the counters after the last."""
        for prompt in prompts:
            yield self._serve(prompt)
        yield {"counters": counters()}

    def counters(self) -> Iterator[Message]:
        yield {"counters": counters()}

    def reset(self) -> Iterator[Message]:
        """Empty the engine's own prefix cache, which vLLM refuses while saves hold blocks."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (done := self._engine.reset_prefix_cache()) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield {"reset": bool(done)}

    def end(self) -> Iterator[Message]:
        """Shut down. The connector waits for its uploads."""
        self._engine.engine_core.shutdown(_PATIENCE_S)
        yield {}

    def _serve(self, prompt: list[int]) -> Message:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=self._answer_tokens, ignore_eos=True, logprobs=LOGPROBS
        )
        self._requests += 1
        start, ttft_s = time.monotonic(), None
        self._engine.add_request(f"prove-{self._requests}", {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            for last in outputs:
                if ttft_s is None and last.outputs[0].token_ids:
                    ttft_s = time.monotonic() - start
            # With VLLM_ENABLE_V1_MULTIPROCESSING=0 the engine runs here: do not spin while waiting.
            time.sleep(0.0 if outputs else 0.001)
        answer = last.outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "ttft_s": ttft_s,
            "cached_tokens": last.num_cached_tokens or 0,
            "logprobs": [
                {token: float(found.logprob) for token, found in position.items()}
                for position in answer.logprobs or ()
            ],
        }


def counters() -> dict[str, float]:
    """The counters of this process, by name and, after bars, the values of their labels."""
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:") and sample.name.endswith("_total"):
                own = [v for k, v in sample.labels.items() if k not in ("engine", "model_name")]
                key = "|".join([sample.name, *own])
                values[key] = values.get(key, 0.0) + float(sample.value)
    return values


def _read(commands: queue.Queue[Message]) -> None:
    """Read commands in a thread, to detect the end of stdin while the engine computes."""
    for line in sys.stdin:
        commands.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


def main(answers: TextIO) -> None:
    """Serve commands until `end`."""
    settings = json.loads(sys.stdin.readline())
    commands: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    arm = ArmEngine(settings)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    while True:
        command = commands.get()
        for answer in getattr(arm, command.pop("do"))(**command):
            print(json.dumps(answer), file=answers, flush=True)
            if not answer:
                return


def run() -> None:
    """Serve commands on stdout, and redirect all other output from there to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(answers)


if __name__ == "__main__":
    run()
