"""The three commands: what each has to bring home, in the order of what matters most."""

from __future__ import annotations

from scripts.gpu.parts import Part

MOST_S = 540
"""Seconds of a command, with `UNPACK_S`."""
UNPACK_S = 50
MOST_FILES = 8
"""Results of a command: those of its parts, the report and the log."""

ENGINE = "scripts.gpu.engine"


def _alike(name: str, module: str, timeout_s: float) -> Part:
    """A program that needs no GPU: its output is its result."""
    program = ("-m", module)
    return Part(name, program, program, timeout_s, stdout=f"{name}.json")


def _benchmark(name: str, module: str, timeout_s: float, *options: str) -> Part:
    """A benchmark of `benchmarks/gpu`, with these options on a GPU."""
    result = f"{module.replace('_', '-')}.json"
    program = ("-m", f"benchmarks.{module}", "--out", f"{{out}}/{result}")
    rehearsal = (*program, "--device", "cpu", "--rounds", "1")
    return Part(name, (*program, *options), rehearsal, timeout_s, files=(result,))


_TESTS = ("-m", "scripts.gpu.tests", "--out", "{out}/tests.jsonl", "--seconds")
_PYTEST = ("-c", "tests/gpu/bare.ini", "--rootdir", ".")
_WHERE = ("tests/gpu", "tests/unit/device")

FIRST = (
    _alike("facts", "scripts.gpu.facts", 40),
    _alike("probe", "s3kv.device.probe", 40),
    Part(
        "tests",
        (*_TESTS, "120", "--", *_PYTEST, "-m", "gpu", "-k", "not memcheck", *_WHERE),
        # All are collected; a few run, on the CPU and on the simulated GPU.
        rehearsal=(
            *(*_TESTS, "1100", "--limit", "300", "--", *_PYTEST),
            *("-k", "test_a_graph_is_replayed or test_streams_of_an_engine", *_WHERE),
        ),
        timeout_s=130,
        files=("tests.jsonl",),
    ),
    Part(
        "batches, again and again",
        ("-m", "tests.gpu.sanitized", "--kind", "cuda-batch", "--large", "--seconds", "60"),
        rehearsal=("-m", "tests.gpu.sanitized", "--kind", "cpu", "--large", "--seconds", "1"),
        timeout_s=90,
    ),
    _benchmark("copies", "gpu_copies", 190, "--seconds", "140", "--rounds", "5"),
)

SECOND = (
    *(
        Part(
            f"engine, runner {runner}",
            ("-m", ENGINE, "--runner", runner, "--out", "{out}"),
            rehearsal=("-m", ENGINE, "--runner", runner, "--out", "{out}", "--dry-run"),
            timeout_s=timeout_s,
            files=(f"gpu-runner-{runner}.json", f"gpu-runner-{runner}.log"),
        )
        for runner, timeout_s in (("2", 200), ("1", 120))
    ),
    _benchmark("beside a busy thread", "gpu_busy", 80, "--seconds", "45"),
    _benchmark("path", "gpu_path", 90, "--seconds", "45"),
)

THIRD = (
    Part(
        "pages",
        ("-m", "benchmarks.pages", "8", "3", "gpu"),
        rehearsal=("-m", "benchmarks.pages", "0.0625", "1"),
        timeout_s=210,
        stdout="gpu-pages.json",
    ),
    Part(
        "memcheck",
        ("-m", "pytest", *_PYTEST, "-m", "gpu", "-k", "memcheck", "tests/gpu/test_memory.py"),
        rehearsal=("-m", "tests.gpu.sanitized", "--kind", "cpu"),
        timeout_s=280,
    ),
)

COMMANDS = {"first": FIRST, "second": SECOND, "third": THIRD}
