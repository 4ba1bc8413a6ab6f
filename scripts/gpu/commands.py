"""The three commands: what each brings home, in the order of what matters most."""

from __future__ import annotations

from scripts.gpu.engine import name_of
from scripts.gpu.parts import Part

MOST_S = 540
"""Seconds of a command, with `UNPACK_S`."""
UNPACK_S = 40

ENGINE = "scripts.gpu.engine"
LINK_MB_S = 1_000.0
"""Rate of the link at which compression has to pay."""
Stage = tuple[Part, ...]
"""Parts that run at once."""


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


def _engine(
    front: str,
    model: str,
    runner: str,
    timeout_s: float,
    link: float | None = None,
    setting: str | None = None,
) -> Part:
    which = ["--front", front, "--model", model, "--runner", runner]
    which += ["--link", f"{link:g}"] if link is not None else []
    which += ["--set", setting] if setting is not None else []
    program = ("-m", ENGINE, *which, "--out", "{out}")
    name = name_of(front, model, runner, link, setting)
    return Part(
        name.removeprefix("gpu-").replace("-", " "),
        program,
        (*program, "--dry-run"),
        timeout_s,
        files=(f"{name}.json",),
        imports="scripts.gpu.rehearsal",
    )


_ENGINES = (
    *(("tier", "tiny", "2"), ("tier", "tiny", "1"), ("tier", "windowed", "2")),
    *(("connector", "tiny", "2"), ("connector", "tiny", "1"), ("connector", "windowed", "2")),
)

FIRST: tuple[Stage, ...] = (
    (_alike("facts", "scripts.gpu.facts", 40),),
    (_alike("probe", "s3kv.device.probe", 40),),
    (
        Part(
            "tests",
            (*_TESTS, "150", "--", *_PYTEST, "-m", "gpu", "-k", "not memcheck", *_WHERE),
            # All are collected; a few run, on the CPU and on the simulated GPU.
            rehearsal=(
                *(*_TESTS, "1100", "--limit", "300", "--", *_PYTEST),
                *("-k", "test_a_graph_is_replayed or test_streams_of_an_engine", *_WHERE),
            ),
            timeout_s=160,
            files=("tests.jsonl",),
        ),
        *(_engine(*which, 200) for which in _ENGINES),
        Part(
            "memcheck",
            ("-m", "pytest", *_PYTEST, "-m", "gpu", "-k", "memcheck", "tests/gpu/test_memory.py"),
            rehearsal=("-m", "tests.gpu.sanitized", "--kind", "cpu"),
            timeout_s=200,
        ),
    ),
    (
        Part(
            "large chunks, again and again",
            ("-m", "tests.gpu.sanitized", "--large", "--seconds", "20"),
            rehearsal=("-m", "tests.gpu.sanitized", "--kind", "cpu", "--large", "--seconds", "1"),
            timeout_s=60,
        ),
    ),
    (_benchmark("copies", "gpu_copies", 130, "--seconds", "80", "--rounds", "3"),),
)

SECOND: tuple[Stage, ...] = (
    (_engine("tier", "llama-8b", "2", 110),),
    (_engine("connector", "llama-8b", "2", 110),),
    (_engine("none", "llama-8b", "2", 70),),
    (_engine("files", "llama-8b", "2", 100),),
    (_benchmark("path", "gpu_path", 60, "--seconds", "30", "--rounds", "5"),),
    (_benchmark("beside a busy thread", "gpu_busy", 50, "--seconds", "25"),),
)

THIRD: tuple[Stage, ...] = (
    *(
        (_engine("connector", "fatter", "2", 110, LINK_MB_S, setting),)
        for setting in ("compress=off", "compress=on", "encryption=aes-gcm")
    ),
    (
        Part(
            "pages",
            ("-m", "benchmarks.pages", "8", "3", "gpu"),
            rehearsal=("-m", "benchmarks.pages", "0.0625", "1"),
            timeout_s=170,
            stdout="gpu-pages.json",
        ),
    ),
)

COMMANDS = {"first": FIRST, "second": SECOND, "third": THIRD}
