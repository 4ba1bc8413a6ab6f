"""Which processors there are for work beside a model that computes on processors."""

from __future__ import annotations

import multiprocessing
import os


def beside_the_model() -> frozenset[int]:
    """Those that the engine's core may run on, as far as it can be told; otherwise those of the
    calling thread.

    vLLM's worker for CPUs has OpenMP bind its threads to cores, the one that calls us included,
    and leaves some cores free for other work. Threads and processes inherit the binding, so
    whatever such a thread starts would run on the cores that compute, and nowhere else.
    """
    processors = frozenset(os.sched_getaffinity(0))
    core = multiprocessing.parent_process()
    if core is None or core.pid is None:
        return processors
    try:
        return processors | os.sched_getaffinity(core.pid)
    except OSError:  # it is gone, or not ours to ask
        return processors
