"""One engine on two hosts: its ranks share a network and a bucket, and no memory.

The hosts are namespaces of this machine (`lab.hosts`), and the executor is Ray's. In float32, where
a token does not depend on how long the hit was.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab import models
from lab.constants import environment, split_connector
from lab.engine import ENGINE_ARGS, ENVIRONMENT, ROOT, Ask, Engine, EngineFailed, Pending
from lab.hosts import Host, gateway, hosts, on_ray, start_ray
from lab.proxy import proxy
from lab.s3 import S3Server
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, answered, changed, slabs
from tests.system.e2e.test_failures import CHUNK_BYTES
from tests.system.e2e.test_parallel import BOTH, WARMED_UP, holds
from tests.waiting import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(5 * START_AND_STOP_S)]

PROMPTS = models.prompts(3, 800)
CHUNKS = 6
# With a connector vLLM waits for every rank's result, also for that of a rank that is gone.
STEP_TIMEOUT = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "60"}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, **WARMED_UP}
PARTS_OF_PIPELINE = {"h0-3of4-l0-1of4", "h0-3of4-l2-3of4"}

Spread = Callable[..., AbstractContextManager[Engine]]


@contextlib.contextmanager
def by_multiprocessing(
    them: list[Host], model: Path, directory: Path, env: dict[str, str], **settings: Any
) -> Iterator[Engine]:
    """An engine whose second host runs `vllm serve --headless`. Both are given the credentials."""
    first, second = them
    nodes = {
        "distributed_executor_backend": "mp",
        "nnodes": 2,
        "master_addr": first.address,
        "master_port": 29_500,
    }
    connector = settings.pop("connector")
    transfer, constants = split_connector(connector)
    arguments = ENGINE_ARGS | settings | nodes | {"node_rank": 1, "kv_transfer_config": transfer}
    follower = second.launch(
        [
            *(sys.executable, "-m", "lab.hosts.follower", "--model", str(model)),
            *("--headless", *flags(arguments)),
        ],
        os.environ
        | ENVIRONMENT
        | {"PYTHONPATH": str(ROOT)}
        | environment(constants, str(ROOT))
        | env
        | second.environment(),
        directory / "follower.log",
    )
    engine = Engine(
        model,
        log_path=directory / "engine.log",
        connector=connector,
        in_process=False,
        env=env | first.environment(),
        python=first.interpreter(directory),
        **settings,
        **nodes,
    )
    try:
        with engine:
            yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):  # its host has lost power
            os.killpg(follower.pid, signal.SIGTERM)
        follower.wait()


@contextlib.contextmanager
def by_ray(
    them: list[Host], model: Path, directory: Path, env: dict[str, str], **settings: Any
) -> Iterator[Engine]:
    """An engine on a Ray cluster. The credentials are given to the engine alone."""
    cluster = {"RAY_ADDRESS": start_ray(them)}
    with Engine(
        model,
        log_path=directory / "engine.log",
        in_process=False,
        env=env | on_ray() | them[0].environment() | cluster,
        python=them[0].interpreter(directory),
        distributed_executor_backend="ray",
        **settings,
    ) as engine:
        yield engine


def flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` takes them. Switches are off unless they are named."""
    words = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def restart(them: list[Host], engine: Engine) -> None:
    """All hosts lose power, and boot without the engine."""
    for host in them:
        host.kill()
    wait_until("the engine's process is gone", lambda: not engine.processes())
    for host in them:
        host.start()


def check_sound(s3: S3Server, bucket: str) -> None:
    """`s3kv verify` finds every object to be what its key says."""
    where = [f"--bucket={bucket}", f"--endpoint-url={s3.url}"]
    done = subprocess.run(
        [sys.executable, "-m", "s3kv.cli", "verify", "--json", *where],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | s3.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["checked"] == len(s3.objects(bucket)) > 0


def wait_until_stored(s3: S3Server, bucket: str, prompts: int, parts: set[str]) -> None:
    what = f"{prompts} prompts are in the bucket"
    wait_until(what, lambda: holds(s3, bucket, prompts * CHUNKS, parts), 120.0)


def check_hits_two(engine: Engine, expected: list[list[int]]) -> None:
    """The first two prompts come from the bucket, and the third is computed."""
    assert answered(engine.generate(PROMPTS)) == ([CHUNKS * 128, CHUNKS * 128, 0], expected)
    counts = engine.metrics()
    assert counts["vllm:s3kv_hit_tokens_bucket_total"] == 2 * CHUNKS * 128
    assert counts["vllm:s3kv_internal_errors_total"] == 0


def mapped_on(host: Host) -> dict[psutil.Process, set[str]]:
    return {process: found for process in host.processes() if (found := slabs(process))}


def check_local(them: list[Host], env: dict[str, str]) -> None:
    """Each host has one I/O process, which has the credentials, and one slab, which the host's
    worker and I/O process map and nobody on another host."""
    found: list[str] = []
    for host in them:
        mapped = mapped_on(host)
        assert len(mapped) == 2, f"{host.name}: {mapped}"
        (slab,) = set().union(*mapped.values())
        found.append(slab)
        (io,) = [process for process in mapped if "s3kv.io" in process.cmdline()]
        assert env.items() <= io.environ().items()
    assert len(set(found)) == len(them)


@pytest.mark.parametrize(
    ("spread", "engine_args", "parts"),
    [
        pytest.param(by_ray, TENSOR, BOTH, id="ray-tensor"),
        pytest.param(by_ray, PIPELINE, PARTS_OF_PIPELINE, id="ray-pipeline"),
        pytest.param(by_multiprocessing, TENSOR, BOTH, id="multiprocessing-tensor"),
        pytest.param(
            by_multiprocessing, PIPELINE, PARTS_OF_PIPELINE, id="multiprocessing-pipeline"
        ),
    ],
)
def test_killed_and_started_again_it_hits(
    rig: Rig, spread: Spread, engine_args: dict[str, Any], parts: set[str]
) -> None:
    expected = rig.truth(PROMPTS)
    with hosts("one", "two") as them, proxy(str(rig.s3.url), address=gateway(them[0])) as store:
        connector = changed(rig.patient, endpoint_url=store.url)
        settings = {"connector": connector, "dtype": "float32", **engine_args}
        with spread(them, rig.tiny, rig.tmp_path, rig.s3.env, **settings) as cold:
            assert answered(cold.generate(PROMPTS[:2])) == ([0, 0], expected[:2])
            wait_until_stored(rig.s3, rig.bucket, 2, parts)
            check_local(them, rig.s3.env)
            restart(them, cold)
        check_sound(rig.s3, rig.bucket)
        with spread(them, rig.tiny, rig.tmp_path, rig.s3.env, **settings) as warm:
            check_hits_two(warm, expected)
            wait_until_stored(rig.s3, rig.bucket, 3, parts)
        for host in them:
            wait_until(f"{host.name} has no slab", lambda host=host: not mapped_on(host))


def seed(model: Path, s3: S3Server, bucket: str, directory: Path, **settings: Any) -> None:
    """Store the first two prompts by an engine of the same size on one host."""
    log = directory / "seed.log"
    with Engine(model, log_path=log, env=s3.env, in_process=False, **settings) as engine:
        engine.generate(PROMPTS[:2])
        wait_until_stored(s3, bucket, 2, BOTH)


def fails_after_cut(cut_off: Host, engine: Engine, pending: Pending) -> None:
    """Cut a host off while a request is served: the engine dies, and the request fails."""
    assert not pending.done()
    cut_off.cut()
    with pytest.raises(EngineFailed, match="EngineDeadError"):
        pending.result(300.0)


def test_without_s3kv_a_host_cut_off_takes_the_engine(tiny: Path, tmp_path: Path) -> None:
    """When Ray misses the host, after about a minute."""
    settings: dict[str, Any] = {"dtype": "float32", **TENSOR}
    with hosts("one", "two") as them, by_ray(them, tiny, tmp_path, {}, **settings) as engine:
        pending = engine.begin_generate([Ask(PROMPTS[0], max_tokens=3_000)])
        wait_until(
            "the first token is there",
            lambda: engine.metrics()["vllm:generation_tokens_total"] > 0,
            120.0,
        )
        fails_after_cut(them[1], engine, pending)
        engine.kill()


def test_a_host_cut_off_during_a_load_takes_the_engine_and_nothing_stored(rig: Rig) -> None:
    expected = rig.truth(PROMPTS)
    settings: dict[str, Any] = {"dtype": "float32", **TENSOR}
    seed(rig.tiny, rig.s3, rig.bucket, rig.tmp_path, connector=rig.patient, **settings)
    stored = rig.s3.everything(rig.bucket)
    with hosts("one", "two") as them, proxy(str(rig.s3.url), address=gateway(them[0])) as store:
        settings["connector"] = changed(rig.patient, endpoint_url=store.url)
        with by_ray(them, rig.tiny, rig.tmp_path, rig.s3.env | STEP_TIMEOUT, **settings) as engine:
            check_local(them, rig.s3.env)
            store.shut_after(CHUNK_BYTES)  # of the six that the ranks fetch
            pending = engine.begin_generate(PROMPTS[:1])
            store.wait_until_shut(120.0)
            fails_after_cut(them[1], engine, pending)
            store.open()
            wait_until("the other host has no slab", lambda: not mapped_on(them[0]), 60.0)
            restart(them, engine)
        assert rig.s3.everything(rig.bucket) == stored
        check_sound(rig.s3, rig.bucket)
        with by_ray(them, rig.tiny, rig.tmp_path, rig.s3.env, **settings) as fresh:
            check_hits_two(fresh, expected)
            wait_until_stored(rig.s3, rig.bucket, 3, BOTH)
        check_sound(rig.s3, rig.bucket)
