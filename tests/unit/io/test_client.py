"""The client with real I/O processes, real sockets, and an S3 server; and what survives a kill."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from lab.service import free_ports
from s3kv.config import Config
from s3kv.errors import ConfigError, IoProcessError, StoreMissing
from s3kv.host.slab import Slab
from s3kv.io import child, wire
from s3kv.io.child import Child
from s3kv.io.client import IoClient
from s3kv.io.process_life import State
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import Outcome
from tests.servers import BUCKET, KEYS, boto_client, data_key, set_credentials
from tests.unit.io import rig
from tests.unit.io.conftest import Open
from tests.unit.io.stubborn import StubbornServer, stubborn_server
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
PATIENCE_S = 250.0
"""Longest wait for what a busy machine does late."""


@pytest.fixture
def bucket(moto_url: str) -> Iterator[Any]:
    """The bucket as another client sees it, emptied afterwards."""
    client = boto_client(moto_url, KEYS)
    yield client
    for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])


@pytest.fixture
def stubborn() -> Iterator[StubbornServer]:
    with stubborn_server(rig.sealed(1)) as server:
        yield server


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    wait_until(what, condition)


def ends(client: IoClient, count: int) -> dict[int, JobEnd]:
    found: list[JobEnd] = []
    until(lambda: found.extend(client.poll()) or len(found) >= count, f"{count} ends")
    assert len(found) == count == len({end.job_id for end in found})
    return {end.job_id: end for end in found}


def fetch(client: IoClient, job_id: int, number: int) -> None:
    client.submit(rig.fetch(job_id, number))


def end_of_fetch(client: IoClient, job_id: int, number: int = 1) -> JobEnd:
    """Of the one job that is under way."""
    fetch(client, job_id, number)
    return ends(client, 1)[job_id]


def upload(client: IoClient, job_id: int) -> None:
    client.submit(rig.upload(job_id))


def is_gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text("ascii")
    except FileNotFoundError:
        return True
    return status.rsplit(") ", 1)[1].startswith("Z")


# What it does


@pytest.mark.parametrize("range_bytes", [0, 4096])
def test_round_trip(
    moto_url: str, bucket: Any, slab: Slab, open_client: Open, range_bytes: int
) -> None:
    client = open_client(moto_url, range_bytes=range_bytes)
    for i in range(8):
        rig.fill(slab, i, number=i)
        upload(client, i)
    uploaded = ends(client, 8)
    assert {(e.outcome, e.nbytes) for e in uploaded.values()} == {
        (Outcome.OK, rig.FORMAT.object_bytes)
    }
    assert bucket.get_object(Bucket=BUCKET, Key=rig.object_key(3))["Body"].read() == rig.sealed(3)
    for i in range(8):
        fetch(client, 10 + i, number=i)
    fetch(client, 20, number=99)
    upload(client, 0)
    fetched = ends(client, 10)
    assert all(fetched[10 + i].outcome is Outcome.OK for i in range(8))
    assert all(bytes(rig.slot(slab, 10 + i)) == rig.sealed(i) for i in range(8))
    assert (fetched[20].outcome, fetched[0].outcome) == (Outcome.MISSING, Outcome.EXISTS)
    assert rig.object_key(99) in fetched[20].detail
    assert client.wait_ready(0).trouble is None


def test_one_poll_waits_for_an_end_when_told(moto_url: str, slab: Slab, open_client: Open) -> None:
    client = open_client(moto_url, clock=Clock())  # time stands still, so nobody pings
    client.wait_ready(PATIENCE_S)
    assert client.poll(linger_s=60.0) == [], "nothing is under way, so there is nothing to wait for"
    fetch(client, 1, number=404)
    (done,) = client.poll(linger_s=60.0)
    assert (done.job_id, done.outcome) == (1, Outcome.MISSING)


def test_a_cancelled_fetch_writes_no_more_after_its_end(
    stubborn: StubbornServer, slab: Slab, open_client: Open
) -> None:
    client = open_client(stubborn.url)
    fetch(client, 1, number=1)
    half = rig.FORMAT.object_bytes // 2
    until(lambda: client.poll() or bytes(rig.slot(slab, 1)[:half]) == stubborn.body[:half])
    client.cancel(1)
    assert ends(client, 1)[1].outcome is Outcome.CANCELLED
    rig.slot(slab, 1)[:] = b"\xaa" * rig.FORMAT.object_bytes
    stubborn.go_on.set()
    assert end_of_fetch(client, 2).outcome is Outcome.OK
    assert set(rig.slot(slab, 1)) == {0xAA}


def test_what_has_begun_cannot_be_withdrawn(stubborn: StubbornServer, open_client: Open) -> None:
    client = open_client(stubborn.url, max_inflight_requests=1)
    fetch(client, 1, number=1)
    fetch(client, 2, number=1)
    until(lambda: client.poll() or stubborn.begun)
    client.cancel(1, if_waiting=True)
    client.cancel(2, if_waiting=True)
    assert ends(client, 1)[2].outcome is Outcome.CANCELLED
    stubborn.go_on.set()
    assert ends(client, 1)[1].outcome is Outcome.OK


def test_ids_of_running_jobs_cannot_be_used_again(
    stubborn: StubbornServer, open_client: Open
) -> None:
    client = open_client(stubborn.url)
    fetch(client, 1, number=1)
    with pytest.raises(ValueError, match="job 1 has not ended"):
        fetch(client, 1, number=2)


# How it starts


def test_a_missing_bucket_is_said(moto_url: str, open_client: Open) -> None:
    client = open_client(moto_url, bucket="no-such-bucket")
    with pytest.raises(StoreMissing, match="no-such-bucket"):
        client.wait_ready(PATIENCE_S)
    assert client.life.state is State.CLOSED


def test_a_server_that_is_not_there_is_waited_for_when_told(open_client: Open) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    client = open_client(url, on_unavailable="serve", max_attempts=1)
    ready = client.wait_ready(PATIENCE_S)
    assert (ready.serving, ready.trouble) == (True, "unavailable")
    assert end_of_fetch(client, 1).outcome is Outcome.FAILED
    assert client.life.deaths == 0


@pytest.mark.parametrize("module", ["s3kv.io.no_such_module", "this"])
def test_a_process_that_ends_at_once_is_said(
    module: str, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a process that was forked meanwhile holds its end of the stream open."""
    spawn, held = child._spawn, list[int]()
    monkeypatch.setattr(
        child, "_spawn", lambda fd, *rest: held.append(os.dup(fd)) or spawn(fd, *rest)
    )
    client = open_client("http://127.0.0.1:1", module=module)
    with pytest.raises(IoProcessError, match="has ended with exit status"):
        client.wait_ready(PATIENCE_S)
    os.close(held[0])


def test_a_process_that_hangs_at_the_start_logs_where(
    open_client: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = open_client(f"http://127.0.0.1:{silent.getsockname()[1]}", stall_s=0.01)
        until(lambda: client.poll() or 'io/__main__.py", line' in caplog.text)


def test_a_process_that_gives_no_answer_in_time_is_ended(moto_url: str, open_client: Open) -> None:
    client = open_client(moto_url)
    pid = client.pid
    with pytest.raises(IoProcessError, match=r"no answer within 0\.001 s"):
        client.wait_ready(0.001)
    assert is_gone(pid)


def test_every_trouble_at_start_has_its_error() -> None:
    assert sorted(get_args(wire.Trouble)) == sorted(wire.TROUBLES.values())


def test_the_process_loads_neither_torch_nor_numpy_nor_vllm() -> None:
    code = (
        "import sys, s3kv.io.__main__, s3kv.io.client, s3kv.stores.s3.fast_client\n"
        "heavy = {'torch', 'vllm', 'numpy', 'boto3', 'aiobotocore', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_keys_that_kms_does_not_decrypt_end_the_start(
    moto_url: str, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3KV_ENCRYPTION_KEYS", "kms:AAAA")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto_url)
    client = open_client(moto_url, encryption="aes-gcm", on_unavailable="serve")
    with pytest.raises(ConfigError, match=r"KMS does not decrypt it: .*InvalidCiphertextException"):
        client.wait_ready(PATIENCE_S)


# How it dies


@pytest.mark.long
def test_a_process_without_kms_is_replaced_until_kms_answers(
    moto_url: str,
    bucket: Any,
    slab: Slab,
    open_client: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Meanwhile every chunk is a miss, and none is taken for one that crashes the process."""
    told = base64.b64encode(data_key(moto_url)).decode()
    monkeypatch.setenv("S3KV_ENCRYPTION_KEYS", f"kms:{told}")
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto_url)
    client = open_client(moto_url, encryption="aes-gcm")
    client.wait_ready(PATIENCE_S)
    rig.fill(slab, 1, number=1)
    upload(client, 1)
    assert ends(client, 1)[1].outcome is Outcome.OK

    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:1")
    os.kill(client.pid, signal.SIGKILL)
    while client.life.deaths < 5:  # once by the signal; a job that crashes it thrice is given up
        until(lambda: client.poll() or client.life.state is State.UP)
        end = end_of_fetch(client, 2)
        assert end.outcome is Outcome.FAILED
    assert "KMS does not decrypt it: Could not connect to the endpoint URL" in end.detail

    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto_url)
    until(lambda: client.poll() or client.life.state is State.UP)
    until(lambda: end_of_fetch(client, 3).outcome is Outcome.OK, "a hit")
    assert bytes(rig.slot(slab, 3)) == rig.sealed(1)
    assert told[:16] not in caplog.text


def test_a_killed_process_is_replaced_and_its_jobs_fail_once(
    stubborn: StubbornServer, slab: Slab, open_client: Open
) -> None:
    client = open_client(stubborn.url)
    for i in range(1, 6):
        fetch(client, i, number=1)
    until(lambda: client.poll() or len(stubborn.begun) >= 5)
    pid = client.pid
    os.kill(pid, signal.SIGKILL)
    failed = ends(client, 5)
    assert {e.outcome for e in failed.values()} == {Outcome.FAILED}
    assert "signal 9" in failed[1].detail
    assert is_gone(pid)
    stubborn.go_on.set()
    until(lambda: client.poll() or client.life.state is State.UP)
    assert end_of_fetch(client, 1).outcome is Outcome.OK
    assert bytes(rig.slot(slab, 1)) == stubborn.body
    assert (client.life.starts, client.life.deaths, len(client._jobs)) == (2, 1, 0)


def test_an_idle_client_reads_only_when_it_checks_its_process(
    moto_url: str, open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, reads = Clock(), 0
    client = open_client(moto_url, clock=clock)
    client.wait_ready(PATIENCE_S)
    receive = Child.receive

    def counted(child: Child, wait_s: float) -> list[Any]:
        nonlocal reads
        reads += 1
        return receive(child, wait_s)

    monkeypatch.setattr(Child, "receive", counted)
    for _ in range(100):
        assert client.poll() == []
    assert reads == 0
    os.kill(client.pid, signal.SIGKILL)
    assert client.poll() == []
    assert client.life.state is State.UP
    clock.now_s += 1.0
    until(lambda: client.poll() or client.life.state is State.DOWN)


def test_jobs_given_while_it_is_down_fail_at_the_next_poll(open_client: Open) -> None:
    client = open_client("http://127.0.0.1:1", module="this", clock=Clock())
    until(lambda: client.poll() or client.life.state is State.DOWN)
    fetch(client, 1, number=1)
    upload(client, 2)
    assert {e.outcome for e in ends(client, 2).values()} == {Outcome.FAILED}
    client.cancel(1)
    assert client.poll() == []


def test_a_process_that_hangs_is_killed_before_its_jobs_end(
    stubborn: StubbornServer, open_client: Open
) -> None:
    clock = Clock()
    client = open_client(stubborn.url, clock=clock)
    fetch(client, 1, number=1)
    until(lambda: client.poll() or stubborn.begun)
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)
    for _ in range(31):
        clock.now_s += 1.0
        assert client.poll() == []
    clock.now_s += 5.0
    end = ends(client, 1)[1]
    assert (end.outcome, is_gone(pid)) == (Outcome.FAILED, True)
    assert "does not answer" in end.detail


def test_an_engine_that_pauses_for_long_does_not_kill_its_process(
    moto_url: str, open_client: Open
) -> None:
    clock = Clock()
    client = open_client(moto_url, clock=clock)
    client.wait_ready(PATIENCE_S)
    for _ in range(3):
        clock.now_s += 3600.0
        before = client._answers.stats
        until(lambda: client.poll() or client._answers.stats is not before)  # noqa: B023
    assert client.life.deaths == 0


def test_a_process_that_breaks_the_protocol_is_replaced(open_client: Open) -> None:
    client = open_client("http://127.0.0.1:1", module="tests.unit.io.babbler")
    end = end_of_fetch(client, 1)
    assert end.outcome is Outcome.FAILED
    assert "breaks the protocol" in end.detail
    until(lambda: client.poll() or client.life.starts > 1)


def test_closing_is_bounded_and_can_be_repeated(moto_url: str, open_client: Open) -> None:
    client = open_client(moto_url)
    client.wait_ready(PATIENCE_S)
    pid = client.pid
    os.kill(pid, signal.SIGSTOP)  # it will not end by itself
    client.close()
    client.close()
    assert is_gone(pid)
    assert client.poll() == []
    assert end_of_fetch(client, 1).outcome is Outcome.FAILED


def test_closing_without_starting(slab: Slab) -> None:
    client = IoClient(rig.handshake(Config(bucket=BUCKET)), slab)
    client.close()
    with pytest.raises(IoProcessError, match="closed"):
        client.start()


# How it shuts down


def test_a_drain_finishes_uploads(
    moto_url: str, bucket: Any, slab: Slab, open_client: Open
) -> None:
    client = open_client(moto_url)
    for i in range(12):
        rig.fill(slab, i, number=i)
        upload(client, i)
    assert client.drain(PATIENCE_S) == 0
    assert bucket.list_objects_v2(Bucket=BUCKET)["KeyCount"] == 12
    assert {e.outcome for e in ends(client, 12).values()} == {Outcome.OK}
    assert client.drain(PATIENCE_S) == 0


def busy_client(stubborn: StubbornServer, open_client: Open) -> IoClient:
    """With three uploads and a fetch that do not end: one upload, and the fetch, have begun."""
    client = open_client(stubborn.url)
    for i in range(3):
        upload(client, i)
    fetch(client, 9, number=1)
    until(lambda: client.poll() or len({*stubborn.begun}) == 2)
    return client


def test_a_drain_tells_what_is_left(stubborn: StubbornServer, open_client: Open) -> None:
    client = busy_client(stubborn, open_client)
    assert client.drain(0.1) == 3
    assert {e.outcome for e in ends(client, 4).values()} == {Outcome.CANCELLED}


def test_jobs_that_do_not_settle_are_cancelled_or_end_with_their_process(
    stubborn: StubbornServer, open_client: Open
) -> None:
    client = open_client(stubborn.url)
    fetch(client, 0, number=0)
    until(lambda: client.poll() or stubborn.begun)
    client.settle(0.1)
    assert ends(client, 1)[0].outcome is Outcome.CANCELLED
    fetch(client, 1, number=1)
    os.kill(client.pid, signal.SIGSTOP)
    client.settle(0.1)
    assert client.life.state is State.DOWN  # so nothing writes to the slab
    assert ends(client, 1)[1].outcome is Outcome.FAILED
    stubborn.go_on.set()
    until(lambda: client.poll() or client.life.state is State.UP)
    fetch(client, 2, number=1)
    client.settle(PATIENCE_S)
    assert ends(client, 1)[2].outcome is Outcome.OK


def test_questions_about_uses_are_not_settled(stubborn: StubbornServer, open_client: Open) -> None:
    """They use no memory, and may be many while the bucket does not answer."""
    client = open_client(stubborn.url)
    client.submit(BucketJob(1, JobKind.USE, rig.chunk(1)))
    client.settle(0.1)
    assert client.life.state is State.UP


def test_a_drain_counts_what_a_killed_process_left(
    stubborn: StubbornServer, open_client: Open
) -> None:
    client = busy_client(stubborn, open_client)
    killing = threading.Timer(0.1, os.kill, (client.pid, signal.SIGKILL))
    killing.start()
    assert client.drain(PATIENCE_S) == 3
    killing.join()
    assert set(ends(client, 4)) == {0, 1, 2, 9}


@pytest.fixture
def parent(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], int]]]:
    """Starts tests.unit.io.parent in a process group of its own; gives it and its child's pid."""
    set_credentials(monkeypatch)
    started: list[subprocess.Popen[str]] = []

    def start(url: str, deed: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-m", "tests.unit.io.parent", url, BUCKET, deed]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        if process.returncode is None:  # or the number may be another's by now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def shared_memory(*pids: int) -> set[Path]:
    """Files in /dev/shm that these processes have mapped: whatever else runs here has its own."""
    maps = [Path(f"/proc/{pid}/maps").read_text("ascii") for pid in pids]
    return {Path(name) for name in re.findall(r"/dev/shm/\S+", "".join(maps))}


@pytest.mark.parametrize("deed", ["sleep", "fork_and_sleep"])
def test_the_process_goes_when_its_parent_is_killed(moto_url: str, parent: Any, deed: str) -> None:
    process, child = parent(moto_url, deed)
    assert not is_gone(child)
    shared = shared_memory(process.pid, child)
    process.kill()
    until(lambda: is_gone(child), "the end of the I/O process")
    assert not any(path.exists() for path in shared)


def test_signals_to_the_group_leave_the_process_serving(moto_url: str, parent: Any) -> None:
    process, child = parent(moto_url, "upload_after_interrupt")
    assert process.stdout.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline() in ("OK 0\n", "EXISTS 0\n")
    until(lambda: is_gone(child), "the end of the I/O process")


def test_a_drain_outlives_a_killed_parent(stubborn: StubbornServer, parent: Any) -> None:
    process, child = parent(stubborn.url, "drain")
    until(lambda: len({*stubborn.begun}) == 4)
    process.kill()  # the Drain was in one frame with the uploads, so it has been read
    process.wait()
    time.sleep(0.2)  # for the process to go, if it did
    assert not is_gone(child)
    stubborn.go_on.set()
    until(lambda: is_gone(child), "the end of the I/O process")


def test_what_processes_say_of_requests_adds_up_over_their_lives(
    moto_url: str, bucket: Any, open_client: Open
) -> None:
    client = open_client(moto_url, aws_hosts=[""])

    def told(request: str, count: int) -> Callable[[], bool]:
        return lambda: not client.poll() and client.counters[f"io_requests|{request}"] == count

    end_of_fetch(client, 1, 9_001)
    until(told("GET|4xx", 1), "one request")
    first = dict(client.counters)
    assert first["cost_usd"] == 400 + 5_000 * first["io_requests|LIST|2xx"]
    os.kill(client.pid, signal.SIGKILL)
    until(lambda: client.poll() or client.counters["io_restarts"] == 1, "another process")
    assert client.counters["io_requests|GET|4xx"] == 1, "what the first one did stays counted"
    end_of_fetch(client, 2, 9_002)
    until(told("GET|4xx", 2), "its request, too")
    assert client.counters["cost_usd"] >= first["cost_usd"] + 400
