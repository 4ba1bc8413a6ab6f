"""Hits beside those of vLLM's own OffloadingConnector, for models of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab import families, models
from lab.engine import Answer, Engine
from lab.offloading import offloading
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, answered, at_rest, cached, tokens
from tests.waiting import wait_until

(SYSTEM_PROMPT,) = models.prompts(1, 2_000, seed=70)
FIRST, SECOND = (SYSTEM_PROMPT + question for question in models.prompts(2, 100, seed=71))
REPEATED = 2_048
ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 256,
}


@pytest.mark.nightly
@pytest.mark.timeout(3 * START_AND_STOP_S)
@pytest.mark.parametrize(
    ("build", "shared"),
    [
        pytest.param(partial(models.build, preset=models.TINY), 1_920, id="llama"),
        pytest.param(partial(families.build, family=families.GEMMA3), 1_920, id="gemma3"),
        pytest.param(partial(families.build, family=families.LFM2), 1_792, id="lfm2"),
    ],
)
def test_repeated_and_shared_prompts(rig: Rig, build: Callable[[Path], Path], shared: int) -> None:
    """A system prompt with two questions: the first is asked again, and then the second. shared:
    its tokens up to the last chunk's end, and for states up to the last step's end."""
    model = build(rig.models_dir)

    def ask(engine: Engine, prompt: list[int]) -> Answer:
        engine.reset_prefix_cache()
        (answer,) = engine.generate([prompt])
        return answer

    folder = {"type": "fs", "root_dir": str(rig.tmp_path / "folder")}
    log = rig.tmp_path / "log"
    with Engine(model, connector=offloading(folder, 2**26), log_path=log, **ARGS) as engine:
        wait_until(
            "it has stored the first prompt",
            lambda: ask(engine, FIRST).cached_tokens == REPEATED,
            START_AND_STOP_S,
        )
        theirs = [ask(engine, prompt) for prompt in (FIRST, SECOND)]
    with rig.serve(model, rig.patient, **ARGS) as engine:
        ask(engine, FIRST)
        at_rest(engine)
        ours = [ask(engine, prompt) for prompt in (FIRST, SECOND)]
        at_rest(engine)
    assert answered(ours) == ([REPEATED, shared], tokens(theirs))
    assert all(a >= b for a, b in zip(cached(ours), cached(theirs), strict=True))
