"""Every command in README.md and the quick start is run by a test, word for word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3kv.objects.keys import Namespace
from tests.project import ROOT
from tests.servers import KEYS, REGION, boto_client, moto_server

DOCUMENTS = ("README.md", "docs/quickstart.md")

ELSEWHERE = {
    "s3kv bench": ("tests/unit/cli/test_bench.py", "bench"),
    "make demo": ("tests/system/e2e/test_demo.py", '"-m", "demo"'),
    "make test": ("Makefile", "\ntest: "),
    "pip install": ("tests/repository/test_packaging.py", "install"),
    "vllm serve": ("tests/system/e2e/test_serve.py", "--kv-transfer-config"),
    "cd terraform/examples/minimal": ("tests/system/infra/checks.py", '"examples"'),
    "terraform init && terraform apply": ("tests/system/infra/applied.py", '"apply"'),
    "terraform output -raw kv_transfer_config": ("tests/system/infra/applied.py", '"output"'),
    "curl --silent http://localhost:8000/metrics": (
        "tests/system/e2e/test_serve.py",
        "s3kv_hit_tokens_bucket_total",
    ),
}
"""Commands that need more than a shell and an empty bucket, by how they begin: the file that runs
them, and a text in it that shows where. `test_docs.py` reads transfer configurations as shown."""


def shown(document: str) -> list[str]:
    """The commands on indented lines, with their comments. A quote that is open goes on."""
    text = (ROOT / document).read_text()
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    commands: list[str] = []
    for line in text.splitlines():
        if commands and commands[-1].count("'") % 2:
            commands[-1] += f"\n{line}"
        elif line.startswith("    ") and re.match(r"[a-z]", line.strip()):
            commands.append(line.strip())
    return commands


SHOWN = [command for document in DOCUMENTS for command in shown(document)]
OURS = sorted(
    {
        command.partition("  #")[0].strip()
        for command in SHOWN
        if command.startswith("s3kv ") and not command.startswith(tuple(ELSEWHERE))
    }
)


def test_every_command_is_run_here_or_somewhere_else() -> None:
    assert len(OURS) >= 4
    for command in SHOWN:
        if command.startswith(tuple(OURS)):
            continue
        places = [place for begin, place in ELSEWHERE.items() if command.startswith(begin)]
        assert len(places) == 1, f"no test runs: {command}"
    for begin, (file, text) in ELSEWHERE.items():
        assert text in (ROOT / file).read_text(), begin
        assert any(command.startswith(begin) for command in SHOWN), f"nobody shows: {begin}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A shell's, with `s3kv` on its path, and a bucket with one empty namespace in it."""
    folder = tmp_path_factory.mktemp("bin")
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
        }


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("command", OURS, ids=lambda command: str(command).split()[1])
def test_a_command_of_ours_works_as_it_stands_there(
    command: str, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        command,
        shell=True,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
