"""The process of an arm around an engine that needs no vLLM: `python -m tests.unit.prove.stub`.

It answers by rule, keeps a folder as its bucket, and misbehaves as `argv` says.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from s3kv.prove import engine
from s3kv.prove.prompts import make_prompts
from tests.unit.prove.test_prompts import encode


class StubArm:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._argv, self._connector = settings["argv"], settings["kv_transfer_config"]
        if "refuses" in self._argv:
            raise SystemExit("this model is not served")
        self._helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self._caches = "--enable-prefix-caching" in self._argv
        extra = {} if self._connector is None else self._connector["kv_connector_extra_config"]
        self._bucket = Path(extra.get("folder", "/nowhere"))
        self._filled = self._bucket.exists() and "endpoint_url" not in extra
        self._served = 0
        self._counts = dict.fromkeys(("local_cache_hit", "external_kv_transfer"), 0)
        self._read = 0
        print("this goes to the log")

    def make_prompts(self, longest_tokens: int, count: int, seed: int) -> Iterator[dict[str, Any]]:
        made = make_prompts(encode, longest_tokens, count, seed)
        yield {"prompts": [{"tokens": one.tokens, "code": one.code} for one in made]}

    def serve(self, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
        self._served += 1
        if "dies" in self._argv and self._connector:
            raise SystemExit("out of memory")
        for prompt in prompts:
            yield self._answer(prompt)
        yield {"counters": self._counters()}

    def counters(self) -> Iterator[dict[str, Any]]:
        yield {"counters": self._counters()}

    def reset(self) -> Iterator[dict[str, Any]]:
        yield {"reset": "busy" not in self._argv}

    def end(self) -> Iterator[dict[str, Any]]:
        self._helper.kill()
        self._helper.wait()
        if self._connector is not None:
            self._bucket.mkdir(exist_ok=True)
        yield {}

    def _answer(self, prompt: list[int]) -> dict[str, Any]:
        if self._caches and self._connector is None and self._served > 1:
            self._counts["local_cache_hit"] += len(prompt)
        elif self._filled:
            self._counts["external_kv_transfer"] += len(prompt)
            self._read += len(prompt) if self._served == 1 else 0
        token = 1 if self._filled and "wrong" in self._argv else 0
        logprobs = [{"0": -0.1 - token, "1": -1.1 + token}]
        reply = {
            "tokens": [token],
            "text": "",
            "finish_reason": "length",
            "ttft_s": 0.1,
            "cached_tokens": 0,
        }
        return reply | {"logprobs": logprobs}

    def _counters(self) -> dict[str, float]:
        by_source = {
            f"vllm:prompt_tokens_by_source_total|{source}": float(count)
            for source, count in self._counts.items()
        }
        if self._connector is None:
            return by_source
        return by_source | {"vllm:s3kv_fetch_bytes_total": float(self._read)}


if __name__ == "__main__":
    engine.ArmEngine = StubArm  # type: ignore[assignment, misc]
    engine.run()
