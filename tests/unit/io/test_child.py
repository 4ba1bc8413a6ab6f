"""One I/O process as the worker sees it: where it may run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io import child as child_module
from s3kv.io.child import Child, _environment


@pytest.mark.parametrize("told", [False, True])
def test_it_runs_where_it_is_told_or_where_its_starter_does(told: bool) -> None:
    everywhere = os.sched_getaffinity(0)
    bound = {min(everywhere)}
    children: list[Child] = []

    def start() -> None:
        os.sched_setaffinity(0, bound)
        slab = Slab.create(4096)
        children.append(Child(slab.fd, "s3kv.io", everywhere if told else None))
        slab.close()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert os.sched_getaffinity(children[0].pid) == (everywhere if told else bound)
    children[0].end(5.0)


def test_it_starts_where_no_core_can_be_had(caplog: pytest.LogCaptureFixture) -> None:
    with closing(Slab.create(4096)) as slab:
        child = Child(slab.fd, "s3kv.io", {4095})
        assert not child.is_dead()
        assert "I/O process not bound to cores: [Errno 22]" in caplog.text
        child.end(5.0)


def test_it_ends_by_itself_although_a_forked_process_holds_its_stream_open() -> None:
    with closing(Slab.create(4096)) as slab:
        child = Child(slab.fd, "s3kv.io")
        held = os.dup(child._sock.fileno())
        child.end(20.0)
        os.close(held)
        assert child._process.returncode == 0


def test_the_longest_timeout_of_the_settings_is_no_error() -> None:
    config = Config(bucket="bkt", drain_timeout_s=1e9)
    slab = Slab.create(4096)
    child = Child(slab.fd, "tests.unit.io.no_module")
    while not child.hung_up:  # there is no such module
        assert child.receive(config.drain_timeout_s) == []
    child.end(5.0)
    slab.close()


def test_a_process_that_no_signal_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab.create(4096)
    child = Child(slab.fd, "s3kv.io")
    process, slept_s = child._process, list[float]()

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait for as long as a disk hangs"
        slept_s.append(timeout)
        raise subprocess.TimeoutExpired("s3kv.io", timeout)

    with monkeypatch.context() as uninterruptible:
        uninterruptible.setattr(process, "wait", wait)
        child.end(5.0)
    assert len(slept_s) == 2
    assert process.wait() == -signal.SIGKILL
    slab.close()


def test_without_a_thread_for_its_log_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = list[int]()

    def refused(stream: object, pid: int) -> None:
        pids.append(pid)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(child_module, "LogPipe", refused)
    slab = Slab.create(4096)
    with pytest.raises(OSError, match="can't start new thread"):
        Child(slab.fd, "s3kv.io")
    assert not Path(f"/proc/{pids[0]}").exists()
    slab.close()


def test_openmp_binds_nothing_in_it() -> None:
    bound = {"GOMP_CPU_AFFINITY": "0", "OMP_PLACES": "{0}", "KMP_AFFINITY": "explicit"}
    kept = {"LD_PRELOAD": "libgomp.so.1", "OMP_NUM_THREADS": "1", "HOME": "/root"}
    environment = _environment(bound | kept)
    assert not set(bound) & set(environment)
    assert kept.items() <= environment.items()
