"""README's and the quick start's `s3kv serve` and `vllm serve`, as they stand there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import s3kv
from lab import constants
from lab.engine import ENVIRONMENT, Engine
from lab.s3 import S3Server
from lab.service import free_ports
from scripts.matrix import host
from tests.repository.test_commands import DOCUMENTS, shown
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, tokens
from tests.system.e2e.test_serve import HIT_TOKENS, PROMPTS, Server, messages, serving, small
from tests.waiting import wait_until

COMMANDS = [command for document in DOCUMENTS for command in shown(document)]
(OURS,) = {command for command in COMMANDS if command.startswith("s3kv serve")}
(VLLMS,) = {command for command in COMMANDS if command.startswith("vllm serve")}
CHUNKS = HIT_TOKENS // 256
MUCH, LITTLE = '"host_bytes": "32GiB"', '"host_bytes": "256MiB"'
"""All that is changed in the words, because a machine for tests has less memory. Hits do not depend
on its speed, either."""


@pytest.fixture
def environment(tiny: Path, s3: S3Server, tmp_path: Path) -> dict[str, str]:
    """A shell's, with the commands `s3kv` and `vllm`, the folder `my-model`, and `my-bucket`."""
    (tmp_path / "my-model").symlink_to(tiny)
    for name, module in (("s3kv", "s3kv.cli"), ("vllm", "vllm.entrypoints.cli.main")):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    # The command asks for the version of a distribution of its name. The one for CPUs has another.
    told = tmp_path / "vllm-0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {host()['vllm']}+cpu\n")
    s3.client().create_bucket(Bucket="my-bucket")
    path = f"{tmp_path}:{os.environ['PATH']}"
    modules = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    patient = constants.environment({"recompute_gate": False, "probe_chunks": 1}, modules)
    return s3.env | {"AWS_ENDPOINT_URL": s3.url, "PATH": path} | patient


@pytest.mark.long
@pytest.mark.timeout(4 * START_AND_STOP_S)
def test_the_documented_commands_start_servers_of_one_namespace(
    rig: Rig, environment: dict[str, str]
) -> None:
    """One command from nothing to a prompt that is served from the bucket: it saves, and run again
    it hits. The command for vLLM itself hits the same objects."""
    expected = rig.truth(PROMPTS[:1])
    for number, (command, known) in enumerate([(OURS, "new"), (OURS, "known"), (VLLMS, "known")]):
        (port,) = free_ports(1)
        words = f"exec {command.replace(MUCH, LITTLE)} {shlex.join(small(port))}"
        log = rig.tmp_path / f"{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", words],
                cwd=rig.tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | environment,
                start_new_session=True,
            )
        with serving(Server(process, port, log)) as server:
            assert [server.complete(PROMPTS[0])] == expected
            assert server.metric("vllm:s3kv_internal_errors_total") == 0
            hits = server.metric("vllm:s3kv_hit_tokens_bucket_total")
            assert hits == (0 if known == "new" else HIT_TOKENS)
            wait_until("it is uploaded", lambda: len(rig.s3.objects("my-bucket")) == CHUNKS)
            server.interrupt()
            server.wait_until_gone(200.0)
        name = f"s3kv {s3kv.__version__} "
        (start,) = (line for line in messages(log.read_text()) if line.startswith(name))
        assert " reads and writes bucket my-bucket under s3kv/ at " in start
        assert f" ({known}), " in start
        assert " of host memory on 1 rank, " in start
        assert ("s3kv: host memory: " in log.read_text()) == (command == OURS)


@pytest.mark.long
def test_the_tier_hits_as_it_is_configured(rig: Rig) -> None:
    """For a GPU, for which `lab.offloading_on_cpu` stands in."""
    words = ["--bucket", rig.bucket, "--endpoint-url", rig.s3.url]
    words += ["--connector", "OffloadingConnector", "--host-bytes", "64MiB", "--block-size", "128"]
    command = [sys.executable, "-m", "s3kv.cli", "serve", str(rig.tiny), *words, "--json"]
    printed = json.loads(subprocess.check_output(command))["command"]
    connector = json.loads(printed[printed.index("--kv-transfer-config") + 1])
    spec = {"spec_name": "TieringOnCpu", "spec_module_path": "lab.offloading_on_cpu"}
    connector["kv_connector_extra_config"] |= spec
    for hits in (0, HIT_TOKENS):
        log = rig.tmp_path / f"{hits}.log"
        with Engine(rig.tiny, connector=connector, env=rig.s3.env, log_path=log) as engine:
            answers = engine.generate(PROMPTS)
            wait_until("it is uploaded", lambda: len(rig.objects()) == 2 * CHUNKS)
        assert [answer.cached_tokens for answer in answers] == [hits] * len(PROMPTS)
    assert tokens(answers) == tokens(rig.reference(rig.tiny, PROMPTS))
