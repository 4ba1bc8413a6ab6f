"""Processors for work beside a model, where the threads that compute are bound to some."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

from s3kv.host.processors import beside_the_model


def bound_worker(pipe: Connection) -> None:
    """As vLLM's worker: started by the core, and then bound."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pipe.send(beside_the_model())


def test_a_bound_worker_has_those_of_the_core_beside_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=bound_worker, args=(theirs,))
    worker.start()
    assert ours.recv() == os.sched_getaffinity(0)
    worker.join()


def test_a_process_of_nobodys_has_its_own() -> None:
    assert multiprocessing.parent_process() is None
    assert beside_the_model() == os.sched_getaffinity(0)
