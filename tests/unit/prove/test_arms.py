"""Arms of a proof on a stub of the engine: what each is given, its facts, its failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3kv.prove.arms import ARMS, USUAL, ArmFailed, RunInputs, run_arms, settings_of, with_settings
from s3kv.prove.judge import ArmFacts, judge

pytestmark = pytest.mark.usefixtures("stub")

TIER = {"type": "s3kv", "bucket": "b"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}, TIER]},
}


def plan(folder: Path, *argv: str) -> RunInputs:
    extra = {"bucket": "b", "folder": str(folder / "bucket")}
    connector = {"kv_connector": "S3KVConnector", "kv_connector_extra_config": extra}
    return RunInputs(argv, connector, 2, folder, longest_tokens=1_100, prompts=2, seed=0)


def measure(folder: Path, *argv: str, names: tuple[str, ...] = USUAL) -> dict[str, ArmFacts]:
    return dict(run_arms(names, plan(folder, *argv), lambda arm, done, total: None))


def test_arms_that_do_as_they_should_are_proven(tmp_path: Path) -> None:
    facts = measure(tmp_path, names=tuple(ARMS))
    assert list(facts) == list(ARMS)
    judgement = judge(facts, longest_wait_s=10.0)
    assert judgement.proven, judgement.findings
    served = [name for name, one in facts.items() if one.connector_tokens]
    assert served == ["host", "restart", "tp"]
    assert "this goes to the log" in (tmp_path / "off.log").read_text()


def test_wrong_kv_is_found_in_every_arm_that_loads(tmp_path: Path) -> None:
    judgement = judge(measure(tmp_path, "wrong"), longest_wait_s=10.0)
    assert {one.arm for one in judgement.findings if one.wrong} == {"host", "restart"}


@pytest.mark.parametrize(
    ("argv", "arm", "text"),
    [("dies", "cold", "out of memory"), ("busy", "host", "its blocks stay in use")],
)
def test_an_arm_that_fails_later_is_a_fact(tmp_path: Path, argv: str, arm: str, text: str) -> None:
    assert text in measure(tmp_path, argv)[arm].error


def test_an_engine_that_does_not_start_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match=r"(?s)arm off did not start.*this model is not served"):
        measure(tmp_path, "refuses")


def test_settings_are_found_and_changed_in_a_copy() -> None:
    several = {"kv_connector_extra_config": {"connectors": [{"kv_connector": "x"}, OFFLOADING]}}
    assert settings_of(OFFLOADING) is settings_of(several) is TIER
    assert settings_of({"kv_connector": "LMCacheConnectorV1"}) is None
    assert settings_of(with_settings(OFFLOADING, prefix="p")) == {**TIER, "prefix": "p"}
    assert "prefix" not in TIER
