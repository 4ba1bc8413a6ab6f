"""The three commands: what each brings home, in the order of what matters most."""

from __future__ import annotations

from scripts.gpu.engine import name_of
from scripts.gpu.parts import Part

MOST_S = 540
"""Seconds of a command, with `UNPACK_S`."""
UNPACK_S = 40

ENGINE = "scripts.gpu.engine"
LINK_MB_S = "1000"
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


def _engine(front: str, model: str, runner: str, timeout_s: float, *options: str) -> Part:
    """options: more of the program's, which are in the name as they are in the result's."""
    which = ("--front", front, "--model", model, "--runner", runner, *options)
    program = ("-m", ENGINE, *which, "--out", "{out}")
    more = (option.removeprefix("--") for option in options if option not in ("--link", "--set"))
    name = name_of(front, model, runner, *more)
    return Part(
        name.removeprefix("gpu-").replace("-", " "),
        program,
        (*program, "--dry-run"),
        timeout_s,
        files=(f"{name}.json",),
        imports="scripts.gpu.rehearsal",
    )


def _with_engines(name: str, timeout_s: float) -> Part:
    """A test of `tests/gpu/test_engines.py`, longer than one of the part `tests` may be."""
    program = ("-m", "pytest", *_PYTEST, "-m", "gpu", "-k", name, "tests/gpu/test_engines.py")
    rehearsal = ("-c", "import tests.gpu.test_engines")
    return Part(name.replace("_", " "), program, rehearsal, timeout_s)


_ENGINES = (
    *(_engine(front, "tiny", "2", 200, "--compile") for front in ("tier", "connector")),
    *(_engine(front, "tiny", "1", 200) for front in ("tier", "connector")),
    *(_engine("tier", model, "2", 200) for model in ("latent", "gpt-oss", "granite4")),
    *(_engine("connector", model, "2", 200) for model in ("latent", "gpt-oss", "granite4", "lfm2")),
)
_WITH_ENGINES = ("proof_tier", "proof_connector", "pictures")
_ALONE = " and ".join(f"not {name}" for name in ("memcheck", *_WITH_ENGINES))
"""Tests that are no parts of their own."""

FIRST: tuple[Stage, ...] = (
    (_alike("facts", "scripts.gpu.facts", 40),),
    (_alike("probe", "s3kv.device.probe", 40),),
    (
        Part(
            "tests",
            (*_TESTS, "150", "--", *_PYTEST, "-m", "gpu", "-k", _ALONE, *_WHERE),
            # All are collected; a few run, on the CPU and on the simulated GPU.
            rehearsal=(
                *(*_TESTS, "1100", "--limit", "300", "--", *_PYTEST),
                *("-k", "test_a_graph_is_replayed or test_streams_of_an_engine", *_WHERE),
            ),
            timeout_s=160,
            files=("tests.jsonl",),
        ),
        *_ENGINES,
        *(_with_engines(name, 200) for name in _WITH_ENGINES),
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
)

THIRD: tuple[Stage, ...] = tuple(
    (_engine("connector", "fatter", "2", 120, "--link", LINK_MB_S, "--set", setting),)
    for setting in ("compress=off", "compress=on", "encryption=aes-gcm")
)

COMMANDS = {"first": FIRST, "second": SECOND, "third": THIRD}
