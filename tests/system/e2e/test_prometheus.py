"""A real Prometheus scrapes a real server, and is put every query of the dashboard and every rule.

One server of vLLM's, whose own cache and host memory hold less than it is asked for, so that every
tier serves; and one engine that encodes images, whose metrics are those a server would show.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import models, vision
from lab.engine import Engine
from lab.prometheus import Prometheus, missing_programs, prometheus
from lab.s3 import S3Server
from s3kv.metrics import EC_METRICS, EC_NAMESPACE, KV_METRICS, NAMESPACE
from tests.project import ROOT, skip_or_fail
from tests.system.deploy.test_dashboard import PANELS, VARIABLES
from tests.system.e2e.conftest import START_AND_STOP_S, changed, new_bucket, patient_for
from tests.system.e2e.pictures import VISION, ask, ec_connector
from tests.system.e2e.test_serve import Server, vllm_serve
from tests.waiting import wait_until

PROMPTS = models.prompts(8, 800, seed=11)
"""6,400 tokens, of which the server's own cache holds 4,352 and host memory 2,100."""
SMALL = "--kv-cache-memory-bytes", str(4_352 * models.TINY.kv_bytes_per_token * 2)
HOST_BYTES = 2_200 * models.TINY.kv_bytes_per_token * 2
RULES = ROOT / "deploy/prometheus/s3kv.rules.yaml"
pytestmark = [pytest.mark.timeout(3 * START_AND_STOP_S)]


@pytest.fixture(scope="module")
def observed(
    s3: S3Server, tiny: Path, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    if missing := missing_programs():
        skip_or_fail(f"not installed: {', '.join(missing)} (Debian's package: prometheus)")
    home = tmp_path_factory.mktemp("prometheus")
    with new_bucket(s3) as bucket:
        prices = {"aws_hosts": [""]}
        connector = changed(patient_for(s3, bucket), host_bytes=HOST_BYTES, **prices)
        encoder = Engine(
            vision.build(models_dir),
            ec_connector=ec_connector(s3, bucket, **prices),
            log_path=home / "encoder.log",
            env=s3.env,
            **VISION,
        )
        with vllm_serve(tiny, connector, s3.env, home / "server.log", *SMALL) as server, encoder:
            targets = {"vllm": server.url.removeprefix("http://")}
            targets["encoder"] = f"127.0.0.1:{encoder.call('lab.exposition:serve')}"
            with prometheus(targets, home, rules=[RULES]) as seen:
                for name in ("saves_total", "ec_saves_total"):
                    wait_until("a scrape", lambda: seen.query(NAMESPACE + name))  # noqa: B023
                ask_both(server, encoder, seen)
                yield seen


def ask_both(server: Server, encoder: Engine, seen: Prometheus) -> None:
    """Every prompt three times, and different images, until all that is counted has been told."""
    for number in range(3 * len(PROMPTS)):
        server.complete(PROMPTS[number % len(PROMPTS)])
        encoder.generate([ask(number)])
        time.sleep(0.2)
    for name in ("cost_usd_total", "ec_cost_usd_total"):
        wait_until(
            "costs are told",
            lambda: (
                server.complete(PROMPTS[0])
                and encoder.generate([ask(1)])
                and value(seen, NAMESPACE + name) > 0  # noqa: B023
            ),
        )
    for _ in range(2):  # rates need points
        wait_for_scrapes(seen)


def wait_for_scrapes(seen: Prometheus) -> None:
    now_s = value(seen, "vector(time())")
    wait_until("all is scraped", lambda: value(seen, "min(timestamp(up))") > now_s)


def value(seen: Prometheus, name: str) -> float:
    return sum(float(sample["value"][1]) for sample in seen.query(name))


def as_asked(expr: str) -> str:
    """As Grafana sends it, with everything chosen, and all that has happened in the interval: what
    was saved at first may be minutes ago."""
    chosen_of = {"$__rate_interval": "1h", "$job": ".*", "$model": ".*"}
    chosen_of |= {f"${n}": v["query"] for n, v in VARIABLES.items() if v["type"] == "textbox"}
    for variable, chosen in chosen_of.items():
        expr = expr.replace(variable, chosen)
    return expr


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_shows_something(observed: Prometheus, panel: dict[str, Any]) -> None:
    for query in panel["targets"]:
        legend, samples = query["legendFormat"], observed.query(as_asked(query["expr"]))
        numbers = [float(sample["value"][1]) for sample in samples]
        assert numbers, f"{panel['title']}, {legend}: no data"
        # What is encoded here is fetched and loaded nowhere: there is no quantile of nothing.
        encoder = panel["title"].startswith("Encoder outputs")
        unused = encoder and legend.startswith(("fetch p", "load p"))
        assert unused or legend == "net" or all(number >= 0 for number in numbers), legend
        for label in re.findall(r"{{(\w+)}}", legend):
            assert all(label in sample["metric"] for sample in samples)


def test_what_the_engine_did_is_what_prometheus_says(observed: Prometheus) -> None:
    def total(name: str) -> float:
        return value(observed, NAMESPACE + name)

    hits = total("hit_tokens_bucket_total") + total("hit_tokens_host_total")
    assert hits == value(observed, "vllm:external_prefix_cache_hits_total") > 0
    assert total("hit_tokens_bucket_total") > 0
    assert total("fetch_ok_total") == total("fetch_seconds_count") > 0
    assert total("io_requests_total{verb='GET',status='2xx'}") > 0
    assert total("misses_total{reason='absent'}") > 0
    assert total("save_seconds_count") == total("save_ok_total") > 0
    assert total("load_bytes_total") == hits * models.TINY.kv_bytes_per_token * 2
    assert 0 < total("slab_bytes") <= HOST_BYTES
    assert total("breaker{state='closed'}") == total("ec_breaker{state='closed'}") == 1
    assert total("ec_saves_total") > 0


@pytest.mark.parametrize("kind", ["", "ec_"])
def test_dollars_are_requests_at_their_prices(observed: Prometheus, kind: str) -> None:
    def answered(verbs: str) -> float:
        chosen = f"verb=~'{verbs}',status=~'2xx|4xx'"
        return value(observed, f"{NAMESPACE}{kind}io_requests_total{{{chosen}}}")

    dollars = value(observed, f"{NAMESPACE}{kind}cost_usd_total")
    assert dollars == pytest.approx(answered("GET|HEAD") * 0.4e-6 + answered("PUT|LIST") * 5e-6)


def test_every_rule_is_evaluated_and_none_rings(observed: Prometheus) -> None:
    (group,) = observed.get("rules")["groups"]
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(group["rules"])
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


def test_everything_in_the_table_is_scraped(observed: Prometheus) -> None:
    names = set(observed.get("label/__name__/values"))
    suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    for namespace, table in ((NAMESPACE, KV_METRICS), (EC_NAMESPACE, EC_METRICS)):
        assert {namespace + n + suffix[m.kind] for n, m in table.items()} <= names
