"""The three commands: what each has to bring home, in the order of what matters most."""

from __future__ import annotations

from scripts.gpu.parts import Part

MOST_S = 540
"""Seconds of a command, with `UNPACK_S`."""
UNPACK_S = 50
MOST_FILES = 8
"""Results of a command: those of its parts, the report and the log."""

ENGINE = "scripts.gpu.engine"

FIRST = (
    Part(
        "facts",
        program=("-m", "scripts.gpu.facts"),
        rehearsal=("-m", "scripts.gpu.facts"),
        timeout_s=40,
        stdout="facts.json",
    ),
    Part(
        "probe",
        program=("-m", "s3kv.device.probe"),
        rehearsal=("-m", "s3kv.device.probe"),
        timeout_s=40,
        stdout="probe.json",
    ),
    Part(
        "tests",
        program=(
            *("-m", "scripts.gpu.tests", "--out", "{out}/tests.jsonl", "--seconds", "120", "--"),
            *("-c", "tests/gpu/bare.ini", "--rootdir", ".", "-m", "gpu"),
            *("-k", "not memcheck", "tests/gpu", "tests/unit/device"),
        ),
        # All are collected; a few run, on the CPU and on the simulated GPU.
        rehearsal=(
            *("-m", "scripts.gpu.tests", "--out", "{out}/tests.jsonl", "--seconds", "1100"),
            *("--limit", "300", "--", "-c", "tests/gpu/bare.ini", "--rootdir", "."),
            *("-k", "test_a_graph_is_replayed or test_streams_of_an_engine"),
            *("tests/gpu", "tests/unit/device"),
        ),
        timeout_s=130,
        files=("tests.jsonl",),
    ),
    Part(
        "batches, again and again",
        program=(
            "-m",
            "tests.gpu.sanitized",
            *("--kind", "cuda-batch", "--large", "--seconds", "60"),
        ),
        rehearsal=("-m", "tests.gpu.sanitized", *("--kind", "cpu", "--large", "--seconds", "1")),
        timeout_s=90,
    ),
    Part(
        "copies",
        program=(
            *("-m", "benchmarks.gpu_copies", "--out", "{out}/gpu-copies.json"),
            *("--seconds", "140", "--rounds", "5"),
        ),
        rehearsal=(
            *("-m", "benchmarks.gpu_copies", "--out", "{out}/gpu-copies.json"),
            *("--device", "cpu", "--rounds", "1"),
        ),
        timeout_s=190,
        files=("gpu-copies.json",),
    ),
)

SECOND = (
    *(
        Part(
            f"engine, runner {runner}",
            program=("-m", ENGINE, "--runner", runner, "--out", "{out}"),
            rehearsal=("-m", ENGINE, "--runner", runner, "--out", "{out}", "--dry-run"),
            timeout_s=timeout_s,
            files=(f"gpu-runner-{runner}.json", f"gpu-runner-{runner}.log"),
        )
        for runner, timeout_s in (("2", 200), ("1", 120))
    ),
    Part(
        "beside a busy thread",
        program=("-m", "benchmarks.gpu_busy", "--out", "{out}/gpu-busy.json", "--seconds", "45"),
        rehearsal=(
            *("-m", "benchmarks.gpu_busy", "--out", "{out}/gpu-busy.json"),
            *("--device", "cpu", "--rounds", "1"),
        ),
        timeout_s=80,
        files=("gpu-busy.json",),
    ),
    Part(
        "path",
        program=("-m", "benchmarks.gpu_path", "--out", "{out}/gpu-path.json", "--seconds", "45"),
        rehearsal=(
            *("-m", "benchmarks.gpu_path", "--out", "{out}/gpu-path.json"),
            *("--device", "cpu", "--rounds", "1"),
        ),
        timeout_s=90,
        files=("gpu-path.json",),
    ),
)

THIRD = (
    Part(
        "pages",
        program=("-m", "benchmarks.pages", "8", "3", "gpu"),
        rehearsal=("-m", "benchmarks.pages", "0.0625", "1"),
        timeout_s=210,
        stdout="gpu-pages.json",
    ),
    Part(
        "memcheck",
        program=(
            *("-m", "pytest", "-c", "tests/gpu/bare.ini", "--rootdir", ".", "-m", "gpu"),
            *("-k", "memcheck", "tests/gpu/test_memory.py"),
        ),
        rehearsal=("-m", "tests.gpu.sanitized", "--kind", "cpu"),
        timeout_s=280,
    ),
)

COMMANDS = {"first": FIRST, "second": SECOND, "third": THIRD}
