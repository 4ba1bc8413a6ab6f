"""Every alarm rings when it should and not when all is well, by Prometheus's own judgement."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.prometheus import missing_programs
from s3kv.metrics import EC_METRICS, EC_NAMESPACE, KV_METRICS, NAMESPACE
from tests.project import ROOT, skip_or_fail

RULES = ROOT / "deploy/prometheus/s3kv.rules.yaml"
GROUP: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
ENGINE = 'job="vllm",instance="a:8000",model_name="m",engine="0"'

WELL: dict[str, str] = {
    "breaker{%s,state='closed'}": "1x{n}",
    "breaker{%s,state='open'}": "0x{n}",
    "breaker{%s,state='half-open'}": "0x{n}",
    "fetch_denied_total{%s}": "0x{n}",
    "upload_denied_total{%s}": "0x{n}",
    "fetch_corrupt_total{%s}": "0x{n}",
    "saves_total{%s}": "0+600x{n}",
    "saves_dropped_total{%s,reason='inflight'}": "0+10x{n}",
    "saves_dropped_total{%s,reason='memory_full'}": "0x{n}",
    "slab_bytes{%s,state='free'}": "10x{n}",
    "slab_bytes{%s,state='filling'}": "5x{n}",
    "slab_bytes{%s,state='clean'}": "80x{n}",
    "slab_bytes{%s,state='dirty'}": "5x{n}",
    "hit_tokens_bucket_total{%s}": "0+3000x{n}",
    "hit_tokens_host_total{%s}": "0+2000x{n}",
    "vllm:prompt_tokens_total{%s}": "0+10000x{n}",
    "fetch_seconds_bucket{%s,le='0.1'}": "0+990x{n}",
    "fetch_seconds_bucket{%s,le='2.0'}": "0+1000x{n}",
    "fetch_seconds_bucket{%s,le='5.0'}": "0+1000x{n}",
    "fetch_seconds_bucket{%s,le='+Inf'}": "0+1000x{n}",
    "io_throttled_total{%s}": "0+10x{n}",
    "io_requests_total{%s,verb='GET',status='2xx'}": "0+1000x{n}",
    "upload_ok_total{%s}": "0+4500x{n}",  # of eight ranks
    "upload_exists_total{%s}": "0+200x{n}",
    "upload_failed_total{%s}": "0+100x{n}",
    "io_restarts_total{%s}": "0x{m} 0x50 1x3 2x7",
    "io_disk_failed_total{%s}": "0x{n}",
    "io_cleaner_sweeps_total{%s}": "0+1x{n}",
    "io_cleaner_failed_total{%s}": "0+1x{n}",
    "internal_errors_total{%s}": "0x{n}",
}
"""A healthy engine for n minutes, a sample a minute: a little of everything may happen."""

ILL: dict[str, dict[str, str]] = {
    "S3kvBucketUnreachable": {"breaker{%s,state='half-open'}": "0x{m} 1x60"},
    "S3kvAccessDenied": {"upload_denied_total{%s}": "0x{m} 0+1x60"},
    "S3kvObjectsDamaged": {"fetch_corrupt_total{%s}": "0x{m} 0x50 1x10"},
    "S3kvSavesDropped": {"saves_dropped_total{%s,reason='inflight'}": "0x{m} 0+100x60"},
    "S3kvHostMemoryFull": {
        "slab_bytes{%s,state='filling'}": "5x{m} 50x60",
        "slab_bytes{%s,state='dirty'}": "5x{m} 45x60",
        "slab_bytes{%s,state='clean'}": "80x{m} 2x60",
        "slab_bytes{%s,state='free'}": "10x{m} 0x60",
    },
    "S3kvHitRatioCollapsed": {
        "hit_tokens_bucket_total{%s}": "0+3000x{m} 4290000x60",
        "hit_tokens_host_total{%s}": "0+2000x{m} 2860000+1000x60",
    },
    "S3kvFetchesSlow": {
        "fetch_seconds_bucket{%s,le='0.1'}": "0+900x{n}",
        "fetch_seconds_bucket{%s,le='2.0'}": "0+980x{n}",
    },
    "S3kvStoreThrottles": {"io_throttled_total{%s}": "0x{m} 0+200x60"},
    "S3kvUploadsFail": {"upload_failed_total{%s}": "0x{m} 0+600x60"},
    "S3kvIoProcessRestarts": {"io_restarts_total{%s}": "0x{m} 0x50 1x3 2x3 3x3"},
    "S3kvDiskFails": {"io_disk_failed_total{%s}": "0x{m} 0x50 1x10"},
    "S3kvCleanerFails": {  # refused: an attempt an hour
        "io_cleaner_sweeps_total{%s}": "9x{n}",
        "io_cleaner_failed_total{%s}": "0x59 1x59 2x59 3x59 4x60",
    },
    "S3kvInternalError": {"internal_errors_total{%s}": "0x{m} 1x60"},
}
"""What is different then, in the last hour. The same of the EC connector has to ring as well."""
MINUTES = dict.fromkeys(ILL, 120) | {"S3kvHitRatioCollapsed": 1_500, "S3kvCleanerFails": 300}
KV_ALONE = {"S3kvHitRatioCollapsed"}
UNKNOWN_TO_EC = ("vllm:prompt_tokens", "hit_tokens", "slab_bytes{%s,state='dirty'}")


@pytest.fixture(autouse=True)
def _programs() -> None:
    if missing := missing_programs():
        skip_or_fail(f"not installed: {', '.join(missing)} (Debian's package: prometheus)")


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def series(values: Mapping[str, str], namespace: str) -> list[dict[str, str]]:
    return [
        {"series": (name if ":" in name else namespace + name) % ENGINE, "values": value}
        for name, value in values.items()
    ]


def rings(folder: Path, values: list[dict[str, str]], alarms: set[str], minutes: int = 120) -> None:
    """So many minutes of these series end with exactly these alarms."""
    lengths = {"n": minutes, "m": minutes - 60}
    values = [one | {"values": one["values"].format(**lengths)} for one in values]
    cases = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
            "eval_time": f"{minutes}m",
            "exp_samples": [{"labels": "{}", "value": int(name in alarms)}],
        }
        for name in (rule["alert"] for rule in GROUP)
    ]
    tests = [{"interval": "1m", "input_series": values, "promql_expr_test": cases}]
    document = {"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests}
    file = folder / "test.yml"
    file.write_text(json.dumps(document))
    promtool("test", "rules", str(file))


def test_prometheus_takes_the_rules() -> None:
    assert f"{len(GROUP)} rules found" in promtool("check", "rules", str(RULES))


def of_encoder_outputs(values: Mapping[str, str]) -> list[dict[str, str]]:
    known = {k: v for k, v in values.items() if not k.startswith(UNKNOWN_TO_EC)}
    return series(known, EC_NAMESPACE)


def away(minutes: int) -> dict[str, str]:
    """The lease is another's, and the store was away for a moment, so long before minute 1500."""
    failed = f"0x{1_499 - minutes} 4x{minutes}"
    return {"io_cleaner_sweeps_total{%s}": "0x{n}", "io_cleaner_failed_total{%s}": failed}


@pytest.mark.parametrize(("kv", "ec"), [(away(80), {}), (away(170), {}), ({}, away(170))])
def test_nothing_rings_when_all_is_well(
    tmp_path: Path, kv: dict[str, str], ec: dict[str, str]
) -> None:
    rings(tmp_path, series(WELL | kv, NAMESPACE) + of_encoder_outputs(WELL | ec), set(), 1_500)


@pytest.mark.parametrize("alarm", ILL)
def test_each_rings_when_it_should(tmp_path: Path, alarm: str) -> None:
    rings(tmp_path, series(WELL | ILL[alarm], NAMESPACE), {alarm}, MINUTES[alarm])


@pytest.mark.parametrize("alarm", sorted(ILL.keys() - KV_ALONE))
def test_each_rings_for_encoder_outputs_beside_a_sound_kv_cache(tmp_path: Path, alarm: str) -> None:
    ill = of_encoder_outputs(WELL | ILL[alarm])
    rings(tmp_path, series(WELL, NAMESPACE) + ill, {alarm}, MINUTES[alarm])


def test_every_alarm_has_a_case_and_a_place_in_the_guide() -> None:
    assert sorted(rule["alert"] for rule in GROUP) == sorted(ILL)
    guide = (ROOT / "docs/operating.md").read_text()
    assert "### Alarms\n" in guide
    for rule in GROUP:
        assert rule["annotations"]["runbook"].startswith("docs/operating.md#alarms: ")
        assert f"| `{rule['alert']}` |" in guide


def test_rules_and_cases_name_metrics_there_are() -> None:
    known = {NAMESPACE + n for n in KV_METRICS} | {EC_NAMESPACE + n for n in EC_METRICS}
    known |= {"vllm:prompt_tokens"}
    ours = " ".join(rule["expr"] for rule in GROUP)
    for name in re.findall(r"vllm:\w+", ours):
        assert re.sub(r"_(total|bucket)$", "", name) in known, name
    for name in WELL:
        bare = re.sub(r"_(total|bucket)$", "", name.partition("{")[0])
        assert bare in KV_METRICS or bare in known, name
