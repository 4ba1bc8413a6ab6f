"""`s3kv prove`: its exit codes, its files, and an empty bucket at its end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.memory_store import MemoryStore
from s3kv.cli import prove, serve
from s3kv.cli.app import cli
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.prove import arms as proof
from s3kv.prove.arms import ArmFailed, RunInputs
from s3kv.prove.judge import ArmAnswer, ArmFacts
from tests.servers import BUCKET
from tests.unit.cli.conftest import Run, left, refused

PLANS: list[RunInputs] = []


@pytest.fixture(autouse=True)
def arms(monkeypatch: pytest.MonkeyPatch, boto: Any) -> dict[str, Any]:
    """Facts of arms that never run: of `restart`; `raises` in their place. They leave an object."""
    told: dict[str, Any] = {"restart": {"connector_tokens": 900, "bucket_bytes": 1}}

    def run_arms(names: Sequence[str], plan: RunInputs, report: object) -> Iterator[Any]:
        PLANS[:] = [plan]
        prefix = (proof.settings_of(plan.connector) or {}).get("prefix", "x/prove/other")
        boto.put_object(Bucket=BUCKET, Key=f"{prefix}/v1/left", Body=b"left")
        if "raises" in told:
            told["raises"]()
        for name in names:
            served = {"engine": {"engine_tokens": 900}} | told
            answers = [ArmAnswer((1,), ({1: -0.1},), found=True, ttft_s=1.0)]
            fact = {"answers": answers, "prompt_tokens": 1_000} | served.get(name, {})
            yield name, ArmFacts(**fact)

    monkeypatch.setattr(proof, "run_arms", run_arms)
    monkeypatch.setattr(serve, "server_of", lambda model: [])
    monkeypatch.setattr(serve, "read_model_config", lambda model, given: {})  # asks the hub
    return told


def test_a_proof_is_shown_written_and_leaves_nothing(run: Run, boto: Any, tmp_path: Path) -> None:
    files = [tmp_path / "report.json", tmp_path / "report.html"]
    options = ["--json", str(files[0]), "--html", str(files[1]), "-pp", "2"]
    done = run("prove", "m", *options, "--arms", "restart", "--seed", "7")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0].startswith("PROVEN: 1 answers are the same as restart")
    assert json.loads(files[0].read_text())["seed"] == 7
    assert "PROVEN" in files[1].read_text()
    assert left(boto) == set()
    assert list(PLANS[0].argv) == ["--model=m", "-pp", "2"]
    assert PLANS[0].other_size == 2
    settings = proof.settings_of(PLANS[0].connector)
    assert settings["prefix"].startswith("s3kv/prove/")


def test_a_wrong_arm_is_exit_code_1(run: Run, boto: Any, arms: dict[str, Any]) -> None:
    arms["restart"] = {}
    done = run("prove", "m", "--arms", "restart")
    assert done.exit_code == 1, done.output
    assert done.stdout.startswith("NOT PROVEN: restart")
    assert "nothing was served: every prompt was computed" in done.stdout
    assert left(boto) == set()


def test_every_program_reads_the_report_of_a_dead_arm(
    run: Run, arms: dict[str, Any], tmp_path: Path
) -> None:
    arms["engine"] = {"answers": [], "error": "the engine has ended"}
    assert run("prove", "m", "--arms", "restart", "--json", f"{tmp_path}/report").exit_code == 1
    report = json.loads((tmp_path / "report").read_text(), parse_constant=pytest.fail)
    assert report["margins"]["noise"] is None


def test_the_files_are_written_though_nobody_reads_the_screen(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr("s3kv.cli.show.print_grid")
    files = ("--json", f"{tmp_path}/report.json", "--html", f"{tmp_path}/report.html")
    with pytest.raises(AttributeError, match="print_grid"):
        run("prove", "m", "--arms", "restart", *files)
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.html"}


def test_a_report_that_cannot_be_written_costs_no_verdict(run: Run, tmp_path: Path) -> None:
    """Nor the other file. A disk took no part: its files of another run would be served."""
    disk = ("--set", f"disk_path={tmp_path}/disk", "--set", "disk_bytes=1GB")
    files = ("--json", "/proc/report", "--html", f"{tmp_path}/report.html")
    done = run("prove", "m", "--arms", "restart", *files, *disk)
    assert done.exit_code == 2, done.output
    assert done.stdout.startswith("PROVEN: ")
    assert "the report cannot be written: [Errno 2]" in done.stderr
    assert "disk_path was left out" in (tmp_path / "report.html").read_text()
    assert proof.settings_of(PLANS[0].connector)["disk_path"] is None


async def test_a_deletion_that_fails_is_tried_again() -> None:
    store = MemoryStore(errors={"delete": [StoreUnavailable("busy")]})
    store.hold("p/1", b"")
    await prove._delete(store, "p/")
    assert store.asked["delete"] == 2


def test_undeletable_objects_cost_no_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(store: object, prefix: str) -> None:
        raise StoreDenied(f"s3:DeleteObject on {prefix}: 403 AccessDenied")

    monkeypatch.setattr(prove, "_delete", refuse)
    done = run("prove", "m", "--arms", "restart", "--connector", "OffloadingConnector")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("PROVEN: ")
    assert "s3kv: objects stay under s3kv/prove/" in done.stderr


def test_the_bucket_is_cleaned_however_it_ends(run: Run, boto: Any, arms: dict[str, Any]) -> None:
    def fail() -> None:
        raise ArmFailed("arm off did not start: no such model")

    def end() -> None:
        signal.raise_signal(signal.SIGTERM)

    for raises, code in ((fail, 2), (end, 128 + signal.SIGTERM)):
        arms["raises"] = raises
        assert run("prove", "m").exit_code == code
        assert left(boto) == set()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--arms", "off,coldd"], "--arms has coldd: allowed are off"),
        (["--html", "nowhere/proof.html"], "--html is 'nowhere/proof.html': its folder"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config is set"),
        (["--connector", "OffloadingConnector", "--host-bytes", "900TiB"], "host_bytes is 900.0"),
        (["--connector-json", "{"], "--connector-json is not JSON"),
        (["--connector-json", "[]"], "--connector-json has no kv_connector"),
    ],
)
def test_what_cannot_be_run_is_exit_code_2(run: Run, options: list[str], text: str) -> None:
    refused(run("prove", "m", *options), text)


def test_a_bucket_that_cannot_be_used_is_exit_code_2(run: Run, url: str) -> None:
    for place in ({"bucket": "no-such-bucket"}, {"at": "http://127.0.0.1:9"}):
        refused(run("prove", "m", **place), "the bucket cannot be used: list: ")


def test_without_vllm_it_is_exit_code_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("vllm_s3kv.vllm_version", lambda: None)
    refused(CliRunner().invoke(cli, ["prove", "m", "--bucket", "my-bucket"]), "has no vLLM")


def test_another_connector_skips_the_arm_that_needs_our_settings(run: Run) -> None:
    other = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
    done = run("prove", "m", "--connector-json", other)
    assert "away did not run: it needs s3kv's settings" in done.stdout
    assert PLANS[0].connector == json.loads(other)
