"""What s3kv costs requests that it does nothing for: `python -m benchmarks.short [--quick] [--json
FILE]`.

Prompts shorter than a chunk, 16 tokens out, eight at a time: nothing to hit, nothing to save. The
figure of a pass of 48 prompts is its requests per second; `benchmarks/turns.py` has the passes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks import turns
from benchmarks.deadline import ends
from benchmarks.rig import SHORT_TOKENS, Store
from lab.engine import Engine
from lab.models import prompts

PROMPTS, OUT_TOKENS, AT_ONCE = 48, 16, 8
TOLD = f"{PROMPTS} x {SHORT_TOKENS} tokens, {OUT_TOKENS} tokens out, {AT_ONCE} at a time"


def passes(engine: Engine, store: Store, prefix: str) -> turns.Measure:
    """The requests per second of a pass. Nothing is saved, so server and prefix do not matter."""
    asked = prompts(PROMPTS, SHORT_TOKENS, seed=8)

    def served(connector: str) -> turns.Figures:
        start_s = time.monotonic()
        engine.generate(asked, max_tokens=OUT_TOKENS, concurrency=AT_ONCE)
        return {"requests_per_s": len(asked) / (time.monotonic() - start_s)}

    return served


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    turns.run(arguments, passes, benchmark="short", figure="requests_per_s", prompts=TOLD, turns=20)


if __name__ == "__main__":
    main()
