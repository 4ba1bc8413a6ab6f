"""What is recorded of a version of vLLM: areas of s3kv, model families, and the tests of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_E2E = "tests/system/e2e"


@dataclass(frozen=True, slots=True)
class Area:
    """Tests whose outcomes are one cell of a table. A test belongs to the area that names it most
    exactly.

    tests: files, folders or tests, as pytest names them. runner: vLLM's model runner they run on,
    if they start an engine. nightly: whether tests with that mark are among them.
    """

    name: str
    told: str
    tests: tuple[str, ...]
    runner: str = "first"
    nightly: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.runner


CONTRACT = Area(
    "contract",
    "hooks, fields, layouts, statistics, what a key stands for",
    ("tests/contract",),
    runner="–",
)
TIERS = Area(
    "tiers",
    "a prefix from the engine's own cache, host memory and the bucket",
    (f"{_E2E}/test_prefix.py::test_every_tier_serves_a_prefix[second-runner]",),
    runner="second",
)
FIRST_RUNNER = Area(
    "first runner",
    "the same on the first-generation runner",
    (f"{_E2E}/test_prefix.py::test_every_tier_serves_a_prefix[first-runner]",),
)
AREAS = (
    CONTRACT,
    TIERS,
    FIRST_RUNNER,
    Area(
        "prefixes",
        "damaged objects, prompts of all lengths, hits that end within a chunk",
        (f"{_E2E}/test_prefix.py",),
        runner="second",
    ),
    Area(
        "requests",
        "preempted, aborted at any moment, scheduled ahead; roles, salts; two ranks; an encoder",
        (
            f"{_E2E}/test_second_runner.py",
            f"{_E2E}/test_requests.py::test_roles",
            f"{_E2E}/test_requests.py::test_salts_and_an_engine_without_a_cache_of_its_own",
        ),
        runner="second",
    ),
    Area(
        "requests",
        "crowds, second turns, aborts at any moment, private requests",
        (f"{_E2E}/test_requests.py",),
    ),
    Area(
        "preemption",
        "requests preempted with little memory, cold and warm",
        (f"{_E2E}/test_requests.py::test_preempted_requests_with_little_memory",),
    ),
    Area(
        "failures",
        "an I/O process killed, wrong credentials",
        (
            f"{_E2E}/test_failures.py::test_the_io_process_killed_in_the_middle",
            f"{_E2E}/test_failures.py::test_wrong_credentials_no_start",
        ),
        runner="second",
    ),
    Area(
        "failures",
        "a bucket that refuses, comes and goes; an I/O process stopped",
        (f"{_E2E}/test_failures.py",),
    ),
    Area(
        "failed loads",
        "loads that fail and are computed",
        (
            f"{_E2E}/test_failed_loads.py::test_a_failed_load_never_becomes_a_wrong_token[recompute]",
        ),
        runner="second",
    ),
    Area(
        "failed loads", "loads that fail and end their requests", (f"{_E2E}/test_failed_loads.py",)
    ),
    Area(
        "encoder outputs",
        "images encoded once per fleet, damaged items, both connectors together",
        (f"{_E2E}/test_encoder_outputs.py",),
    ),
    Area(
        "tier hooks",
        "as a tier of vLLM's offloading: hooks, settings, vLLM's own cases, every fault",
        tuple(
            f"tests/contract/{name}.py"
            for name in ("test_offload_tier", "test_tier_api", "test_tier_cases", "test_tier_setup")
        ),
        runner=CONTRACT.runner,
    ),
    Area(
        "tier",
        "the same on an engine: every tier, another question, damaged objects",
        tuple(
            f"{_E2E}/test_tier.py::{test}"
            for test in (
                "test_a_new_process_gives_the_tokens_of_a_local_hit[tiny]",
                "test_another_question_hits_the_system_prompt_until_it_is_damaged",
            )
        ),
        runner="second",
    ),
    Area(
        "tier",
        "the same with windows; a bucket that goes, an I/O process killed",
        (f"{_E2E}/test_tier.py",),
    ),
    Area(
        "forms",
        "objects compressed, encrypted, on a disk, from ranks of another number; short requests",
        tuple(
            f"{_E2E}/test_{name}.py"
            for name in ("compression", "encryption", "disk", "shards", "short_requests")
        ),
    ),
    Area(
        "commands",
        "`s3kv serve` as documented, with both front ends, restarted; `s3kv prove`",
        (
            f"{_E2E}/test_serve.py::test_serve_restart_serve",
            f"{_E2E}/test_serve_commands.py",
            f"{_E2E}/test_prove.py",
        ),
    ),
)
"""What holds s3kv to its host: a row each."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same kinds of layers: a row of the table of families.

    areas: one for each of `COLUMNS`. instead: what is said of a family that no engine runs here;
    its one area is a contract test of that.
    """

    name: str
    layers: str
    areas: tuple[Area, ...]
    instead: str = ""


COLUMNS = ("first", "second", "two ranks")
"""The first runner and the second one with one rank; two tensor ranks on the first."""


def _family(name: str, layers: str, case: str) -> Family:
    tests = (
        "test_every_tier_gives_the_tokens_of_a_local_hit",
        "test_on_the_second_generation_runner",
        "test_two_tensor_ranks",
    )
    named = [f"{_E2E}/test_families.py::{test}[{case}]" for test in tests]
    return Family(name, layers, tuple(_area(name, *at) for at in zip(COLUMNS, named, strict=True)))


def _area(family: str, column: str, test: str) -> Area:
    return Area(family, "", (test,), column, nightly=True)


def _held(name: str, layers: str, instead: str, test: str) -> Family:
    """A family that a contract test holds to what is said of it."""
    at = f"tests/contract/test_kv_groups.py::{test}"
    return Family(name, layers, (Area(name, "", (at,), CONTRACT.runner),), instead)


def _refused(name: str, layers: str, case: str) -> Family:
    test = f"test_other_groups_are_refused_with_the_reason[{case}]"
    return _held(name, layers, "refused at start", test)


FAMILIES = (
    Family(
        "Llama",
        "full attention",
        (
            FIRST_RUNNER,
            TIERS,
            _area("Llama", "two ranks", f"{_E2E}/test_parallel.py::test_two_ranks[tensor]"),
        ),
    ),
    Family(
        "DeepSeek-V3",
        "MLA",
        tuple(
            _area("DeepSeek-V3", column, f"{_E2E}/test_latent.py::{test}")
            for column, test in (
                ("first", "test_every_tier_serves_all_ranks_from_one_object[latent on one rank]"),
                ("second", "test_on_the_second_generation_runner"),
                ("two ranks", "test_every_tier_serves_all_ranks_from_one_object[latent]"),
            )
        ),
    ),
    _family("Gemma 3", "windows, full attention", "gemma3"),
    _family(
        "Gemma 4", "windows in blocks of 256 tokens, full attention in blocks of 128", "gemma4"
    ),
    _family("Gemma 4 whose last layers read the KV of others", "as Gemma 4", "gemma4_shared"),
    _family("Cohere2", "windows, full attention without positions", "cohere2"),
    _family("gpt-oss", "windows and full attention, with sinks", "gpt_oss"),
    _family("Llama with windows", "windows, full attention", "llama"),
    _family("Mistral", "windows alone", "mistral"),
    _family("Llama 4", "chunked local attention, full attention", "llama4"),
    _family("LFM2", "short convolution, full attention", "lfm2"),
    _family("Qwen3-Next", "Gated DeltaNet, full attention", "qwen3_next"),
    _family("Qwen3.5 (text)", "Gated DeltaNet, full attention", "qwen3_5"),
    _family("Mamba2", "Mamba2 alone", "mamba2"),
    _family("Granite 4", "Mamba2, full attention", "granite4"),
    _family("Nemotron-H", "Mamba2, full attention, layers without either", "nemotron_h"),
    _family("Falcon-H1", "Mamba2 and full attention in every layer", "falcon_h1"),
    _held(
        "DeepSeek-V3.2",
        "MLA with an indexer in every layer",
        "layouts read, not run, as vLLM has no sparse attention on a CPU",
        "test_an_indexer_is_cached_with_its_latent_attention",
    ),
    _held(
        "Kimi Linear",
        "a Gated DeltaNet, MLA",
        "groups read, not run, as vLLM has its kernels on GPUs alone",
        "test_states_beside_latent_attention_are_by_rank",
    ),
    _refused("DeepSeek-V4", "MLA with windows, compressed and sparse", "deepseek-v4"),
    _refused("Jamba", "Mamba1, full attention", "jamba"),
    _refused("MiniMax-01", "linear attention, full attention", "linear"),
)
RECORDED = (*AREAS, *(area for family in FAMILIES for area in family.areas if area not in AREAS))
"""Every area, in the order of the files that record them."""


def areas_named(names: Iterable[str], runner: str | None = None) -> list[Area]:
    """The areas with these names. "families" means every area that is nightly, and no name means
    every other.

    runner: only those of this runner. Raises `KeyError` with a name that no area has, and
    `ValueError` if none is of this runner.
    """
    nightly = [area for area in RECORDED if area.nightly]
    found: list[Area] = []
    for name in names:
        more = [area for area in RECORDED if area.name == name]
        if not (more or name == "families"):
            raise KeyError(name)
        found += more or nightly
    found = found or [area for area in RECORDED if not area.nightly]
    found = [area for area in found if runner in (None, area.runner)]
    if not found:
        raise ValueError(runner)
    return found


def area_of(nodeid: str) -> Area:
    """The area that names a test most exactly. Raises `KeyError` if none does."""
    named = {test: area for area in RECORDED for test in area.tests}
    found = [test for test in named if is_within(nodeid, test)]
    if not found:
        raise KeyError(nodeid)
    return named[max(found, key=len)]


def is_within(nodeid: str, outer: str) -> bool:
    """Whether pytest's `outer` (a folder, file or test) is or has the test or file `nodeid`."""
    return re.match(rf"{re.escape(outer)}($|[/:\[])", nodeid) is not None
