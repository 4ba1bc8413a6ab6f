"""One I/O process as the worker sees it: where it may run."""

from __future__ import annotations

import os
import threading

import pytest

from s3kv.host.slab import Slab
from s3kv.io.child import Child, _environment


@pytest.fixture
def started() -> Child:
    """Started by a thread that is bound to one processor."""
    children: list[Child] = []

    def start() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        slab = Slab.create(4096)
        children.append(Child(slab.fd, "s3kv.io"))
        slab.close()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return children[0]


def test_it_may_run_where_it_is_told(started: Child) -> None:
    everywhere = os.sched_getaffinity(0)
    assert os.sched_getaffinity(started.pid) == {min(everywhere)}
    started.run_on(everywhere)
    assert os.sched_getaffinity(started.pid) == everywhere
    started.end(5.0)


def test_one_that_is_gone_is_left_alone(started: Child) -> None:
    started.end(5.0)
    started.run_on(os.sched_getaffinity(0))


def test_openmp_binds_nothing_in_it() -> None:
    bound = {"GOMP_CPU_AFFINITY": "0", "OMP_PLACES": "{0}", "KMP_AFFINITY": "explicit"}
    kept = {"LD_PRELOAD": "libgomp.so.1", "OMP_NUM_THREADS": "1", "HOME": "/root"}
    environment = _environment(bound | kept)
    assert not set(bound) & set(environment)
    assert kept.items() <= environment.items()
