"""`make demo-chat` in its short form, whole."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.chat import SHORT
from tests.project import makeflags
from tests.system.e2e.test_demo import start_demo

USUAL_PORTS = (5_000, 8_000, 29_500)
"""Of moto, vLLM's server and torch's rendezvous."""


def start(mark: str, *command: str, **more: str) -> subprocess.Popen[str]:
    """The demo, with a mark that everything it starts inherits."""
    command = command or (sys.executable, "-m", "demo", "chat", "--short")
    return start_demo(*command, MARK_OF_A_TEST=mark, COLUMNS="80", **more)


def running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK_OF_A_TEST") == mark:
                found.append(process)
    return found


def left_running(mark: str) -> list[psutil.Process]:
    """What is still there when whatever was killed in its own start has had time to notice."""
    _, left = psutil.wait_procs(running(mark), timeout=100)
    return left


@pytest.fixture
def taken_ports() -> Iterator[None]:
    """Ports that others like to have are in use."""
    with contextlib.ExitStack() as stack:
        for port in USUAL_PORTS:
            with contextlib.suppress(OSError):  # then they are in use already
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def row(output: str, name: str) -> list[int]:
    """The figures of a row: requests, two times, tokens by source, and dollars."""
    (found,) = re.findall(rf"^{name} +(\d.*)$", output, re.MULTILINE)
    return [int(word.replace(",", "")) for word in found.split()]


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_a_replacement_lives_on_the_bucket_and_nothing_is_left_running(
    taken_ports: None, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    demo = start(mark, "make", "demo-chat", MAKEFLAGS=makeflags(tmp_path, "--short"))
    output, errors = demo.communicate(timeout=1_100)
    assert demo.returncode == 0, output + errors
    assert errors == ""
    assert left_running(mark) == []
    assert output.count("B is killed (SIGKILL) with a request under way; C starts") == 2
    ours, plain = row(output, "with s3kv"), row(output, "without")
    for requests, _, _, *tokens, _ in (ours, plain):
        assert requests == SHORT.requests
        assert sum(tokens) > SHORT.requests * SHORT.system_tokens
    assert plain[4:6] == [0, 0], "neither host memory nor a bucket"
    assert ours[6] < plain[6], "computed"
    assert row(output, "C with s3kv")[5] > 0, "from the bucket to the replacement"
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("moment", ["in the first second", "while replicas start"])
def test_ctrl_c_leaves_one_line_and_no_process(moment: str) -> None:
    mark = uuid.uuid4().hex
    demo = start(mark)
    if moment == "in the first second":
        process = psutil.Process(demo.pid)  # importing torch takes it a second
        while not any("libtorch" in one.path for one in process.memory_maps()):
            assert demo.poll() is None
    else:
        while "start" not in demo.stdout.readline():
            assert demo.poll() is None
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 130, errors
    assert errors.splitlines() == ["Interrupted. Nothing of it is left running."]
    assert left_running(mark) == []
