"""Every command in README.md and the quick start is run by a test, word for word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from textwrap import indent

import pytest

from s3kv.metrics import KV_METRICS, NAMESPACE
from s3kv.objects.keys import Namespace
from tests.project import ROOT, makeflags
from tests.repository.test_installation import BESIDE_VLLM, COMMAND_LINE
from tests.servers import KEYS, REGION, QuietHandler, boto_client, in_a_thread, moto_server

DOCUMENTS = ("README.md", "docs/quickstart.md")

TERRAFORM = ("tests/system/infra/test_applied.py", 'startswith(("cd terraform", "terraform "))')
ELSEWHERE = {
    "make demo": ("tests/system/e2e/test_demo.py", '"make", "demo"'),
    "make demo-chat": ("tests/system/e2e/test_demo_chat.py", '"make", "demo-chat"'),
    "pip install": ("tests/repository/test_installation.py", "shell(command"),
    "vllm serve": ("tests/system/e2e/test_serve_commands.py", 'startswith("vllm serve")'),
    "s3kv serve": ("tests/system/e2e/test_serve_commands.py", 'startswith("s3kv serve")'),
    "cd terraform/examples/minimal": TERRAFORM,
    "terraform init && terraform apply": TERRAFORM,
    "terraform output -raw kv_transfer_config": TERRAFORM,
}
"""Commands that need more than a shell, a bucket and a page, by how they begin: the file that runs
them as they stand there, and a text in it that shows where."""

HERE = ("s3kv ", "curl ", "make test")
"""Commands that are run here, by how they begin."""

DIFFERENCES = {
    "make demo-chat": "in its short form (ARGS): the long one takes three minutes",
    "s3kv serve": "a free port, and arguments for a machine without a GPU",
    "vllm serve": "256 MiB of host memory, a free port, and arguments for a machine without a GPU",
    "cd terraform/examples/minimal": "in a copy, whose provider is told where the simulation is",
    "terraform init && terraform apply": "without lifecycle rules, which take a minute to settle",
    "curl ": "port 8000 leads to a page with the counters' names, because no engine runs here",
    "make test": "it collects the tests and runs none, because this is one of them",
}
"""What is not word for word, by how commands begin, and why."""


def shown(document: str) -> list[str]:
    """Commands on indented lines and in fences of bash, with comments. An open quote goes on."""
    text = (ROOT / document).read_text()
    fence = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
    text = fence.sub(lambda match: indent(match[1], "    "), text)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    commands: list[str] = []
    for line in text.splitlines():
        if commands and commands[-1].count("'") % 2:
            commands[-1] += f"\n{line}"
        elif line.startswith("    ") and re.match(r"[a-z]", line.strip()):
            commands.append(line.strip())
    return commands


SHOWN = [command for document in DOCUMENTS for command in shown(document)]
HERE_SHOWN = [c for c in SHOWN if c.startswith(HERE) and not c.startswith("s3kv serve")]
OURS = sorted({command.partition("  #")[0].strip() for command in HERE_SHOWN})


def test_every_command_is_run_here_or_somewhere_else() -> None:
    assert {begin for begin in HERE if any(o.startswith(begin) for o in OURS)} == set(HERE)
    for command in SHOWN:
        if command.startswith(tuple(OURS)):
            continue
        places = [begin for begin in ELSEWHERE if f"{command} ".startswith(f"{begin} ")]
        assert len(places) == 1, f"no test runs: {command}"
    for begin, (file, text) in ELSEWHERE.items():
        assert text in (ROOT / file).read_text(), begin
        assert any(command.startswith(begin) for command in SHOWN), f"nobody shows: {begin}"


def test_differences_are_those_of_commands_that_are_shown() -> None:
    unknown = [d for d in DIFFERENCES if not any(command.startswith(d) for command in SHOWN)]
    assert unknown == []


def test_what_pip_is_asked_for_is_installed_word_for_word() -> None:
    asked = {c.partition("  ")[0].strip() for c in SHOWN if c.startswith("pip ")}
    assert asked <= {COMMAND_LINE, *BESIDE_VLLM}
    assert asked & BESIDE_VLLM


class _Metrics(QuietHandler):
    """The names of s3kv's counters, as a server's /metrics has them."""

    def do_GET(self) -> None:
        page = "".join(f"{NAMESPACE}{name}_total 0.0\n" for name in KV_METRICS)
        self.answer(200 if self.path == "/metrics" else 404, page.encode())


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """Where a server with that page listens."""
    with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)) as url:
        yield url.removeprefix("http://")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, page: str) -> Iterator[dict[str, str]]:
    """A shell's, with `s3kv` on its path, and a bucket with one empty namespace in it. curl finds
    port 8000 elsewhere, and make neither makes an environment nor runs what it collects."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / ".curlrc").write_text(f"connect-to = localhost:8000:{page}\n")
    script = folder / "s3kv"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m s3kv.cli "$@"\n')
    script.chmod(0o755)
    with moto_server() as url:
        client = boto_client(url, KEYS)
        client.create_bucket(Bucket="my-bucket")
        client.put_object(Bucket="my-bucket", Key=Namespace("s3kv", "ab" * 16).manifest, Body=b"{}")
        yield {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            **KEYS,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": url,
            "MAKEFLAGS": makeflags(folder, "--collect-only"),
        }


@pytest.mark.long
@pytest.mark.timeout(600)  # collecting all tests takes a busy machine a minute
@pytest.mark.parametrize("command", OURS, ids=lambda c: " ".join(c.split()[:2]))
def test_a_command_of_ours_works_as_it_stands_there(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    program = command.split()[0]
    if program in ("curl", "make") and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(
        command,
        shell=True, cwd=ROOT if program == "make" else tmp_path, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert done.stdout
