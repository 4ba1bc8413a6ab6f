"""vLLM's HTTP server, set up as the README says, by the connector's name alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
import pytest

import s3kv
from lab import models
from lab.constants import environment, split_connector
from lab.engine import ENGINE_ARGS, ENVIRONMENT, ROOT, Engine
from lab.proxy import proxy
from lab.service import free_ports
from lab.zygote import Process
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, changed
from tests.system.e2e.test_failures import CHUNK_BYTES
from tests.waiting import wait_until

PROMPTS = models.prompts(2, 800)
HIT_TOKENS = 768
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text()


def small(port: int) -> list[str]:
    """Arguments for a server of a model without a tokenizer, on a machine without a GPU."""
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    arguments += ["--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "4096"]
    return [*arguments, "--kv-cache-memory-bytes", str(ENGINE_ARGS["kv_cache_memory_bytes"])]


class Server:
    """A server process and its children. port, log: those that the process was started with."""

    def __init__(self, process: Process, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process, self._log = process, log

    def wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self._process.poll() is None, self._log.read_text()[-4_000:]
            assert time.monotonic() < deadline, self._log.read_text()[-4_000:]
            with contextlib.suppress(OSError):
                self._get("/health")
                return
            time.sleep(0.2)

    def refusal(self, timeout_s: float) -> list[str]:
        """What a server that does not start has printed."""
        assert self._process.wait(timeout_s) != 0, self._log.read_text()[-4_000:]
        return self._log.read_text().splitlines()

    def _get(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(error.read().decode()) from None

    def complete(self, prompt: list[int], **more: Any) -> list[int]:
        answer = json.loads(
            self._get(
                "/v1/completions",
                {
                    "prompt": prompt,
                    "max_tokens": 8,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                    "detokenize": False,
                }
                | more,
            )
        )
        return list(answer["choices"][0]["token_ids"])

    def metric(self, name: str) -> float:
        """The sum over all labels of one counter."""
        text = self._get("/metrics").decode()
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return sum(float(value) for value in found)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                ours = os.getsid(process.pid) == self._process.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def running(self, word: str) -> list[psutil.Process]:
        return [p for p in self.processes() if word in " ".join(p.cmdline())]

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to every process at once, as a terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """What an orchestrator does: SIGTERM to the process it has started."""
        self._process.send_signal(signal.SIGTERM)

    def kill_first(self) -> None:
        """`kill -9` of the process that was started, and of no other."""
        self._process.send_signal(signal.SIGKILL)

    def wait_until_gone(self, timeout_s: float) -> None:
        self._process.wait(timeout_s)
        wait_until("all processes end", lambda: not self.processes())

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self._process.wait()


def start(
    model: Path, connector: dict[str, Any], env: dict[str, str], log: Path, *more: str
) -> Server:
    """What `vllm serve` runs, and test_serve_commands.py starts as users do: forked here, when vLLM
    is imported, as is its engine."""
    (port,) = free_ports(1)
    connector, constants = split_connector(connector)
    env = os.environ | ENVIRONMENT | env | environment(constants, env.get("PYTHONPATH"))
    program = ["vllm.entrypoints.openai.api_server", "--model", str(model), *small(port)]
    program += ["--kv-transfer-config", json.dumps(connector), *more]
    with log.open("wb") as output:
        process = Engine.zygotes.launch(sys.executable, env, output, program, imports=program[0])
    return Server(process, port, log)


def vllm_serve(*started: Any) -> AbstractContextManager[Server]:
    """The server that `start` starts with these arguments, as in `serving`."""
    return serving(start(*started))


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    """The server, from when it answers until the end of the block, which kills what is left."""
    try:
        server.wait_until_ready(START_AND_STOP_S)
        yield server
    finally:
        server.kill()


def test_the_plugin_is_installed() -> None:
    found = {entry.name: entry for entry in entry_points(group="vllm.general_plugins")}
    assert "s3kv" in found, "run: pip install -e ."
    assert callable(found["s3kv"].load())


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_serve_restart_serve(rig: Rig) -> None:
    """Ctrl-C in the middle of uploads: vLLM kills its engine at once, and all that the engine has
    started. The next server hits what has been uploaded, and computes and uploads the rest."""
    expected = rig.truth(PROMPTS)
    by_name = dict(rig.patient)
    del by_name["kv_connector_module_path"]
    with proxy(str(rig.s3.url)) as slow:
        # It is shut before the second prompt asks: that one need not wait for long.
        connector = changed(by_name, endpoint_url=slow.url, max_wait_ms=2_000)
        log = rig.tmp_path / "cold.log"
        with vllm_serve(rig.tiny, connector, rig.s3.env, log) as server:
            wait_until("the namespace is new", lambda: " is new; " in log.read_text())
            slow.shut_after(3 * CHUNK_BYTES)
            assert [server.complete(prompt) for prompt in PROMPTS] == expected
            assert server.metric("vllm:external_prefix_cache_queries_total") > 0
            assert server.metric("vllm:external_prefix_cache_hits_total") == 0
            slow.wait_until_shut(200.0)
            under_way = len(rig.objects())
            printed = len(log.read_text())
            server.interrupt()
            slow.open()
            server.wait_until_gone(200.0)
    assert under_way < 12
    ours = f'File "{Path(s3kv.__file__).parent}/'  # vLLM may have a traceback of its own
    assert ours not in log.read_text()[printed:], "a traceback of ours"

    log = rig.tmp_path / "warm.log"
    with vllm_serve(rig.tiny, by_name, rig.s3.env, log) as server:
        assert [server.complete(prompt) for prompt in PROMPTS] == expected
        hits = server.metric("vllm:external_prefix_cache_hits_total")
        assert 0 < hits <= 2 * HIT_TOKENS
        assert server.metric("vllm:s3kv_hit_tokens_bucket_total") == hits
        assert server.metric("vllm:s3kv_fetch_bytes_total") > 0
        assert server.metric("vllm:s3kv_internal_errors_total") == 0
        wait_until("it is known", lambda: " is known, " in log.read_text())
        server.interrupt()
        server.wait_until_gone(200.0)
    logs = [rig.tmp_path / "cold.log", rig.tmp_path / "warm.log"]
    for log, known in zip(logs, ("new", "known"), strict=True):
        check_lines(log, rig.bucket, known)
    said = {essence(line) for log in logs for line in messages(log.read_text())}
    shown = {essence(line) for line in messages(QUICK_START)}
    assert shown <= said, "the quick start shows lines that vLLM's log does not have"


_FORMAT = re.compile(r".*INFO \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] (.*)")
_VOLATILE = (
    (r"bucket \S+ under \S+ at .*?: namespace \w+|namespace \S+? is", "PLACE"),
    (r"^s3kv \S+ ", "s3kv VERSION "),
    (r"under \S+ to compare", "under PREFIX to compare"),
    (r"\b[0-9a-f]{32}\b", "HASH"),
    (r"\d[\d.,]*\d|\d", "N"),
    (r"\b([KMGT]i)?B\b", "BYTES"),
)


def essence(message: str) -> str:
    """What of a line in the log is the same for every bucket, and on every machine."""
    for pattern, word in _VOLATILE:
        message = re.sub(pattern, word, message)
    return message


def messages(text: str) -> list[str]:
    """What vLLM's log says, of lines in its own format: process, level, time and place."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    return [match[1] for line in plain if (match := _FORMAT.fullmatch(line))]


def check_lines(log: Path, bucket: str, known: str) -> None:
    """A start, the namespace and the first request have a line each, in vLLM's format."""
    said = messages(log.read_text())
    start = f"s3kv {s3kv.__version__} reads and writes bucket {bucket} under "
    starts = [line for line in said if line.startswith(start)]
    assert [f" ({known}), " in line for line in starts] == [True], log.read_text()[-9_000:]
    assert any(line.startswith("s3kv: Hit rate: ") for line in said)
    namespaces = [line for line in said if re.match(r"I/O process \d+: namespace ", line)]
    assert [f" is {known}" in line for line in namespaces] == [True], namespaces
    unformatted = [line for line in log.read_text().splitlines() if line.startswith("s3kv")]
    assert unformatted == []


def test_the_quick_start_shows_lines_of_a_log() -> None:
    assert len(messages(QUICK_START)) == 3


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_a_server_that_is_given_time_finishes_its_uploads(rig: Rig) -> None:
    """With `--shutdown-timeout`, an end in the middle of uploads loses nothing."""
    with proxy(str(rig.s3.url)) as slow:
        settings = {"max_wait_ms": 2_000, "drain_timeout_s": 50.0}
        connector = changed(rig.patient, endpoint_url=slow.url, **settings)
        time_to_drain = ("--shutdown-timeout", "60")
        log = rig.tmp_path / "server.log"
        with vllm_serve(rig.tiny, connector, rig.s3.env, log, *time_to_drain) as server:
            slow.shut_after(3 * CHUNK_BYTES)
            for prompt in PROMPTS:
                server.complete(prompt)
            slow.wait_until_shut(200.0)
            # Not always all 12: one that was asked for through the proxy, too late to be saved.
            saves = server.metric("vllm:s3kv_saves_total")
            assert len(rig.objects()) < saves
            server.terminate()
            time.sleep(3.0)  # whoever would kill it does so by now
            slow.open()
            server.wait_until_gone(200.0)
    assert len(rig.objects()) == saves


@pytest.mark.nightly
@pytest.mark.timeout(2 * START_AND_STOP_S)
@pytest.mark.parametrize("printed", ["Initializing a V1 LLM engine", "reads and writes bucket"])
def test_ctrl_c_twice_during_a_start_leaves_nothing_running(rig: Rig, printed: str) -> None:
    log = rig.tmp_path / "server.log"
    server = start(rig.tiny, rig.patient, rig.s3.env, log)
    try:
        wait_until("it says so", lambda: printed in log.read_text(), START_AND_STOP_S)
        server.interrupt()
        server.interrupt()
        server.wait_until_gone(200.0)
    finally:
        server.kill()


@pytest.mark.timeout(2 * START_AND_STOP_S)
def test_a_request_says_what_of_it_is_cached_and_a_kill_9_leaves_nothing_running(rig: Rig) -> None:
    """A private request, one that vLLM refuses, one that s3kv cannot read, and one with a limit:
    the last one alone leaves objects.

    vLLM's engine outlives its server, with or without s3kv. It gets a SIGTERM here, as from the
    `pkill` of the quick start, and takes the I/O process along."""
    expected = rig.truth(PROMPTS)
    log = rig.tmp_path / "server.log"
    with vllm_serve(rig.tiny, rig.patient, rig.s3.env, log) as server:
        private = {"s3kv": {"save": False}}
        assert server.complete(PROMPTS[0], kv_transfer_params=private) == expected[0]
        with pytest.raises(AssertionError, match="kv_transfer_params"):
            server.complete(PROMPTS[0], kv_transfer_params="private")
        misspelt = {"s3kv": {"saev": False}}
        assert server.complete(PROMPTS[1], kv_transfer_params=misspelt) == expected[1]
        limited = {"max_offload_tokens": 300}
        assert server.complete(PROMPTS[0], kv_transfer_params=limited) == expected[0]
        wait_until("two chunks are uploaded", lambda: len(rig.objects()) == 2)
        assert server.metric("vllm:s3kv_saves_total") == 2
        assert server.metric("vllm:s3kv_internal_errors_total") == 0

        assert server.running("s3kv.io")
        server.kill_first()
        for engine in server.running("VLLM::EngineCore"):
            engine.terminate()
        wait_until("all processes end", lambda: not server.processes())
    (line,) = (line for line in log.read_text().splitlines() if "s3kv saves nothing of" in line)
    assert "saev" in line


def last_line_of_the_error(printed: list[str]) -> str:
    """The last with an error of ours. vLLM ends with one of its own, which points up, and Python
    may complain about what the processes have left behind."""
    ours = [n for n, line in enumerate(printed) if re.search(r"s3kv\.errors\.\w+: ", line)]
    assert ours, "\n".join(printed[-60:])
    below = "\n".join(printed[ours[-1] + 1 :])
    assert "Engine core initialization failed. See root cause above" in below, below
    return printed[ours[-1]]


REFUSALS: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "unknown setting": (
        {"chunk_token": 128},
        True,
        ("chunk_token' in kv_connector_extra_config", "did you mean 'chunk_tokens'"),
    ),
    "wrong bucket": ({"bucket": "no-such-bucket"}, True, ("no-such-bucket", "create the bucket")),
    "no credentials": ({}, False, ("no credentials found", "set AWS_ACCESS_KEY_ID")),
    "wrong endpoint": (
        {"endpoint_url": "http://127.0.0.1:9"},
        True,
        ("127.0.0.1:9", "refused", "check endpoint_url", "on_unavailable"),
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        "unknown setting",
        "wrong endpoint",
        pytest.param("wrong bucket", marks=pytest.mark.nightly),
        pytest.param("no credentials", marks=pytest.mark.nightly),
    ],
)
def test_a_server_that_is_refused_ends_with_what_to_change(rig: Rig, what: str) -> None:
    settings, has_credentials, said = REFUSALS[what]
    env = dict(rig.s3.env)
    if not has_credentials:
        env |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    server = start(rig.tiny, changed(rig.patient, **settings), env, rig.tmp_path / "server.log")
    try:
        printed = server.refusal(START_AND_STOP_S)
        wait_until("all processes end", lambda: not server.processes())
    finally:
        server.kill()
    line = last_line_of_the_error(printed)
    for word in said:
        assert word in line
