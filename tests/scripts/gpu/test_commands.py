"""The three commands fit into the time there is, and each runs to where CUDA begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.gpu import __main__ as program
from scripts.gpu.commands import COMMANDS, MOST_S, UNPACK_S
from scripts.gpu.pack import ARCHIVE, installed, write
from tests.project import ROOT

LONG_S = 1500


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_time_for_all_its_parts_and_names_no_result_twice(name: str) -> None:
    stages = COMMANDS[name]
    assert sum(max(part.timeout_s for part in stage) for stage in stages) + UNPACK_S <= MOST_S
    written = [result for stage in stages for part in stage for result in part.results()]
    assert len(set(written)) == len(written)


def test_the_readme_lists_every_part_with_its_limit_and_results() -> None:
    readme = (ROOT / "scripts" / "gpu" / "README.md").read_text()
    rows = [line.split(" | ") for line in readme.splitlines() if line.startswith("| ")]
    listed = {row[1]: (row[3], row[4].rstrip(" |")) for row in rows[1:]}
    assert listed == {
        part.name: (f"{part.timeout_s:g} s", ", ".join(f"`{name}`" for name in part.results()))
        for stages in COMMANDS.values()
        for stage in stages
        for part in stage
    }


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine alone: this environment has the packages."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("pack")
    write(folder / ARCHIVE, installed(), preset=0)
    return folder


@pytest.mark.long
@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_to_where_cuda_begins(name: str, pack: Path, tmp_path: Path) -> None:
    well = program.main([name, "--dry-run", "--pack", str(pack), "--out", str(tmp_path)]) == 0
    log = (tmp_path / f"{name}.log").read_text(errors="replace")
    assert well, log
    written = {result for stage in COMMANDS[name] for part in stage for result in part.results()}
    assert {path.name for path in tmp_path.iterdir()} == written | {f"{name}.json", f"{name}.log"}
